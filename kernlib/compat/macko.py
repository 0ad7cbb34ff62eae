"""MACKO-SpMV's names and tuple over kernlib's kernels:
``import kernlib.compat.macko as macko_spmv``.

A compressed matrix is the bare tuple ``(values float16 [P], deltas uint8 [P / 2], row_ptr int32
[R + 1], R, C)``, byte for byte MACKO's (see :mod:`kernlib.ops.sparse_format_macko`), so that
either library reads what the other wrote. What differs is what MACKO refuses or gets wrong:

- ``compress`` takes any strides, and works where the matrix lies, on a GPU too;
- ``multiply`` checks the shapes, dtypes and devices that it is given, takes a vector of any stride,
  works on the device of its operands whichever is the current one, and on CPU tensors;
- a product reads nothing behind the tensors, and adds up in an order that depends on the GPU alone.

``torch.ops.macko_spmv.multiply`` is registered when this module is imported, unless it is there.
"""

from __future__ import annotations

import torch

from kernlib.ops import sparse_format_macko as codec
from kernlib.ops import sparse_lowering_macko_product as product
from kernlib.ops.product_arguments import no_autocast
from kernlib.ops.tensors import check_dense, refuse_gradients

__all__ = ["compress", "decompress", "move_to_device", "multiply"]

Compressed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]

SCHEMA = (
    "multiply(Tensor M_values, Tensor M_deltas, Tensor M_row_indices, int M_rows, int M_cols, "
    "Tensor V) -> Tensor"
)


def compress(M: torch.Tensor) -> Compressed:
    """The tuple of a float16 matrix (R, C) of any strides, where it lies. On a GPU it synchronises
    once.

    Raises RuntimeError for other dtypes and for 2^31 entries or more, which int32 does not count,
    TypeError or ValueError for what is no matrix.
    """
    check_dense(("M",), M=M)
    if M.dtype != torch.float16:
        raise RuntimeError(f"M must be torch.half, got {M.dtype}")
    if M.dim() != 2:
        raise ValueError(f"M must be a matrix (rows, columns), got shape {tuple(M.shape)}")
    tensors, facts = codec.encode(M)
    if facts["entries"] >= codec.WIDE_FROM:
        raise RuntimeError(
            f"M has {facts['entries']} entries, more than int32 row_ptr counts: compress slices of "
            "its rows, or use kernlib.sparse.compress"
        )
    return *(tensors[name] for name in codec.TENSORS), *M.shape


def decompress(compressed: Compressed) -> torch.Tensor:
    """The matrix (R, C) of a tuple, where it lies. Raises ValueError for no such tuple."""
    values, deltas, row_ptr, rows, columns = _checked(compressed)
    tensors = dict(zip(codec.TENSORS, (values, deltas, row_ptr), strict=True))
    return codec.decode(tensors, {}, (rows, columns), torch.float16)


def move_to_device(compressed: Compressed, device: torch.device | str) -> Compressed:
    """The tuple with its tensors on a device. Raises ValueError for no such tuple."""
    *tensors, rows, columns = _checked(compressed)
    return *(tensor.to(device) for tensor in tensors), rows, columns


def multiply(compressed: Compressed, V: torch.Tensor) -> torch.Tensor:
    """``M @ V`` (R,) of a tuple and a float16 vector (C,), summed in float32.

    Raises ValueError for other shapes, dtypes and mixed devices, TypeError for what is no tensor,
    RuntimeError where a gradient would be recorded.
    """
    values, deltas, row_ptr, rows, columns = compressed
    refuse_gradients("kernlib.compat.macko", V=V, values=values)
    return torch.ops.macko_spmv.multiply(values, deltas, row_ptr, rows, columns, V)


def _checked(compressed: Compressed) -> Compressed:
    if not isinstance(compressed, (tuple, list)) or len(compressed) != 5:
        raise ValueError("a compressed matrix is a tuple (values, deltas, row_ptr, rows, columns)")
    _check_matrix(*compressed)
    return tuple(compressed)


def _check_matrix(values, deltas, row_ptr, rows: int, columns: int) -> None:
    """Raises TypeError or ValueError unless these are the parts of a matrix, as far as can be told
    without looking at them."""
    check_dense(("values", "deltas", "row_ptr"), values=values, deltas=deltas, row_ptr=row_ptr)
    entries = values.numel()
    wanted = {
        "values": (values, torch.float16, (entries // 8 * 8,)),
        "deltas": (deltas, torch.uint8, (entries // 2,)),
        "row_ptr": (row_ptr, torch.int32, (rows + 1,)),
    }
    for name, (tensor, dtype, shape) in wanted.items():
        if tensor.dtype != dtype:
            raise ValueError(f"{name} must have dtype {dtype}, got {tensor.dtype}")
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} of a {rows} x {columns} matrix with {entries} entries must have shape "
                f"{shape}, got {tuple(tensor.shape)}"
            )
        if tensor.device != values.device:
            raise ValueError(f"{name} is on {tensor.device} and values on {values.device}")


def _check_product(values, deltas, row_ptr, rows: int, columns: int, V) -> None:
    _check_matrix(values, deltas, row_ptr, rows, columns)
    check_dense(("V",), V=V)
    if V.dim() != 1 or V.shape[0] != columns:
        raise ValueError(
            f"V must have shape ({columns},) for a matrix of shape ({rows}, {columns}), got "
            f"{tuple(V.shape)}"
        )
    if V.dtype != values.dtype:
        raise ValueError(f"V must have dtype {values.dtype} as values, got {V.dtype}")
    if V.device != values.device:
        raise ValueError(f"V is on {V.device} and values on {values.device}")


def _fake(values, deltas, row_ptr, rows, columns, V):
    _check_product(values, deltas, row_ptr, rows, columns, V)
    return V.new_empty((rows,))


def _on_cpu(values, deltas, row_ptr, rows, columns, V):
    _check_product(values, deltas, row_ptr, rows, columns, V)
    dense = decompress((values, deltas, row_ptr, rows, columns))
    with no_autocast(V):
        return (dense.float() @ V.float()).to(V.dtype)


def _on_cuda(values, deltas, row_ptr, rows, columns, V):
    _check_product(values, deltas, row_ptr, rows, columns, V)
    return product.product((values, deltas, row_ptr), (rows, columns), V)


def _register() -> torch.library.Library | None:
    """The operator's library, which must live as long as it; None if MACKO itself has made it."""
    if hasattr(torch.ops.macko_spmv, "multiply"):
        return None
    made = torch.library.Library("macko_spmv", "FRAGMENT")
    made.define(SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    made.impl("multiply", _on_cpu, "CPU")
    made.impl("multiply", _on_cuda, "CUDA")
    torch.library.register_fake("macko_spmv::multiply", _fake, lib=made)
    return made


_library = _register()

"""MACKO-SpMV's names and tuple over kernlib's kernels:
``import kernlib.compat.macko as macko_spmv``.

A compressed matrix is the bare tuple ``(values float16 [P], deltas uint8 [P / 2], row_ptr int32
[R + 1], R, C)``, byte for byte MACKO's (see :mod:`kernlib.families.sparse.formats.macko`), so that
either library reads what the other wrote. What differs is what MACKO refuses or gets wrong:

- ``compress`` takes any strides, and works where the matrix lies, on a GPU too;
- ``multiply`` checks the shapes, dtypes and devices that it is given, takes a vector of any stride,
  works on the device of its operands whichever is the current one, and on CPU tensors;
- a tuple whose bytes are no matrix is refused before anything is read by them;
- a product reads nothing behind the tensors, and adds up in an order that depends on the GPU alone.

``torch.ops.macko_spmv.multiply`` is registered when this module is imported, unless it is there.

Example:
    >>> import kernlib.compat.macko as macko_spmv
    >>> compressed = macko_spmv.compress(torch.tensor([[0.0, 2.0], [3.0, 0.0]]).half())
    >>> macko_spmv.multiply(compressed, torch.tensor([1.0, 10.0]).half())
    tensor([20.,  3.], dtype=torch.float16)
"""

from __future__ import annotations

import weakref

import torch
from torch.compiler import is_compiling

from kernlib.compat.macko import product
from kernlib.descriptors.base import as_int, shown
from kernlib.families.sparse.formats import macko as codec
from kernlib.families.sparse.tensors import check_whole, placed
from kernlib.runtime.arguments import no_autocast
from kernlib.runtime.tensors import check_dense, refuse_gradients, stand_ins

__all__ = ["compress", "decompress", "move_to_device", "multiply"]

Compressed = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]

SCHEMA = (
    "multiply(Tensor M_values, Tensor M_deltas, Tensor M_row_indices, int M_rows, int M_cols, "
    "Tensor V) -> Tensor"
)


def compress(M: torch.Tensor) -> Compressed:
    """The tuple of ``M``, a float16 matrix (R, C) of any strides, where it lies. On a GPU it
    synchronises once.

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
    compressed = tuple(tensors[name] for name in codec.TENSORS)
    _remember(compressed, tuple(M.shape))
    return *compressed, *M.shape


def decompress(compressed: Compressed) -> torch.Tensor:
    """The matrix (R, C) of a ``compressed`` tuple, where it lies. Raises ValueError and TypeError
    for no such tuple, whatever bytes it holds."""
    tensors, shape = _parts(compressed)
    _check_matrix(*tensors, *shape)
    if 2 * max(1, shape[0]) * max(1, shape[1]) >= 2**63:
        raise ValueError(f"a matrix of shape {shape} has more bytes than torch counts")
    if tensors[0].is_meta:
        return torch.empty(shape, dtype=torch.float16, device="meta")
    _look(tensors, shape)
    return _decoded(tensors, shape)


def move_to_device(compressed: Compressed, device: torch.device | str | int) -> Compressed:
    """The ``compressed`` tuple with its tensors on a ``device``. Raises ValueError and TypeError
    for no such tuple, whatever bytes it holds, and for what is no device."""
    tensors, shape = _parts(compressed)
    _check_matrix(*tensors, *shape)
    if type(device) not in (torch.device, str, int):
        raise TypeError(f"device must be a torch.device, str or int, got {shown(device)}")
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be one of torch's, got {shown(device)}") from error
    _look(tensors, shape)
    try:
        moved = tuple(tensor.to(device) for tensor in tensors)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        if "out of memory" in str(error):
            raise
        raise ValueError(f"device must be one that torch can use, got {device}: {error}") from error
    _remember(moved, shape)
    return *moved, *shape


def multiply(compressed: Compressed, V: torch.Tensor) -> torch.Tensor:
    """``M @ V`` (R,) of a ``compressed`` tuple and ``V``, a float16 vector of C elements, (C,) or
    behind dimensions of size 1, summed in float32.

    What a tuple holds is looked at once, at its first product, unless it comes from
    :func:`compress` or :func:`move_to_device`; on a GPU the host waits for that. A CUDA graph that
    captures a tuple unseen multiplies with the matrix laid out.

    Raises ValueError for other shapes, dtypes and mixed devices and for tensors that are no matrix,
    TypeError for what is no tensor, RuntimeError where a gradient would be recorded.
    """
    (values, deltas, row_ptr), (rows, columns) = _parts(compressed)
    refuse_gradients("kernlib.compat.macko", V=V, values=values)
    try:
        return torch.ops.macko_spmv.multiply(values, deltas, row_ptr, rows, columns, V)
    except (RuntimeError, TypeError, ValueError):
        _check_product(values, deltas, row_ptr, rows, columns, V)  # in this function's words
        raise


def _parts(compressed: Compressed) -> tuple[tuple, tuple]:
    """Tensors and shape of a tuple. Raises ValueError."""
    if not isinstance(compressed, (tuple, list)) or len(compressed) != 5:
        raise ValueError(
            "a compressed matrix must be a tuple (values, deltas, row_ptr, rows, columns), got "
            f"{shown(compressed)}"
        )
    return tuple(compressed[:3]), tuple(compressed[3:])


def _check_matrix(values, deltas, row_ptr, rows: int, columns: int) -> None:
    """Raises TypeError or ValueError unless these are the parts of a matrix, as far as can be told
    without looking at them."""
    check_dense(("values", "deltas", "row_ptr"), values=values, deltas=deltas, row_ptr=row_ptr)
    for name, size in (("rows", rows), ("columns", columns)):
        if not isinstance(size, torch.SymInt):
            size = as_int(name, size)
        if size < 0:
            raise ValueError(f"{name} must be at least 0, got {shown(size)}")
        if size >= 1 << 63:
            raise ValueError(f"{name} must be below 2**63, got {shown(size)}")
    entries = values.numel()
    expected = {
        "values": (values, torch.float16, (entries // 8 * 8,)),
        "deltas": (deltas, torch.uint8, (entries // 2,)),
        "row_ptr": (row_ptr, torch.int32, (rows + 1,)),
    }
    for name, (tensor, dtype, shape) in expected.items():
        if tensor.dtype != dtype:
            raise ValueError(f"{name} must have dtype {dtype}, got {tensor.dtype}")
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} of a {rows} x {columns} matrix with {entries} entries must have shape "
                f"{shape}, got {tuple(tensor.shape)}"
            )
        if tensor.device != values.device:
            raise ValueError(
                f"{name} is on {tensor.device} and values on {values.device}: move it there"
            )


# Tuples that have been looked at, by the id of their values. Known are the tensors themselves,
# where they lie and how often torch has seen them written.

looked_at: dict[int, tuple] = {}


def _state(values, deltas, row_ptr) -> tuple[int, ...]:
    addresses = values.data_ptr(), deltas.data_ptr(), row_ptr.data_ptr()
    try:
        return *addresses, values._version, deltas._version, row_ptr._version
    except RuntimeError:  # tensors of inference mode have no version
        return addresses


def _remember(tensors: tuple[torch.Tensor, ...], shape: tuple[int, int]) -> None:
    if tensors[0].is_meta or is_compiling() or stand_ins(*tensors):
        return
    key = id(tensors[0])
    gone = weakref.ref(tensors[0], lambda _: looked_at.pop(key, None))
    looked_at[key] = gone, *map(weakref.ref, tensors[1:]), shape, _state(*tensors)


def _is_known(tensors: tuple[torch.Tensor, ...], shape: tuple[int, int]) -> bool:
    """Whether a tuple has been looked at, shapes and dtypes included: in 0.7 us."""
    entry = looked_at.get(id(tensors[0]))
    if entry is None:
        return False
    values, deltas, row_ptr, seen_shape, state = entry
    same = values() is tensors[0] and deltas() is tensors[1] and row_ptr() is tensors[2]
    return same and seen_shape == shape and state == _state(*tensors)


def _look(tensors: tuple[torch.Tensor, ...], shape: tuple[int, int]) -> bool:
    """Whether the tuple is known to be a matrix. One that is not is read in full. Raises ValueError
    for one that is none. Not while a CUDA graph is captured: nothing runs there."""
    stands_in = tensors[0].is_meta or is_compiling() or stand_ins(*tensors)
    if stands_in or _is_known(tensors, shape):
        return True
    if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    for name, tensor in zip(codec.TENSORS, tensors, strict=True):
        check_whole(name, tensor)
    codec.check_stream(_named(tensors), shape)
    _remember(tensors, shape)
    return True


def _named(tensors: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """The tensors by name, as kernels read them."""
    return {n: placed(t) for n, t in zip(codec.TENSORS, tensors, strict=True)}


def _decoded(tensors: tuple[torch.Tensor, ...], shape: tuple[int, int]) -> torch.Tensor:
    return codec.decode(_named(tensors), {}, shape, torch.float16)


def _check_product(values, deltas, row_ptr, rows: int, columns: int, V) -> None:
    _check_matrix(values, deltas, row_ptr, rows, columns)
    _check_vector(values, rows, columns, V)


def _check_vector(values, rows: int, columns: int, V) -> None:
    """Raises TypeError or ValueError for a V that does not fit a checked matrix."""
    check_dense(("V",), V=V)
    if V.dim() == 0 or V.shape[-1] != columns or any(size != 1 for size in V.shape[:-1]):
        raise ValueError(
            f"V must have shape ({columns},), or that behind ones, for a matrix of shape "
            f"({rows}, {columns}), got {tuple(V.shape)}"
        )
    if V.dtype != values.dtype:
        raise ValueError(f"V must have dtype {values.dtype} as values, got {V.dtype}")
    if V.device != values.device:
        raise ValueError(f"V is on {V.device} and values on {values.device}: move it there")


def _fake(values, deltas, row_ptr, rows, columns, V):
    _check_product(values, deltas, row_ptr, rows, columns, V)
    return V.new_empty((rows,))


def _on_cpu(values, deltas, row_ptr, rows, columns, V):
    _check_product(values, deltas, row_ptr, rows, columns, V)
    dense = decompress((values, deltas, row_ptr, rows, columns))
    with no_autocast(V):
        return (dense.float() @ V.reshape(columns).float()).to(V.dtype)


def _on_cuda(values, deltas, row_ptr, rows, columns, V):
    tensors, shape = (values, deltas, row_ptr), (rows, columns)
    is_known = _is_known(tensors, shape)
    if not is_known:
        _check_matrix(*tensors, *shape)
    _check_vector(values, rows, columns, V)
    V = V if V.dim() == 1 else V.reshape(columns)
    if is_known or _look(tensors, shape):
        return product.product(tensors, shape, V)
    with no_autocast(V):  # in a capture: what undoes codes stays within tensors of any bytes
        return torch.mv(_decoded(tensors, shape), V)


def _mapped(info, dims, values, deltas, row_ptr, rows, columns, V):
    """vmap, by which MACKO's layer multiplies with several vectors: one after the other."""
    if any(dim is not None for dim in dims[:3]):
        raise RuntimeError("torch.vmap maps V, no compressed matrix")
    call, matrix = torch.ops.macko_spmv.multiply, (values, deltas, row_ptr, rows, columns)
    return torch.stack([call(*matrix, v) for v in V.movedim(dims[5], 0)]), 0


def _register() -> torch.library.Library | None:
    """The operator's library, which must live as long as it; None if MACKO itself has made it."""
    if hasattr(torch.ops.macko_spmv, "multiply"):
        return None
    library = torch.library.Library("macko_spmv", "FRAGMENT")
    library.define(SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("multiply", _on_cpu, "CPU")
    library.impl("multiply", _on_cuda, "CUDA")
    torch.library.register_fake("macko_spmv::multiply", _fake, lib=library)
    torch.library.register_vmap("macko_spmv::multiply", _mapped, lib=library)
    return library


_library = _register()

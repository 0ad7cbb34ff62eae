"""What the formats of sparse matrices share: a dense matrix checked, and as the bits it is made of.

Formats store the bits of values, so the payload of a NaN comes back as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from kernlib.descriptors.base import shown, whole
from kernlib.runtime.tensors import check_dense, materialised, refuse_distributed

# dtypes of values, and the integers of as many bits.
BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
# All bits of a value but its sign, and the bits of infinity.
MAGNITUDE = {torch.float16: 0x7FFF, torch.bfloat16: 0x7FFF, torch.float32: 0x7FFFFFFF}
INFINITY = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80, torch.float32: 0x7F800000}
COUNTED = 1 << 22  # entries that are counted together
FEW_COUNTS = 1 << 16  # a core sorts them before a GPU has begun the operators for that


def matrix(dense: torch.Tensor) -> torch.Tensor:
    """A dense matrix whose memory holds its values, without a record of gradients. Raises TypeError
    for what is no dense tensor, ValueError for one that is not a matrix of a dtype of ``BITS``."""
    check_dense(("dense",), dense=dense)
    refuse_distributed(dense=dense)
    if dense.dim() != 2:
        raise ValueError(f"dense must be a matrix (rows, columns), got shape {tuple(dense.shape)}")
    if dense.dtype not in BITS:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in BITS)
        raise ValueError(f"dense must have a dtype of {names}, got {dense.dtype}")
    if dense.device.type not in ("cpu", "cuda"):
        raise ValueError(f"dense must lie on a CPU or a CUDA device, got {dense.device}")
    return materialised(dense.detach())


def check_columns(columns: int) -> None:
    """Raises ValueError for what is no number of vectors."""
    number = whole(columns)
    if number is None or number < 1:
        raise ValueError(f"columns must be a positive int, got {shown(columns)}")


def readable(dense: torch.Tensor) -> torch.Tensor:
    """The matrix itself, or a contiguous copy if neighbours in a row do not lie side by side."""
    aside = dense.shape[1] > 1 and dense.stride(1) != 1
    return dense.contiguous() if aside else dense


def bits(dense: torch.Tensor) -> torch.Tensor:
    """A view of a matrix as integers."""
    return dense.view(BITS[dense.dtype])


def counted(counts: torch.Tensor) -> torch.Tensor:
    """Counts by kernels, for sums and orders of them. Few numbers go to the host, which waits,
    since the first use of each operator on a GPU takes 10 to 25 ms."""
    on_host = counts.device.type == "cuda" and counts.numel() <= FEW_COUNTS
    return counts.cpu() if on_host else counts


def moved(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of :func:`counted` numbers on the matrix's device, which the host does not wait
    for."""
    return t.to(device, non_blocking=True)


def nonzero(values: torch.Tensor) -> torch.Tensor:
    """Where :func:`bits` are those of a value other than 0.0 and -0.0. Bits are compared, not
    values: where torch flushes subnormals, these would count as zero."""
    return (values & torch.iinfo(values.dtype).max) != 0


def entries_in(dense: torch.Tensor) -> int:
    """Entries of a matrix that are not 0. Waits for the device. Of some rows at a time, as torch
    takes 9 bytes for each entry of a GPU that it counts."""
    rows = max(1, COUNTED // max(1, dense.shape[1]))
    return int(sum(torch.count_nonzero(some) for some in dense.split(rows)))


def check_tensors(
    format: str, tensors: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype]
) -> None:
    """Raises ValueError unless ``tensors`` are those that ``dtypes`` names, contiguous, of these
    dtypes, on one device, and begin at whole 16 bytes there, as kernels read them."""
    check_names(format, tensors, dtypes)
    devices = {tensors[name].device for name in dtypes}
    if len(devices) > 1:
        raise ValueError(
            f"the tensors of a matrix must lie on one device, got {sorted(map(str, devices))}"
        )
    for name, dtype in dtypes.items():
        tensor = tensors[name]
        if tensor.dtype != dtype:
            raise ValueError(f"{name} must have dtype {dtype}, got {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
        if tensor.device.type == "cuda" and tensor.data_ptr() % 16:
            raise ValueError(f"{name} must begin at whole 16 bytes of memory; clone it")


def check_names(format: str, tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> None:
    """Raises ValueError unless ``tensors`` have these names."""
    if set(tensors) != set(names):
        raise ValueError(
            f"a matrix of format {format!r} has the tensors {', '.join(names)}, "
            f"got {', '.join(map(str, tensors)) or 'none'}: pass what state() gives"
        )


def check_facts(format: str, facts: Mapping[str, int], names: tuple[str, ...]) -> None:
    """Raises ValueError for a fact that a format does not know."""
    more = [repr(name) for name in facts if name not in names]
    if more:
        listed = ", ".join(names) or "none"
        raise ValueError(
            f"a matrix of format {format!r} has the facts {listed}, got {', '.join(more)} too"
        )


def check_size(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless a tensor of a matrix has ``shape``."""
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}")

"""Compressed matrices made from the three tensors of CSR, which are checked before they are
used."""

from __future__ import annotations

import torch

from kernlib.debug import takes_debug
from kernlib.descriptors.base import shown, whole
from kernlib.families.sparse.formats.encoding import BITS
from kernlib.families.sparse.matrix import SparseMatrix, compressed
from kernlib.runtime.tensors import check_dense, materialised

INDICES = (torch.int32, torch.int64)


@takes_debug
def from_csr(
    crow: torch.Tensor,
    col: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, int],
    format: str = "auto",
    columns: int = 1,
    *,
    debug: bool = False,
) -> SparseMatrix:
    """:func:`kernlib.sparse.compress` of a matrix in CSR form: row ``r`` holds
    ``values[crow[r]:crow[r + 1]]`` in the columns ``col[crow[r]:crow[r + 1]]``, which rise within a
    row. ``values`` (nnz,) are float16, bfloat16 or float32, the indices ``crow`` (R + 1,) and
    ``col`` (nnz,) int32 or int64. The host waits for the device, since indices are checked before
    they are used.

    Raises TypeError for what is no dense tensor, and for a ``shape`` that is not two ints;
    ValueError for other dtypes, sizes and devices, and for indices that cannot be those of such a
    matrix; and what :func:`kernlib.sparse.compress` raises.
    """
    check_dense(("crow", "col", "values"), crow=crow, col=col, values=values)
    rows, cols = _checked_shape(shape)
    _check_tensors(crow, col, values, rows)
    crow, col = crow.detach().to(torch.int64), col.detach().to(torch.int64)
    counts = crow.diff()
    _check_rows(crow, counts, values.numel())
    owner = torch.repeat_interleave(counts)
    _check_columns(col, owner, cols)
    dense = torch.zeros((rows, cols), dtype=values.dtype, device=values.device)
    dense[owner, col] = materialised(values.detach())
    return compressed(dense, format, columns)


def _checked_shape(shape) -> tuple[int, int]:
    """Raises TypeError for what is not two ints, ValueError for sizes below 0."""
    found = tuple(map(whole, shape)) if isinstance(shape, (tuple, list)) else ()
    if len(found) != 2 or None in found:
        raise TypeError(f"shape must be two ints (rows, columns), got {shown(shape)}")
    if min(found) < 0:
        raise ValueError(f"shape must be (rows, columns) of at least 0, got {found}")
    return found


def _check_tensors(crow, col, values, rows: int) -> None:
    """Raises ValueError for other dtypes, sizes and devices."""
    if values.dtype not in BITS:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in BITS)
        raise ValueError(f"values must have a dtype of {names}, got {values.dtype}")
    if values.device.type not in ("cpu", "cuda"):
        raise ValueError(f"values must lie on a CPU or a CUDA device, got {values.device}")
    if values.dim() != 1:
        raise ValueError(f"values must have one dimension, got shape {tuple(values.shape)}")
    sizes = {"crow": (crow, (rows + 1,)), "col": (col, tuple(values.shape))}
    for name, (tensor, size) in sizes.items():
        if tensor.dtype not in INDICES:
            raise ValueError(f"{name} must have dtype int32 or int64, got {tensor.dtype}")
        if tuple(tensor.shape) != size:
            raise ValueError(f"{name} must have shape {size}, got {tuple(tensor.shape)}")
        if tensor.device != values.device:
            raise ValueError(f"{name} is on {tensor.device} and values on {values.device}")


def _check_rows(crow: torch.Tensor, counts: torch.Tensor, entries: int) -> None:
    """Raises ValueError unless rows lie one behind the other. Neighbours are compared with each
    other, since their differences may overflow."""
    falls = (crow[1:] < crow[:-1]).sum()
    first, last, falls = torch.stack((crow[0], crow[-1], falls)).tolist()
    if first != 0 or last != entries or falls:
        raise ValueError(
            f"crow must rise from 0 to {entries}, the number of values, got {first} to {last}"
            + (", falling in between" if falls else "")
        )


def _check_columns(col: torch.Tensor, owner: torch.Tensor, cols: int) -> None:
    """Raises ValueError unless all columns are within the matrix and rise within each row."""
    outside = ((col < 0) | (col >= cols)).sum()
    falls = ((owner[1:] == owner[:-1]) & (col[1:] <= col[:-1])).sum()
    outside, falls = torch.stack((outside, falls)).tolist()
    if outside:
        raise ValueError(f"col must hold columns from 0 to {cols - 1}; {outside} are others")
    if falls:
        raise ValueError("col must rise within each row, so that no column stands there twice")

"""The entries of matrices in torch's sparse layouts. Whatever their indices are, they are checked
before they are used.

CSR and BSR are read as they are; of the others indices are made that lie by rows, once.
"""

from __future__ import annotations

import torch

from kernlib.families.sparse.formats.encoding import BITS
from kernlib.families.sparse.formats.entries import Entries, coo
from kernlib.runtime.tensors import materialised, stand_ins

INDICES = (torch.int32, torch.int64)
CSR = ("crow", "col", "values")
BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)


def of_tensor(dense: torch.Tensor) -> Entries:
    """The entries of a matrix of a sparse layout. Raises ValueError, naming ``dense``, for batches,
    other dtypes and invalid indices."""
    if dense.dim() != 2:
        raise ValueError(
            f"dense must be a matrix (rows, columns), got shape {tuple(dense.shape)}: compress its "
            "matrices one by one"
        )
    if torch._C._functorch.is_functorch_wrapped_tensor(dense) or stand_ins(dense):
        raise ValueError(
            "dense has no values here to compress (a fake tensor, or one inside a transform of "
            "torch.func): compress outside"
        )
    dense = dense.detach()
    if dense.layout == torch.sparse_coo:
        return _of_coo(dense)
    by_rows = dense.layout in BY_ROWS
    starts = dense.crow_indices() if by_rows else dense.ccol_indices()
    indices = dense.col_indices() if by_rows else dense.row_indices()
    names = ("dense.crow_indices()", "dense.col_indices()", "dense.values()")
    if by_rows:
        return of_rows(starts, indices, dense.values(), tuple(dense.shape), names)
    return _of_columns(starts, indices, dense.values(), tuple(dense.shape))


def of_rows(
    crow: torch.Tensor,
    col: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, int],
    names: tuple[str, str, str] = CSR,
) -> Entries:
    """The entries of CSR's three tensors, or of BSR's, whose ``values`` are blocks. Raises
    ValueError that names the tensor."""
    block = tuple(values.shape[1:]) or (1, 1)
    _check_tensors(crow, col, values, shape[0] // block[0], names)
    _check_rows(crow, col.numel(), names[0])
    entries = Entries(crow.detach(), col.detach(), materialised(values.detach()), shape)
    entries.check(names[1])
    return entries


def _of_columns(
    ccol: torch.Tensor, row: torch.Tensor, values: torch.Tensor, shape: tuple[int, int]
) -> Entries:
    """The entries of CSC and BSC, whose tensors are the transpose's, except for the blocks."""
    height, width = tuple(values.shape[1:]) or (1, 1)
    names = ("dense.ccol_indices()", "dense.row_indices()", "dense.values()")
    lines = shape[0] // height
    _check_tensors(ccol, row, values, shape[1] // width, names)
    _check_rows(ccol, row.numel(), names[0])
    _check_within(row, lines, names[1])
    order = row.argsort(stable=True)
    col = torch.repeat_interleave(ccol.diff().long())[order]
    names = ("dense.ccol_indices()", "dense.ccol_indices()", "dense.values()")
    return of_rows(_starts(row, lines), col, values[order], shape, names)


def _of_coo(dense: torch.Tensor) -> Entries:
    if dense.sparse_dim() != 2:
        raise ValueError(
            f"dense must have two sparse dimensions, got {dense.sparse_dim()}: compress "
            "dense.to_dense()"
        )
    lines, names = dense.shape[0], ("dense.indices()", "dense.indices()", "dense.values()")
    for indices, size in zip(dense._indices(), dense.shape, strict=True):
        _check_within(indices, size, names[0])
    row = dense._indices()[0]
    if not dense.is_coalesced() or bool((row[1:] < row[:-1]).any()):
        dense = coo(dense._indices(), dense._values(), tuple(dense.shape)).coalesce()
    row, col = dense._indices()
    return of_rows(_starts(row, lines), col, dense._values(), tuple(dense.shape), names)


def _starts(row: torch.Tensor, lines: int) -> torch.Tensor:
    """Where the entries of each row begin, and where the last end, of rows in order or not."""
    counts = torch.bincount(row, minlength=lines)
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def _check_tensors(crow, col, values, rows: int, names: tuple[str, str, str]) -> None:
    """Raises ValueError for other dtypes, sizes and devices."""
    if values.dtype not in BITS:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in BITS)
        raise ValueError(f"{names[2]} must have a dtype of {dtypes}, got {values.dtype}")
    if values.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{names[2]} must lie on a CPU or a CUDA device, got {values.device}")
    sizes = {names[0]: (crow, (rows + 1,)), names[1]: (col, tuple(values.shape[:1]))}
    for name, (tensor, size) in sizes.items():
        if tensor.dtype not in INDICES:
            raise ValueError(f"{name} must have dtype int32 or int64, got {tensor.dtype}")
        if tuple(tensor.shape) != size:
            raise ValueError(f"{name} must have shape {size}, got {tuple(tensor.shape)}")
        if tensor.device != values.device:
            raise ValueError(f"{name} is on {tensor.device} and {names[2]} on {values.device}")


def _check_rows(crow: torch.Tensor, entries: int, name: str) -> None:
    """Raises ValueError unless rows lie one behind the other. Neighbours are compared with each
    other, since their differences may overflow."""
    falls = (crow[1:] < crow[:-1]).sum()
    first, last, falls = torch.stack([n.long() for n in (crow[0], crow[-1], falls)]).tolist()
    if first != 0 or last != entries or falls:
        raise ValueError(
            f"{name} must rise from 0 to {entries}, the number of values, got {first} to {last}"
            + (", falling in between" if falls else "")
        )


def _check_within(indices: torch.Tensor, size: int, name: str) -> None:
    """Raises ValueError for an index of a row or column that the matrix has not."""
    if not indices.numel():
        return
    least, most = torch.stack(indices.aminmax()).tolist()
    if least < 0 or most >= size:
        raise ValueError(f"{name} must hold indices from 0 to {size - 1}, got {least} to {most}")

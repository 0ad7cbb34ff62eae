"""Matrices of the bitmap formats one below the other, and some rows of one, by chunks: nothing
is decoded, so values of fewer bits keep their scales. None for other formats, and where rows are no
whole chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kernlib.families.sparse.formats import bitmap
from kernlib.families.sparse.formats.bitmap_cpu import COLUMNS, ROWS, UNIT
from kernlib.families.sparse.lowering.quantised import QUANTISED
from kernlib.families.sparse.matrix import SparseMatrix
from kernlib.lowering.arithmetic import ceil_div

FORMATS = (bitmap.FORMAT, *QUANTISED)


def stack(matrices: Sequence[SparseMatrix]) -> SparseMatrix | None:
    """The matrices, of one dtype and as many columns, as one of their format."""
    first, *rest = matrices
    if first.format not in FORMATS or any(w.format != first.format for w in rest):
        return None
    if any(w.shape[0] % ROWS for w in matrices[:-1]):
        return None
    if sum(w.tensors["data"].numel() for w in matrices) >= bitmap.MOST_BYTES:
        return None
    tensors = _stacked([w.tensors for w in matrices])
    counts = [w.known_nnz() for w in matrices]
    nnz = None if None in counts else sum(n for n in counts if n is not None)
    shape = sum(w.shape[0] for w in matrices), first.shape[1]
    return SparseMatrix(first.format, shape, first.dtype, tensors, _largest_of(tensors), nnz)


def rows_of(w: SparseMatrix, first: int, count: int) -> SparseMatrix | None:
    """Some rows of a matrix, in its format."""
    last = first + count
    if w.format not in FORMATS or first % ROWS or (last % ROWS and last < w.shape[0]):
        return None
    tensors = _slabs_of(w.tensors, w.shape, first, last)
    return SparseMatrix(w.format, (count, w.shape[1]), w.dtype, tensors, _largest_of(tensors))


def _stacked(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The tensors of matrices of equal columns, one below the other. All but the last have whole
    slabs."""
    ends = [int(part["offsets"][-1]) for part in parts]
    starts = [sum(ends[:i]) for i in range(len(parts))]
    moved = [part["offsets"][1:] + start for part, start in zip(parts, starts, strict=True)]
    offsets = torch.cat([parts[0]["offsets"][:1], *moved])
    return {"data": torch.cat([part["data"] for part in parts]), "offsets": offsets}


def _slabs_of(
    tensors: Mapping[str, torch.Tensor], shape: tuple[int, int], first: int, last: int
) -> dict[str, torch.Tensor]:
    """The tensors of the rows of a matrix from ``first``, of a slab, to before ``last``."""
    across = ceil_div(shape[1], COLUMNS)
    offsets = tensors["offsets"][first // ROWS * across : ceil_div(last, ROWS) * across + 1]
    begin, end = (UNIT * int(offsets[i]) for i in (0, -1))
    return {"data": tensors["data"][begin:end].clone(), "offsets": offsets - offsets[0]}


def _largest_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The facts."""
    units = tensors["offsets"].diff()
    return {"largest": UNIT * int(units.max()) if units.numel() else 0}

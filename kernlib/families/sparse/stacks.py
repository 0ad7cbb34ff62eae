"""Matrices whose values have fewer bits, one below the other, and some rows of one: by their
chunks, since other groups of values would have other scales. None where rows are no whole
chunks."""

from __future__ import annotations

from collections.abc import Sequence

from kernlib.families.sparse.formats.bitmap_cpu import ROWS
from kernlib.families.sparse.lowering.value_codes import QUANTISED
from kernlib.families.sparse.matrix import SparseMatrix


def stack(matrices: Sequence[SparseMatrix]) -> SparseMatrix | None:
    """The matrices, of one dtype and as many columns, as one of their format."""
    first, *others = matrices
    if first.format not in QUANTISED or any(w.format != first.format for w in others):
        return None
    if any(w.shape[0] % ROWS for w in matrices[:-1]):
        return None
    from kernlib.families.sparse.formats.quantised import largest_of, stacked

    tensors = stacked([w.tensors for w in matrices])
    counts = [w.known_nnz() for w in matrices]
    nnz = None if None in counts else sum(n for n in counts if n is not None)
    shape = sum(w.shape[0] for w in matrices), first.shape[1]
    return SparseMatrix(first.format, shape, first.dtype, tensors, largest_of(tensors), nnz)


def rows_of(w: SparseMatrix, first: int, count: int) -> SparseMatrix | None:
    """Some rows of a matrix, in its format."""
    last = first + count
    if w.format not in QUANTISED or first % ROWS or (last % ROWS and last < w.shape[0]):
        return None
    from kernlib.families.sparse.formats.quantised import largest_of, slabs_of

    tensors = slabs_of(w.tensors, w.shape, first, last)
    return SparseMatrix(w.format, (count, w.shape[1]), w.dtype, tensors, largest_of(tensors))

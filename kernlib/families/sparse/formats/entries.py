"""Matrices by their entries, some rows at a time: formats are encoded from these without a dense
matrix.

Whoever encodes goes over the slabs of :meth:`Entries.slabs` more than once, to count and to write.
What a slab takes is bounded, whatever the matrix is: it has SLAB entries, or else 16 rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from kernlib.families.sparse.formats.encoding import BITS, nonzero

ROWS = 16  # of a slab are a multiple of these, as are those of bitmap's chunks
SLAB = 1 << 21  # entries, each of which takes some 100 bytes while it is encoded
CELLS = 1 << 20  # chunks, or rows of panels, that are counted together


class Slab(NamedTuple):
    """The entries of the rows from ``first`` to before ``last``: their rows, counted from
    ``first``, their columns, which rise within a row, both int64, and the bits of their values."""

    first: int
    last: int
    rows: torch.Tensor
    columns: torch.Tensor
    bits: torch.Tensor

    def present(self) -> Slab:
        """Without those that are 0.0 or -0.0."""
        mask = nonzero(self.bits)
        return self if bool(mask.all()) else self.where(mask)

    def where(self, mask: torch.Tensor) -> Slab:
        """The entries that a mask selects."""
        return self._replace(rows=self.rows[mask], columns=self.columns[mask], bits=self.bits[mask])


class Triplets(NamedTuple):
    """Entries of a compressed matrix, in any order: rows and columns, int64, and bits."""

    rows: torch.Tensor
    columns: torch.Tensor
    bits: torch.Tensor


def of_triplets(parts: Iterable[Triplets], shape: tuple[int, int], like: torch.Tensor) -> Entries:
    """The entries of a matrix, passed in any order. ``like`` is an empty tensor of its values'
    dtype and device."""
    listed = [*parts]
    none = torch.empty(0, dtype=torch.int64, device=like.device)
    rows, columns = (torch.cat([none, *(part[i] for part in listed)]) for i in (0, 1))
    values = torch.cat([like, *(part.bits.view(like.dtype) for part in listed)])
    listed.clear()
    order = rows.argsort(stable=True)
    starts = torch.nn.functional.pad(torch.bincount(rows, minlength=shape[0]).cumsum(0), (1, 0))
    entries = Entries(starts, columns[order], values[order], shape)
    entries.check("columns")
    return entries


class Entries:
    """The entries of a matrix of ``shape``: of row r those from ``crow[r]`` to before
    ``crow[r + 1]``, each in its column ``col``, in any order.

    With ``values`` (entries, block rows, block columns) they are blocks, of rows and columns of
    blocks. ``crow`` must be right; :meth:`check` looks at the columns, which comes first.
    """

    def __init__(
        self,
        crow: torch.Tensor,
        col: torch.Tensor,
        values: torch.Tensor,
        shape: tuple[int, int],
    ):
        self.shape, self.dtype, self.device = shape, values.dtype, values.device
        self._block = tuple(values.shape[1:]) or (1, 1)
        self._crow, self._col, self._bits = crow, col, values.view(BITS[values.dtype])
        self._is_sorted = True
        self._only: Slab | None = None  # of a matrix that is one
        self.nnz = 0  # entries that are not 0

    def to(self, dtype: torch.dtype) -> Entries:
        """The matrix with its values in another dtype that formats hold."""
        values = self._bits.view(self.dtype).to(dtype)
        entries = Entries(self._crow, self._col, values, self.shape)
        entries.check("columns")
        return entries

    def is_wide(self, panels: int, width: int) -> bool:
        """Whether there are more panels of ``width`` columns than entries, and no block lies in
        two."""
        return self._bits.numel() < panels and width % self._block[1] == 0

    def in_panels(self, width: int) -> tuple[Entries, torch.Tensor]:
        """The matrix of those panels of ``width`` columns that hold entries, side by side, and
        their numbers in order, where :meth:`is_wide`."""
        width_of_blocks = width // self._block[1]
        numbers, place = torch.unique(self._col.long() // width_of_blocks, return_inverse=True)
        columns = place * width_of_blocks + self._col % width_of_blocks
        values, shape = self._bits.view(self.dtype), (self.shape[0], len(numbers) * width)
        entries = Entries(self._crow, columns, values, shape)
        entries.check("columns")
        return entries, numbers

    def as_coo(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix in torch's layout COO, its values in a dtype."""
        rows = torch.repeat_interleave(self._crow.long().diff())
        values = self._bits.view(self.dtype).to(dtype)
        indices = torch.stack((rows, self._col.long()))
        return coo(indices, values, self.shape)

    def check(self, name: str) -> None:
        """Look at all columns, and count the entries. Raises ValueError, naming ``name``, for such
        as are no column of the matrix or stand twice in a row."""
        outside = twice = nnz = 0
        most = self.shape[1] // self._block[1]
        for low in range(0, self._col.numel(), SLAB):
            some = self._col[low : low + SLAB]
            outside += int(((some < 0) | (some >= most)).sum())
        if outside:
            raise ValueError(f"{name} must hold columns from 0 to {most - 1}; {outside} are others")
        for slab in self.slabs():
            falls = _falls(slab.rows, slab.columns)
            if bool(falls.any()):
                self._is_sorted = False
                slab = _sorted(slab)
                twice += int(_falls(slab.rows, slab.columns).sum())
            nnz += int(nonzero(slab.bits).sum())
            self._only = slab if slab.last - slab.first == self.shape[0] else None
        if twice:
            raise ValueError(
                f"{name} must hold each column once in a row, {twice} stand there again: add their "
                "values up, as scipy's sum_duplicates() and torch's coalesce() do"
            )
        self.nnz = nnz

    def slabs(self, most_rows: int = CELLS) -> Iterator[Slab]:
        """All rows, some at a time: whole ROWS, and ``most_rows`` at most, if that is more."""
        most_rows = max(ROWS, most_rows // ROWS * ROWS)
        if self._only is not None and most_rows >= self.shape[0]:
            yield self._only
            return
        first = 0
        while first < self.shape[0]:
            last = min(self._end(first), first + most_rows, self.shape[0])
            slab = self._slab(first, last)
            yield slab if self._is_sorted else _sorted(slab)
            first = last

    def _end(self, first: int) -> int:
        """The row behind those from ``first`` on that have SLAB entries, or ROWS of them."""
        height, width = self._block
        line = first // height
        most = int(self._crow[line]) + SLAB // (height * width)
        most = min(most, int(self._crow[-1]))
        behind = int(torch.searchsorted(self._crow, most, right=True)) - 1
        rows = (behind * height - first) // ROWS * ROWS
        return self.shape[0] if behind * height >= self.shape[0] else first + max(ROWS, rows)

    def _slab(self, first: int, last: int) -> Slab:
        height, width = self._block
        if (height, width) == (1, 1):
            starts = self._crow[first : last + 1].long()
            low, high = int(starts[0]), int(starts[-1])
            rows = torch.repeat_interleave(starts.diff())
            columns = self._col[low:high].long()
            return Slab(first, last, rows, columns, self._bits[low:high].reshape(-1))
        line = torch.arange(first, last, dtype=torch.int64, device=self.device)
        starts = self._crow[line // height].long()
        counts = (self._crow[line // height + 1].long() - starts) * width
        rows = torch.repeat_interleave(counts)
        number = torch.arange(rows.numel(), dtype=torch.int64, device=self.device)
        number -= (counts.cumsum(0) - counts)[rows]
        block, inside = starts[rows] + number // width, number % width
        columns = self._col[block].long() * width + inside
        return Slab(first, last, rows, columns, self._bits[block, (first + rows) % height, inside])


def coo(indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """A tensor of torch's layout COO, of indices that have been checked."""
    kind, place = values.dtype, values.device
    return torch.sparse_coo_tensor(
        indices, values, shape, dtype=kind, device=place, check_invariants=False
    )


def _falls(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Which entries do not lie behind the one before them, of the same row."""
    return (rows[1:] == rows[:-1]) & (columns[1:] <= columns[:-1])


def _sorted(slab: Slab) -> Slab:
    order = slab.columns.argsort(stable=True)
    order = order[slab.rows[order].argsort(stable=True)]
    return slab._replace(columns=slab.columns[order], bits=slab.bits[order])

"""Which pairs of rows and columns a reduction takes: those of one batch, or of blocks of a mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, TypeAlias

import torch

from kernlib.descriptors.base import as_int, shown
from kernlib.runtime.tensors import check_dense

Splits: TypeAlias = "torch.Tensor | Sequence[int]"
Device: TypeAlias = "torch.device | str | None"
MOST = 1 << 31


class Pairs:
    """The pairs that a reduction takes, of all rows and columns: ragged batches, or blocks.

    ``rows`` (P, M, 2) are P ranges of columns of each row, each its first and its end, which
    do not overlap and may be empty; ``cols`` (Q, N, 2) are the same pairs as ranges of rows of each
    column. They are int64, on the device of the points. ``shape`` is (M, N).

    Made by :meth:`from_splits`, :meth:`from_batch` and :meth:`from_blocks`, which look at their
    numbers once; calls that share a Pairs do not look again. ``rows`` and ``cols`` passed here are
    not looked at. Results need no padding: a row without columns has a sum of 0, a log-sum-exp of
    -inf, and as its smallest entry inf in column 0. Raises TypeError for other tensors.

    Example:
        >>> pairs = kl.Pairs.from_splits([0, 2, 3], [0, 1, 4])
        >>> x, y = torch.zeros(3, 1), torch.tensor([[1.0], [2.0], [3.0], [4.0]])
        >>> kl.kernel_sum(kl.l1_distance(), x, y, pairs=pairs)
        tensor([1., 1., 9.])
    """

    def __init__(self, rows: torch.Tensor, cols: torch.Tensor):
        check_dense(("rows", "cols"), rows=rows, cols=cols)
        for name, t in (("rows", rows), ("cols", cols)):
            if not isinstance(t, torch.Tensor) or t.dtype != torch.int64 or t.shape[2:] != (2,):
                raise TypeError(
                    f"{name} must be an int64 tensor (ranges, points, 2), got {shown(t)}"
                )
        self.rows, self.cols = rows.contiguous(), cols.contiguous()
        self.shape = rows.shape[1], cols.shape[1]

    def __repr__(self) -> str:
        ranges = f"{len(self.rows)} and {len(self.cols)} ranges"
        return f"Pairs(of {self.shape[0]} rows and {self.shape[1]} columns, {ranges})"

    def to(self, device: torch.device | str) -> Pairs:
        """The same on another ``device``. Raises what ``torch.Tensor.to`` raises.

        Example:
            >>> kl.Pairs.from_splits([0, 2], [0, 3]).to("cpu")
            Pairs(of 2 rows and 3 columns, 1 and 1 ranges)
        """
        return Pairs(self.rows.to(device), self.cols.to(device))

    @staticmethod
    def from_splits(row_splits: Splits, col_splits: Splits, *, device: Device = None) -> Pairs:
        """Of batches that lie one behind the other: batch i has the rows from ``row_splits[i]`` up
        to ``row_splits[i + 1]``, and the columns of ``col_splits`` likewise.

        Splits are lists or tensors (batches + 1,) of whole numbers that begin at 0 and do not
        decrease; the last are the numbers of rows and columns. ``device`` is by default theirs.
        Raises ValueError and TypeError that name the argument.

        Example:
            >>> kl.Pairs.from_splits(torch.tensor([0, 100, 250]), torch.tensor([0, 80, 90]))
            Pairs(of 250 rows and 90 columns, 1 and 1 ranges)
        """
        device = _device(device, row_splits, col_splits)
        rows, cols = _splits("row_splits", row_splits), _splits("col_splits", col_splits)
        if len(rows) != len(cols):
            raise ValueError(
                f"row_splits are of {len(rows) - 1} batches and col_splits of {len(cols) - 1}: "
                "give both as many, as each batch has rows and columns, which may be none"
            )
        of_rows, of_cols = _repeated(cols, rows), _repeated(rows, cols)
        return Pairs(of_rows[None].to(device), of_cols[None].to(device))

    @staticmethod
    def from_batch(row_batch: torch.Tensor, col_batch: torch.Tensor) -> Pairs:
        """Of the rows and columns of one batch: ``row_batch`` (M,) and ``col_batch`` (N,) are whole
        numbers that do not decrease, as point-cloud libraries have them.

        Raises ValueError for others, whose points are to be sorted by batch, and TypeError.

        Example:
            >>> kl.Pairs.from_batch(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1, 1]))
            Pairs(of 3 rows and 4 columns, 1 and 1 ranges)
        """
        rows, cols = _batch("row_batch", row_batch), _batch("col_batch", col_batch)
        of_rows, of_cols = (
            torch.stack([torch.searchsorted(of, x), torch.searchsorted(of, x, right=True)], dim=-1)
            for x, of in ((rows, cols), (cols, rows))
        )
        return Pairs(of_rows[None].to(row_batch.device), of_cols[None].to(row_batch.device))

    @staticmethod
    def from_blocks(
        mask: torch.Tensor, row_splits: Splits, col_splits: Splits, *, device: Device = None
    ) -> Pairs:
        """Of blocks of pairs: those of row block i, from ``row_splits[i]`` up to ``row_splits[i +
        1]``, and column block j, of ``col_splits``, where ``mask[i, j]`` is True. Splits and
        ``device`` are those of :meth:`from_splits`. Neighbouring blocks of a row are one range, and
        a reduction goes over the pairs once for each of the most ranges that a row has: sort points
        so that blocks lie together.

        Raises ValueError and TypeError that name the argument. After the block-sparse reductions of
        the KeOps project.

        Example:
            >>> mask = torch.tensor([[True, False], [True, True]])
            >>> kl.Pairs.from_blocks(mask, [0, 2, 4], [0, 3, 6])
            Pairs(of 4 rows and 6 columns, 1 and 1 ranges)
        """
        device = _device(device, mask)
        rows, cols = _splits("row_splits", row_splits), _splits("col_splits", col_splits)
        shape = (len(rows) - 1, len(cols) - 1)
        _check_values("mask", mask)
        if mask.dtype != torch.bool:
            raise TypeError(f"mask must be a tensor of bools, got {shown(mask)}")
        if tuple(mask.shape) != shape:
            raise ValueError(
                f"mask must be {shape}, as splits have blocks, got {tuple(mask.shape)}"
            )
        mask = mask.cpu()
        of_rows = _runs(mask, cols)[:, _owners(rows)]
        of_cols = _runs(mask.T, rows)[:, _owners(cols)]
        return Pairs(of_rows.to(device), of_cols.to(device))


def _device(device, *values: object) -> torch.device:
    if device is not None:
        return torch.device(device)
    of = [value.device for value in values if isinstance(value, torch.Tensor)]
    return of[0] if of else torch.device("cpu")


def _splits(name: str, value: object) -> torch.Tensor:
    """Splits in host memory. Raises TypeError and ValueError for what is none."""
    t = _whole(name, value)
    if t.dim() != 1 or not len(t):
        raise ValueError(f"{name} must be (batches + 1,), got {tuple(t.shape)}")
    if int(t[0]) != 0:
        raise ValueError(f"{name} must begin at 0, got {int(t[0])}")
    _check_order(name, t)
    return t


def _batch(name: str, value: torch.Tensor) -> torch.Tensor:
    _check_values(name, value)
    t = _whole(name, value)
    if t.dim() != 1:
        raise ValueError(f"{name} must be one number for each point, got {tuple(t.shape)}")
    _check_order(name, t)
    return t


def _check_order(name: str, t: torch.Tensor) -> None:
    falls = (t.diff() < 0).nonzero()
    if len(falls):
        at = int(falls[0])
        advice = "" if name.endswith("splits") else ": sort the points by batch"
        raise ValueError(
            f"{name} must not decrease, got {int(t[at])} before {int(t[at + 1])} at {at}{advice}"
        )
    if len(t) and int(t[-1]) >= MOST and name.endswith("splits"):
        raise ValueError(f"{name} must end below {MOST}, got {int(t[-1])}")


def _whole(name: str, value: object) -> torch.Tensor:
    """Whole numbers in host memory, int64."""
    if isinstance(value, torch.Tensor):
        _check_values(name, value)
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            _refuse(name, value)
        return value.detach().to("cpu", torch.int64)
    if not isinstance(value, (list, tuple)):
        _refuse(name, value)
    return torch.tensor([as_int(name, x) for x in value], dtype=torch.int64, device="cpu")


def _check_values(name: str, value: object) -> None:
    """Raises TypeError for what is no tensor, ValueError for one without values."""
    check_dense((name,), **{name: value})
    if value.is_meta:
        raise ValueError(f"{name} must have values, got a meta tensor; pass one of a device")


def _refuse(name: str, value: object) -> NoReturn:
    got = f"dtype {value.dtype}" if isinstance(value, torch.Tensor) else shown(value)
    raise TypeError(f"{name} must be whole numbers, a list or a tensor, got {got}")


def _repeated(ranges: torch.Tensor, splits: torch.Tensor) -> torch.Tensor:
    """The range of its batch for each point of ``splits``, (points, 2)."""
    return torch.stack([ranges[:-1], ranges[1:]], -1)[_owners(splits)]


def _owners(splits: torch.Tensor) -> torch.Tensor:
    """The place of its batch for each point."""
    places = torch.arange(len(splits) - 1, dtype=torch.int64, device="cpu")
    return places.repeat_interleave(splits.diff())


def _runs(mask: torch.Tensor, splits: torch.Tensor) -> torch.Tensor:
    """The ranges of True blocks of each row, (most ranges, rows, 2); empty ones at the end."""
    padded = torch.nn.functional.pad(mask.to(torch.int8), (1, 1))
    change = padded.diff(dim=1)
    counts = (change == 1).sum(1)
    most = max(1, int(counts.max())) if len(counts) else 1
    runs = torch.zeros(most, len(mask), 2, dtype=torch.int64, device="cpu")
    row, first = (change == 1).nonzero(as_tuple=True)
    _, end = (change == -1).nonzero(as_tuple=True)
    before = counts.cumsum(0) - counts
    place = torch.arange(len(row), dtype=torch.int64, device="cpu") - before[row]
    runs[place, row] = torch.stack([splits[first], splits[end]], -1)
    return runs

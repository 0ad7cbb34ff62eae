"""Reductions by blocks of rows of the matrix, which kernels leave to torch: the k smallest scores
of each row, and the pairs below a threshold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from kernlib.descriptors.expression import Name, Node, Operation
from kernlib.descriptors.score.kinds import INT
from kernlib.families.pairwise.formula import grammar, plans
from kernlib.families.pairwise.formula.spec import COL, ROW, Input, Spec
from kernlib.families.pairwise.reductions import blocks

NOWHERE = -1  # the column of an entry that is not there


class Matrix(NamedTuple):
    """A matrix of scores that is not there: tensors and numbers of a request, the text of its spec,
    batch, rows and columns; and the columns of each row (P, rows, 2), None for all."""

    tensors: list[torch.Tensor]
    numbers: list[float]
    text: str
    batch: int
    rows: int
    cols: int
    ranges: torch.Tensor | None = None


def topk(
    tensors: list, numbers: list, text: str, shape: list[int], k: int, largest: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and places, (batch, rows, k), of the matrix of a spec's ``text``. ``shape`` is batch,
    rows and columns."""
    is_ranged = plans.spec_of(text, tensors).ranged
    ranges = tensors[-2] if is_ranged else None
    tensors = tensors[:-2] if is_ranged else tensors
    values, places = [], []
    beyond = float("-inf" if largest else "inf")
    for rows, first, scores in each(Matrix(tensors, numbers, text, *shape, ranges)):
        there = None if ranges is None else contained(ranges[:, rows], first, scores.shape[-1])
        if there is not None:
            scores = torch.where(there, scores, beyond)
        if scores.shape[-1] < k:
            scores = torch.nn.functional.pad(scores, (0, k - scores.shape[-1]), value=beyond)
        some, at = blocks.first(scores, k, largest)
        if there is not None:
            padded = torch.nn.functional.pad(there, (0, scores.shape[-1] - there.shape[-1]))
            is_there = padded.expand(scores.shape).gather(-1, at)
            some = torch.where(is_there, some, beyond)
            at = torch.where(is_there, at + first, NOWHERE)
        values.append(some)
        places.append(at)
    return torch.cat(values, 1), torch.cat(places, 1)


def below(matrix: Matrix, limit: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, columns and scores of the pairs whose score is at most ``limit``, row by row."""
    parts, ranges = [], matrix.ranges
    for rows, first, scores in each(matrix):
        hit = scores[0] <= limit
        if ranges is not None:
            hit &= contained(ranges[:, rows], first, scores.shape[-1])
        row, col = hit.nonzero(as_tuple=True)
        parts.append((row + rows.start, col + first, scores[0][row, col]))
    if not parts:
        none = torch.zeros(0, dtype=torch.int64, device=limit.device)
        return none, none, limit[:0]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def contained(ranges: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Which of ``count`` columns from ``first`` on are in the ranges (P, rows, 2) of each row,
    (rows, count)."""
    cols = torch.arange(first, first + count, dtype=torch.int64, device=ranges.device)
    return ((ranges[..., :1] <= cols) & (cols < ranges[..., 1:])).any(0)


def each(matrix: Matrix) -> Iterator[tuple[slice, int, torch.Tensor]]:
    """Blocks of rows of a matrix: which rows, their first column, and the scores (batch, some rows,
    columns). Of ragged batches the columns that some row of a block has."""
    plan = plans.spec_of(matrix.text, matrix.tensors)
    wide, device = plans.arithmetic(matrix.tensors, plan.inputs), matrix.tensors[0].device
    of = [each for each in plan.inputs if not each.on_host]
    shifted = _shifted(plan).canonical()
    for rows, cols in _parts(matrix, blocks.entries_of(device, wide)):
        tensors = [_part(t, x.axes, rows, cols) for t, x in zip(matrix.tensors, of, strict=True)]
        for start in (rows.start, cols.start):
            tensors.append(torch.full((1,), start, dtype=torch.int32, device=device))
        sizes = [matrix.batch, rows.stop - rows.start, cols.stop - cols.start, 1]
        yield rows, cols.start, plans.execute(tensors, matrix.numbers, shifted, sizes)


def _parts(matrix: Matrix, entries: int) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of blocks of at most so many entries, or of one row."""
    entries, ranges = entries // max(1, matrix.batch), matrix.ranges
    bounds = None
    if ranges is not None:  # one copy to the host for all blocks
        first = torch.where(ranges[..., 0] < ranges[..., 1], ranges[..., 0], matrix.cols).amin(0)
        bounds = torch.stack([first, ranges[..., 1].amax(0)], -1).cpu()
    start = 0
    while start < matrix.rows:
        cols = slice(0, matrix.cols)
        if bounds is None:
            stop = min(matrix.rows, start + max(1, entries // max(1, matrix.cols)))
        else:
            stop = _end(bounds, start, entries)
            least, most = int(bounds[start:stop, 0].min()), int(bounds[start:stop, 1].max())
            cols = slice(min(least, most), most)
        yield slice(start, stop), cols
        start = stop


def _end(bounds: torch.Tensor, start: int, entries: int) -> int:
    """The end of the rows from ``start`` on whose block has at most so many entries."""
    first = bounds[start:, 0].cummin(0).values
    widths = bounds[start:, 1].cummax(0).values - first
    rows = torch.arange(1, len(widths) + 1, dtype=torch.int64, device="cpu")
    fits = rows * widths.clamp(min=1) <= entries
    return start + max(1, int(fits.sum()) if bool(fits[0]) else 1)


def _part(t: torch.Tensor, axes: tuple[str, ...], rows: slice, cols: slice) -> torch.Tensor:
    if ROW in axes:
        t = t[:, rows]
    return t.narrow(1 + (ROW in axes), cols.start, cols.stop - cols.start) if COL in axes else t


def _shifted(plan: Spec) -> Spec:
    """The spec of a block, whose first row and first column are two more inputs."""
    count = len(plan.inputs)
    places = {
        Name(axis): Operation("+", (Name(axis), Name(f"t{count + i}")))
        for i, axis in enumerate((ROW, COL))
    }

    def moved(node: Node) -> Node:
        return grammar.mapped(node, places.get)

    inputs = (*plan.inputs, Input((), INT), Input((), INT))
    return plan._replace(
        score=moved(plan.score), terms=tuple(map(moved, plan.terms)), inputs=inputs, ranged=False
    )

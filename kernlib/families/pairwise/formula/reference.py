"""Formulas in PyTorch, by blocks of rows: what computes them on a CPU, and what kernels are
compared with. Tensors have a batch in front, of one size or 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kernlib.descriptors.expression import Node, Operation, names
from kernlib.families.pairwise.formula.spec import COL, FEATURE, LEAST, LOGSUMEXP, MATRIX, ROW, Spec
from kernlib.runtime import expressions
from kernlib.runtime.precision import product

BLOCK = 1 << 22  # numbers of a block of pairs and features


class Values:
    """What the trees of a spec are for some pairs. Values have four dimensions, batch, rows,
    columns and features, each of size 1 where the tree does not name it; or they are numbers."""

    def __init__(self, spec: Spec, values: dict, wide: torch.dtype):
        self.spec, self.wide, self.values = spec, wide, values
        for i, term in enumerate(spec.terms):
            self.values[f"#{i}"] = self._sum(term)

    def of(self, node: Node) -> torch.Tensor:
        """The value of a score, a term or a unit."""
        values = {name: self.values[name] for name in names(node)}
        result = expressions.evaluate(node, values, self.wide)
        return result if result.dim() == 4 else result.reshape(1, 1, 1, 1)

    def _sum(self, term: Node) -> torch.Tensor:
        """A term, added up over features: by a product of matrices where it is one."""
        if not _is_product(term) or not _are_wide(self.spec, term.operands):
            return self.of(term).sum(-1, keepdim=True)
        sides = sorted(term.operands, key=lambda x: COL in self.spec.axes_of(x))
        if [_side(self.spec, x) for x in sides] != [ROW, COL]:
            return self.of(term).sum(-1, keepdim=True)
        left, right = map(self.of, sides)
        return product(left[:, :, 0], right[:, 0].mT)[..., None]

    def weighted(self, score: torch.Tensor) -> torch.Tensor:
        """``sum_n score * unit``, (batch, rows, features)."""
        unit = self.spec.unit
        if ROW in self.spec.axes_of(unit):
            return (score * self.of(unit)).sum(2)
        value = self.of(unit)  # (batch, 1, columns, features)
        return product(score[..., 0], value[:, 0].expand(-1, score.shape[2], -1))


def compute(spec: Spec, tensors: Sequence, sizes: Sequence[int], wide: torch.dtype, ranges=None):
    """The result of a spec: ``sizes`` are batch, rows, columns and features; numbers of the host
    stand among the tensors. ``ranges`` (M, 2) are each row's first and end column. Of the smallest
    of a row also its place."""
    batch, features = sizes[0], sizes[3]
    parts = []
    for at, of in _blocks(spec, sizes, tensors, ranges):
        values = Values(spec, _values(spec, tensors, at, of), wide)
        shape = batch, at.stop - at.start, of.stop - of.start, 1
        score = values.of(spec.score).to(wide).expand(shape)
        parts.append(_reduced(spec, values, score, features, of.start))
    if spec.reduction != LEAST:
        return torch.cat(parts, 1)
    return tuple(torch.cat(list(some), 1) for some in zip(*parts, strict=True))


def _reduced(spec: Spec, values: Values, score: torch.Tensor, features: int, first: int):
    if spec.reduction == MATRIX:
        return score[..., 0]
    if spec.reduction == LOGSUMEXP:
        return score[..., 0].logsumexp(2)
    if spec.reduction == LEAST:
        return _least(score[..., 0], first)
    if spec.unit is None:
        return score.sum(2)
    result = values.weighted(score)
    return result.expand(*score.shape[:2], features)


def _least(score: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest of each row, a NaN being smaller than any number, and its first place."""
    if not score.shape[2]:
        none = score.new_full(score.shape[:2], float("inf"))
        return none, torch.zeros(none.shape, dtype=torch.int64, device=score.device)
    value = score.amin(2)
    is_it = (score == value[..., None]) | (score.isnan() & value.isnan()[..., None])
    return value, is_it.to(torch.uint8).argmax(2) + first


def _blocks(spec: Spec, sizes, tensors, ranges) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of blocks that have at most BLOCK numbers, or one row."""
    batch, rows, cols, features = sizes
    trees = [*spec.terms, *([] if spec.unit is None else [spec.unit])]
    widths = [1, features]
    for tree in trees:
        widths += [tensors[i].shape[-1] for i in spec.features_of(tree)]
    for start, stop, first, end in _segments(rows, cols, ranges):
        step = max(1, BLOCK // max(1, batch * (end - first) * max(widths)))
        for at in range(start, max(stop, start + 1), step):  # no rows are a block too
            yield slice(at, min(at + step, stop)), slice(first, end)


def _segments(rows: int, cols: int, ranges) -> list[tuple[int, int, int, int]]:
    """Rows that follow each other and have the same columns, and those."""
    if ranges is None:
        return [(0, rows, 0, cols)]
    same, counts = torch.unique_consecutive(ranges, dim=0, return_counts=True)
    segments, start = [], 0
    for (first, end), count in zip(same.tolist(), counts.tolist(), strict=True):
        segments.append((start, start + count, first, max(first, end)))
        start += count
    return segments or [(0, 0, 0, 0)]


def _values(spec: Spec, tensors: Sequence, rows: slice, cols: slice) -> dict:
    """The values of a block's names."""
    placed = (t for t in tensors if isinstance(t, torch.Tensor))
    device = next((t.device for t in placed), torch.device("cpu"))
    at = [torch.arange(s.start, s.stop, dtype=torch.int64, device=device) for s in (rows, cols)]
    values = {ROW: at[0][None, :, None, None], COL: at[1][None, None, :, None]}
    for i, (t, each) in enumerate(zip(tensors, spec.inputs, strict=True)):
        values[f"t{i}"] = _part(t, each.axes, rows, cols)
    return values


def _part(t, axes: tuple[str, ...], rows: slice, cols: slice):
    """A tensor's rows and columns of a block, in four dimensions."""
    if not isinstance(t, torch.Tensor):
        return t
    if ROW in axes:
        t = t[:, rows]
    if COL in axes:
        t = t.narrow(1 + (ROW in axes), cols.start, cols.stop - cols.start)
    return _in_four(t, axes)


def _in_four(t: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
    for place, axis in enumerate((ROW, COL, FEATURE), 1):
        if axis not in axes:
            t = t.unsqueeze(place)
    return t


def chosen(
    spec: Spec, tensors: Sequence, places: torch.Tensor, wide: torch.dtype, at=None
) -> torch.Tensor:
    """The scores of the columns ``places`` (batch, rows, K) of each row, recorded by torch. Rows
    are counted from 0 on, or are the places ``at``."""
    batch, rows, count = places.shape
    if at is None:
        at = torch.arange(rows, dtype=torch.int64, device=places.device)
    values = {ROW: at[None, :, None, None], COL: places[..., None]}
    for i, (t, each) in enumerate(zip(tensors, spec.inputs, strict=True)):
        if isinstance(t, torch.Tensor):
            t = _gathered(t, each.axes, places) if COL in each.axes else _in_four(t, each.axes)
        values[f"t{i}"] = t
    score = Values(spec, values, wide).of(spec.score)
    return score.to(wide).expand(batch, rows, count, 1)[..., 0]


def _gathered(t: torch.Tensor, axes: Sequence[str], places: torch.Tensor) -> torch.Tensor:
    """What a tensor of columns has at the places of each row."""
    batch = torch.arange(t.shape[0], dtype=torch.int64, device=t.device)[:, None, None]
    if ROW in axes:
        rows = torch.arange(places.shape[1], dtype=torch.int64, device=t.device)[None, :, None]
        t = t[batch, rows, places]
    else:
        t = t[batch, places]
    return t if FEATURE in axes else t[..., None]


def _is_product(node: Node) -> bool:
    return isinstance(node, Operation) and node.operator == "*"


def _are_wide(spec: Spec, nodes: tuple[Node, ...]) -> bool:
    """Whether all of them have features."""
    return all(FEATURE in spec.axes_of(node) for node in nodes)


def _side(spec: Spec, node: Node) -> str:
    """ROW or COL where a tree has that axis alone, else ""."""
    axes = spec.axes_of(node) - {FEATURE}
    return next(iter(axes)) if len(axes) == 1 else ""

"""The k smallest scores of each row, by blocks of rows of the matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from kernlib.descriptors.expression import Name, Node, Operation
from kernlib.descriptors.score.kinds import INT
from kernlib.families.pairwise.formula import grammar, plans
from kernlib.families.pairwise.formula.spec import ROW, Input, Spec
from kernlib.families.pairwise.reductions import blocks


def topk(
    matrix: Callable,
    tensors: list,
    numbers: list,
    text: str,
    shape: list[int],
    k: int,
    largest: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and places, (batch, rows, k), of the matrix of a spec's ``text``. ``shape`` is batch,
    rows and columns, ``matrix`` the operator of matrices."""
    values, places = [], []
    for scores in each(matrix, tensors, numbers, text, shape):
        some, at = blocks.first(scores, k, largest)
        values.append(some)
        places.append(at)
    return torch.cat(values, 1), torch.cat(places, 1)


def each(
    matrix: Callable, tensors: list, numbers: list, text: str, shape: list[int]
) -> Iterator[torch.Tensor]:
    """Blocks of rows of a matrix, (batch, some rows, columns)."""
    plan = plans.spec_of(text, tensors)
    wide, (batch, total, cols) = plans.arithmetic(tensors, plan.inputs), shape
    entries = blocks.entries_of(tensors[0].device, wide)
    count = max(1, entries // max(1, batch * cols))
    if count >= total:
        yield matrix(tensors, numbers, text, [*shape, 1], False)
        return
    shifted = _shifted(plan).canonical()
    of = [each for each in plan.inputs if not each.on_host]
    for start in range(0, total, count):
        rows = min(count, total - start)
        parts = [
            t[:, start : start + rows] if ROW in each.axes else t
            for t, each in zip(tensors, of, strict=True)
        ]
        parts.append(torch.full((1,), start, dtype=torch.int32, device=tensors[0].device))
        yield matrix(parts, numbers, shifted, [batch, rows, cols, 1], False)


def _shifted(plan: Spec) -> Spec:
    """The spec of a block of rows, whose first row is one more input."""
    place = Operation("+", (Name(ROW), Name(f"t{len(plan.inputs)}")))

    def moved(node: Node) -> Node:
        return grammar.mapped(node, {Name(ROW): place}.get)

    inputs = (*plan.inputs, Input((), INT))
    return plan._replace(
        score=moved(plan.score), terms=tuple(map(moved, plan.terms)), inputs=inputs
    )

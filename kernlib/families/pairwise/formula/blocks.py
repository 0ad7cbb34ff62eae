"""The k smallest scores of each row, by blocks of rows of the matrix."""

from __future__ import annotations

import torch

from kernlib.descriptors.expression import Name, Node, Operation
from kernlib.descriptors.score.kinds import INT
from kernlib.families.pairwise.formula import grammar, operators, plans
from kernlib.families.pairwise.formula.arguments import Call
from kernlib.families.pairwise.formula.spec import ROW, Input, Spec
from kernlib.families.pairwise.reductions import blocks


def topk(call: Call, text: str, k: int, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and places, (batch, rows, k), of the matrix of a spec's ``text``."""
    values, places = [], []
    for scores in each(call, text):
        some, at = blocks.first(scores, k, largest)
        values.append(some)
        places.append(at)
    return torch.cat(values, 1), torch.cat(places, 1)


def each(call: Call, text: str):
    """Blocks of rows of a matrix, (batch, some rows, columns)."""
    plan = plans.spec_of(text, call.tensors)
    wide = plans.arithmetic(call.tensors, plan.inputs)
    count = max(
        1, blocks.entries_of(call.tensors[0].device, wide) // max(1, call.batch * call.cols)
    )
    if count >= call.rows:
        sizes = [call.batch, call.rows, call.cols, 1]
        yield operators.formula(call.tensors, call.numbers, text, sizes, False)
        return
    shifted = _shifted(plan)
    of = [each for each in plan.inputs if not each.on_host]
    for start in range(0, call.rows, count):
        rows = min(count, call.rows - start)
        tensors = [
            t[:, start : start + rows] if ROW in each.axes else t
            for t, each in zip(call.tensors, of, strict=True)
        ]
        first = torch.full((1,), start, dtype=torch.int32, device=tensors[0].device)
        tensors.append(first)
        sizes = [call.batch, rows, call.cols, 1]
        yield operators.formula(tensors, call.numbers, shifted.canonical(), sizes, False)


def _shifted(plan: Spec) -> Spec:
    """The spec of a block of rows, whose first row is one more input."""
    place = Operation("+", (Name(ROW), Name(f"t{len(plan.inputs)}")))

    def moved(node: Node) -> Node:
        return grammar.mapped(node, {Name(ROW): place}.get)

    inputs = (*plan.inputs, Input((), INT))
    return plan._replace(
        score=moved(plan.score), terms=tuple(map(moved, plan.terms)), inputs=inputs
    )

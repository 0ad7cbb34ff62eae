"""Problems of reductions that tests of lowering share, and what a source says of them."""

from __future__ import annotations

from kernlib.families.pairwise.lowering.problem import Layout
from kernlib.families.pairwise.lowering.reduce import Problem


def problem(
    reduction="matmul", m=5000, n=7000, k=64, columns=1, batch=1, shifted=False, **changes
) -> Problem:
    """A call on contiguous row-major tensors, with some fields changed; ``shifted`` by a potential
    of columns."""
    columns = columns if reduction == "matmul" or shifted else 0
    step = 1 if batch > 1 else 0
    fields = {
        "a": Layout(m * k * step, k, 1),
        "b": Layout(n * k * step, k, 1),
        "v": Layout(n * columns * step, columns, 1),
        "columns": columns,
        "out_columns": columns,
    }
    return Problem(reduction, m, n, k, batch, **(fields | changes))


def constant(step, name: str) -> int:
    """A number that the source of a launch has by name."""
    return int(step.spec.source.split(f" {name} = ")[1].split(";")[0])

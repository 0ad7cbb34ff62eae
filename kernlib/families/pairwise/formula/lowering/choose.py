"""Which kernel computes a formula: ``small`` reductions of few features, ``tile`` those of any
number, ``matrix`` what stores a value of each pair."""

from __future__ import annotations

from kernlib.families.pairwise.formula.lowering.hoist import outside_unit
from kernlib.families.pairwise.formula.lowering.problem import Problem
from kernlib.lowering import kernel
from kernlib.lowering.kernel import Gpu
from kernlib.lowering.steps import Lowered

KERNELS = "kernlib.families.pairwise.formula.kernels"


def lower(problem: Problem, gpu: Gpu) -> Lowered:
    """The launches of a call of one row or more. Raises UnsupportedError for sizes that no grid can
    hold."""
    problem = problem._replace(spec=outside_unit(problem.spec))
    option = kernel.choose(kernel.kernels(KERNELS, "pairs"), problem, gpu)
    return option.kernel.launch(None, problem, gpu, option.knobs)

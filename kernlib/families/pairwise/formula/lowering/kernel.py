"""What the kernels of formulas share on the host."""

from __future__ import annotations

from typing import Any, NamedTuple

from kernlib.families.pairwise.formula.lowering.problem import Problem, facts, fields, pointers_text
from kernlib.families.pairwise.formula.spec import LOGSUMEXP, TOTAL
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import round_up
from kernlib.lowering.config import Fact
from kernlib.lowering.kernel import Kernel, named
from kernlib.lowering.steps import WORKSPACE


class FormulaKernel(Kernel):
    """A kernel of a formula, which no list has ahead of its call: its subject is None, and a launch
    says its specification."""

    role = "pairs"

    class Variant(NamedTuple):
        """The text in front of the header, which decides everything."""

        text: str

    def variants(self, subject: Any, scope: Any):
        """None ahead of calls."""
        return iter(())

    def spec_of(
        self,
        problem: Problem,
        text: str,
        more: dict[str, Fact],
        threads: int,
        shared_bytes: int,
        words: list[str],
    ) -> KernelSpec:
        """The specification of a formula's text with further facts."""
        texts = (
            "using AccT = Config::AccT;\n",
            pointers_text(problem),
            fields(problem).text(),
            text,
        )
        names = (
            "pairwise/formula/values.cuh",
            "common/reducer_names.cuh",
            "pairwise/formula/names.cuh",
        )
        source = self.source({**facts(problem), **more}, *texts, includes=names)
        spec = problem.spec
        words = [spec.reduction, *["ranged"] * spec.ranged, problem.result, *words]
        line = f"formula {self.name} {' '.join(words)}"
        plain = KernelSpec("formula", source, self.entry, threads, shared_bytes, description=line)
        return named(plain, *words)


def reducer_of(problem: Problem, width: int) -> str:
    """The type that a row's scores go to, with so many features of the unit."""
    spec = problem.spec
    if spec.unit is not None:
        return f"Matmul<{width}>"
    sums = "LogSumExp" if problem.result == "float64" else "LogSums"
    return {TOTAL: "RowSum", LOGSUMEXP: sums}.get(spec.reduction, "Minimum")


Operand = tuple[str, int]


def results(problem: Problem, splits: int) -> tuple[Operand, Operand | None, int]:
    """Where so many blocks of a row leave results and indices, and the bytes of the workspace."""
    has_indices = problem.has_indices
    if splits == 1:
        return ("out", 0), ("indices", 0) if has_indices else None, 0
    count = splits * problem.batch * problem.rows
    size = round_up(count * problem.outputs * problem.bytes, 256)
    if not has_indices:
        return (WORKSPACE, 0), None, size
    return (WORKSPACE, 0), (WORKSPACE, size), size + 8 * count

"""Partial results of rows whose columns were divided among blocks, put together in one order."""

from __future__ import annotations

from typing import NamedTuple

from kernlib.families.pairwise.formula.lowering.problem import MAX_BLOCKS, Problem
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Kernel, named
from kernlib.lowering.parameters import Fields
from kernlib.lowering.steps import WORKSPACE, Step

_FIELDS = Fields(("i64 count", "i64 splits"))
_JOINS = {"sum": "JoinSums", "logsumexp": "JoinLogSumExps", "min": "JoinMinima"}


class Variant(NamedTuple):
    """The reduction and its dtype."""

    reduction: str
    dtype: str


class Join(Kernel):
    """A thread for each result."""

    role = "join"
    name = "join"
    header = "pairwise/formula/join.cuh"
    entry = "formula_join"
    Variant = Variant
    threads = 256

    def step(self, problem: Problem, splits: int, indices: int) -> Step:
        """The launch, of partial results in the workspace, whose indices begin at a byte of it."""
        count = problem.batch * problem.rows * problem.outputs
        pointers = [(WORKSPACE, 0), (WORKSPACE, indices), ("out", 0)]
        pointers.append(("indices" if problem.has_indices else "out", 0))
        return Step(
            self.spec(None, Variant(problem.spec.reduction, problem.result), ""),
            (min(ceil_div(count, self.threads), MAX_BLOCKS), 1),
            _FIELDS.pack(count=count, splits=splits),
            tuple(pointers),
        )

    def spec(self, subject: None, variant: Variant, arch: str) -> KernelSpec:
        facts = {
            "AccT": DTYPES[variant.dtype].cuda,
            "THREADS": self.threads,
            "Join": _JOINS[variant.reduction],
        }
        source = self.source(facts, _FIELDS.text(), includes=("pairwise/formula/names.cuh",))
        line = f"formula join {variant.reduction} {variant.dtype}"
        return named(KernelSpec("formula", source, self.entry, self.threads, description=line),
                     *variant)  # fmt: skip

    def takes(self, problem: Problem, arch: str) -> bool:
        """Never by choice: it ends a reduction."""
        return False


JOIN = Join()

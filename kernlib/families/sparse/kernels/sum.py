"""The launch behind a product whose columns were divided: parts of sums, added up in their order.

Every format's product may end in it, with :meth:`Sum.step`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.sparse.lowering.problem import OVERLAPPING, Problem, Scope
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.kernel import Kernel
from kernlib.lowering.parameters import Fields
from kernlib.lowering.steps import WORKSPACE, Step

THREADS = 128
FIXED = Fields((
    "i64 rows", "i64 part_stride", "i64 out_vector_stride", "i64 out_row_stride",
    "int columns", "int parts",
))  # fmt: skip
OPERANDS = (WORKSPACE, "out")


class Sum(Kernel):
    """Adds up float32 sums [part][n][row], a thread a row."""

    role = "step"
    name = "sum"
    header = "sparse/sum.cuh"
    entry = "sparse_sum"
    reason = "parts of sums that blocks have left, added up in one order"

    class Variant(NamedTuple):
        """Everything that code generation chooses besides the epilogue: the result's dtype."""

        dtype: str

    def step(
        self,
        epilogue: tuple[Epilogue, ...],
        problem: Problem,
        arch: str,
        parts: int,
        begin: int = 0,
    ) -> Step:
        """Adds up ``parts`` sums, which begin at a byte of the workspace."""
        fixed = FIXED.pack(
            rows=problem.rows,
            part_stride=problem.columns * problem.rows,
            out_vector_stride=problem.out_strides[0],
            out_row_stride=problem.out_strides[1],
            columns=problem.columns,
            parts=parts,
        )
        (_, *others) = text.pointers(OPERANDS, epilogue)
        return Step(
            self.spec(epilogue, self.Variant(problem.dtype), arch),
            (ceil_div(problem.rows, THREADS), min(problem.columns, 65535)),
            fixed,
            ((WORKSPACE, begin), *others),
            text.scalar_count(epilogue),
            overlaps=arch in OVERLAPPING,
        )

    def axes(self, epilogue: tuple[Epilogue, ...], scope: Scope) -> Mapping[str, Iterable]:
        """The dtypes of a scope."""
        return {"dtype": scope.dtypes}

    def spec(self, epilogue: tuple[Epilogue, ...], variant: Variant, arch: str) -> KernelSpec:
        """The specification for a dtype of the result."""
        facts = {
            **text.facts(variant.dtype, variant.dtype, epilogue),
            "OVERLAPS": arch in OVERLAPPING,
            "PARAMETER_BYTES": text.parameters(len(OPERANDS), FIXED.format, epilogue).size,
        }
        texts = FIXED.text(), text.typed_finish(epilogue)
        source = self.source(facts, *texts, includes=("common/math.cuh",))
        return self.named_spec(source, THREADS, 0, variant.dtype, [], epilogue)

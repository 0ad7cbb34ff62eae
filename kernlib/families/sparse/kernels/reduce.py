"""The kernel slices/reduce.cuh of kernel_sources/sparse: panels of products with the formats u8,
u4 and u2, added up in their order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.sparse.lowering.codes import grid
from kernlib.families.sparse.lowering.problem import OVERLAPPING, Problem, Scope
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.kernel import Kernel
from kernlib.lowering.parameters import Fields
from kernlib.lowering.steps import WORKSPACE, Step

ROWS, THREADS = 32, 256  # of a block
FIXED = Fields((
    "i64 out_column_stride", "i64 out_row_stride",
    "u32 panels", "u32 rows", "u32 columns", "u32 unused",
))  # fmt: skip
OPERANDS = (WORKSPACE, "out")


class Reduce(Kernel):
    """Adds up float32 sums [panel][n][row], and applies epilogues."""

    role = "step"
    name = "sum of panels"
    header = "sparse/slices/reduce.cuh"
    entry = "sparse_slices_reduce"
    reason = "panels of `slices`, added up in one order"

    class Variant(NamedTuple):
        """Everything that code generation chooses besides the epilogue: the result's dtype."""

        dtype: str

    def step(self, epilogue: tuple[Epilogue, ...], problem: Problem, arch: str) -> Step:
        """The launch behind that of a problem."""
        panels, _ = grid((problem.rows, problem.cols), problem.fact("width"))
        fixed = FIXED.pack(
            out_column_stride=problem.out_strides[0],
            out_row_stride=problem.out_strides[1],
            panels=panels,
            rows=problem.rows,
            columns=problem.columns,
            unused=0,
        )
        return Step(
            self.spec(epilogue, self.Variant(problem.dtype), arch),
            (ceil_div(problem.rows, ROWS), problem.columns),
            fixed,
            text.pointers(OPERANDS, epilogue),
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
            "PARAMETER_BYTES": text.parameters(len(OPERANDS), FIXED.format, epilogue).size,
        }
        texts = FIXED.text(), text.typed_finish(epilogue)
        source = self.source(facts, *texts, includes=("common/math.cuh",))
        return self.named_spec(source, THREADS, 0, variant.dtype, [], epilogue)

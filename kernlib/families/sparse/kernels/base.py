"""What the family's kernels have in common: the struct of their parameters, and what the generated
text and the launch have of an epilogue; and the kernels that add up what a product leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.sparse.lowering.problem import OVERLAPPING, Problem, Scope
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.config import Fact
from kernlib.lowering.kernel import Kernel
from kernlib.lowering.parameters import Fields
from kernlib.lowering.steps import WORKSPACE, Step


class SparseKernel(Kernel):
    """A kernel whose launches take the addresses of ``operands``, then those of the epilogue, and
    ``fixed``. Its text has the epilogue, if it ``finishes``, and ``includes``. Kernels that its
    launches take besides are ``steps``."""

    operands: ClassVar[tuple[str, ...]]
    fixed: ClassVar[Fields]
    finishes: ClassVar[bool] = True
    includes: ClassVar[tuple[str, ...]] = ("common/math.cuh",)
    steps: ClassVar[tuple[type[Kernel], ...]] = ()

    def step_of(
        self,
        epilogue: tuple[Epilogue, ...],
        problem: Problem,
        variant: Any,
        arch: str,
        grid: tuple[int, int],
        overlaps: bool = True,
        **values: int,
    ) -> Step:
        """The launch of a variant. ``values`` are those of ``fixed`` that the problem does not
        say."""
        sizes = sizes_of(problem)
        fixed = {name: sizes[name] for name in self.fixed.names if name in sizes}
        return Step(
            self.spec(epilogue, variant, arch),
            grid,
            self.fixed.pack(**fixed, **values),
            text.pointers(self.operands, epilogue),
            text.scalar_count(epilogue),
            overlaps=overlaps and arch in OVERLAPPING,
        )

    def specs(self, epilogue: tuple[Epilogue, ...], scope: Any, arch: str) -> list[KernelSpec]:
        """The specifications of all variants of a scope, and of what is launched besides."""
        specs = super().specs(epilogue, scope, arch)
        if specs:
            for kind in self.steps:
                specs += kind().specs(epilogue, scope, arch)
        return specs

    def spec_of(
        self,
        epilogue: tuple[Epilogue, ...],
        facts: Mapping[str, Fact],
        threads: int,
        shared_bytes: int,
        dtype: str,
        words: list[str],
        *texts: str,
    ) -> KernelSpec:
        """The specification by facts and texts besides those of the epilogue."""
        size = text.parameters(len(self.operands), self.fixed.format, epilogue).size
        facts = {**facts, "PARAMETER_BYTES": size}
        texts = (*[text.typed_finish(epilogue)] * self.finishes, *texts)
        source = self.source(facts, self.fixed.text(), *texts, includes=self.includes)
        return self.named_spec(source, threads, shared_bytes, dtype, words, epilogue)


class PartialSums(SparseKernel):
    """Adds up sums of a product, in one order, and applies the epilogue."""

    role = "step"
    operands = (WORKSPACE, "out")
    threads: ClassVar[int]

    class Variant(NamedTuple):
        """Everything that code generation chooses besides the epilogue: the result's dtype."""

        dtype: str

    def axes(self, epilogue: tuple[Epilogue, ...], scope: Scope) -> Mapping[str, Iterable]:
        """The dtypes of a scope."""
        return {"dtype": scope.dtypes}

    def facts(self, variant: Any) -> dict[str, Fact]:
        """What the header reads besides types and the epilogue."""
        return {}

    def words(self, variant: Any) -> list[str]:
        """What tells variants of a dtype apart in names."""
        return []

    def spec(self, epilogue: tuple[Epilogue, ...], variant: Any, arch: str) -> KernelSpec:
        """The specification for a dtype of the result."""
        dtype = variant.dtype
        facts = {**text.facts(dtype, dtype, epilogue), **self.facts(variant)}
        facts["OVERLAPS"] = arch in OVERLAPPING
        return self.spec_of(epilogue, facts, self.threads, 0, dtype, self.words(variant))


def sizes_of(problem: Problem) -> dict[str, int]:
    """Sizes and strides of a problem by all names that they have in structs of parameters."""
    vector_stride, row_stride = problem.out_strides
    return {
        "rows": problem.rows,
        "rows_count": problem.rows,
        "cols": problem.cols,
        "columns": problem.columns,
        "x_stride": problem.x_stride,
        "out_vector_stride": vector_stride,
        "out_column_stride": vector_stride,
        "out_row_stride": row_stride,
        "unused": 0,
    }

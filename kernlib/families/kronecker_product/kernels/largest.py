"""The largest number of each row of x, or of each column with the factors on the left."""

from __future__ import annotations

from typing import NamedTuple

from kernlib.families.kronecker_product.lowering.problem import Problem
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.kernel import Kernel
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import Step

THREADS, CHUNK, COLUMNS = 256, 8, 64  # as in largest.cuh
UNROLLED, BLOCKS, MOST_DOWN = 4, 8, 65535  # loads at once; of a multiprocessor; of a grid
FIXED = Fields((
    "i64 features", "i64 columns", "i64 feature_stride", "i64 column_stride",
    "i64 aligned",  # whether neighbours of 16 bytes are
))  # fmt: skip


class Largest(Kernel):
    """Of float16; a block for each row, or each 64 columns, and some for parts of it."""

    role = "step"
    name = "largest"
    header = "kronecker_product/hopper/largest.cuh"
    entry = "kronecker_product_largest"
    reason = "the largest number of each row, by which float16 is scaled between launches"

    class Variant(NamedTuple):
        """Whether columns lie behind features."""

        inside: bool

    def spec(self, subject: None, variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant."""
        parameters = Parameters(2, FIXED.format)
        facts = {"THREADS": THREADS, "INSIDE": variant.inside, "PARAMETER_BYTES": parameters.size}
        words = "columns" if variant.inside else "rows"
        shared, source = 4 * (COLUMNS if variant.inside else 1), self.source(facts, FIXED.text())
        return self.named_spec(source, THREADS, shared, "float16", [words])

    def step(self, problem: Problem, multiprocessors: int, place: tuple[str, int]) -> Step:
        """The launch, which takes zeros at a place to bits of float32."""
        x, inside = problem.x, problem.inside
        along, across = (x.column, x.feature) if inside else (x.feature, x.column)
        blocks = ceil_div(problem.columns, COLUMNS) if inside else problem.columns
        rows = THREADS * CHUNK // COLUMNS if inside else THREADS * CHUNK  # features at once
        busy = ceil_div(BLOCKS * multiprocessors, blocks)
        most = min(ceil_div(problem.in_features, rows * UNROLLED), MOST_DOWN)
        fixed = FIXED.pack(
            features=problem.in_features,
            columns=problem.columns,
            feature_stride=x.feature,
            column_stride=x.column,
            aligned=along == 1 and across % CHUNK == 0 and x.alignment % 16 == 0,
        )
        spec = self.spec(None, self.Variant(inside), "")
        return Step(spec, (blocks, max(1, min(busy, most))), fixed, (("x", 0), place))


LARGEST = Largest()

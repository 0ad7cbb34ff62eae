"""Sums of splits of a depth, in an order that does not depend on which CTA ends first."""

from __future__ import annotations

from typing import NamedTuple

from kernlib.errors import UnsupportedError
from kernlib.families.kronecker_sparse.lowering.problem import MAX_BLOCKS, OutLayout, Problem
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Kernel
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import Step

THREADS = 256
RUN = 4  # columns of a thread
SUM_BYTES = 4 * RUN * THREADS  # of static shared memory: the sums of all threads
MOST_GROUPS = 8  # of threads that share the splits of a run
SPLITS_EACH = 4  # that a thread adds up at least, where several share those of a run
FIXED = Fields((
    "i64 out_block_stride", "i64 out_lane_stride", "i64 out_row_stride", "i64 out_column_stride",
    "i64 split_stride",
    "u32 splits", "u32 lanes", "u32 rows", "u32 columns",
    "u32 runs", "u32 total",  # of RUN columns, in a row and in all
    "u32 groups",  # of threads that share the splits of a run: 1, 2, 4 or 8
    "u32 unused",
))  # fmt: skip


class SplitKSum(Kernel):
    """Adds up splits in float32 into the result and, if rows have a sum for it, into a bias's
    gradient."""

    role = "step"
    name = "sum of splits"
    header = "kronecker_sparse/split_k_sum.cuh"
    entry = "kronecker_sparse_split_k_sum"
    reason = "parts of long sums that blocks have left, added up in one order"

    class Variant(NamedTuple):
        """Everything that code generation chooses."""

        dtype: str
        bias: bool = False

    def step(
        self, problem: Problem, partial: OutLayout, one: int, count: int, bias: bool = False
    ) -> Step:
        """The launch that adds up ``count`` splits of ``one`` element each, as :func:`layout`
        says. Raises UnsupportedError for a result that no grid can hold."""
        total = one // RUN
        if total > MAX_BLOCKS:
            raise UnsupportedError(
                f"a result of {one} elements is more than the sum of splits holds ({MAX_BLOCKS} "
                f"runs of {RUN}); call it on slices"
            )
        groups = next((some for some in (MOST_GROUPS, 4, 2) if count >= SPLITS_EACH * some), 1)
        fixed = FIXED.pack(
            **problem.out.strides,
            split_stride=one,
            splits=count,
            lanes=problem.lanes,
            rows=problem.rows,
            columns=problem.columns,
            runs=partial.row // RUN,
            total=total,
            groups=groups,
            unused=0,
        )
        pointers = (("workspace", 0), ("out", 0), *[("bias", 0)] * bias)
        spec = self.spec((), self.Variant(problem.dtype, bias))
        return Step(spec, (ceil_div(total * groups, THREADS), 1), fixed, pointers)

    def spec(self, subject: tuple, variant: Variant, arch: str = "") -> KernelSpec:
        """The specification of a variant, on any GPU."""
        dtype, bias = variant
        size = Parameters(2 + bias, FIXED.format).size
        facts = {"OutputT": DTYPES[dtype].cuda, "BIAS": bias, "PARAMETER_BYTES": size}
        source = self.source(facts, FIXED.text())
        return self.named_spec(source, THREADS, 0, dtype, ["bias"] * bias)


def layout(problem: Problem, bias: bool = False) -> tuple[OutLayout, int]:
    """Where one split's sums go, rows padded to whole runs, and the elements of one split. Rows
    with a sum for a bias end in a run of it."""
    pitch = round_up(problem.columns, RUN) + RUN * bias
    lane = problem.rows * pitch
    block = problem.lanes * lane
    return OutLayout(block, lane, pitch, 1), problem.blocks * block

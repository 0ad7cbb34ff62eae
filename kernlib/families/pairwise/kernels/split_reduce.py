"""Reductions of matrices of squared distances and dot products by tensor cores, sm_90a.

A call is the launches of :mod:`kernlib.families.pairwise.kernels.split` with a kernel that reduces
in the place of the one that stores, and behind the gate a kernel of
:mod:`kernlib.families.pairwise.kernels.reduce`, which leaves the same partial results.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.kernels import pack as packing
from kernlib.families.pairwise.kernels import reduce
from kernlib.families.pairwise.lowering import pack
from kernlib.families.pairwise.lowering import reduce as direct
from kernlib.families.pairwise.lowering.finish import finish_reduced, lists
from kernlib.families.pairwise.lowering.pack import BARRIER_BYTES, PRECISIONS, split_facts
from kernlib.families.pairwise.lowering.problem import (
    ARCH,
    TYPES,
    Call,
    scalar_count,
    terms,
    types,
)
from kernlib.families.pairwise.lowering.reduce import Problem, ReductionKernel
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import division
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.kernel import Gpu
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import WORKSPACE, Lowered, Step
from kernlib.lowering.wgmma import multiply

INFOS = 3  # tiles whose PointInfo and lines of v are in shared memory
MAX_STAGES = 8
MAX_BLOCKS = 2**31 - 1
POINTERS = 5  # before those of struct Parameters of reduce/parameters.cuh
BEHIND = Fields((  # what a plan fixes behind it
    "i64 a_packed_stride", "i64 b_packed_stride",  # of batch entries
    "i64 a_info_stride", "i64 b_info_stride",
    "int stages", "int splits",  # stages of a tile
))  # fmt: skip
SINGLE_K = 64  # features whose products may be summed in one go, at fp32's accuracy
LISTS, WAITING = 4, 16  # of a row that is chosen from, and what waits for a place in each
NARROW = 4  # columns of v up to which registers hold a wide tile; log-sum-exp's code is long
# Functions in a Finish that are an instruction or two.
SHORT = {"operator", "AccT", "if", "sqrt", "absolute", "exp2_approximate", "integer_power"}
SHORT |= {"maximum", "minimum"}
L2_BYTES = 1 << 24  # of rows of a that blocks at work at a time may share


class SplitReduce(ReductionKernel):
    """Products of words, reduced over n in registers."""

    name = "split reduce"
    header = "pairwise/split/reduce.cuh"
    entry = "pairwise_split_reduce"
    # 18 ms for 1e10 pairs of 64 features, and 16 in one go 54, as each value then waits for its
    # share of reads of v.
    widest = 8

    class Variant(NamedTuple):
        """Everything that code generation chooses besides the descriptor."""

        reducer: str
        dtype: str
        copies: int  # words of a number
        warpgroups: int  # of 64 rows each
        columns: int  # of a tile
        depth: int  # features of a stage
        resident: int  # stages of a that stay in shared memory
        promote: int  # stages whose products are summed in one go; 0 for all
        ordered: bool  # warpgroups take turns
        inner: float | str
        outer: float | str
        root: bool
        epsilon: bool
        regularized: bool
        entries: int = 0  # of the lists of a Nearest, of which a row has LISTS
        largest: bool = False

        @property
        def rows(self) -> int:
            return 64 * self.warpgroups

        @property
        def width(self) -> int:
            """Columns of v."""
            return direct.columns_of(self.reducer)

        @property
        def stage_bytes(self) -> int:
            rows = self.columns + (0 if self.resident else self.rows)
            return 2 * self.copies * self.depth * rows

        @property
        def stages(self) -> int:
            """As many as fit into shared memory."""
            limit = targets.SHARED_BYTES[ARCH] - BARRIER_BYTES
            return min(MAX_STAGES, (limit - self._beside) // self.stage_bytes)

        @property
        def shared_bytes(self) -> int:
            return self.stages * self.stage_bytes + self._beside

        @property
        def _beside(self) -> int:
            resident = self.resident * 2 * self.copies * self.depth * self.rows
            lists = LISTS * self.rows * (self.entries + WAITING) * 8 if self.entries else 0
            return resident + INFOS * self.columns * (pack.INFO_BYTES + 4 * self.width) + lists

    def takes(self, call: Call, arch: str) -> bool:
        """Whether a reduction is of squared distances or dot products of a size and type that this
        kernel knows."""
        descriptor, problem, _, precision = call
        if arch != ARCH or precision is None or problem.columns > direct.WIDTHS[-1]:
            return False
        problem = self.first(problem)
        if not pack.is_product(descriptor, problem) or not direct.fits(problem, arch):
            return False
        variant = default(descriptor, problem, precision)
        blocks = ceil_div(problem.m, variant.rows) * division.MAX_SPLITS * problem.batch
        place = pack.workspace(problem, variant)
        return blocks <= MAX_BLOCKS and place.size <= pack.MAX_WORKSPACE

    def launch(
        self, descriptor: Pairwise, call: Call, gpu: Gpu, choice: Mapping[str, Any]
    ) -> Lowered:
        """The launches of a pass. What is chosen may be members of the variant too."""
        knobs, problem, strides = dict(choice), call.problem, call.strides
        per_split = knobs.pop("per_split", 0)
        variant = default(descriptor, problem, call.precision)._replace(**knobs)
        place = pack.workspace(problem, variant)
        row_blocks = ceil_div(problem.m, variant.rows)
        if not per_split:
            least = least_splits(variant, place, gpu.multiprocessors)
            sums, columns = direct.sums_of(problem), variant.columns
            per_split = division.split(sums, row_blocks, columns, gpu.multiprocessors, least)
        main = main_step(descriptor, problem, variant, place, per_split, row_blocks, strides)
        behind = reduce.lower(descriptor, problem, *gpu, strides, per_split)
        steps = (
            *packing.steps(descriptor, problem, variant, place),
            main,
            pack.gated_step(*behind.steps, place),
        )
        return Lowered(steps, place.size, parts=behind.parts, per_part=per_split)

    def spec(self, descriptor: Pairwise, variant: Variant, arch: str) -> KernelSpec:
        """The specification of the products and what reduces them."""
        scalars, entries = scalar_count(descriptor), variant.entries
        fields, text = direct.fields(scalars), finish_reduced(descriptor, variant)
        fixed = f"{fields.format}{BEHIND.letters}"
        size = Parameters(POINTERS + len(direct.OPERANDS), fixed, scalars).size
        facts = {
            **types(variant.dtype),
            **terms(descriptor, variant),
            **split_facts(variant),
            **lists(entries, WAITING, LISTS * variant.rows, variant.largest),
            "DIFFERENCE": descriptor.operator == "difference",
            "Reducer": variant.reducer,
            "REGULARIZED": variant.regularized,
            "WARPGROUPS": variant.warpgroups,
            "INFOS": INFOS,
            "RESIDENT": variant.resident,
            "ROLLED": _is_long(text),
            "PARAMETER_BYTES": size,
        }
        texts = (
            fields.text(),
            BEHIND.text("FixedBehind"),
            multiply("float16", variant.columns, False),
        )
        includes = *TYPES, "pairwise/reduce/kinds.cuh", "pairwise/reduce/math.cuh"
        source = self.source(facts, *texts, text, includes=includes)
        words = [variant.reducer, variant.dtype]
        words += [f"split words={variant.copies} tile={variant.rows}x{variant.columns}"]
        words += [f"resident={variant.resident}", f"promote={variant.promote}"]
        flags = ("ordered", "epsilon", "regularized", "largest")
        words += [flag for flag in flags if getattr(variant, flag)]
        words += [f"kept={entries}"] * (entries > 0)
        threads = 128 * (variant.warpgroups + 1)
        return self.described(descriptor, source, threads, variant.shared_bytes, words)


KERNEL = SplitReduce()


def default(descriptor: Pairwise, problem: Problem, precision: str) -> SplitReduce.Variant:
    """The variant of a call. Sums of all features in one go leave registers for a wider tile, and
    few features shared memory for those of a."""
    exact, copies = precision == "fp32", PRECISIONS[precision]
    if problem.dtype != "float32" and not pack.is_difference(descriptor, problem):
        copies = 1  # the type's numbers are words of fp16 as they are
    depth = 32 if exact else 64
    resident = next((count for count in (2, 4) if problem.k <= depth * count), 0)
    if exact and problem.k > SINGLE_K:
        resident = 0
    promote = 2 if exact and not resident else 0
    columns = 192 if promote else 256
    if problem.out_columns > NARROW or problem.reduction == "logsumexp":
        columns = 128
    warpgroups = 2
    if not exact and resident == 2 and columns == 256 and problem.columns <= 1:
        # 4.8 ms in place of 5.3 at 100000 x 100000 x 64; four columns of v have no registers left.
        warpgroups, columns = 3, 192
    return SplitReduce.Variant(
        direct.reducer_of(problem),
        problem.dtype, copies, warpgroups, columns, depth, resident, promote,
        resident == 2 and warpgroups == 2,
        problem.inner, problem.outer, problem.root, problem.epsilon, problem.regularized,
    )  # fmt: skip


def least_splits(variant: SplitReduce.Variant, place: pack.Workspace, multiprocessors: int) -> int:
    """Splits of n for which rows of a that are read at a time stay in L2."""
    rows_bytes = variant.rows * place.centre_pitch * 2 * variant.copies * multiprocessors
    return 1 if variant.resident else ceil_div(rows_bytes, L2_BYTES)


def main_step(
    descriptor: Pairwise,
    problem: Problem,
    variant: SplitReduce.Variant,
    place: pack.Workspace,
    per_split: int,
    row_blocks: int,
    strides: tuple[int, ...],
) -> Step:
    """The launch of the products and what reduces them."""
    splits = ceil_div(problem.n, per_split)
    fixed = direct.fixed_parameters(problem, per_split, row_blocks, tuple(strides))
    fixed += BEHIND.pack(
        a_packed_stride=place.a_stride,
        b_packed_stride=place.b_stride,
        a_info_stride=place.a_points,
        b_info_stride=place.b_points,
        stages=place.stages,
        splits=splits,
    )
    offsets = (place.doubtful, place.packed_a, place.packed_b, place.a_info, place.b_info)
    pointers = (
        *((WORKSPACE, offset) for offset in offsets),
        *((name, 0) for name in direct.OPERANDS),
    )
    spec = KERNEL.spec(descriptor, variant, ARCH)
    grid = (row_blocks * splits * problem.batch, 1)
    return Step(spec, grid, fixed, pointers, scalar_count(descriptor))


def _is_long(text: str) -> bool:
    """Whether the ``Finish`` of a source calls functions of more than a few instructions: 128 times
    unrolled, a power takes NVRTC 2.7 s."""
    body = text[text.index("operator()") :].replace("reciprocal(AccT(", "(AccT(")
    return not set(re.findall(r"(\w+)(?:<\d+>)?\(", body)) <= SHORT

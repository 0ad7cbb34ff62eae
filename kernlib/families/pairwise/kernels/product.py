"""Products of a kernel matrix with many columns by tensor cores, sm_90a.

A call is the packing of v and of points (for sums of words by pack.py, for folded exponents one
more), the product, and behind gates what takes the calls that it leaves: where points are too far
from each other for folded exponents a product without them, and for what is not finite kernels of
:mod:`kernlib.families.pairwise.kernels.reduce` for every 16 columns. All leave the same partial
results.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.kernels import pack as packing
from kernlib.families.pairwise.kernels import reduce
from kernlib.families.pairwise.kernels.product_pack import ProductFold, ProductPack
from kernlib.families.pairwise.lowering import pack
from kernlib.families.pairwise.lowering import reduce as direct
from kernlib.families.pairwise.lowering.finish import finish_reduced
from kernlib.families.pairwise.lowering.problem import (
    ARCH,
    MAX_BATCH_BLOCKS,
    TYPES,
    Call,
    PairKernel,
    scalar_count,
    terms,
    types,
)
from kernlib.families.pairwise.lowering.reduce import Problem, ReductionKernel
from kernlib.families.pairwise.lowering.wide import (
    GROUP,
    LEAST_STAGES,
    TILE_N,
    WIDTHS,
    Variant,
    is_of_words,
    is_on_lanes,
    variants,
)
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import division
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES, FLOAT_SUMS
from kernlib.lowering.kernel import Gpu
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import WORKSPACE, Lowered, Step
from kernlib.lowering.wgmma import multiply

CLOSED = 8  # bytes from the count of doubtful pairs on: struct Gate
MAX_BLOCKS = 2**31 - 1
POINTERS = 6  # before those of struct Parameters of reduce/parameters.cuh
BEHIND = Fields((  # what a plan fixes behind it; strides of batch entries
    "i64 a_packed_stride", "i64 b_packed_stride", "i64 a_info_stride", "i64 b_info_stride",
    "i64 v_packed_stride",
    "int splits", "int padding",
))  # fmt: skip


class _Main(PairKernel):
    """Values of a tile in registers, where they become words that are multiplied by those of v."""

    role = "step"
    entry = "pairwise_product_main"
    Variant = Variant

    def facts(self, variant: Variant) -> dict:
        """Facts of the way of summing."""
        return {"DEPTH": variant.depth}

    def multiply(self) -> str:
        """CUDA text of the product of points."""
        return multiply("float16", TILE_N, False)

    def step(
        self,
        descriptor: Pairwise,
        problem: Problem,
        strides: tuple[int, ...],
        place: Place,
        variant: Variant,
        per_split: int,
    ) -> Step:
        """The launch of a variant."""
        splits, points = ceil_div(problem.n, per_split), place.points
        row_blocks = ceil_div(problem.m, variant.rows)
        a, b, a_stride, b_stride = {
            "lanes": (0, place.lines, 0, 4 * place.lines_stride),
            "words": (points.packed_a, points.packed_b, points.a_stride, points.b_stride),
            "folded": (place.folded_a, place.folded_b, place.a_stride, place.b_stride),
        }[variant.sums]
        fixed = direct.fixed_parameters(problem, per_split, row_blocks, tuple(strides))
        fixed += BEHIND.pack(
            a_packed_stride=a_stride,
            b_packed_stride=b_stride,
            a_info_stride=points.a_points,
            b_info_stride=points.b_points,
            v_packed_stride=place.v_stride,
            splits=splits,
            padding=0,
        )
        offsets = (points.doubtful, a, b, points.a_info, points.b_info, place.v)
        pointers = (
            *((WORKSPACE, offset) for offset in offsets),
            *((name, 0) for name in direct.OPERANDS),
        )
        grid = (row_blocks * splits * problem.batch, 1)
        spec = self.spec(descriptor, variant, ARCH)
        return Step(spec, grid, fixed, pointers, scalar_count(descriptor))

    def spec(self, descriptor: Pairwise, variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant."""
        scalars = scalar_count(descriptor)
        fields = direct.fields(scalars)
        pointers, fixed = POINTERS + len(direct.OPERANDS), fields.format + BEHIND.letters
        facts = {
            **types(variant.dtype),
            **terms(descriptor, variant),
            **self.facts(variant),
            "DIFFERENCE": descriptor.operator == "difference",
            "WARPGROUPS": variant.warpgroups,
            "STAGES": variant.stages,
            "WIDTH": variant.width,
            "COPIES": variant.copies,
            "V_COPIES": variant.v_copies,
            "REGULARIZED": variant.regularized,
            # Whether folded exponents are computed where no point is too far.
            "BEHIND_FOLDED": variant.behind and variant.sums != "folded",
            "DOUBTFUL": pack.DOUBTFUL,  # of the sample, above which nothing is done
            "DYNAMIC_BYTES": variant.shared_bytes,
            "PARAMETER_BYTES": Parameters(pointers, fixed, scalars).size,
        }
        texts = [fields.text(), BEHIND.text("FixedBehind")]
        texts += [multiply("float16", variant.width, True), self.multiply()]
        texts.append(finish_reduced(descriptor, variant))
        source = self.source(facts, *texts, includes=(*TYPES, "pairwise/reduce/math.cuh"))
        words = [f"columns={variant.width}", variant.dtype, f"{variant.sums}={variant.depth}"]
        words += [f"words={variant.copies}x{variant.v_copies} rows={variant.rows}"]
        words += [flag for flag in ("epsilon", "regularized", "behind") if getattr(variant, flag)]
        threads = 128 * (variant.warpgroups + 1)
        return self.described(descriptor, source, threads, variant.shared_bytes, words)


class ProductOnLanes(_Main):
    """Sums on the lanes, of few features."""

    name = "product on lanes"
    header = "pairwise/product/sums_on_lanes.cuh"

    def facts(self, variant: Variant) -> dict:
        """Features of a sum."""
        return {"FEATURES": variant.features}

    def multiply(self) -> str:
        """No product."""
        return ""


class ProductFolded(_Main):
    """Sums that are exponents, norms and scale among their entries."""

    name = "product folded"
    header = "pairwise/product/sums_folded.cuh"


class ProductOfWords(_Main):
    """Sums of products of words."""

    name = "product of words"
    header = "pairwise/product/sums_of_words.cuh"


MAIN: dict[str, _Main] = {
    "lanes": ProductOnLanes(),
    "folded": ProductFolded(),
    "words": ProductOfWords(),
}


class Place(NamedTuple):
    """Where v, lines of points and entries of folded exponents begin in the workspace behind what
    the packing of points keeps there, and strides from batch entry to batch entry, in bytes, of
    lines in numbers."""

    points: pack.Workspace
    v: int
    lines: int
    folded_a: int
    folded_b: int
    size: int
    v_stride: int
    lines_stride: int
    a_stride: int
    b_stride: int
    groups: int

    @property
    def closed(self) -> pack.Workspace:
        """The same with the gate of the direct kernels."""
        return self.points._replace(doubtful=self.points.doubtful + CLOSED)


def workspace(problem: Problem, variant: Variant, behind: Variant | None = None) -> Place:
    """What a call keeps where, by a variant and, if that is of folded exponents, the one behind it.
    What all batch entries share is packed once, but for entries of folded exponents, of which each
    may have a bandwidth of its own."""
    plain = behind or variant
    points = pack.workspace(problem, plain) if plain.sums == "words" else _few(problem)
    batch, groups = problem.batch, ceil_div(problem.n, GROUP)
    of_v, of_b = (1 if side.batch == 0 else problem.batch for side in (problem.v, problem.b))
    v_bytes = groups * (GROUP // TILE_N) * variant.v_bytes
    lines = groups * GROUP * plain.features
    entries = variant.point_bytes if behind else 0
    a_bytes = round_up(problem.m, variant.rows) * entries
    b_bytes = round_up(problem.n, TILE_N) * entries
    places = [round_up(points.size, pack.ALIGNMENT)]
    for size in (v_bytes * of_v, 4 * lines * of_b, a_bytes * batch, b_bytes * batch):
        places.append(places[-1] + round_up(size, pack.ALIGNMENT))
    return Place(
        points, *places,
        v_bytes if of_v > 1 else 0, lines if of_b > 1 else 0,
        a_bytes if batch > 1 else 0, b_bytes if batch > 1 else 0, groups,
    )  # fmt: skip


def _few(problem: Problem) -> pack.Workspace:
    """The gate and the centre alone."""
    shared = 0 in (problem.a.batch, problem.b.batch)
    centres = 1 if shared else problem.batch
    pitch = round_up(problem.k, 4)
    size = pack.ALIGNMENT + round_up(4 * centres * pitch, pack.ALIGNMENT)
    none = pack.Workspace(*[0] * 14)
    return none._replace(centre=pack.ALIGNMENT, size=size, centre_pitch=pitch, centres=centres)


class Product(ReductionKernel):
    """The product by whichever of these, and what is launched before and behind it."""

    name = "product"
    widest = WIDTHS[-1]

    def passes(self, columns: int) -> list[tuple[int, int]]:
        """Nearly the same columns for all."""
        each = ceil_div(columns, ceil_div(columns, self.widest))
        return [(first, min(each, columns - first)) for first in range(0, columns, each)]

    def takes(self, call: Call, arch: str) -> bool:
        """Whether it computes a product."""
        descriptor, problem, _, precision = call
        if arch != ARCH or problem.reduction != "matmul" or problem.dtype not in FLOAT_SUMS:
            return False
        if min(problem.m, problem.n, problem.k, problem.columns) < 1:
            return False
        if max(problem.m, problem.n) > pack.MAX_SIZE or problem.batch > MAX_BATCH_BLOCKS:
            return False
        problem = self.first(problem)
        gated = problem._replace(columns=min(problem.columns, direct.WIDTHS[-1]))
        on_lanes, of_words = is_on_lanes(descriptor, problem), is_of_words(descriptor, problem)
        if not (on_lanes or of_words) or not direct.fits(gated, arch):
            return False
        variant, second = variants(descriptor, problem, precision)
        blocks = ceil_div(problem.m, variant.rows) * division.MAX_SPLITS * problem.batch
        stages = min(each.stages for each in (variant, second) if each)
        size = workspace(problem, variant, second).size
        return stages >= LEAST_STAGES and blocks <= MAX_BLOCKS and size <= pack.MAX_WORKSPACE

    def launch(
        self, descriptor: Pairwise, call: Call, gpu: Gpu, choice: Mapping[str, int]
    ) -> Lowered:
        """The launches of a pass."""
        problem, per_split = call.problem, choice.get("per_split", 0)
        variant, second = variants(descriptor, problem, call.precision)
        place = workspace(problem, variant, second)
        row_blocks = ceil_div(problem.m, variant.rows)
        sums = direct.sums_of(problem)
        per_split = per_split or division.split(sums, row_blocks, GROUP, gpu.multiprocessors)
        rest = descriptor, problem, call.strides, place
        main = [MAIN[one.sums].step(*rest, one, per_split) for one in (variant, second) if one]
        steps = (
            *_point_steps(descriptor, problem, second or variant, place),
            *([ProductFold().step(*rest, variant)] if second else ()),
            ProductPack().step(problem, second or variant, place),
            *main,
            *_steps_behind(*rest, gpu, per_split),
        )
        parts = ceil_div(problem.n, per_split)
        return Lowered(steps, place.size, parts=parts, per_part=per_split)


KERNEL = Product()


def _point_steps(descriptor, problem: Problem, variant: Variant, place: Place) -> tuple[Step, ...]:
    """The packing of points as words; for others what opens the gate, and centres."""
    if variant.sums == "words":
        return packing.steps(descriptor, problem, variant, place.points)
    return (packing.opening(problem, place.points, variant.behind),)


def _steps_behind(
    descriptor, problem: Problem, strides, place: Place, gpu: Gpu, per_split: int
) -> list[Step]:
    """What computes the call where the gate is closed."""
    steps = []
    for first in range(0, problem.columns, direct.WIDTHS[-1]):
        count = min(direct.WIDTHS[-1], problem.columns - first)
        part = problem._replace(columns=count)
        (step,) = reduce.lower(descriptor, part, *gpu, strides, per_split).steps
        offsets = {"v": first * problem.v.columns * DTYPES[problem.dtype].bytes, "out": 4 * first}
        pointers = tuple((name, at + offsets.get(name, 0)) for name, at in step.pointers)
        steps.append(pack.gated_step(step._replace(pointers=pointers), place.closed))
    return steps

"""Products of a kernel matrix with a few columns, and its row sums, in float64
(kernel_sources/pairwise/double/double.cuh), on every GPU.

Squared differences and dot products of enough features are products of tensor cores, of points that
a launch before packs, with the squares of their norms; other sums are those of terms. Rows of few
features lie in the registers of ``kernel_sources/pairwise/reduce/small.cuh``, which takes their
log-sum-exps and minima too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.kernels import reduce
from kernlib.families.pairwise.lowering import pack
from kernlib.families.pairwise.lowering import reduce as direct
from kernlib.families.pairwise.lowering.finish import finish_double, takes_powers
from kernlib.families.pairwise.lowering.problem import (
    EXPONENT_STAGES,
    MAX_BATCH_BLOCKS,
    TYPES,
    Call,
    Layout,
    scalar_count,
    terms,
    types,
    view,
)
from kernlib.families.pairwise.lowering.reduce import Problem, ReductionKernel
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import division
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.kernel import Gpu, Kernel, named
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import WORKSPACE, Lowered, Step

TILED = ("matmul", "sum")  # reductions that tiles compute
WIDTH = 8  # columns of v that a launch takes
# Columns of v up to which computing the matrix once for every WIDTH of them is faster than storing
# blocks of it, which takes as long as 72 operations of an entry: products of tensor cores, and sums
# of few features, take fewer.
MOST_COLUMNS, FEW_COLUMNS = 2 * WIDTH, WIDTH
THREADS, TILE, DEPTH, STAGES, RESIDENT = 128, 64, 16, 2, 3
LINE = DEPTH + 4  # of a point in shared memory
# Of 8 normally distributed features 0.8 % of the tiles have a pair whose difference products would
# cancel, and that makes the tile's sums anew; of 4 nearly all.
LEAST_FEATURES = 8
# Of rows in registers. Of 12 features tiles are as fast, and more columns make registers spill.
SMALL_FEATURES, SMALL_COLUMNS = 10, 4
POWER_ROWS = 2  # of a thread, at most, where values are powers: 4 spill up to 92 bytes
NUMBER_BYTES = 8
# Stages, and totals of two warps a row with what they round off.
SHARED_NUMBERS = STAGES * 2 * TILE * LINE + 2 * TILE * 2 * WIDTH
# What a plan fixes of packed points, from batch entry to batch entry, in numbers; and of packing.
STRIDES = Fields(("i64 a_stride", "i64 b_stride", "i64 a_norms_stride", "i64 b_norms_stride"))
SIDE = Fields((
    "View view",
    "i64 points",
    "i64 stride", "i64 norms_stride",  # of batch entries as packed; 0 for one that all share
    "i64 blocks",  # of a batch entry
))  # fmt: skip
PACKING = Fields(
    (
        "Side a_side", "Side b_side",
        "int k", "int chunks",
        "int apart",  # whether batch entries have centres of their own
        "int padding",
    ),
    {"Side": SIDE},
)  # fmt: skip
POINTERS = 4  # to packed points, before those of all reductions


class Variant(NamedTuple):
    """Everything that code generation chooses besides the descriptor."""

    products: bool
    centred: bool
    summed: bool  # no v
    inner: float | str
    outer: float | str
    root: bool
    epsilon: bool
    regularized: bool
    dtype: str = "float64"


class Place(NamedTuple):
    """Where packed points and squares of norms begin in the workspace, in bytes, and strides from
    batch entry to batch entry, in numbers; 0 for an operand that all share."""

    a: int
    b: int
    a_norms: int
    b_norms: int
    size: int
    a_stride: int
    b_stride: int
    a_norms_stride: int
    b_norms_stride: int


def variant(descriptor: Pairwise, problem: Problem) -> Variant:
    """That of a problem."""
    products = by_products(descriptor, problem)
    return Variant(
        products, products and pack.is_difference(descriptor, problem), problem.reduction == "sum",
        problem.inner, problem.outer, problem.root, problem.epsilon, problem.regularized,
    )  # fmt: skip


def by_products(descriptor: Pairwise, problem: Problem) -> bool:
    """Whether tensor cores multiply points."""
    products = pack.is_difference(descriptor, problem) or pack.is_dot(descriptor)
    if not products or problem.reduction not in TILED:
        return False
    if descriptor.direct or problem.k < LEAST_FEATURES:
        return False
    few = problem.batch <= MAX_BATCH_BLOCKS
    return few and workspace(problem).size <= pack.MAX_WORKSPACE


def is_small(descriptor: Pairwise, problem: Problem) -> bool:
    """Whether rows of so few features lie in registers (kernel_sources/pairwise/reduce/small.cuh):
    a pair then takes no more operations than it must. Not of powers by logarithms, whose 43
    operations a feature leave nothing to gain, and whose registers spill up to 224 bytes."""
    few = problem.k <= SMALL_FEATURES and problem.out_columns <= SMALL_COLUMNS
    by_logarithms = type(descriptor.inner) in EXPONENT_STAGES and problem.inner in ("any", "device")
    return few and not by_logarithms and not by_products(descriptor, problem)


def workspace(problem: Problem) -> Place:
    """What a call keeps where. What all batch entries share is packed once."""
    pitch = round_up(problem.k, DEPTH)
    points = [round_up(count, TILE) for count in (problem.m, problem.n)]
    entries = [_entries(side, problem) for side in (problem.a, problem.b)]
    sizes = [count * pitch for count in points] + points
    places = [0]
    for size, each in zip(sizes, entries * 2, strict=True):
        places.append(places[-1] + round_up(size * each * NUMBER_BYTES, pack.ALIGNMENT))
    strides = (size if each > 1 else 0 for size, each in zip(sizes, entries * 2, strict=True))
    return Place(*places, *strides)


def _entries(side: Layout, problem: Problem) -> int:
    """Batch entries of an operand as packed."""
    return 1 if side.batch == 0 else problem.batch


def _main_step(
    spec: KernelSpec, problem: Problem, place: Place | None, per_split: int, row_blocks, strides
) -> Step:
    # A row sum is a product with one column of ones.
    columns = max(1, problem.columns)
    product = problem._replace(columns=columns, out_columns=max(columns, problem.out_columns))
    fixed = direct.fixed_parameters(product, per_split, row_blocks, strides)
    pointers = tuple((name, 0) for name in direct.OPERANDS)
    if place is not None:
        pointers = (*_packed(place), *pointers)
        fixed += STRIDES.pack(
            a_stride=place.a_stride,
            b_stride=place.b_stride,
            a_norms_stride=place.a_norms_stride,
            b_norms_stride=place.b_norms_stride,
        )
    grid = (
        row_blocks * ceil_div(problem.n, per_split),
        min(problem.batch, MAX_BATCH_BLOCKS),
    )
    return Step(spec, grid, fixed, pointers, len(strides))


def _packed(place: Place) -> tuple[tuple[str, int], ...]:
    return tuple((WORKSPACE, offset) for offset in place[:4])


def _pack_step(problem: Problem, place: Place, centred: bool) -> Step:
    a_blocks, b_blocks = ceil_div(problem.m, TILE), ceil_div(problem.n, TILE)
    fixed = PACKING.pack(
        a_side=(*view(problem.a), problem.m, place.a_stride, place.a_norms_stride, a_blocks),
        b_side=(*view(problem.b), problem.n, place.b_stride, place.b_norms_stride, b_blocks),
        k=problem.k,
        chunks=ceil_div(problem.k, DEPTH),
        apart=place.a_stride > 0 and place.b_stride > 0,
        padding=0,
    )
    pointers = (("a", 0), ("b", 0), *_packed(place))
    entries = problem.batch if place.a_stride or place.b_stride else 1
    return Step(PACK.spec(None, centred, ""), (a_blocks + b_blocks, entries), fixed, pointers)


def _fits(descriptor: Pairwise, problem: Problem) -> bool:
    """Whether grids have room for a problem of these types, which storing blocks of the matrix
    would not take less time for."""
    sizes = problem.m, problem.n, problem.k
    if problem.dtype != "float64" or min(sizes) < 1 or max(sizes) > pack.MAX_SIZE:
        return False
    if ceil_div(problem.m, TILE) * division.MAX_SPLITS > direct.MAX_BLOCKS:
        return False
    cheap = problem.k <= direct.SMALL_K or by_products(descriptor, problem)
    return problem.columns <= (MOST_COLUMNS if cheap else FEW_COLUMNS)


class DoubleSmall(reduce.Small):
    """Of few features, by a kernel without dynamic shared memory, for any arch."""

    role = "double"
    name = "double small"
    widest = WIDTH

    def takes(self, call: Call, arch: str) -> bool:
        return is_small(call.descriptor, call.problem) and _fits(call.descriptor, call.problem)

    def launch(
        self, descriptor: Pairwise, call: Call, gpu: Gpu, choice: Mapping[str, int]
    ) -> Lowered:
        """The launch of a pass."""
        if takes_powers(descriptor, call.problem):
            choice = {**choice, "most_rows": POWER_ROWS}
        return super().launch(descriptor, call, gpu, choice)


class Double(ReductionKernel):
    """Products with up to WIDTH columns, and row sums."""

    role = "double"
    rank = 1
    widest = WIDTH
    name = "double"
    header = "pairwise/double/double.cuh"
    entry = "pairwise_double_main"
    reason = "float64 sums in tiles: by tensor cores of squares and dot products of enough features"
    Variant = Variant

    def takes(self, call: Call, arch: str) -> bool:
        """Whether it computes a reduction, and is the fastest to do so."""
        return call.problem.reduction in TILED and _fits(call.descriptor, call.problem)

    def launch(
        self, descriptor: Pairwise, call: Call, gpu: Gpu, choice: Mapping[str, int]
    ) -> Lowered:
        """The launches of a pass, whose partial results are in float64."""
        problem, main = call.problem, variant(descriptor, call.problem)
        row_blocks, sums = ceil_div(problem.m, TILE), direct.sums_of(problem)
        slots = gpu.multiprocessors * RESIDENT
        per_split = choice.get("per_split") or division.split(sums, row_blocks, TILE, slots)
        place = workspace(problem) if main.products else None
        spec = self.spec(descriptor, main, gpu.arch)
        steps = [_main_step(spec, problem, place, per_split, row_blocks, call.strides)]
        if place is not None:
            steps.insert(0, _pack_step(problem, place, main.centred))
        size, parts = place.size if place else 0, ceil_div(problem.n, per_split)
        return Lowered(tuple(steps), size, parts=parts, per_part=per_split)

    def spec(self, descriptor: Pairwise, variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant."""
        scalars, strides = scalar_count(descriptor), STRIDES if variant.products else Fields(())
        fixed = direct.fields(scalars)
        layout = "<" + fixed.format[1:] + strides.format[1:]
        pointers = len(direct.OPERANDS) + POINTERS * variant.products
        facts = {
            **types(variant.dtype),
            **terms(descriptor, variant),
            "PRODUCTS": variant.products,
            "CENTRED": variant.centred,
            "SUM": variant.summed,
            "REGULARIZED": variant.regularized,
            "POWERS": takes_powers(descriptor, variant),
            "PARAMETER_BYTES": Parameters(pointers, layout, scalars).size,
        }
        texts = fixed.text(), strides.text("PackedStrides"), finish_double(descriptor, variant)
        words = ["sums" if variant.summed else "products", variant.dtype]
        words += ["tensor"] * variant.products
        words += [f"p={variant.inner}"] * (variant.inner != "any")
        words += reduce.flags(variant, "epsilon", "regularized")
        source, shared = self.source(facts, *texts, includes=TYPES), SHARED_NUMBERS * NUMBER_BYTES
        return self.described(descriptor, source, THREADS, shared, words)


class Pack(Kernel):
    """The packing of points."""

    role = "step"
    name = "double pack"
    header = "pairwise/double/pack.cuh"
    entry = "pairwise_double_pack"

    def spec(self, subject: None, centred: bool, arch: str) -> KernelSpec:
        """The specification for points with the centre of the data as their origin, or not."""
        texts = SIDE.text("Side"), PACKING.text()
        source = self.source({"CENTRED": centred}, *texts, includes=("pairwise/view.cuh",))
        words = ["centred"] * centred
        line, size = " ".join(["pairwise double pack", *words]), THREADS * NUMBER_BYTES
        spec = KernelSpec("pairwise", source, self.entry, THREADS, size, description=line)
        return named(spec, *words)


SMALL, DOUBLE, PACK = DoubleSmall(), Double(), Pack()
KERNELS: tuple[Kernel, ...] = (SMALL, DOUBLE)

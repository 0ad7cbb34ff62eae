"""Gradients of many features as their kernels see them (kernels/points.py): which launches they
take, what code generation chooses, and what lies where in the workspace."""

from __future__ import annotations

from typing import NamedTuple

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering import pack, reduce
from kernlib.families.pairwise.lowering.backward import Problem
from kernlib.families.pairwise.lowering.backward_source import LARGEST
from kernlib.families.pairwise.lowering.pack import BARRIER_BYTES
from kernlib.families.pairwise.lowering.problem import ARCH, MAX_BATCH_BLOCKS
from kernlib.jit import targets
from kernlib.lowering import division
from kernlib.lowering.arithmetic import ceil_div, round_up

TILE_N, GROUP = 64, 256  # lines of a stage, and of those that are scaled alike
DIRECT_TILE = 64  # rows, and lines, of a block of the lanes' kernel
DIRECT_LINE = DIRECT_TILE + 4  # floats of shared memory that a feature takes
MAX_STAGES = 8
# Pairs of the sample, of 4096, above which the lanes do the work: of 0.4 % doubtful ones products
# take twice their time.
DOUBTFUL = pack.PROBES // 256
IN_WORKSPACE, POINTERS = 7, 14  # of struct PointsLaunch
PACK_THREADS, DIRECT_THREADS = 256, 256
# What Slopes takes of a sum, for infinite ones. Here a sum that is infinite may make a NaN, which
# closes the gate, and saves a slot a pair.
BOUNDED = f"fminf(s, {LARGEST})"
WIDTHS = (1, 2, 4)  # columns of g and v that a launch takes
# Up to which registers hold what :func:`crowd` counts of three warpgroups, and of two.
CROWDED, MOST_CROWDED = 80, 152
MOST_FEATURES = 128
LEAST_STAGES = 2
DIRECT_RESIDENT = 2  # blocks of a multiprocessor
EIGHT = 8  # features that a block packs
SLOPES = {"difference": "SquareSlope", "dot": "IdentitySlope"}
# Microseconds: of a launch, of a million pairs and of each feature of these, by tensor cores and on
# the lanes; of what stores blocks of the matrix, as measured on an H200, 45 of 20 features, 30 of
# 64. The others are floors and a fifth.
LAUNCH, PRODUCTS, LANES = 30, (0.65, 0.019), (0.8, 0.18)
BLOCKS = 200, 30


class Variant(NamedTuple):
    """Everything that code generation chooses besides the descriptor and its derivatives. The names
    of ``depth``, ``rows``, ``columns``, ``copies`` and ``promote`` are those that the packing of
    points reads."""

    role: str
    depth: int  # features of a sum as padded
    width: int  # features of a line as padded
    sets: int  # columns of g and v
    weighted: bool
    points: bool
    values: bool
    hyper: int
    difference: bool
    counted: bool  # whether the width has room for a one
    warpgroups: int  # of 64 rows each
    inner: float | str
    outer: float | str
    root: bool
    epsilon: bool

    dtype = "float32"
    copies = 2  # words of a number
    columns = TILE_N
    promote = 1

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups

    @property
    def numbers(self) -> int:
        """Of a row, and of a line, behind its point."""
        return self.sets * (2 if self.role == "both" else 1)

    @property
    def point_bytes(self) -> int:
        """Of the words of one point."""
        return 2 * self.copies * self.depth

    @property
    def lines_bytes(self) -> int:
        """Of the features of a stage's lines, of what these are multiplied by, and of numbers."""
        features = TILE_N * self.copies * self.width * 2 + 4 * self.width if self.points else 0
        return features + 4 * TILE_N * self.numbers

    @property
    def stage_bytes(self) -> int:
        return TILE_N * (self.point_bytes + pack.INFO_BYTES) + self.lines_bytes

    @property
    def resident_bytes(self) -> int:
        return self.point_bytes * self.rows

    @property
    def stages(self) -> int:
        """As many as fit into shared memory."""
        room = targets.SHARED_BYTES[ARCH] - BARRIER_BYTES - self.resident_bytes
        return min(MAX_STAGES, room // self.stage_bytes)

    @property
    def shared_bytes(self) -> int:
        return self.resident_bytes + self.stages * self.stage_bytes

    @property
    def direct_bytes(self) -> int:
        """Of shared memory of the kernel of the lanes."""
        floats = (2 * self.depth + DIRECT_TILE) * DIRECT_LINE + 2 * DIRECT_TILE * self.numbers
        return 4 * floats


class Place(NamedTuple):
    """Where lines begin in the workspace, behind what the packing of points keeps there, its size,
    and the stride of lines from batch entry to batch entry, in bytes."""

    points: pack.Workspace
    lines: int
    size: int
    lines_stride: int


def takes(descriptor: Pairwise, problem: Problem, arch: str) -> bool:
    """Whether the kernels compute a launch: sums that are products, of a size that they know."""
    product = pack.is_product(descriptor, problem) and problem.k <= MOST_FEATURES
    if not product or problem.slope != SLOPES[descriptor.operator]:
        return False
    if problem.times_p or problem.times_scale or problem.columns > WIDTHS[-1]:
        return False
    code = variant(problem, 0)
    blocks = ceil_div(problem.m, DIRECT_TILE) * division.MAX_SPLITS * problem.batch
    fits = code.direct_bytes <= targets.SHARED_BYTES[arch]
    return fits and blocks <= reduce.MAX_BLOCKS and problem.batch <= MAX_BATCH_BLOCKS


def by_products(descriptor: Pairwise, problem: Problem, arch: str) -> bool:
    """Whether tensor cores compute a launch that the kernels take."""
    if arch != ARCH or not descriptor.takes_products:
        return False
    code = variant(problem, 0)
    return code.stages >= LEAST_STAGES and workspace(problem, code).size <= pack.MAX_WORKSPACE


def pays(descriptor: Pairwise, problem: Problem, arch: str, launches: int) -> bool:
    """Whether so many launches like this one are faster than blocks of the matrix."""
    pairs = problem.m * problem.n * problem.batch * 1e-6
    products = by_products(descriptor, problem, arch)
    each, feature = PRODUCTS if products else LANES
    tile = 3 * TILE_N if products else DIRECT_TILE
    padded = round_up(problem.m, tile) * round_up(problem.n, TILE_N) * problem.batch * 1e-6
    launch = LAUNCH + padded * (each + feature * problem.k)
    return launches * launch < BLOCKS[0] + pairs * BLOCKS[1]


def columns_of(problem: Problem, hyper: int) -> int:
    """Columns of g and v that a launch with so many hyperparameters takes: as many as registers
    hold."""
    fitting = (
        width
        for width in reversed(WIDTHS)
        if crowd(_variant(problem._replace(columns=width), hyper)) <= MOST_CROWDED
    )
    return next(fitting, 1)


def variant(problem: Problem, hyper: int, warpgroups: int | None = None) -> Variant:
    """The code for a problem with so many hyperparameters, with as many warpgroups as registers and
    shared memory hold."""
    code = _variant(problem, hyper)._replace(warpgroups=warpgroups or 3)
    few = code.stages < LEAST_STAGES or crowd(code) > CROWDED
    return code if warpgroups or not few else code._replace(warpgroups=2)


def _variant(problem: Problem, hyper: int) -> Variant:
    width, difference = round_up(problem.k, 8), problem.slope == SLOPES["difference"]
    return Variant(
        problem.role, round_up(problem.k, 16), width if problem.points else 8,
        next(width for width in WIDTHS if width >= problem.columns), problem.weighted,
        problem.points, problem.values, hyper, difference,
        difference and problem.points and problem.k < width, 3, problem.inner, problem.outer,
        problem.root, problem.epsilon,
    )  # fmt: skip


def crowd(variant: Variant) -> int:
    """Registers that grow with a variant: sums of features on their way to totals and these, and of
    two rows numbers and sums on the lanes, twice as well."""
    sums = variant.points + variant.values * variant.sets + variant.hyper
    return variant.width * variant.points + 2 * variant.numbers + 4 * sums


def workspace(problem: Problem, variant: Variant) -> Place:
    """What a launch keeps where."""
    points = pack.workspace(problem, variant)
    each = ceil_div(problem.n, GROUP) * (GROUP // TILE_N) * variant.lines_bytes
    lines = round_up(points.size, pack.ALIGNMENT)
    size = lines + round_up(each * problem.batch, pack.ALIGNMENT)
    return Place(points, lines, size, each if problem.batch > 1 else 0)

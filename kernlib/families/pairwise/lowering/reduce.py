"""A reduction of a kernel matrix as its kernels see it, and how these divide it: two kinds of
kernel (kernels/reduce.py), neither of which stores the matrix.

``small``: up to SMALL_K features, rows in registers. ``tile``: any number, sums by the main loop of
:mod:`kernlib.families.pairwise.kernels.direct`. Both for float32 and half types; of float64
:mod:`kernlib.families.pairwise.kernels.double` takes products and sums, and all reductions of few
features by ``small``. What none takes is computed by blocks of the matrix
(:mod:`kernlib.families.pairwise.reductions.blocks`).
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar, NamedTuple

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering.problem import (
    BIG_TILE,
    EXPONENT_STAGES,
    PROMOTE_K,
    THREADS,
    Layout,
    PairKernel,
    access,
    shared_bytes,
    view,
)
from kernlib.jit import targets
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.division import MAX_PLACES, Sums, split
from kernlib.lowering.dtypes import DTYPES, FLOAT_SUMS
from kernlib.lowering.parameters import Fields

SMALL_K = 16
WIDTHS = (1, 2, 4, 8, 16)  # columns of v that a launch takes
# Whose addresses the parameter struct starts with; out takes the values, indices their places.
OPERANDS = ("a", "b", "v", "out", "indices")
RESIDENT = 2  # blocks of a multiprocessor, as __launch_bounds__ promises
MAX_BLOCKS = 2**31 - 1  # of a grid's first axis
# Where whole rows make few blocks: rows of a thread, and threads that share a row's points.
SHAPES = ((2, 1), (2, 8), (2, 32), (1, 32))
STAGE_BYTES = 32 << 10  # of a stage whose lines partners read, which few stages fill at once
MOST_STAGE, FEWEST_POINTS = 2048, 16  # points of a stage, and of a block
FEW_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# What Work.duration counts beside pairs, in issue slots of the warps of a block, 1.4 ns (H100): a
# wait for a stage's points, each time that partners meet, a launch that joins partial results, and
# each of those; how many such launches torch's functions take.
FILLING, MEETING, JOINING, JOIN = 600, 150, 1500, 40
JOINS = {"logsumexp": 10, "min": 3}
# By the name of a reduction, the reducer of common/reducers.cuh, and whether it reads v.
REDUCERS = {"sum": "RowSum", "logsumexp": "LogSumExp", "min": "Minimum"}
SHIFTED = "ShiftedLogSumExp"  # of values to which a column of v is added, in the arithmetic's type
# Numbers of a row beside its features, as many as leave no register of 4 rows to memory, of those
# that keep more in double than sums.
LONG_REDUCERS = {"LogSumExp": 6, SHIFTED: 6, "Minimum": 5}
# Columns of v that a launch of products with many takes, and what it takes of a million pairs, in
# microseconds, where values are exponentials of the sum alone, and else.
MOST_WIDE, FOLDED, UNFOLDED = 128, 0.5, 0.9
LANES = 4  # features up to which squares on the lanes take fewer issue slots than sums of words


class ReductionKernel(PairKernel):
    """A kernel that stores nothing of the matrix. A launch takes ``widest`` columns of v, of which
    the problem that it is chosen for has all. What is chosen may say ``per_split``, the n of a
    block of another launch, whose partial results lie side by side with this one's."""

    role = "reduction"
    widest: ClassVar[int] = WIDTHS[-1]

    def passes(self, columns: int) -> list[tuple[int, int]]:
        """The launches for so many columns of v: first column, count. One for none."""
        starts = range(0, max(1, columns), self.widest)
        return [(start, min(self.widest, columns - start)) for start in starts]

    def first(self, problem: Problem) -> Problem:
        """The problem of the first of them."""
        return problem._replace(columns=min(problem.columns, self.widest))


class Problem(NamedTuple):
    """One launch: shapes, layouts, and ``columns`` of v, of which a row of the result has
    ``out_columns``: 0 for reductions that read none, 1 for what a log-sum-exp adds to columns."""

    reduction: str
    m: int
    n: int
    k: int
    batch: int
    a: Layout
    b: Layout
    v: Layout
    columns: int
    out_columns: int
    dtype: str = "float32"
    diagonal: int = 0  # n - m of the entries that receive the regularization
    inner: float | str = "any"
    outer: float | str = "any"
    root: bool = False
    epsilon: bool = False
    regularized: bool = False
    largest: bool = False  # of "topk", whose columns are the entries of a list


class Variant(NamedTuple):
    """Everything that code generation chooses besides the descriptor. ``k`` and ``rows`` are those
    of the small kernel, 0 for the tile's; access and ``long_k`` the tile's."""

    reducer: str
    dtype: str
    k: int
    rows: int
    long_k: bool
    access_a: str
    access_b: str
    inner: float | str
    outer: float | str
    root: bool
    epsilon: bool
    regularized: bool
    partners: int = 1  # of the small kernel

    @property
    def kind(self) -> str:
        return "small" if self.k else "tile"

    @property
    def columns(self) -> int:
        """Of v, that the reducer reads."""
        return columns_of(self.reducer)

    @property
    def line_bytes(self) -> int:
        """A point of the small kernel with its line of v, in shared memory."""
        return round_up((self.k + self.columns) * DTYPES[self.dtype].sums.bytes, 16)


def split_pays(problem: Problem) -> bool:
    """Whether products of tensor cores beat the lanes: four launches and the packing, about 30 us
    and 2 us a million packed numbers, against their 0.25 us a million pairs and 0.06 a feature."""
    pairs = problem.m * problem.n * problem.batch
    packed = (problem.m + problem.n) * problem.batch * problem.k
    products = 30 + 2e-6 * packed + pairs * (4e-7 + max(problem.k, 32) * 8e-9)
    few = problem.k <= SMALL_K
    return products < pairs * ((2.5e-7 if few else 2.4e-6) + problem.k * 6e-8)


def product_pays(descriptor: Pairwise, problem: Problem) -> bool:
    """Whether tensor cores, which multiply values of the matrix by those of v, beat the other ways
    to compute a product, by microseconds fitted to squares of 512 to 16384 points of 3 to 128
    features and 1 to 128 columns on an H100."""
    if problem.reduction != "matmul":
        return False
    others = _others_us(problem)
    if _product_us(problem, FOLDED) >= others:  # as most calls, of whose epilogue nothing is asked
        return False
    from kernlib.families.pairwise.lowering.exponents import is_exponent

    return is_exponent(descriptor, problem) or _product_us(problem, UNFOLDED) < others


def _product_us(problem: Problem, each: float) -> float:
    """Microseconds, of which a million pairs take ``each`` beside their features and columns."""
    columns, count = problem.columns, ceil_div(problem.columns, MOST_WIDE)
    # Tiles as they are padded, which of a batch of small matrices is most of them.
    tiles = round_up(problem.m, 192) * round_up(problem.n, 256) * problem.batch
    launches = count * (30 + (7 if problem.k > LANES else 0))
    launches += 1.5 * ceil_div(columns, WIDTHS[-1])
    return launches + tiles * 1e-6 * (count * (each + 0.01 * problem.k) + 0.004 * columns)


def _others_us(problem: Problem) -> float:
    """Microseconds of the fastest other way: kernels of few columns, or blocks of the matrix."""
    pairs, columns = problem.m * problem.n * problem.batch * 1e-6, problem.columns
    blocks = 35 + pairs * (2.6 + 0.077 * columns)
    if problem.k <= SMALL_K:
        passes = ceil_div(columns, 16)
        alone = 0.34 + 0.037 * max(0, problem.k - 3)
        return min(blocks, passes * 25 + pairs * (alone * passes + 0.056 * columns))
    if columns > 16:
        return blocks
    return 25 + pairs * (0.7 * ceil_div(columns, 8) + 0.14 * columns)


def width_of(columns: int) -> int:
    """Columns that the kernel for ``columns`` of v computes; 0 for none."""
    return next((width for width in (0, *WIDTHS) if width >= columns), WIDTHS[-1])


def reducer_of(problem: Problem) -> str:
    """The name of a reducer of reduce/reducers.cuh."""
    if problem.reduction == "logsumexp" and problem.columns:
        return SHIFTED
    return REDUCERS.get(problem.reduction, f"Matmul<{width_of(problem.columns)}>")


def columns_of(reducer: str) -> int:
    """Columns of v that a reducer reads."""
    if reducer == SHIFTED:
        return 1
    return int(reducer[7:-1]) if reducer.startswith("Matmul") else 0


def fits(problem: Problem, arch: str) -> bool:
    """Whether one of the kernels takes a problem on an arch."""
    takes = problem.dtype in FLOAT_SUMS and min(problem.k, problem.m, problem.n) > 0
    if (
        not takes
        or problem.columns > WIDTHS[-1]
        or ceil_div(problem.m, THREADS) > MAX_BLOCKS // 1024
    ):
        return False
    return shared(variant(problem, arch)) <= targets.SHARED_BYTES[arch]


def variant(problem: Problem, arch: str, rows: int | None = None) -> Variant:
    """The code for a problem. Where totals beside the stages do not fit, two chains become one."""
    code = _variant(problem, rows)
    if code.k:
        return code
    short = problem.k <= 2 * PROMOTE_K and shared(code) > targets.SHARED_BYTES[arch]
    return code._replace(long_k=False) if short else code


def _variant(problem: Problem, rows: int | None) -> Variant:
    width = width_of(problem.columns)
    reducer = reducer_of(problem)
    small = problem.k <= SMALL_K
    a, b = ((layout, count) for layout, count in ((problem.a, problem.m), (problem.b, problem.n)))
    return Variant(
        reducer,
        problem.dtype,
        problem.k if small else 0,
        (rows or rows_of(problem.k, width, problem.dtype, reducer)) if small else 0,
        not small and problem.k > PROMOTE_K,
        "strided" if small else access(*a, problem.k, problem.dtype),
        "strided" if small else access(*b, problem.k, problem.dtype),
        problem.inner,
        problem.outer,
        problem.root,
        problem.epsilon,
        problem.regularized,
    )


def rows_of(k: int, width: int, dtype: str = "float32", reducer: str = "") -> int:
    """Rows of a thread of the small kernel. Each read of a point serves them all, but with 8 of
    them fewer threads hide less: 1e10 pairs of 3 features take 3.8 ms with 4, 4.5 with 8 (H200)."""
    size = DTYPES[dtype].sums.bytes
    numbers = LONG_REDUCERS.get(reducer) if size == 8 else None
    words = (k + (numbers or 2 * max(1, width))) * size // 4
    return 4 if 4 * words <= 80 else 2


def sums_of(problem: Problem) -> Sums:
    """Those of all launches of a reduction."""
    count, size = problem.m * max(1, problem.out_columns), DTYPES[problem.dtype].sums.bytes
    return Sums(problem.n, count, problem.batch, size)


class Cut(NamedTuple):
    """How the small kernels divide pairs: rows of a thread, threads of a block that share a row's
    points, and points of a block."""

    rows: int
    partners: int
    per_split: int


class Work(NamedTuple):
    """What :func:`small_cut` divides: the points of ``sums`` for ``m`` rows, of which a pair takes
    ``slots`` issue slots, and a point ``line_bytes`` of shared memory; partial results take so many
    ``joins``."""

    m: int
    sums: Sums
    slots: int
    line_bytes: int
    multiprocessors: int
    joins: int = 1

    def row_blocks(self, cut: Cut) -> int:
        return ceil_div(self.m, cut.rows * THREADS // cut.partners)

    def splits(self, cut: Cut) -> int:
        return ceil_div(self.sums.n, cut.per_split)

    def blocks(self, cut: Cut) -> int:
        return self.row_blocks(cut) * self.splits(cut) * self.sums.batch

    def is_large(self, rows: int) -> bool:
        """Whether blocks of so many rows of a thread and a stage of points are enough for four
        waves, and few of their threads lack a row."""
        blocks = self.blocks(Cut(rows, 1, THREADS))
        return self.m > (rows - 1) * THREADS and blocks >= 4 * RESIDENT * self.multiprocessors

    def duration(self, cut: Cut) -> float:
        """An estimate, in issue slots of the warps of a block."""
        each, splits = ceil_div(self.blocks(cut), self.multiprocessors), self.splits(cut)
        points = ceil_div(cut.per_split, cut.partners)
        busy = points * (cut.rows * self.slots + self.line_bytes // 16)
        busy += ceil_div(cut.per_split, THREADS) * self.line_bytes  # to fill a stage
        stages = ceil_div(cut.per_split, stage_of(cut.partners, self.line_bytes))
        waiting = stages * FILLING + (cut.partners.bit_length() - 1) * MEETING
        joining = self.joins * (JOINING + splits * JOIN) if splits > 1 else 0
        return busy * each + waiting * ceil_div(each, RESIDENT) + joining


def work_of(descriptor: Pairwise, problem: Problem, variant: Variant, multiprocessors: int) -> Work:
    """That of a problem. Slots are those of differences, a Gaussian and products, about; those of
    float64 take two, and its exponential 12 more."""
    slots = 2 * problem.k + 3 + max(1, variant.columns) + 8 * (problem.reduction == "logsumexp")
    if type(descriptor.inner) in EXPONENT_STAGES and problem.inner in ("any", "device"):
        slots += 16 * problem.k
    if DTYPES[problem.dtype].sums.bytes == 8:
        slots = 2 * (slots + 12)
    joins = JOINS.get(problem.reduction, 1)
    return Work(problem.m, sums_of(problem), slots, variant.line_bytes, multiprocessors, joins)


def stage_of(partners: int, line_bytes: int) -> int:
    """Points of a stage: partners take many, so that a block waits for few stages."""
    if partners == 1:
        return THREADS
    return max(THREADS, min(MOST_STAGE, STAGE_BYTES // line_bytes // THREADS * THREADS))


def small_cut(work: Work, rows: int, per_split: int = 0, fixed: bool = False) -> Cut:
    """The cut that is done first: of large problems that of the ``rows`` given and whole stages,
    else one of :data:`SHAPES` too, but of rows that are ``fixed``. ``per_split`` is that of another
    launch."""
    if work.is_large(rows):
        blocks = work.row_blocks(Cut(rows, 1, THREADS))
        slots = RESIDENT * work.multiprocessors
        return Cut(rows, 1, per_split or split(work.sums, blocks, THREADS, slots))
    shapes = [(rows, 1), *(() if fixed else SHAPES)]
    cuts = [
        Cut(min(few, rows), partners, points)
        for few, partners in shapes
        for points in ([per_split] if per_split else _per_splits(work, min(few, rows), partners))
    ]
    return min(cuts, key=work.duration)


def _per_splits(work: Work, rows: int, partners: int) -> list[int]:
    """The points of a block that are worth a look: of splits that give each multiprocessor one
    block, two and so on, and of few splits."""
    sums, unit = work.sums, max(FEWEST_POINTS, partners)
    units = ceil_div(sums.n, unit)
    most = min(units, sums.most)
    least = min(most, ceil_div(units * unit, MAX_PLACES))
    each = work.row_blocks(Cut(rows, partners, unit)) * sums.batch
    counts = [blocks * work.multiprocessors // each for blocks in range(1, 9)]
    counts = sorted({max(least, min(count, most)) for count in (*counts, *FEW_SPLITS) if count})
    return [ceil_div(units, count) * unit for count in counts]


def shared(variant: Variant) -> int:
    """Bytes of dynamic shared memory: the tile kernel's stages, sums and lines of v."""
    if variant.k:
        return 0
    return shared_bytes(variant.dtype, BIG_TILE, variant.long_k) + BIG_TILE * variant.columns * 4


@cache
def fields(scalars: int) -> Fields:
    """What a plan fixes, of struct Parameters of reduce/parameters.cuh."""
    return Fields((
        f"i64 scalar_strides[{scalars}]",
        "View a_view", "View b_view", "View v_view",  # (batch, point, feature), (batch, n, column)
        "i64 m", "i64 n", "i64 batch",
        "i64 diagonal",  # n - m of the entries that receive the regularization
        "i64 per_split",  # n of a block, less for the last one
        "int k", "int row_blocks",
        "int columns", "int out_columns",  # of v that exist here, and of a row of out
    ))  # fmt: skip


def fixed_parameters(
    problem: Problem, per_split: int, row_blocks: int, scalar_strides: tuple[int, ...]
) -> bytes:
    """Its bytes."""
    return fields(len(scalar_strides)).pack(
        scalar_strides=scalar_strides,
        a_view=view(problem.a),
        b_view=view(problem.b),
        v_view=view(problem.v),
        m=problem.m,
        n=problem.n,
        batch=problem.batch,
        diagonal=problem.diagonal,
        per_split=per_split,
        k=problem.k,
        row_blocks=row_blocks,
        columns=problem.columns,
        out_columns=max(1, problem.out_columns),
    )

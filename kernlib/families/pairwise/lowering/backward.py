"""First gradients of a product or a sum with a kernel matrix by the kernel for up to SMALL_K
features and COLUMNS columns (:mod:`kernlib.families.pairwise.kernels.backward`): the problem, which
code computes it, and how its pairs are divided."""

from __future__ import annotations

from typing import NamedTuple

from kernlib.families.pairwise.lowering import reduce
from kernlib.families.pairwise.lowering.problem import THREADS, Layout
from kernlib.families.pairwise.lowering.reduce import Cut, Work
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.division import Sums, split

COLUMNS = 4  # of g and v that a launch takes
WIDTHS = (1, 2, 4)
# Lines that a block of whole rows reads at a time; of which a block's are a multiple.
STAGE, GRAIN = 128, 32
ROLES = ("first", "second", "both")
# Whose addresses the parameter struct starts with.
OPERANDS = ("a", "b", "g", "v", "points", "values", "totals")
MOST_FEATURES, MOST_WORDS = 10, (52, 56)  # of a thread with several rows: of 4 and of 2
STATIC_BYTES = 48 << 10  # of shared memory


class Problem(NamedTuple):
    """One launch: ``m`` rows and ``n`` lines, ``columns`` of g, and of v if it is ``weighted``.
    What is wanted: gradients of the rows' ``points``, of v as ``values``. ``slope`` and the three
    numbers behind it are as of :class:`kernlib.families.pairwise.lowering.gradient.Problem`, the
    last four as of :class:`kernlib.families.pairwise.lowering.reduce.Problem`."""

    role: str
    m: int
    n: int
    k: int
    batch: int
    a: Layout
    b: Layout
    g: Layout
    v: Layout
    columns: int
    weighted: bool
    points: bool
    values: bool
    slope: str
    factor: float = 1.0
    times_p: bool = False
    times_scale: bool = False
    inner: float | str = "any"
    outer: float | str = "any"
    root: bool = False
    epsilon: bool = False

    dtype = "float32"


class Variant(NamedTuple):
    """Everything that code generation chooses besides the descriptor and its derivatives."""

    role: str
    k: int
    rows: int
    columns: int
    weighted: bool
    points: bool
    values: bool
    slope: str
    inner: float | str
    outer: float | str
    root: bool
    epsilon: bool
    partners: int = 1
    dtype: str = "float32"

    @property
    def line_bytes(self) -> int:
        """A line with its numbers of g and v, at most."""
        return round_up(self.k + self.columns * (2 if self.role == "both" else 1), 4) * 4


def cut_of(work: Work, variant: Variant, fixed: bool) -> Cut:
    """How pairs are divided, of rows that are ``fixed`` or may be fewer."""
    if work.is_large(variant.rows):
        return Cut(variant.rows, 1, stages_split(work, variant.rows))
    return reduce.small_cut(work, variant.rows, fixed=fixed)


def work_of(problem: Problem, variant: Variant, hyper: int, multiprocessors: int) -> Work:
    """What is divided. Issue slots are those of a Gaussian, about."""
    point = problem.k if variant.points else 0
    count = point + (problem.columns if variant.values else 0)
    sums = Sums(problem.n, problem.m * max(1, count), problem.batch)
    weights = variant.columns * (2 if variant.role == "both" else 1)
    slots = 2 * problem.k + 3 + weights + count + 3 * hyper
    joins = variant.points + variant.values
    return Work(problem.m, sums, slots, variant.line_bytes, multiprocessors, joins)


def stages_split(work: Work, rows: int) -> int:
    """The n of a block of many rows: of the number of splits that is best in whole stages, which
    need not be whole."""
    row_blocks = ceil_div(work.m, rows * THREADS)
    per_split = split(work.sums, row_blocks, STAGE, work.multiprocessors * reduce.RESIDENT)
    return round_up(ceil_div(work.sums.n, ceil_div(work.sums.n, per_split)), GRAIN)


def variant(problem: Problem, hyper: int, rows: int | None = None) -> Variant:
    """The code for a problem with so many hyperparameters."""
    columns = next(width for width in WIDTHS if width >= problem.columns)
    single = Variant(
        problem.role, problem.k, rows or 1, columns, problem.weighted, problem.points,
        problem.values, problem.slope, problem.inner, problem.outer, problem.root,
        problem.epsilon,
    )  # fmt: skip
    return single._replace(rows=rows or rows_of(single, hyper))


def rows_of(variant: Variant, hyper: int) -> int:
    """Rows of a thread: each read of a line serves them all. As many as 128 registers hold beside
    what is in flight, which are more differences of more features, and code of a p on the device,
    and whose totals fit a block's static shared memory."""
    numbers = variant.columns * (2 if variant.role == "both" else 1)
    words = 2 * variant.k + numbers + variant.values * variant.columns
    if variant.k > MOST_FEATURES or 2 * words > MOST_WORDS[1]:
        return 1
    rows = 4 if 4 * words <= MOST_WORDS[0] else 2
    rows = rows // 2 if variant.slope == "DeviceSlope" else rows
    while rows > 1 and shared(variant._replace(rows=rows), hyper) > STATIC_BYTES:
        rows //= 2
    return rows


def fits(problem: Problem, hyper: int) -> bool:
    """Whether the totals of a block, of so many hyperparameters too, have room."""
    return shared(variant(problem, hyper), hyper) <= STATIC_BYTES


def shared(variant: Variant, hyper: int) -> int:
    """Bytes of static shared memory: a stage of lines, and the totals of a block."""
    return stage_of(variant, hyper) * variant.line_bytes + _totals_bytes(variant, hyper)


def _totals_bytes(variant: Variant, hyper: int) -> int:
    sums = variant.rows * (variant.points * variant.k + variant.values * variant.columns) + hyper
    return THREADS * round_up(sums, 4) * 4 + 16  # a word


def stage_of(variant: Variant, hyper: int) -> int:
    """Lines of a stage: where partners read them as many as there is room for."""
    if variant.partners == 1:
        return STAGE
    fit = (STATIC_BYTES - _totals_bytes(variant, hyper)) // variant.line_bytes // STAGE * STAGE
    return min(fit, reduce.stage_of(variant.partners, variant.line_bytes))

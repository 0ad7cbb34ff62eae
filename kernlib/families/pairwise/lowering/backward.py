"""From first gradients of a product or a sum with a kernel matrix to a KernelSpec, a grid and
parameters: ``pairwise_reduce_gradient``, for up to SMALL_K features and COLUMNS columns, which
stores no entry of the matrix (``kernel_sources/pairwise/reduce/gradient.cuh``)."""

from __future__ import annotations

import struct
from typing import NamedTuple

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering import reduce
from kernlib.families.pairwise.lowering.backward_source import (
    Derivatives,
    SlopeSource,
    is_curved,
    slopes,
)
from kernlib.families.pairwise.lowering.finish import finish_reduced
from kernlib.families.pairwise.lowering.layout import Layout
from kernlib.families.pairwise.lowering.problem import (
    MAX_BATCH_BLOCKS,
    THREADS,
    inner_codes,
    scalar_count,
    short,
    terms,
    types,
)
from kernlib.families.pairwise.lowering.reduce import Cut, Work
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import config
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.division import Sums, split
from kernlib.lowering.names import named
from kernlib.lowering.steps import Lowered, Step

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


def lower(
    descriptor: Pairwise,
    derivatives: Derivatives,
    problem: Problem,
    arch: str,
    multiprocessors: int,
    scalar_strides: tuple[int, ...],
    rows: int | None = None,
) -> Lowered:
    """The launch for a problem of 1 feature or more. Each row gets ``parts`` partial sums, and each
    block leaves totals of the hyperparameters, one after the other. ``rows`` overrides the rows of
    a thread."""
    hyper = len(derivatives.others)
    made = variant(problem, hyper, rows)
    work = work_of(problem, made, hyper, multiprocessors)
    if work.is_large(made.rows):
        cut = Cut(made.rows, 1, whole_split(work, made.rows))
    else:
        cut = reduce.small_cut(work, made.rows, fixed=rows is not None)
    made = made._replace(rows=cut.rows, partners=cut.partners)
    row_blocks, per_split = work.row_blocks(cut), cut.per_split
    splits = ceil_div(problem.n, per_split)
    fixed = fixed_parameters(problem, per_split, row_blocks, scalar_strides)
    grid = (row_blocks * splits, min(problem.batch, MAX_BATCH_BLOCKS))
    pointers = tuple((name, 0) for name in OPERANDS)
    made = spec(descriptor, derivatives, made)
    step = Step(made, grid, fixed, pointers, scalar_count(descriptor))
    return Lowered((step,), parts=splits, per_part=per_split)


def work_of(problem: Problem, made: Variant, hyper: int, multiprocessors: int) -> Work:
    """What is divided. Issue slots are those of a Gaussian, about."""
    point = problem.k if made.points else 0
    count = point + (problem.columns if made.values else 0)
    sums = Sums(problem.n, problem.m * max(1, count), problem.batch)
    weights = made.columns * (2 if made.role == "both" else 1)
    slots = 2 * problem.k + 3 + weights + count + 3 * hyper
    joins = made.points + made.values
    return Work(problem.m, sums, slots, made.line_bytes, multiprocessors, joins)


def whole_split(work: Work, rows: int) -> int:
    """The n of a block of many rows: of the number of splits that is best in whole stages, which
    need not be whole."""
    row_blocks = ceil_div(work.m, rows * THREADS)
    found = split(work.sums, row_blocks, STAGE, work.multiprocessors * reduce.RESIDENT)
    return round_up(ceil_div(work.sums.n, ceil_div(work.sums.n, found)), GRAIN)


def variant(problem: Problem, hyper: int, rows: int | None = None) -> Variant:
    """The code for a problem with so many hyperparameters."""
    columns = next(width for width in WIDTHS if width >= problem.columns)
    made = Variant(
        problem.role, problem.k, rows or 1, columns, problem.weighted, problem.points,
        problem.values, problem.slope, problem.inner, problem.outer, problem.root,
        problem.epsilon,
    )  # fmt: skip
    return made._replace(rows=rows or rows_of(made, hyper))


def rows_of(made: Variant, hyper: int) -> int:
    """Rows of a thread: each read of a line serves them all. As many as 128 registers hold beside
    what is in flight, which are more differences of more features, and code of a p on the device,
    and whose totals fit a block's static shared memory."""
    own = made.columns * (2 if made.role == "both" else 1)
    words = 2 * made.k + own + made.values * made.columns
    if made.k > MOST_FEATURES or 2 * words > MOST_WORDS[1]:
        return 1
    rows = 4 if 4 * words <= MOST_WORDS[0] else 2
    rows = rows // 2 if made.slope == "DeviceSlope" else rows
    while rows > 1 and shared(made._replace(rows=rows), hyper) > STATIC_BYTES:
        rows //= 2
    return rows


def fits(problem: Problem, hyper: int) -> bool:
    """Whether the totals of a block, of so many hyperparameters too, have room."""
    return shared(variant(problem, hyper), hyper) <= STATIC_BYTES


def shared(made: Variant, hyper: int) -> int:
    """Bytes of static shared memory: a stage of lines, and the totals of a block."""
    return stage_of(made, hyper) * made.line_bytes + _totals_bytes(made, hyper)


def _totals_bytes(made: Variant, hyper: int) -> int:
    sums = made.rows * (made.points * made.k + made.values * made.columns) + hyper
    return THREADS * round_up(sums, 4) * 4 + 16  # a word


def stage_of(made: Variant, hyper: int) -> int:
    """Lines of a stage: where partners read them as many as there is room for."""
    if made.partners == 1:
        return STAGE
    fit = (STATIC_BYTES - _totals_bytes(made, hyper)) // made.line_bytes // STAGE * STAGE
    return min(fit, reduce.stage_of(made.partners, made.line_bytes))


def spec(descriptor: Pairwise, derivatives: Derivatives, made: Variant) -> KernelSpec:
    """The KernelSpec of a variant."""
    wanted = [name for name in ("points", "values") if getattr(made, name)]
    words = [descriptor.describe(), "gradient", made.role, *wanted]
    words += [f"hyperparameters={len(derivatives.others)}"] * bool(derivatives.others)
    words += [f"K={made.k} C={made.columns * made.weighted} rows={made.rows}"]
    words += [f"partners={made.partners}"] * (made.partners > 1)
    words += [f"p={made.inner}"] * (made.inner != "any") + ["epsilon"] * made.epsilon
    specification = KernelSpec(
        "pairwise",
        source(descriptor, derivatives, made),
        "pairwise_reduce_gradient",
        THREADS,
        0,
        description=" ".join(words),
    )
    return named(specification, *short(descriptor), *words[1:], epilogue=descriptor.epilogue)


def source(descriptor: Pairwise, derivatives: Derivatives, made: Variant) -> str:
    """The generated CUDA text: a few defines, ``Finish``, ``Slopes``, one include."""
    dot = descriptor.operator == "dot"
    swapped = made.role == "second" and not dot
    flags = {
        "WEIGHTED": made.weighted,
        "POINTS": made.points,
        "VALUES": made.values,
        "CURVED": is_curved(derivatives),
        "DOT": dot,
    }
    numbers = {
        "SCALARS": scalar_count(descriptor),
        "COLUMNS": made.columns,
        "HYPER": len(derivatives.others),
    }
    rows = {
        "K": made.k,
        "THREADS": THREADS,
        "ROWS": made.rows,
        "PARTNERS": made.partners,
        "STAGE": stage_of(made, len(derivatives.others)),
    }
    constants = [f"constexpr int {name} = {value};" for name, value in numbers.items()]
    constants += [f"constexpr bool {name} = {str(on).lower()};" for name, on in flags.items()]
    lines = "\n".join(constants)
    return f"""#include "common/types.cuh"
#include "pairwise/reduce/math.cuh"
#include "pairwise/terms.cuh"

{config.text({**types("float32"), **terms(descriptor, made, swapped), "BY_NORM": False, **rows})}
using InputT = float;
using AccT = float;

enum class Role {{ {", ".join(ROLES)} }};
constexpr Role ROLE = Role::{made.role};
{lines}

#define OPERATION {"Swapped" * swapped}{"Dot" if dot else "Difference"}
#define INNER {inner_codes(descriptor)[made.inner]}
#define SLOPE {made.slope}
{finish_reduced(descriptor, made, SlopeSource)}
{slopes(descriptor, derivatives, made.root)}
#include "pairwise/reduce/gradient.cuh"
"""


def fixed_parameters(
    problem: Problem, per_split: int, row_blocks: int, scalar_strides: tuple[int, ...]
) -> bytes:
    """What follows the numbers in struct Parameters of reduce/gradient.cuh."""
    layouts = (problem.a, problem.b, problem.g, problem.v)
    views = [x for v in layouts for x in (v.batch, v.rows, v.columns)]
    return struct.pack(
        f"<{len(scalar_strides)}q12q4qd4i",
        *scalar_strides, *views, problem.m, problem.n, problem.batch, per_split, problem.factor,
        row_blocks, problem.columns, problem.times_p, problem.times_scale,
    )  # fmt: skip

"""From a reduction of a kernel matrix and the layout of its tensors to a KernelSpec, a grid and
parameters: two kinds of kernel, neither of which stores the matrix.

``small``: up to SMALL_K features, rows in registers. ``tile``: any number, sums by the main loop of
:mod:`kernlib.families.pairwise.lowering.direct`. Both for float32 and half types; of float64
:mod:`kernlib.families.pairwise.lowering.double` takes products and sums, of few features by
``small``. What none takes is computed by blocks of the matrix
(:mod:`kernlib.families.pairwise.reductions.blocks`).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering.direct import (
    BIG_TILE,
    MAX_BATCH_BLOCKS,
    PROMOTE_K,
    THREADS,
    inner_codes,
    scalar_count,
    shared_bytes,
    short,
)
from kernlib.families.pairwise.lowering.finish import finish_reduced, is_norm
from kernlib.families.pairwise.lowering.layout import Layout, access
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.dtypes import DTYPES, FLOAT_SUMS
from kernlib.lowering.names import named
from kernlib.lowering.steps import Lowered, Step

SMALL_K = 16
WIDTHS = (1, 2, 4, 8, 16)  # columns of v that a launch takes
# Whose addresses the parameter struct starts with; out takes the values, indices their places.
OPERANDS = ("a", "b", "v", "out", "indices")
FEWEST_POINTS = 16  # of a block of the small kernel
# Points that take one row as long as it takes to start a block, and to add a split's partial
# results, by the bytes of a sum: 0.07 us.
START, JOIN = 64, {4: 6, 8: 1}
RESIDENT = 2  # blocks of a multiprocessor, as __launch_bounds__ promises
MAX_BLOCKS = 2**31 - 1  # of a grid's first axis
MAX_SPLITS = 512
MAX_PLACES = 1 << 30  # n of a block, which an int counts
WORKSPACE_BYTES = 64 << 20  # of partial results
# By the name of a reduction, the reducer of reduce/reducers.cuh, and whether it reads v.
REDUCERS = {"sum": "RowSum", "logsumexp": "LogSumExp", "min": "Minimum"}


class Problem(NamedTuple):
    """One launch: shapes, layouts, and ``columns`` of v (0 for reductions that read none), of which
    a row of the result has ``out_columns``."""

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

    @property
    def kind(self) -> str:
        return "small" if self.k else "tile"


def width_of(columns: int) -> int:
    """Columns that the kernel for ``columns`` of v computes; 0 for none."""
    return next((width for width in (0, *WIDTHS) if width >= columns), WIDTHS[-1])


def lower(
    descriptor: Pairwise,
    problem: Problem,
    arch: str,
    multiprocessors: int,
    scalar_strides: tuple[int, ...],
    per_split: int = 0,
    rows: int | None = None,
    most_rows: int | None = None,
) -> Lowered:
    """Choose the kernel for a problem of 1 feature or more. Each row gets partial results, of
    ``per_part`` n each; ``per_split`` is that of another launch whose results lie side by side with
    this one's. ``rows`` overrides the rows of a thread of the small kernel, ``most_rows`` bounds
    those it chooses."""
    made, slots = variant(problem, arch, rows), multiprocessors * RESIDENT
    sums = sums_of(problem)
    if made.k:
        most = min(made.rows, most_rows or made.rows)
        fewer, fine = small_shape(problem.m, sums, most, slots)
        made = made._replace(rows=rows or fewer)
        row_blocks = ceil_div(problem.m, made.rows * THREADS)
        per_split = per_split or (
            fine_split(sums, row_blocks, slots) if fine else split(sums, row_blocks, THREADS, slots)
        )
    else:
        row_blocks = ceil_div(problem.m, BIG_TILE)
        per_split = per_split or split(sums, row_blocks, BIG_TILE, slots)
    splits = ceil_div(problem.n, per_split)
    fixed = fixed_parameters(problem, per_split, row_blocks, scalar_strides)
    grid = (row_blocks * splits, min(problem.batch, MAX_BATCH_BLOCKS))
    pointers = tuple((name, 0) for name in OPERANDS)
    step = Step(spec(descriptor, made, arch), grid, fixed, pointers, scalar_count(descriptor))
    return Lowered((step,), parts=splits, per_part=per_split)


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
    made = _variant(problem, rows)
    if made.k:
        return made
    short = problem.k <= 2 * PROMOTE_K and shared(made) > targets.SHARED_BYTES[arch]
    return made._replace(long_k=False) if short else made


def _variant(problem: Problem, rows: int | None) -> Variant:
    width = width_of(problem.columns)
    small = problem.k <= SMALL_K
    a, b = ((layout, count) for layout, count in ((problem.a, problem.m), (problem.b, problem.n)))
    return Variant(
        REDUCERS.get(problem.reduction, f"Matmul<{width}>"),
        problem.dtype,
        problem.k if small else 0,
        (rows or rows_of(problem.k, width, problem.dtype)) if small else 0,
        not small and problem.k > PROMOTE_K,
        "strided" if small else access(*a, problem.k, problem.dtype),
        "strided" if small else access(*b, problem.k, problem.dtype),
        problem.inner,
        problem.outer,
        problem.root,
        problem.epsilon,
        problem.regularized,
    )


def rows_of(k: int, width: int, dtype: str = "float32") -> int:
    """Rows of a thread of the small kernel. Each read of a point serves them all, but with 8 of
    them fewer threads hide less: 1e10 pairs of 3 features take 3.8 ms with 4, 4.5 with 8 (H200)."""
    words = (k + 2 * max(1, width)) * DTYPES[dtype].sums.bytes // 4
    return 4 if 4 * words <= 80 else 2


class Sums(NamedTuple):
    """What :func:`split` divides: n terms each of a count of sums in each batch entry, which have
    so many bytes."""

    n: int
    count: int
    batch: int
    bytes: int = 4


def sums_of(problem: Problem) -> Sums:
    """Those of all launches of a reduction."""
    count, size = problem.m * max(1, problem.out_columns), DTYPES[problem.dtype].sums.bytes
    return Sums(problem.n, count, problem.batch, size)


def split(
    sums: Sums, row_blocks: int, unit: int, slots: int, least: int = 1, start: float = 1, join=0.0
) -> int:
    """The n of a block, a multiple of ``unit``: of the numbers of splits, ``least`` or more, the
    one whose blocks, in waves of ``slots``, are done first, where starting a block takes as long as
    ``start`` units and to add one split's sums as long as ``join``."""
    units = ceil_div(sums.n, unit)
    fit = WORKSPACE_BYTES // (sums.count * sums.batch * sums.bytes)
    most = max(1, min(units, MAX_SPLITS, fit))
    least = max(min(least, most), ceil_div(units * unit, MAX_PLACES))

    def duration(splits: int) -> float:
        waves = ceil_div(row_blocks * splits * sums.batch, slots)
        return waves * (ceil_div(units, splits) + start) + splits * join

    best = min(range(least, max(least, most) + 1), key=duration)
    return ceil_div(units, best) * unit


def small_shape(m: int, sums: Sums, rows: int, slots: int) -> tuple[int, bool]:
    """Rows of a thread of the small kernels, and whether to divide n by :func:`fine_split`: the
    ``rows`` given and whole stages where these are enough for ``slots`` blocks at a time. 1000 x
    1000 pairs are 4 blocks of 4 rows and 256 points, which take 19 us; in 52 of one row and 80
    points they take 7 (H100, 3 features)."""
    row_blocks = ceil_div(m, rows * THREADS) * sums.batch
    few = row_blocks * ceil_div(sums.n, START) < slots or ceil_div(m, THREADS) < rows
    return 1 if few else rows, row_blocks * ceil_div(sums.n, THREADS) < 4 * slots


def fine_split(sums: Sums, row_blocks: int, slots: int) -> int:
    """The n of a block of the small kernels where blocks are few."""
    start, join = START / FEWEST_POINTS, JOIN[sums.bytes] / FEWEST_POINTS
    return split(sums, row_blocks, FEWEST_POINTS, slots, start=start, join=join)


def shared(made: Variant) -> int:
    """Bytes of dynamic shared memory: the tile kernel's stages, sums and lines of v."""
    if made.k:
        return 0
    columns = int(made.reducer[7:-1]) if made.reducer.startswith("Matmul") else 0
    return shared_bytes(made.dtype, BIG_TILE, made.long_k) + BIG_TILE * columns * 4


def spec(descriptor: Pairwise, made: Variant, arch: str) -> KernelSpec:
    """The KernelSpec of a variant."""
    words = [descriptor.describe(), made.reducer, made.kind, made.dtype]
    words += [f"K={made.k} rows={made.rows}"] if made.k else [f"{made.access_a}/{made.access_b}"]
    words += [f"p={made.inner}"] * (made.inner != "any")
    flags = ("long_k", "epsilon", "regularized")
    words += [flag for flag in flags if getattr(made, flag)]
    specification = KernelSpec(
        "pairwise",
        source(descriptor, made),
        f"pairwise_reduce_{made.kind}",
        THREADS,
        shared(made),
        description=" ".join(words),
    )
    words[:3] = [*short(descriptor), made.reducer]
    return named(specification, *words, epilogue=descriptor.epilogue)


def source(descriptor: Pairwise, made: Variant) -> str:
    """The generated CUDA text: a few defines, ``Finish``, one include."""
    own = small_text(made) if made.k else tile_text(made)
    return f'{head(descriptor, made, own)}#include "pairwise/reduce/{made.kind}.cuh"\n'


def head(descriptor: Pairwise, made: Variant, own: str) -> str:
    """The text ahead of the include: what all reductions define, what is a kind's ``own``, and
    ``Finish``."""
    operation = "Dot" if descriptor.operator == "dot" else "Difference"
    return f"""#include "common/types.cuh"
#include "pairwise/reduce/math.cuh"

using InputT = {DTYPES[made.dtype].cuda};
using AccT = {DTYPES[made.dtype].sums.cuda};

constexpr int SCALARS = {scalar_count(descriptor)};
constexpr bool REGULARIZED = {str(made.regularized).lower()};
{own}
#define OPERATION {operation}
#define INNER {inner_codes(descriptor)[made.inner]}
#define REDUCER {made.reducer}
{"#define BY_NORM" * is_norm(made)}
{finish_reduced(descriptor, made)}
"""


def small_text(made: Variant) -> str:
    """What the kinds with rows in registers define."""
    return f"""constexpr int K = {made.k};
constexpr int ROWS = {made.rows};
"""


def tile_text(made: Variant) -> str:
    """What the kinds with tiles define."""
    return f"""constexpr int TILE = {BIG_TILE};
constexpr bool LONG_K = {str(made.long_k).lower()};

#define ACCESS_A Access::{made.access_a}
#define ACCESS_B Access::{made.access_b}
"""


def fixed_parameters(
    problem: Problem, per_split: int, row_blocks: int, scalar_strides: tuple[int, ...]
) -> bytes:
    layouts = (problem.a, problem.b, problem.v)
    views = [x for v in layouts for x in (v.batch, v.rows, v.columns)]
    sizes = (problem.m, problem.n, problem.batch, problem.diagonal, per_split)
    counts = (problem.k, row_blocks, problem.columns, max(1, problem.out_columns))
    return struct.pack(f"<{len(scalar_strides)}q9q5q4i", *scalar_strides, *views, *sizes, *counts)

"""The kernel gradients.cuh: gradients of a Kronecker product by its factors and by x, one launch
for each run of factors and one that adds up what their blocks have summed.

Where there are several runs, what each makes of x is made again first, as none of it was kept. The
gradient by it then takes its place in the workspace.
"""

from __future__ import annotations

import math
from functools import lru_cache

from kernlib.families.kronecker_product.lowering import gradient_variant, grouping, modes, parts
from kernlib.families.kronecker_product.lowering.gradient_variant import Variant
from kernlib.families.kronecker_product.lowering.problem import Factor, Layout, Problem
from kernlib.families.kronecker_product.lowering.runs import Run, split
from kernlib.families.kronecker_product.lowering.variant import (
    GRID_BATCH,
    Part,
    matrix_numbers,
    parameters,
    run_numbers,
    spec,
)
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.steps import WORKSPACE, Lowered, Step
from kernlib.records import NamedTuple

MOST_FACTORS = 128  # whose strides a launch's parameters hold
COLUMNS = 1024  # that the time of a run is estimated for


class Gradients(NamedTuple):
    """Of a product, whose ``out`` is the layout of the gradient that is given: where the one by x
    goes, whether it is wanted, of which factors a call is given the transpose, and whether a
    gradient by a factor is the sum of all batches."""

    product: Problem
    back: Layout
    wanted: bool
    turned: tuple[bool, ...]
    is_one_sum: bool


@lru_cache(maxsize=1024)
def runs(
    sizes: tuple[grouping.Size, ...], dtype: str, precision: str, arch: str
) -> tuple[tuple[int, int], ...] | None:
    """The runs of factors whose gradients one pass takes, first to last as they are applied to x;
    None for a factor whose gradient is torch's: no block's shared memory or registers hold it."""
    arithmetic = grouping.arithmetic_of(dtype, precision)
    item, handed = DTYPES[dtype].bytes, DTYPES[dtype].sums.bytes  # by way of device memory
    most, room = modes.most_features(dtype), modes.room(dtype, arch)

    def cost(run: tuple[grouping.Size, ...], elements: int, begins: bool, ends: bool):
        if not gradient_variant.fits(run, dtype, arch):
            return None
        moved = item if begins else handed, item if ends else handed
        is_hidden = grouping.fits(run, arithmetic, most, room // 4)  # beside another tile
        return grouping.cycles(run, elements, moved, (0, 0), arithmetic, is_hidden, elements)

    return grouping.groups(sizes, COLUMNS * math.prod(rows for rows, _ in sizes), cost)


def takes(sizes: tuple[grouping.Size, ...], dtype: str, arch: str) -> bool:
    """Whether kernels compute the gradients by factors of these rows and columns."""
    return len(sizes) <= MOST_FACTORS and all(
        gradient_variant.fits((size,), dtype, arch) for size in sizes
    )


def lower(given: Gradients, arch: str, multiprocessors: int) -> Lowered:
    """The launches. Operands are ``x``, ``grad``, ``to_x`` if it is wanted, ``factor0`` and so on,
    and ``to_factor0`` and so on."""
    problem = given.product
    sizes = problem.sizes
    found = runs(sizes, problem.dtype, problem.precision, arch)
    assert found is not None, sizes
    itemsize = DTYPES[problem.dtype].sums.bytes
    own, at, kept = split(problem, found, back=given.back), 0, []
    for run in own[:-1]:
        kept.append((WORKSPACE, at))
        at = round_up(at + run.elements * itemsize, 256)
    device = arch, multiprocessors
    forward = [
        _again(problem, own[index], found[index], _ends(kept, index), device)
        for index in range(len(own) - 1)
    ]
    backward, summed, base = [], [], at
    for index in reversed(range(len(own))):
        made = _variant(given, own, index, *device)
        grid, sums = _grid(given, own[index], made, *device)
        ends = _ends(kept, index)
        backward.append(_step(given, own[index], found[index], made, grid, ends, at, arch))
        begin = (at - base) // itemsize
        summed += parts.matrices(made, found[index][0], begin, sums)
        count = sums * (1 if given.is_one_sum else problem.batch)
        at = round_up(at + count * made.entries * itemsize, 256)
    whole = parts.step(problem, given.turned, given.is_one_sum, summed, (WORKSPACE, base))
    return Lowered((*forward, *backward, whole), at)


def _ends(kept: list, index: int) -> tuple[tuple[str, int], tuple[str, int] | None]:
    """What a run reads of x, and what it leaves of it for the next, None for the last."""
    source = kept[index - 1] if index else ("x", 0)
    return source, kept[index] if index < len(kept) else None


def _again(problem: Problem, run: Run, numbers: tuple[int, int], ends: tuple, device) -> Step:
    """The launch that makes what a run but the last leaves of x."""
    sums = DTYPES[problem.dtype].accumulator
    source = problem.dtype if ends[0][0] == "x" else sums
    columns = modes.columns_of(run, problem.dtype, problem.precision, *device)
    dtypes = source, problem.dtype, sums
    made = modes.variant(run.sizes, dtypes, problem.precision, run.inside, columns, device[0])
    factors = ((f"factor{number}", 0) for number in range(*numbers))
    return modes.step((), run, made, *device, (*ends, *factors))


def _variant(
    given: Gradients, own: list[Run], index: int, arch: str, multiprocessors: int
) -> Variant:
    """The kernel of a run, whose tiles have so few columns that each multiprocessor has two of
    them, but whole sectors of 32 bytes."""
    run, dtype = own[index], given.product.dtype
    sums = DTYPES[dtype].accumulator
    ends = dtype if index == 0 else sums
    gradient = dtype if index == len(own) - 1 else sums
    wanted = given.wanted or index > 0
    made = Variant(
        dtype, given.product.precision, ends, gradient, ends, 1, run.inside, run.sizes, wanted
    )
    count = run.batch * run.outer * run.inner * run.columns
    shared = max(ceil_div(count, 2 * multiprocessors), modes.SECTOR if run.inside else 1)
    most = min(gradient_variant.most_columns(made, arch), run.columns, shared)
    return made._replace(columns=1 << (most.bit_length() - 1))


def variants(
    sizes: tuple[grouping.Size, ...], inside: bool, kinds: list[tuple[str, str]], arch: str
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for factors of these sizes and ``kinds`` of numbers:
    (dtype, precision). None for factors that kernels do not take."""
    found: list[KernelSpec] = []
    for dtype, precision in kinds:
        if takes(sizes, dtype, arch):
            found += _variants(_some(sizes, dtype, precision, inside), arch)
    return list(dict.fromkeys(found))


def _variants(given: Gradients, arch: str) -> list[KernelSpec]:
    problem = given.product
    sizes = problem.sizes
    parted = runs(sizes, problem.dtype, problem.precision, arch)
    assert parted is not None, sizes
    own, kind = split(problem, parted, back=given.back), (problem.dtype, problem.precision)
    found, matrices, sums = [], 0, DTYPES[problem.dtype].accumulator
    for index, run in enumerate(own):
        made = _variant(given, own, index, arch, 1)
        matrices += len(made.modes)
        for wanted in {True, index > 0}:
            each = made._replace(wanted=wanted)
            for bits in range(gradient_variant.most_columns(each, arch).bit_length()):
                found.append(gradient_variant.spec(each._replace(columns=1 << bits), arch))
        if index < len(own) - 1:
            dtypes = sums if index else problem.dtype, problem.dtype, sums
            most = modes.most_columns(run.sizes, run.inside, *kind, arch)
            for bits in range(most.bit_length()):
                again = modes.variant(run.sizes, dtypes, kind[1], run.inside, 1 << bits, arch)
                found.append(spec((), again, arch))
    return [*found, parts.spec(problem.dtype, len(sizes), matrices)]


def _some(sizes: tuple[grouping.Size, ...], dtype: str, precision: str, inside: bool) -> Gradients:
    """Those of some product of factors of these sizes."""
    factors = tuple(Factor(rows, columns, columns, 1) for rows, columns in sizes)
    ends = (math.prod(rows for rows, _ in sizes), math.prod(columns for _, columns in sizes))
    x, out = (Layout(0, 0, *((1, COLUMNS) if inside else (count, 1))) for count in ends)
    problem = Problem(1, COLUMNS, inside, factors, x, out, dtype, precision)
    return Gradients(problem, x, True, (False,) * len(sizes), True)


def _tiles(run: Run, made: Variant) -> int:
    return run.outer * run.inner * ceil_div(run.columns, made.columns)


def _grid(
    given: Gradients, run: Run, made: Variant, arch: str, multiprocessors: int
) -> tuple[tuple[int, int], int]:
    """Blocks of a launch, and the parts that they make of one sum."""
    most = made.resident(arch) * multiprocessors
    across = min(_tiles(run, made), most)
    if given.is_one_sum:
        down = min(run.batch, max(1, most // across))
        return (across, down), across * down
    across = min(across, max(1, ceil_div(most, run.batch)))
    return (across, min(run.batch, GRID_BATCH)), across


def _step(
    given: Gradients,
    run: Run,
    numbers: tuple[int, int],
    made: Variant,
    grid: tuple[int, int],
    ends: tuple,
    at: int,
    arch: str,
) -> Step:
    """The launch of a run, whose parts lie ``at`` bytes behind the beginning of the workspace."""
    turned = tuple(
        f._replace(
            rows=f.columns, columns=f.rows, row_stride=f.column_stride, column_stride=f.row_stride
        )
        for f in run.factors
    )
    assert run.back is not None
    sides = run._replace(out=run.back), run._replace(x=run.out, out=run.back, factors=turned)
    fixed, last = [], (run.outer, run.columns)
    for side, source in zip(sides, (made.source, made.gradient), strict=True):
        part = Part(source, made.target, made.columns, run.inside, side.sizes)
        fixed += run_numbers(side, part, last, ((0, 0), (0, 0)))
    fixed += matrix_numbers(list(sides))
    layout = parameters(2, 2 * len(run.factors), ())
    (source, place), behind = ends[0], ends[1] or ("grad", 0)
    target = (source, place) if source == WORKSPACE else ("to_x" if made.wanted else WORKSPACE, 0)
    factors = [(f"factor{number}", 0) for number in range(*numbers)]
    # What slabs count in the last place is nothing here.
    pointers = (ends[0], behind, (WORKSPACE, at), target, *factors, *factors, (WORKSPACE, 0))
    packed = layout.pack(*fixed, run.batch, int(given.is_one_sum), _tiles(run, made), 0)
    return Step(gradient_variant.spec(made, arch), grid, packed, pointers)

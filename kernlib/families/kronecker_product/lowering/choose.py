"""The launches of a Kronecker product: one for each run of factors, through a workspace where there
are several."""

from __future__ import annotations

import math

from kernlib.descriptors.epilogues import Epilogue
from kernlib.errors import UnsupportedError
from kernlib.families.kronecker_product.lowering import grouping, modes
from kernlib.families.kronecker_product.lowering.modes import Run
from kernlib.families.kronecker_product.lowering.problem import Layout, Problem
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.steps import WORKSPACE, Lowered

COLUMNS = 1024  # that the time of a run is estimated for


def takes(sizes: tuple[grouping.Size, ...], dtype: str, arch: str) -> bool:
    """Whether kernels take factors of these rows and columns, on either side."""
    most, room = modes.most_features(dtype), modes.room(dtype, arch)
    return all(
        grouping.fits([size], most, room) and grouping.fits([size[::-1]], most, room)
        for size in sizes
    )


def runs(problem: Problem, arch: str) -> tuple[tuple[int, int], ...]:
    """The runs of factors that are applied in one pass each, first to last. Raises UnsupportedError
    for a factor that no block's shared memory holds."""
    sizes = tuple((factor.rows, factor.columns) for factor in problem.factors)
    found = _runs(sizes, problem.dtype, problem.precision, arch)
    if found is None:
        largest = max(sizes, key=math.prod)
        raise UnsupportedError(
            f"a factor {largest[0]} x {largest[1]} in {problem.dtype} does not fit the shared "
            f"memory of a block of {arch}"
        )
    return found


def _runs(sizes: tuple, dtype: str, precision: str, arch: str) -> tuple | None:
    """Those of any number of columns, so that the bits of one do not depend on it."""
    arithmetic = {"float64": "fp64", "float32": precision}.get(dtype, "tf32")
    limits = modes.most_features(dtype), modes.room(dtype, arch)
    elements = COLUMNS * math.prod(rows for rows, _ in sizes)
    return grouping.groups(sizes, elements, DTYPES[dtype].bytes, arithmetic, *limits)


def lower(
    epilogue: tuple[Epilogue, ...], problem: Problem, arch: str, multiprocessors: int
) -> Lowered:
    """The launches of a call."""
    found = runs(problem, arch)
    sums = DTYPES[problem.dtype].accumulator
    parts, steps = split(problem, found), []
    kept = [_elements(part) * DTYPES[sums].bytes for part in parts[:-1]]
    second = round_up(max(kept[::2], default=0), 256)  # two buffers, in turn
    whole = second + max(kept[1::2], default=0)
    for index, (part, (first, last)) in enumerate(zip(parts, found, strict=True)):
        source = (WORKSPACE, 0 if index % 2 else second) if index else ("x", 0)
        ends = index == len(parts) - 1
        target = ("out", 0) if ends else (WORKSPACE, second if index % 2 else 0)
        dtypes = _dtypes(problem.dtype, index == 0, ends)
        columns = modes.columns_of(part, problem.dtype, arch, multiprocessors)
        sizes = modes.sizes_of(part)
        made = modes.variant(sizes, dtypes, problem.precision, part.inside, columns)
        operands = (source, target, *((f"factor{number}", 0) for number in range(first, last)))
        own = epilogue if ends else ()
        steps.append(modes.step(own, part, made, arch, multiprocessors, operands))
    return Lowered(tuple(steps), whole)


def variants(
    epilogue: tuple[Epilogue, ...],
    sizes: tuple[grouping.Size, ...],
    inside: bool,
    kinds: list[tuple[str, str]],
    arch: str,
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for factors of these sizes and ``kinds`` of numbers:
    (dtype, precision). None for factors that kernels do not take."""
    made = []
    for dtype, precision in kinds:
        parts = _runs(sizes, dtype, precision, arch) or ()
        for index, (first, last) in enumerate(parts):
            ends, own = index == len(parts) - 1, sizes[first:last]
            dtypes = _dtypes(dtype, index == 0, ends)
            within = inside or index > 0
            for bits in range(modes.most_columns(own, within, dtype, arch).bit_length()):
                one = modes.variant(own, dtypes, precision, within, 1 << bits)
                made.append(modes.spec(epilogue if ends else (), one, arch))
    return list(dict.fromkeys(made))


def _dtypes(dtype: str, begins: bool, ends: bool) -> tuple[str, str, str]:
    """Those of x, factors and result of a launch: between two they are those of the sums."""
    sums = DTYPES[dtype].accumulator
    return dtype if begins else sums, dtype, dtype if ends else sums


def split(problem: Problem, found: tuple[tuple[int, int], ...]) -> list[Run]:
    """The launches of runs, whose results but the last lie in the workspace without gaps, in the
    order of x's dimensions."""
    made, x = [], problem.x
    for first, last in found:
        before = math.prod(factor.rows for factor in problem.factors[:first])
        behind = math.prod(factor.columns for factor in problem.factors[last:])
        own = problem.factors[first:last]
        sizes = [math.prod(getattr(f, name) for f in own) for name in ("rows", "columns")]
        out = problem.out
        if first:  # into the workspace: (batch, columns, before, own, behind), or columns last
            features = before * sizes[1] * behind
            out = Layout(
                features * problem.columns,
                0,
                1 if problem.inside else features,
                problem.columns if problem.inside else 1,
            )
        made.append(_run(problem, x, out, before, sizes, behind, own))
        x = out
    return made


def _run(problem: Problem, x: Layout, out: Layout, before, sizes, behind, own) -> Run:
    """One launch over features (before, own, behind), of which ``before`` or ``behind`` go to the
    tile's columns and the rest to outer indices. Output features are those of the last run, which
    alone has an epilogue: nothing is before it."""
    sides = list(zip((x, out), sizes, strict=True))
    outer = [s.feature * size * behind for s, size in sides]  # from one before to the next
    own_strides = [s.feature * behind for s, _ in sides]
    if problem.inside:  # (before, own, behind, columns)
        if behind > 1 and any(s.feature != problem.columns * s.column for s, _ in sides):
            raise UnsupportedError("features and columns of the result must lie in one run")
        columns, count = [s.column for s, _ in sides], behind * problem.columns
        merged = _layouts(sides, outer, columns, own_strides)
        feature = (0, 1, behind)
        return Run(problem.batch, before, count, True, own, *merged, feature, problem.columns)
    rows = [s.column for s, _ in sides]
    if behind > 1:  # (columns, before, own, behind)
        if before == 1:
            outer = rows
        elif any(row != step * before for row, step in zip(rows, outer, strict=True)):
            raise UnsupportedError("rows between two launches must lie in one run")
        merged = _layouts(sides, outer, [s.feature for s, _ in sides], own_strides)
        count = problem.columns * before
        return Run(problem.batch, count, behind, True, own, *merged, (0, 1, behind), 1)
    if before == 1:  # (columns, own)
        merged = _layouts(sides, [0, 0], rows, own_strides)
        return Run(problem.batch, 1, problem.columns, False, own, *merged, (0, 0, 1), 1)
    if all(row == step * before for row, step in zip(rows, outer, strict=True)):
        merged = _layouts(sides, [0, 0], outer, own_strides)
        count = problem.columns * before
        return Run(problem.batch, 1, count, False, own, *merged, (0, 0, 1), 1)
    merged = _layouts(sides, rows, outer, own_strides)
    return Run(problem.batch, problem.columns, before, False, own, *merged, (0, 0, 1), 1)


def _layouts(sides: list, outer: list, columns: list, features: list) -> list[Layout]:
    """Those of x and of the result."""
    return [
        Layout(side.batch, *strides, side.alignment)
        for (side, _), *strides in zip(sides, outer, columns, features, strict=True)
    ]


def _elements(part: Run) -> int:
    width = math.prod(factor.columns for factor in part.factors)
    return part.batch * part.outer * part.columns * width

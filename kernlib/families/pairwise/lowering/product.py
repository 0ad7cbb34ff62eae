"""Products of a kernel matrix with many columns by tensor cores
(kernel_sources/pairwise/product/product.cuh), sm_90a.

A call is the packing of v and of points (for sums of words by pack.py, for folded exponents one
more), the product, and behind gates what takes the calls that it leaves: where points are too far
from each other for folded exponents a product without them, and for what is not finite kernels of
:mod:`kernlib.families.pairwise.lowering.reduce` for every 16 columns. All leave the same partial
results.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.kernels import reduce
from kernlib.families.pairwise.lowering import pack, product_source
from kernlib.families.pairwise.lowering import reduce as direct
from kernlib.families.pairwise.lowering.pack import ARCH
from kernlib.families.pairwise.lowering.problem import MAX_BATCH_BLOCKS, scalar_count
from kernlib.families.pairwise.lowering.product_source import FIXED, FOLD_POINTS, PACK_PARAMETERS
from kernlib.families.pairwise.lowering.reduce import Problem
from kernlib.families.pairwise.lowering.wide import (
    GROUP,
    LEAST_STAGES,
    TILE_N,
    WIDTHS,
    Variant,
    is_of_words,
    is_on_lanes,
    pays,
    variants,
)
from kernlib.lowering import division
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES, FLOAT_SUMS
from kernlib.lowering.steps import WORKSPACE, Lowered, Step

__all__ = ["WIDTHS", "lower", "pays", "takes", "variants", "widths"]

FAR, CLOSED = 4, 8  # bytes from the count of doubtful pairs on: struct Gate
EIGHT = 8  # columns that a block packs
MAX_BLOCKS = 2**31 - 1


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


def takes(descriptor: Pairwise, problem: Problem, arch: str, precision: str | None) -> bool:
    """Whether this kernel computes a product. ``precision`` is a key of PRECISIONS, None for sums
    that are no products."""
    if arch != ARCH or problem.reduction != "matmul" or problem.dtype not in FLOAT_SUMS:
        return False
    if min(problem.m, problem.n, problem.k, problem.columns) < 1:
        return False
    if problem.columns > WIDTHS[-1] or max(problem.m, problem.n) > pack.MAX_SIZE:
        return False
    if problem.batch > MAX_BATCH_BLOCKS:
        return False
    gated = problem._replace(columns=min(problem.columns, direct.WIDTHS[-1]))
    on_lanes, of_words = is_on_lanes(descriptor, problem), is_of_words(descriptor, problem)
    if not (on_lanes or of_words) or not direct.fits(gated, arch):
        return False
    variant, second = variants(descriptor, problem, precision)
    blocks = ceil_div(problem.m, variant.rows) * division.MAX_SPLITS * problem.batch
    stages = min(each.stages for each in (variant, second) if each)
    size = workspace(problem, variant, second).size
    return stages >= LEAST_STAGES and blocks <= MAX_BLOCKS and size <= pack.MAX_WORKSPACE


def widths(columns: int) -> list[tuple[int, int]]:
    """The launches for so many columns of v: first column, count, nearly the same for all."""
    count = ceil_div(columns, WIDTHS[-1])
    each = ceil_div(columns, count)
    return [(first, min(each, columns - first)) for first in range(0, columns, each)]


def workspace(problem: Problem, variant: Variant, behind: Variant | None = None) -> Place:
    """What a call keeps where, by a variant and, if that is of folded exponents, the one behind it.
    What all batch entries share is packed once, but for entries of folded exponents, of which each
    may have a bandwidth of its own."""
    made = behind or variant
    points = pack.workspace(problem, made) if made.sums == "words" else _few(problem)
    batch, groups = problem.batch, ceil_div(problem.n, GROUP)
    of_v, of_b = (1 if side.batch == 0 else problem.batch for side in (problem.v, problem.b))
    v_bytes = groups * (GROUP // TILE_N) * variant.v_bytes
    lines = groups * GROUP * made.features
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


def lower(
    descriptor: Pairwise,
    problem: Problem,
    arch: str,
    multiprocessors: int,
    scalar_strides: tuple[int, ...],
    precision: str | None,
    per_split: int = 0,
) -> Lowered:
    """The launches of a product that :func:`takes`, with partial results and ``per_split`` as of
    :func:`kernlib.families.pairwise.kernels.reduce.lower`."""
    variant, second = variants(descriptor, problem, precision)
    place = workspace(problem, variant, second)
    row_blocks = ceil_div(problem.m, variant.rows)
    sums = direct.sums_of(problem)
    per_split = per_split or division.split(sums, row_blocks, GROUP, multiprocessors)
    given = descriptor, problem, scalar_strides, place
    main = [_main_step(*given, each, per_split) for each in (variant, second) if each]
    steps = (
        *_point_steps(descriptor, problem, second or variant, place),
        *([_fold_step(*given, variant)] if second else ()),
        _pack_step(problem, second or variant, place),
        *main,
        *_steps_behind(*given, arch, multiprocessors, per_split),
    )
    return Lowered(steps, place.size, parts=ceil_div(problem.n, per_split), per_part=per_split)


def _point_steps(descriptor, problem: Problem, variant: Variant, place: Place) -> tuple[Step, ...]:
    """The packing of points as words; for others what opens the gate, and centres."""
    if variant.sums == "words":
        return pack.steps(descriptor, problem, variant, place.points)
    return (pack.opening(problem, place.points, variant.behind),)


def _fold_step(descriptor, problem: Problem, strides, place: Place, variant: Variant) -> Step:
    sides, blocks = [], 0
    for layout, count, tile, stride in (
        (problem.a, problem.m, variant.rows, place.a_stride),
        (problem.b, problem.n, TILE_N, place.b_stride),
    ):
        own = round_up(count, tile) // FOLD_POINTS
        sides += (*pack.view(layout), count, stride, tile, own)
        blocks += own
    parameters = product_source.fold_parameters(descriptor)
    centre = place.points.centre_pitch if place.points.centres > 1 else 0
    fixed = parameters.pack(*strides, *sides, centre, problem.k, 0)
    offsets = (place.points.centre, place.points.doubtful + FAR, place.folded_a, place.folded_b)
    pointers = (("a", 0), ("b", 0), *((WORKSPACE, offset) for offset in offsets))
    entries = problem.batch if place.a_stride or place.b_stride else 1
    made = product_source.fold_spec(descriptor, problem, variant)
    return Step(made, (blocks, entries), fixed, pointers, scalar_count(descriptor))


def _pack_step(problem: Problem, variant: Variant, place: Place) -> Step:
    fixed = PACK_PARAMETERS.pack(
        *pack.view(problem.b), *pack.view(problem.v),
        problem.n, place.v_stride, place.lines_stride, place.groups, problem.columns,
    )  # fmt: skip
    parts = variant.width // EIGHT + (variant.features > 0)
    entries = problem.batch if place.v_stride or place.lines_stride else 1
    pointers = (
        ("b", 0), ("v", 0),
        *((WORKSPACE, offset) for offset in (place.points.doubtful, place.v, place.lines)),
    )  # fmt: skip
    return Step(product_source.pack_spec(variant), (place.groups * parts, entries), fixed, pointers)


def _main_step(
    descriptor, problem: Problem, strides, place: Place, variant: Variant, per_split: int
) -> Step:
    splits, points = ceil_div(problem.n, per_split), place.points
    row_blocks = ceil_div(problem.m, variant.rows)
    a, b, a_stride, b_stride = {
        "lanes": (0, place.lines, 0, 4 * place.lines_stride),
        "words": (points.packed_a, points.packed_b, points.a_stride, points.b_stride),
        "folded": (place.folded_a, place.folded_b, place.a_stride, place.b_stride),
    }[variant.sums]
    fixed = direct.fixed_parameters(problem, per_split, row_blocks, tuple(strides)) + struct.pack(
        FIXED, a_stride, b_stride, points.a_points, points.b_points, place.v_stride, splits, 0
    )
    offsets = (points.doubtful, a, b, points.a_info, points.b_info, place.v)
    pointers = (
        *((WORKSPACE, offset) for offset in offsets),
        *((name, 0) for name in direct.OPERANDS),
    )
    made = product_source.spec(descriptor, variant, pack.is_difference(descriptor, problem))
    grid = (row_blocks * splits * problem.batch, 1)
    return Step(made, grid, fixed, pointers, scalar_count(descriptor))


def _steps_behind(
    descriptor, problem: Problem, strides, place: Place, arch, multiprocessors, per_split: int
) -> list[Step]:
    """What computes the call where the gate is closed."""
    made = []
    for first in range(0, problem.columns, direct.WIDTHS[-1]):
        count = min(direct.WIDTHS[-1], problem.columns - first)
        part = problem._replace(columns=count)
        (step,) = reduce.lower(descriptor, part, arch, multiprocessors, strides, per_split).steps
        offsets = {"v": first * problem.v.columns * DTYPES[problem.dtype].bytes, "out": 4 * first}
        pointers = tuple((name, at + offsets.get(name, 0)) for name, at in step.pointers)
        made.append(pack.gated_step(step._replace(pointers=pointers), place.closed))
    return made

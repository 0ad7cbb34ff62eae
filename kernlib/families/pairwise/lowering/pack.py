"""The launches before the products of tensor cores (kernel_sources/pairwise/split/split.cuh and
split/reduce.cuh): the centre of the data, and both operands packed as words of fp16. What lies
where in the workspace that they share.

A ``variant`` here has ``dtype``, ``copies`` (words of a number), ``rows`` and ``columns`` of a
tile, ``depth`` (features of a stage) and ``promote`` (of whose multiples stages are counted).
"""

from __future__ import annotations

from typing import NamedTuple

from kernlib.families.pairwise import stages as norms
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering.layout import Layout
from kernlib.families.pairwise.lowering.problem import MAX_BATCH_BLOCKS, Problem, types
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import config
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES, FLOAT_SUMS
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import WORKSPACE, Step

INFO_BYTES = 8  # of a point
CHUNK = 8  # features
CENTRE_COLUMNS = 32
SAMPLES = 512  # of each operand, for the centre
PACK_WARPS = 8
PROBES = 64 * 64
DOUBTFUL = PROBES // 64  # probed pairs above which the direct kernel does the work
ALIGNMENT = 256  # of what lies in the workspace
MAX_WORKSPACE = 2**32
MAX_SIZE = 2**31 - 2**16  # of a side, in points or features
# A Side of split/pack.cuh, of which its parameter struct has two, and that of split/centre.cuh.
SIDE = "6q4i"
CENTRE_PARAMETERS = Parameters(4, "<6qq2iq2i4i")
PACK_PARAMETERS = Parameters(8, f"<{SIDE}{SIDE}q4i")


class Workspace(NamedTuple):
    """Where things begin in the workspace, in bytes, and strides from batch entry to batch entry,
    those of packed operands in bytes, of infos in points."""

    doubtful: int
    centre: int
    a_info: int
    b_info: int
    packed_a: int
    packed_b: int
    size: int
    stages: int
    centre_pitch: int
    centres: int  # batch entries with a centre of their own: all, or 1
    a_stride: int
    b_stride: int
    a_points: int
    b_points: int


def is_product(descriptor: Pairwise, problem: Problem) -> bool:
    """Whether a call's sums are squared distances or dot products, of sizes and types known."""
    if problem.dtype not in FLOAT_SUMS or problem.k < 1 or problem.batch > MAX_BATCH_BLOCKS:
        return False
    if not is_difference(descriptor, problem) and not is_dot(descriptor):
        return False
    return max(problem.m, problem.n, problem.k) <= MAX_SIZE


def is_difference(descriptor: Pairwise, problem: Problem) -> bool:
    """Whether they are squared distances."""
    power = isinstance(descriptor.inner, norms.Power) and problem.inner == 2.0
    return descriptor.operator == "difference" and (power or squares(descriptor))


def squares(descriptor: Pairwise) -> bool:
    return isinstance(descriptor.inner, norms.Square)


def is_dot(descriptor: Pairwise) -> bool:
    return descriptor.operator == "dot" and isinstance(descriptor.inner, norms.Identity)


def workspace(problem: Problem, variant) -> Workspace:
    """What a call keeps where. An operand that all batch entries share is packed once; where there
    is one, they share the centre too."""
    group = max(variant.promote, 1)
    stages = ceil_div(problem.k, variant.depth * group) * group
    pitch = stages * variant.depth
    entries = [1 if side.batch == 0 else problem.batch for side in (problem.a, problem.b)]
    points = [
        round_up(count, tile)
        for count, tile in ((problem.m, variant.rows), (problem.n, variant.columns))
    ]
    packed = [count * pitch * 2 * variant.copies for count in points]
    centres = 1 if 1 in entries else problem.batch
    sizes = [4, centres * pitch * 4]
    sizes += [count * each * INFO_BYTES for count, each in zip(points, entries, strict=True)]
    sizes += [size * each for size, each in zip(packed, entries, strict=True)]
    places = [0]
    for size in sizes:
        places.append(places[-1] + round_up(size, ALIGNMENT))
    strides = [0 if each == 1 else 1 for each in entries]
    return Workspace(
        *places, stages, pitch, centres,
        packed[0] * strides[0], packed[1] * strides[1],
        points[0] * strides[0], points[1] * strides[1],
    )  # fmt: skip


def steps(
    descriptor: Pairwise,
    problem: Problem,
    variant,
    place: Workspace,
    names: tuple[str, str] = ("a", "b"),
) -> tuple[Step, Step]:
    """The centre, then the packing; ``names`` are the operands in the caller's words."""
    difference = is_difference(descriptor, problem)
    return (
        _centre_step(problem, place, names, difference),
        _pack_step(problem, variant, place, names, difference),
    )


def opening(problem: Problem, place: Workspace, centred: bool) -> Step:
    """What opens the gate, and finds the centre if asked to, where no points are packed."""
    return _centre_step(problem, place, ("a", "b"), centred)


def _centre_step(problem: Problem, place: Workspace, names, difference: bool) -> Step:
    alone = place.centres > 1
    fixed = CENTRE_PARAMETERS.pack(
        *view(problem.a), *view(problem.b), *_sample(problem.m), *_sample(problem.n),
        problem.k, place.centre_pitch, 1 if alone else problem.batch, 0,
    )  # fmt: skip
    grid = (ceil_div(place.centre_pitch, CENTRE_COLUMNS), place.centres) if difference else (1, 1)
    pointers = _pointers(names, place.centre, place.doubtful)
    return Step(centre_spec(problem.dtype, difference), grid, fixed, pointers)


def _sample(points: int) -> tuple[int, int, int]:
    """struct Sample of an operand."""
    step = ceil_div(points, SAMPLES)
    return step, ceil_div(points, step), 0


def _pointers(names: tuple[str, str], *offsets: int) -> tuple[tuple[str, int], ...]:
    return (names[0], 0), (names[1], 0), *((WORKSPACE, offset) for offset in offsets)


def _pack_step(problem: Problem, variant, place: Workspace, names, difference: bool) -> Step:
    sides, blocks = [], 0
    for layout, count, tile, stride, points in (
        (problem.a, problem.m, variant.rows, place.a_stride, place.a_points),
        (problem.b, problem.n, variant.columns, place.b_stride, place.b_points),
    ):
        groups = round_up(count, tile) // CHUNK
        entries = 1 if layout.batch == 0 else problem.batch
        blocks += groups * entries
        sides += (*view(layout), count, stride, points, tile, groups, entries)
        sides.append(_reads_vectors(layout, problem.dtype))
    centre = place.centre_pitch if place.centres > 1 else 0
    fixed = PACK_PARAMETERS.pack(*sides, centre, problem.k, place.stages, problem.batch, 0)
    pointers = _pointers(
        names, place.centre, place.doubtful, place.packed_a, place.packed_b, place.a_info,
        place.b_info,
    )  # fmt: skip
    grid = (blocks + PROBES // PACK_WARPS, 1)
    return Step(pack_spec(variant, difference), grid, fixed, pointers)


def view(layout: Layout) -> tuple[int, int, int]:
    """struct View of a tensor."""
    return layout.batch, layout.rows, layout.columns


def _reads_vectors(layout: Layout, dtype: str) -> bool:
    """Whether 8 features are aligned loads of 16 bytes."""
    run = 16 // DTYPES[dtype].bytes
    aligned = layout.alignment % 16 == 0 and layout.columns == 1
    return aligned and layout.rows % run == 0 and layout.batch % run == 0


def gated(spec: KernelSpec) -> KernelSpec:
    """A direct kernel, for the case that the gate is open to it."""
    name = f"{spec.entry}_gated"
    source = spec.source.replace(spec.entry, name, 1)
    source = source.replace("int GATED = 0;", f"int GATED = {DOUBTFUL};", 1)
    return spec._replace(entry=name, source=source, description=f"{spec.description} gated")


def gated_step(step: Step, place: Workspace) -> Step:
    """The launch of a direct kernel behind the gate."""
    pointers = ((WORKSPACE, place.doubtful), *step.pointers)
    return step._replace(spec=gated(step.spec), pointers=pointers)


def centre_spec(dtype: str, difference: bool) -> KernelSpec:
    source = f"""{constants(dtype, difference, CENTRE_PARAMETERS.size)}
#include "pairwise/split/centre.cuh"
"""
    words = f"pairwise split centre {dtype}" + " dot" * (not difference)
    made = KernelSpec("pairwise", source, "pairwise_split_centre", 1024, description=words)
    return named(made, dtype, *["dot"] * (not difference))


def pack_spec(variant, difference: bool) -> KernelSpec:
    source = f"""{constants(variant.dtype, difference, PACK_PARAMETERS.size)}
constexpr int DEPTH = {variant.depth};
constexpr int COPIES = {variant.copies};

#include "pairwise/split/pack.cuh"
"""
    words = f"pairwise split pack {variant.dtype} words={variant.copies} depth={variant.depth}"
    words += " dot" * (not difference)
    made = KernelSpec("pairwise", source, "pairwise_split_pack", 256, description=words)
    return named(made, words.removeprefix("pairwise split pack"))


def constants(dtype: str, difference: bool, parameter_bytes: int, fixed="", **facts) -> str:
    """What each of the sources begins with."""
    return f"""#include "common/types.cuh"
{'#include "pairwise/terms.cuh"' if "Term" in facts else ""}
{'#include "pairwise/reduce/kinds.cuh"' if "Reducer" in facts else ""}
{'#include "pairwise/view.cuh"' if fixed else ""}
{config.text({**types(dtype), **facts})}
{fixed}
using InputT = {DTYPES[dtype].cuda};
using AccT = float;

constexpr bool DIFFERENCE = {str(difference).lower()};
constexpr int PARAMETER_BYTES = {parameter_bytes};
"""

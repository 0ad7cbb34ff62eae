"""Which calls are products of tensor cores, what lies where in the workspace that their launches
share, and the gate.

A ``variant`` here has ``dtype``, ``copies`` (words of a number), ``rows`` and ``columns`` of a
tile, ``depth`` (features of a stage) and ``promote`` (of whose multiples stages are counted).
"""

from __future__ import annotations

from typing import NamedTuple

from kernlib.families.pairwise import stages as norms
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering.problem import MAX_BATCH_BLOCKS, Problem
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import FLOAT_SUMS
from kernlib.lowering.steps import WORKSPACE, Step

PRECISIONS = {"fp32": 2, "tf32": 1, "bf16": 1}  # copies: two words of a number, or one
BARRIER_BYTES = 256  # at most, of static shared memory
INFO_BYTES = 8  # of a point
PROBES = 64 * 64  # pairs of the sample
DOUBTFUL = PROBES // 64  # probed pairs above which the direct kernel does the work
ALIGNMENT = 256  # of what lies in the workspace
MAX_WORKSPACE = 2**32
MAX_SIZE = 2**31 - 2**16  # of a side, in points or features


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


def split_facts(variant) -> dict:
    """Facts of products of words: ``variant`` is one of Split or of what reduces."""
    return {
        "TILE_N": variant.columns,
        "DEPTH": variant.depth,
        "STAGES": variant.stages,
        "COPIES": variant.copies,
        "PROMOTE": variant.promote,
        "ORDERED": variant.ordered,
        "DOUBTFUL": DOUBTFUL,  # of the sample, above which nothing is done
        "DYNAMIC_BYTES": variant.shared_bytes,
    }


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

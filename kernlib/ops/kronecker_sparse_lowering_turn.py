"""Gradients of a weight of batch-first operands with d > 1: turned to batch last, then summed by
another kind.

kernel_sources/kronecker_sparse/turn.cuh costs a read and a write of both operands. Summed as they
are, features d apart and batches a row apart would each be a 32-byte sector.
"""

from __future__ import annotations

import struct
from types import ModuleType

from kernlib.descriptors.epilogues import Epilogue
from kernlib.jit.spec import KernelSpec
from kernlib.ops import kronecker_sparse_lowering_gradient as gradient
from kernlib.ops import kronecker_sparse_lowering_portable as portable
from kernlib.ops.kronecker_sparse_lowering_problem import (
    MAX_BLOCKS,
    TYPES,
    Choice,
    Layout,
    Lowered,
    Problem,
    Step,
    ceil,
    is_deep,
)

KIND = "turned"
THREADS = 256
TILE = 64
FIXED = "<2q4I"
ALIGNMENT = 256  # of each operand in the workspace


def candidates(problem: Problem, arch: str) -> list[Choice]:
    """What sums the turned problem, none if it is not one to turn."""
    if not is_deep(problem) or not _is_batch_first(problem):
        return []
    return _inner(problem, arch).candidates(_turned(problem), arch)


def default(problem: Problem, known: list[Choice], multiprocessors: int) -> Choice:
    """Of the candidates the one taken untuned."""
    turned = _turned(problem)
    kind = portable if "rows" in known[0] else gradient  # which chooses columns alone
    return kind.default(turned, known, multiprocessors)


def lower(
    epilogue: tuple[Epilogue, ...],
    problem: Problem,
    arch: str,
    multiprocessors: int,
    choice: Choice,
) -> Lowered:
    """The launches of a call: both operands turned into the workspace, and what sums them there."""
    inner = _inner(problem, arch).lower(epilogue, _turned(problem), arch, multiprocessors, choice)
    left, right = _bytes(problem, problem.rows), _bytes(problem, problem.columns)
    places = {"left": 0, "right": left, "workspace": left + right}
    turns = [
        _step(problem, "left", problem.left, problem.rows, 0),
        _step(problem, "right", problem.right, problem.columns, left),
    ]
    steps = [step._replace(pointers=_moved(step.pointers, places)) for step in inner.steps]
    return Lowered((*turns, *steps), left + right + inner.workspace)


def specs(
    epilogue: tuple[Epilogue, ...], problem: Problem, arch: str, choice: Choice
) -> list[KernelSpec]:
    """The specs that :func:`lower` takes for a choice."""
    inner = _inner(problem, arch).specs(epilogue, _turned(problem), arch, choice)
    return [spec(problem.dtype), *inner]


def variants(
    epilogues: list[tuple[Epilogue, ...]], sizes: tuple[int, int], arch: str, kinds: list
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose besides those of the kinds that sum."""
    return [spec(dtype) for dtype in dict.fromkeys(dtype for dtype, _ in kinds)]


def _is_batch_first(problem: Problem) -> bool:
    """Whether both operands are rows of features (i, j, l) without gaps."""
    d = problem.lanes
    sides = ((problem.left, problem.rows), (problem.right, problem.columns))
    return d > 1 and all(
        side.lane == 1
        and (side.line == d or count == 1)
        and (side.block == d * count or problem.blocks == 1)
        and problem.blocks * d * count < 2**31
        and ceil(problem.blocks * d * count, TILE) * ceil(problem.depth, TILE) <= MAX_BLOCKS
        for side, count in sides
    )


def _inner(problem: Problem, arch: str) -> ModuleType:
    """The kind that sums the turned problem."""
    return gradient if gradient.candidates(_turned(problem), arch) else portable


def _pitch(problem: Problem) -> int:
    """From one turned feature to the next, in elements: whole chunks of 16 bytes."""
    chunk = 16 // TYPES[problem.dtype][1]
    return ceil(problem.depth, chunk) * chunk


def _turned(problem: Problem) -> Problem:
    """The problem over operands in the workspace, where the depth is contiguous."""
    d, pitch = problem.lanes, _pitch(problem)

    def side(count: int) -> Layout:
        return Layout(count * d * pitch, pitch, d * pitch, 1, 16, True)

    return problem._replace(left=side(problem.rows), right=side(problem.columns))


def _bytes(problem: Problem, count: int) -> int:
    """Workspace of an operand of ``count`` lines a group."""
    size = problem.blocks * count * problem.lanes * _pitch(problem) * TYPES[problem.dtype][1]
    return ceil(size, ALIGNMENT) * ALIGNMENT


def _moved(pointers: tuple, places: dict[str, int]) -> tuple:
    """Pointers into the workspace, where an operand's and its own lie at these places."""
    return tuple(
        ("workspace", at + places[name]) if name in places else (name, at) for name, at in pointers
    )


def _step(problem: Problem, name: str, side: Layout, count: int, place: int) -> Step:
    """The launch that turns an operand of ``count`` lines a group."""
    columns = problem.blocks * count * problem.lanes
    chunk = 16 // TYPES[problem.dtype][1]
    tiles = ceil(columns, TILE), ceil(problem.depth, TILE)
    vectors = int(side.depth % chunk == 0 and side.alignment % 16 == 0)
    sizes = (problem.depth, columns, tiles[0], vectors)
    fixed = struct.pack(FIXED, side.depth, _pitch(problem), *sizes)
    pointers = ((name, 0), ("workspace", place))
    return Step(spec(problem.dtype), (tiles[0] * tiles[1], 1), fixed, pointers)


def spec(dtype: str) -> KernelSpec:
    """The KernelSpec that turns an operand of ``dtype``."""
    source = f"""#include "common/types.cuh"

using InputT = {TYPES[dtype][0]};

constexpr int PARAMETER_BYTES = {16 + struct.calcsize(FIXED)};

#include "kronecker_sparse/turn.cuh"
"""
    description = f"kronecker_sparse turn {dtype}"
    entry = "kronecker_sparse_turn"
    return KernelSpec("kronecker_sparse", source, entry, THREADS, description=description)

"""Gradients of a weight of batch-first operands with d > 1: turned to batch last, then summed by
another kind.

kernel_sources/kronecker_sparse/transpose.cuh costs a read and a write of both operands. Summed as
they are, features d apart and batches a row apart would each be a 32-byte sector. The kind
`transposed` has its launches from here too.
"""

from __future__ import annotations

from types import ModuleType

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.kronecker_sparse.lowering import portable, weight_gradient
from kernlib.families.kronecker_sparse.lowering.problem import MAX_BLOCKS, Layout, Problem, is_deep
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.choice import Choice
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import WORKSPACE, Lowered, Step

KIND = "turned"
THREADS = 256
TILE = 64
PARAMETERS = {False: Parameters(2, "<2q6I"), True: Parameters(3, "<2q6I")}  # with sums of rows
ALIGNMENT = 256  # of each operand in the workspace


def candidates(problem: Problem, arch: str) -> list[Choice]:
    """What sums the turned problem, none if it is not one to turn."""
    if not is_deep(problem) or not _is_batch_first(problem):
        return []
    return _inner(problem, arch).candidates(transposed_problem(problem), arch)


def default(problem: Problem, known: list[Choice], multiprocessors: int) -> Choice:
    """Of the candidates the one taken untuned."""
    inner = transposed_problem(problem)
    kind = portable if "rows" in known[0] else weight_gradient  # which chooses columns alone
    return kind.default(inner, known, multiprocessors)


def lower(
    epilogue: tuple[Epilogue, ...],
    problem: Problem,
    arch: str,
    multiprocessors: int,
    choice: Choice,
) -> Lowered:
    """The launches of a call: both operands turned into the workspace, and what sums them there."""
    inner = _inner(problem, arch).lower(
        epilogue, transposed_problem(problem), arch, multiprocessors, choice
    )
    left, right = (
        size(problem.dtype, problem.blocks * count * problem.lanes, problem.depth)
        for count in (problem.rows, problem.columns)
    )
    starts = {"left": 0, "right": left, "workspace": left + right}
    places = {name: (WORKSPACE, start) for name, start in starts.items()}
    turns = [
        _step(problem, "left", problem.left, problem.rows, 0),
        _step(problem, "right", problem.right, problem.columns, left),
    ]
    steps = [step.placed(places) for step in inner.steps]
    return Lowered((*turns, *steps), left + right + inner.workspace)


def variants(
    epilogues: list[tuple[Epilogue, ...]], sizes: tuple[int, int, int], arch: str, kinds: list
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose besides those of the kinds that sum."""
    return [spec(dtype) for dtype in dict.fromkeys(dtype for dtype, _ in kinds)]


def _is_batch_first(problem: Problem) -> bool:
    """Whether both operands are rows of features (i, j, l) without gaps."""
    d = problem.lanes
    sides = ((problem.left, problem.rows), (problem.right, problem.columns))
    return d > 1 and all(
        is_flat(problem, count, side.lane, side.line, side.block)
        and problem.blocks * d * count < 2**31
        and ceil_div(problem.blocks * d * count, TILE) * ceil_div(problem.depth, TILE) <= MAX_BLOCKS
        for side, count in sides
    )


def is_flat(problem: Problem, count: int, lane: int, near: int, block: int) -> bool:
    """Whether features (i, j, l), ``count`` of j and with these strides of l, j and i, lie side by
    side."""
    d = problem.lanes
    return (
        (lane == 1 or d == 1)
        and (near == d or count == 1)
        and (block == d * count or problem.blocks == 1)
    )


def _inner(problem: Problem, arch: str) -> ModuleType:
    """The kind that sums the turned problem."""
    return (
        weight_gradient
        if weight_gradient.candidates(transposed_problem(problem), arch)
        else portable
    )


def pitch(dtype: str, count: int) -> int:
    """From one turned line of ``count`` elements to the next: whole chunks of 16 bytes."""
    chunk = 16 // DTYPES[dtype].bytes
    return round_up(count, chunk)


def size(dtype: str, lines: int, count: int) -> int:
    """Workspace of turned lines of ``count`` elements each, in bytes."""
    return ceil_div(lines * pitch(dtype, count) * DTYPES[dtype].bytes, ALIGNMENT) * ALIGNMENT


def transposed_problem(problem: Problem) -> Problem:
    """The problem over operands in the workspace, where the depth is contiguous."""
    d, apart = problem.lanes, pitch(problem.dtype, problem.depth)

    def side(count: int) -> Layout:
        return Layout(count * d * apart, apart, d * apart, 1, 16, True)

    return problem._replace(left=side(problem.rows), right=side(problem.columns))


def _step(problem: Problem, name: str, side: Layout, count: int, place: int) -> Step:
    """The launch that turns an operand of ``count`` lines a group."""
    sizes = problem.depth, problem.blocks * count * problem.lanes
    strides = side.depth, pitch(problem.dtype, problem.depth)
    return step(problem.dtype, sizes, strides, side.alignment, ((name, 0), ("workspace", place)))


def step(
    dtype: str,
    sizes: tuple[int, int],
    strides: tuple[int, int],
    alignment: int,
    pointers: tuple[tuple[str, int], ...],
    whole: bool = True,
    bias: bool = False,
) -> Step:
    """The launch that turns ``sizes``, rows and columns, at the first of ``pointers`` to columns
    and rows at the second: rows and turned columns lie ``strides`` elements apart. The first row
    begins at ``alignment`` modulo 16; turned columns take ``whole`` 16 bytes, aligned, of which the
    last may end in zeros, or lie anywhere, and nothing behind them is written. With ``bias`` a
    third pointer gets the sums of TILE rows each, in float32."""
    rows, columns = sizes
    chunk = 16 // DTYPES[dtype].bytes
    tiles = ceil_div(columns, TILE), ceil_div(rows, TILE)
    vectors = int(strides[0] % chunk == 0 and alignment % 16 == 0)
    fixed = PARAMETERS[bias].pack(*strides, rows, columns, tiles[0], vectors, int(whole), 0)
    return Step(spec(dtype, bias), (tiles[0] * tiles[1], 1), fixed, pointers)


def spec(dtype: str, bias: bool = False) -> KernelSpec:
    """The KernelSpec that turns a matrix of ``dtype``, a half type if it sums rows too."""
    source = f"""#include "common/types.cuh"

using InputT = {DTYPES[dtype].cuda};

constexpr int PARAMETER_BYTES = {PARAMETERS[bias].size};
#define BIAS {int(bias)}
#define HALF_INPUT {int(dtype != "float32")}

#include "kronecker_sparse/transpose.cuh"
"""
    description = f"kronecker_sparse turn {dtype}" + " bias" * bias
    entry = "kronecker_sparse_transpose"
    made = KernelSpec("kronecker_sparse", source, entry, THREADS, description=description)
    return named(made, dtype, f"{TILE}x{TILE}", *["bias"] * bias)

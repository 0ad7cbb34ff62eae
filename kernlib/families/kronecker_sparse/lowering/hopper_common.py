"""What Hopper's kernels are assembled from: facts and epilogues, stages that fit shared memory."""

from __future__ import annotations

from collections.abc import Iterable

from kernlib.descriptors.epilogues import Epilogue
from kernlib.descriptors.expression import Node, Operation
from kernlib.families.kronecker_sparse.lowering.problem import Layout, OutLayout, Problem
from kernlib.jit import targets
from kernlib.lowering import product_source as text
from kernlib.lowering import tma
from kernlib.lowering.arithmetic import round_up
from kernlib.lowering.config import Fact
from kernlib.lowering.dtypes import DTYPES

ARCH = "sm_90a"
THREADS = 384
ROW_BYTES = 128  # of a swizzled row of shared memory
SWIZZLE_BYTES = 1024  # whose multiples swizzled rows begin at, where shared memory does at 16
BARRIER_BYTES = 256  # at most, of static shared memory
MAX_STAGES = 8
MAX_TILES = 2**31 - 1  # of all CTAs, counted by an int
INCLUDES = "common/math.cuh", "common/hopper.cuh"  # of what is generated
_CHEAP = ("+", "-", "*", "neg", "abs", "max", "min")


def facts(
    dtype: str, precision: str, epilogue: tuple[Epilogue, ...], staged: bool = False
) -> dict[str, Fact]:
    """Facts of a kernel of products whose epilogues are :func:`finish`."""
    head, rest = _apart(epilogue, staged)
    return {
        **text.facts(dtype, dtype, epilogue),
        "HEAD": bool(head),
        "REST": bool(rest),
        "HEAD_VECTORS": len(text.vectors(head)),
        "HEAD_SCALARS": text.scalar_count(head),
        "PRODUCTS": products(dtype, precision),
        "HALF_INPUT": dtype != "float32",
    }


def finish(epilogue: tuple[Epilogue, ...], staged: bool = False) -> str:
    """The epilogues in two parts: ``Finish`` of the cheap ones at the beginning, which go over
    accumulators, 128 times unrolled, and ``Rest`` of the others, or of all if ``staged``, in a loop
    over the staged tile."""
    head, rest = _apart(epilogue, staged)
    return f"{text.typed_finish(head)}\n{text.finish(rest, 'Rest')}"


def _apart(epilogue: tuple[Epilogue, ...], staged: bool) -> tuple[tuple, tuple]:
    costly = (i for i, part in enumerate(epilogue) if staged or not _is_cheap(part.tree()))
    count = next(costly, len(epilogue))
    return epilogue[:count], epilogue[count:]


def is_cheap(epilogue: tuple[Epilogue, ...]) -> bool:
    """Whether all of it takes but a few instructions."""
    return all(_is_cheap(part.tree()) for part in epilogue)


def _is_cheap(node: Node) -> bool:
    """Whether an expression takes but a few instructions."""
    if not isinstance(node, Operation):
        return True
    return node.operator in _CHEAP and all(map(_is_cheap, node.operands))


def products(dtype: str, precision: str) -> int:
    """Products of one multiplication: 3 for fp32 by 3xTF32."""
    return 3 if (dtype, precision) == ("float32", "fp32") else 1


def row(dtype: str) -> int:
    """Elements of a swizzled row."""
    return ROW_BYTES // DTYPES[dtype].bytes


def stages(beside: int, stage: int) -> tuple[int, int]:
    """As many stages as fit beside so many bytes, and the dynamic shared memory of all."""
    beside += SWIZZLE_BYTES
    count = min(MAX_STAGES, (targets.SHARED_BYTES[ARCH] - BARRIER_BYTES - beside) // stage)
    return count, beside + count * stage


def by_padding(widths: Iterable[int], count: int) -> list[int]:
    """Widths of tile: first those that pad so many columns least, of these the widest."""
    return sorted(widths, key=lambda columns: (round_up(count, columns), -columns))


def extent(
    problem: Problem, side: Layout | OutLayout, lines: int, depth: int, lines_near: bool
) -> tma.Extent:
    """Of an operand, or of the result with columns for a depth, each l by itself. ``lines_near``
    says that neighbours are of several lines, else they are of one."""
    block, lane, of_line, of_depth, *_ = side
    near, far, stride = (lines, depth, of_depth) if lines_near else (depth, lines, of_line)
    return tma.Extent((near, problem.lanes, far, problem.blocks), (lane, stride, block))


def maps(dtype: str, *boxes: tuple[tma.Extent, int]) -> tuple[tma.TensorMap, ...]:
    """Of tensors of which a copy takes so many swizzled rows."""
    return tuple(tma.tensor_map(dtype, each, (row(dtype), 1, rows, 1)) for each, rows in boxes)


def addresses(problem: Problem, x: tma.Extent, y: tma.Extent) -> bool:
    """Whether the copy engine reads the left operand, x, and writes the result, y."""
    return tma.takes(problem.dtype, problem.left.alignment, problem.out.alignment, x, y)

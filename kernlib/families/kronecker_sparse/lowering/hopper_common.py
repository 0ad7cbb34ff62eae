"""What Hopper's kernels are assembled from: types and epilogues, the parameter struct, stages that
fit shared memory."""

from __future__ import annotations

from kernlib.descriptors.epilogues import Epilogue
from kernlib.descriptors.expression import Node, Operation
from kernlib.families.kronecker_sparse.lowering.problem import Problem
from kernlib.jit import targets
from kernlib.lowering import config, tma
from kernlib.lowering import product_source as text
from kernlib.lowering.choice import Choice
from kernlib.lowering.dtypes import DTYPES

ARCH = "sm_90a"
THREADS = 384
ROW_BYTES = 128  # of a swizzled row of shared memory
SWIZZLE_BYTES = 1024  # whose multiples swizzled rows begin at, where shared memory does at 16
BARRIER_BYTES = 256  # at most, of static shared memory
MAX_STAGES = 8
MAX_TILES = 2**31 - 1  # of all CTAs, counted by an int
_CHEAP = ("+", "-", "*", "neg", "abs", "max", "min")


def preamble(dtype: str, epilogue: tuple[Epilogue, ...], staged: bool = False) -> str:
    """Types, and the epilogues in two parts: the cheap ones at the beginning go over accumulators,
    128 times unrolled, the others, or all if ``staged``, in a loop over the staged tile."""
    count = next(
        (i for i, part in enumerate(epilogue) if staged or not _is_cheap(part.tree())), None
    )
    head, rest = epilogue[:count], () if count is None else epilogue[count:]
    return f"""#include "common/types.cuh"
#include "common/math.cuh"

{config.text(text.facts(dtype, dtype, epilogue))}
using InputT = Config::InputT;
using AccT = Config::AccT;
using OutputT = Config::OutputT;
constexpr int VECTORS = Config::VECTORS;
constexpr int SCALARS = Config::SCALARS;
constexpr bool HEAD = {str(bool(head)).lower()};
constexpr bool REST = {str(bool(rest)).lower()};
constexpr int HEAD_VECTORS = {len(text.vectors(head))};
constexpr int HEAD_SCALARS = {text.scalar_count(head)};

{text.finish(head)}
{text.finish(rest, "Rest")}"""


def is_cheap(epilogue: tuple[Epilogue, ...]) -> bool:
    """Whether all of it takes but a few instructions."""
    return all(_is_cheap(part.tree()) for part in epilogue)


def _is_cheap(node: Node) -> bool:
    """Whether an expression takes but a few instructions."""
    if not isinstance(node, Operation):
        return True
    return node.operator in _CHEAP and all(map(_is_cheap, node.operands))


def default(problem: Problem, known: list[Choice], multiprocessors: int) -> Choice:
    """Of candidates by preference the one taken untuned."""
    return known[0]


def products(dtype: str, precision: str) -> int:
    """Products of one multiplication: 3 for fp32 by 3xTF32."""
    return 3 if (dtype, precision) == ("float32", "fp32") else 1


def row(dtype: str) -> int:
    """Elements of a swizzled row."""
    return ROW_BYTES // DTYPES[dtype].bytes


def stages(kept: int, stage: int) -> tuple[int, int]:
    """As many stages as fit beside ``kept`` bytes, and the dynamic shared memory of all."""
    kept += SWIZZLE_BYTES
    count = min(MAX_STAGES, (targets.SHARED_BYTES[ARCH] - BARRIER_BYTES - kept) // stage)
    return count, kept + count * stage


def addresses(problem: Problem, x: tma.Extent, y: tma.Extent) -> bool:
    """Whether the copy engine reads the left operand, x, and writes the result, y."""
    return tma.takes(problem.dtype, problem.left.alignment, problem.out.alignment, x, y)

"""CUDA text that every kernel of attention begins with, and the part of its parameters that all of
them have: flags, lengths, captured tensors, numbers of the call. score.cuh of
kernel_sources/blocksparse/attention reads both.
"""

from __future__ import annotations

from collections.abc import Iterable

from kernlib.families.blocksparse.lowering.attention.problem import Attention, Collected, Score
from kernlib.lowering.config import Fact
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.parameters import Fields, Parameters

# The scalars of each launch, in order. On the device scale and dropout_p are float32, the rest
# int64; on the host a window without an end on one side has 2**30 there.
SCALARS = ("scale", "left", "right", "dropout_p", "seed")
LENGTHS = ("q_lengths", "kv_lengths")  # int32, one for each batch
WIDEST = 2**30  # rows and columns that an int holds twice
INCLUDES = ("common/math.cuh", "blocksparse/attention/captured.cuh")  # what the text reads

# What a captured tensor's elements are in a kernel; integers and bools have no gradient.
CAPTURED = {
    "float32": "float",
    "float16": "half_t",
    "bfloat16": "bfloat16_t",
    "int32": "int",
    "int64": "i64",
    "bool": "unsigned char",
}

_PLAIN = "using Score = PlainScore;\n"


def facts(dtype: str, score: Score) -> dict[str, Fact]:
    """Facts of every kernel of attention: storage, what of a call is in the code, and how many
    tensors score and mask read."""
    return {
        "InputT": DTYPES[dtype].cuda,
        "HAS_SCORE": score.has_score,
        "HAS_MASK": score.has_mask,
        "CAUSAL": score.causal,
        "WINDOW": score.window,
        "LENGTHS": score.lengths,
        "DROPOUT": score.dropout,
        "CAPTURED": len(score.captured),
    }


def text(score: Score) -> str:
    """``Score``."""
    return score.text or _PLAIN


def collected(tensors: tuple[tuple[int, bool], ...]) -> str:
    """What a launch collects, as collected.cuh is told of it: numbers of captured tensors, and
    whether their gradients are of pairs."""
    numbers = ", ".join(str(index) for index, _ in tensors) or "0"
    pairs = ", ".join(str(is_pair).lower() for _, is_pair in tensors) or "false"
    return f"""constexpr int COLLECTED_AT[] = {{{numbers}}};
constexpr bool IS_PAIR[] = {{{pairs}}};
"""


def pointers(score: Score) -> tuple[str, ...]:
    """Names of operands whose addresses lie behind a kernel's own."""
    lengths = LENGTHS if score.lengths else ()
    return (*lengths, *(f"captured{index}" for index in range(len(score.captured))))


def fields(score: Score, members: Iterable[str], collected: int = 0) -> Fields:
    """What a plan fixes: strides of captured tensors, a kernel's own members, and strides of what
    so many of these tensors collect."""
    count = len(score.captured)
    first = (f"CapturedStrides captured_strides[{count}]",) if count else ()
    last = (f"CapturedStrides collected_strides[{collected}]",) if collected else ()
    return Fields((*first, *members, *last))


def parameters(operands: int, fixed: Fields, score: Score, maps: int = 0) -> Parameters:
    """The parameter struct of a kernel with so many operands that no map tells of."""
    return Parameters(operands + len(pointers(score)), fixed.format, len(SCALARS), maps)


def strides(attention: Attention) -> dict[str, tuple[int, ...]]:
    """The values of the first members."""
    numbers = tuple(stride for view in attention.captured for stride in view)
    return {"captured_strides": numbers} if numbers else {}


def collected_strides(collected: Iterable[Collected]) -> dict[str, tuple[int, ...]]:
    """The values of the last members."""
    numbers = tuple(stride for each in collected for stride in each.strides)
    return {"collected_strides": numbers} if numbers else {}


def words(score: Score) -> list[str]:
    """What tells kernels apart in names: what of a call is in the code."""
    flags = {
        "causal": score.causal,
        "window": score.window,
        "lengths": score.lengths,
        "dropout": score.dropout,
        "score": score.has_score,
        "mask": score.has_mask,
    }
    return [word for word, is_set in flags.items() if is_set]

"""CUDA text that every kernel of attention begins with, and the part of its parameters that all of
them have: flags, lengths, captured tensors, numbers of the call. score.cuh of
kernel_sources/blocksparse/attention reads both.
"""

from __future__ import annotations

from kernlib.families.blocksparse.lowering.attention.problem import Attention, Score
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.parameters import Parameters

# The scalars of each launch, in order. On the device scale and dropout_p are float32, the rest
# int64; on the host a window without an end on one side has 2**30 there.
SCALARS = ("scale", "left", "right", "dropout_p", "seed")
LENGTHS = ("q_lengths", "kv_lengths")  # int32, one for each batch
VIEW = "4q"  # struct CapturedStrides
WIDEST = 2**30  # rows and columns that an int holds twice

# What a captured tensor's elements are in a kernel; integers and bools have no gradient.
CAPTURED = {
    "float32": "float",
    "float16": "half_t",
    "bfloat16": "bfloat16_t",
    "int32": "int",
    "int64": "i64",
    "bool": "unsigned char",
}

_PLAIN = "using Score = PlainScore;"


def preamble(dtype: str, score: Score) -> str:
    """InputT, flags, score.cuh, and ``Score``."""
    return f"""#include "common/types.cuh"
#include "common/math.cuh"

using InputT = {DTYPES[dtype].cuda};

constexpr bool HAS_SCORE = {flag(score.has_score)};
constexpr bool HAS_MASK = {flag(score.has_mask)};
constexpr bool CAUSAL = {flag(score.causal)};
constexpr bool WINDOW = {flag(score.window)};
constexpr bool LENGTHS = {flag(score.lengths)};
constexpr bool DROPOUT = {flag(score.dropout)};
constexpr int CAPTURED = {len(score.captured)};

#include "blocksparse/attention/score.cuh"

{score.text or _PLAIN}
"""


def collected(tensors: tuple[tuple[int, bool], ...]) -> str:
    """What a launch collects, as collected.cuh is told of it: numbers of captured tensors, and
    whether their gradients are of pairs."""
    numbers = ", ".join(str(index) for index, _ in tensors) or "0"
    pairs = ", ".join(flag(is_pair) for _, is_pair in tensors) or "false"
    return f"""constexpr int COLLECTED = {len(tensors)};
constexpr int COLLECTED_AT[] = {{{numbers}}};
constexpr bool IS_PAIR[] = {{{pairs}}};"""


def flag(value: bool) -> str:
    """A bool as C++ has it."""
    return str(value).lower()


def pointers(score: Score) -> tuple[str, ...]:
    """Names of operands whose addresses lie behind a kernel's own."""
    lengths = LENGTHS if score.lengths else ()
    return (*lengths, *(f"captured{index}" for index in range(len(score.captured))))


def parameters(own: int, fixed: str, score: Score, maps: int = 0) -> Parameters:
    """The parameter struct of a kernel with so many pointers of its own, whose struct of what is
    fixed, in a format of :mod:`struct` without its byte order, lies behind the views of captured
    tensors."""
    views = VIEW * len(score.captured)
    return Parameters(own + len(pointers(score)), f"<{views}{fixed}", len(SCALARS), maps)


def views(attention: Attention) -> list[int]:
    """What of the fixed values comes before a kernel's own."""
    return [stride for view in attention.captured for stride in view]


def words(score: Score) -> list[str]:
    """What tells kernels apart in names: what of a call is in the code."""
    found = {
        "causal": score.causal,
        "window": score.window,
        "lengths": score.lengths,
        "dropout": score.dropout,
        "score": score.has_score,
        "mask": score.has_mask,
    }
    return [word for word, there in found.items() if there]

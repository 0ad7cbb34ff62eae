"""The kernel of kernel_sources/blocksparse/attention/deltas/deltas.cuh: of each row the sum of
out * grad, less the gradient by its log-sum-exp, which every kernel of gradients reads; for
some of these the logarithm of its sum of exponentials too, and where a score changes logits what a
float leaves of that.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from kernlib.errors import UnsupportedError
from kernlib.families.blocksparse.lowering.attention.problem import AttentionGradient
from kernlib.families.blocksparse.lowering.attention.score_source import flag
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import WORKSPACE, Step

THREADS, CHUNK = 256, 8
MOST_CTAS = 2**31 - 1
LANES = (2, 4, 8, 16, 32)  # of a row
PADDED = 256  # rows of which a head's are a multiple beside sums: as many as any tile has
PARAMETERS = Parameters(8, "<7q4i")


def step(problem: AttentionGradient, has_sums: bool = False) -> Step:
    """The launch. Deltas lie in the workspace, and behind them, if ``has_sums``, logarithms of sums
    of exponentials, and behind these what floats leave of them. Raises UnsupportedError for more
    rows than a grid holds."""
    attention, lanes = problem.attention, lanes_of(problem.attention.values)
    rows = rows_of(problem, has_sums)
    total = attention.batch * attention.heads * rows
    count = ceil_div(total * lanes, THREADS)
    if count > MOST_CTAS:
        raise UnsupportedError(
            f"a gradient of attention has {total} rows, more than a launch takes: give parts of "
            "the batch"
        )
    numbers = [*attention.out[:3], *problem.grad[:3], total]
    numbers += [attention.heads, attention.queries, rows, attention.values // CHUNK]
    of_lse = "grad_lse" if problem.has_grad_lse else "lse"
    behind = nbytes(problem, has_sums) if has_sums else 0
    has_rests = has_sums and attention.score.has_score
    pointers = (("out", 0), ("grad", 0), (of_lse, 0), ("lse", 0), ("rest", 0))
    pointers += tuple((WORKSPACE, n * behind) for n in (0, 1, 2 * has_rests))
    found = spec(attention.dtype, lanes, problem.has_grad_lse, has_sums, has_rests)
    return Step(found, (max(1, count), 1), PARAMETERS.pack(*numbers), pointers)


def rows_of(problem: AttentionGradient, has_sums: bool = False) -> int:
    """Rows of a head as the workspace has them."""
    queries = problem.attention.queries
    return round_up(queries, PADDED) if has_sums else queries


def nbytes(problem: AttentionGradient, has_sums: bool = False) -> int:
    """Of the deltas, and as many of the sums."""
    attention = problem.attention
    return 4 * attention.batch * attention.heads * rows_of(problem, has_sums)


def lanes_of(values: int) -> int:
    """Lanes that read a row of so many values: a chunk each."""
    return next(lanes for lanes in LANES if lanes * CHUNK >= values)


def spec(
    dtype: str,
    lanes: int,
    has_grad_lse: bool,
    has_sums: bool = False,
    has_rests: bool = False,
) -> KernelSpec:
    """The KernelSpec for rows of so many lanes."""
    words = [dtype, f"{lanes} lanes", *["lse"] * has_grad_lse, *["sums"] * has_sums]
    words += ["rests"] * has_rests
    source = f"""#include "common/types.cuh"

using InputT = {DTYPES[dtype].cuda};

constexpr int LANES = {lanes};
constexpr bool HAS_GRAD_LSE = {flag(has_grad_lse)};
constexpr bool HAS_SUMS = {flag(has_sums)};
constexpr bool HAS_RESTS = {flag(has_rests)};
constexpr int PARAMETER_BYTES = {PARAMETERS.size};

#include "blocksparse/attention/deltas/deltas.cuh"
"""
    description = " ".join(["blocksparse attention deltas", *words])
    entry = "blocksparse_attention_deltas"
    return named(KernelSpec("blocksparse", source, entry, THREADS, description=description), *words)


def variants(
    dtypes: tuple[str, ...], has_sums: bool = False, has_rests: bool = False
) -> Iterator[KernelSpec]:
    """Every spec that :func:`step` may take."""
    for dtype, lanes, has_grad_lse in product(dtypes, LANES, (False, True)):
        yield spec(dtype, lanes, has_grad_lse, has_sums, has_rests)

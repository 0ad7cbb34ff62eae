"""The kernel of kernel_sources/blocksparse/attention/deltas/deltas.cuh: of each row the sum of
out * grad, less the gradient by its log-sum-exp, which every kernel of gradients reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from kernlib.errors import UnsupportedError
from kernlib.families.blocksparse.lowering.attention.problem import AttentionGradient
from kernlib.families.blocksparse.lowering.attention.score_source import flag
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import WORKSPACE, Step

THREADS, CHUNK = 256, 8
MOST_CTAS = 2**31 - 1
LANES = (2, 4, 8, 16, 32)  # of a row
PARAMETERS = Parameters(4, "<7q4i")


def step(problem: AttentionGradient, at: int = 0) -> Step:
    """The launch, whose sums (batch, heads, queries) lie in the workspace from byte ``at`` on.
    Raises UnsupportedError for more rows than a grid holds."""
    attention, lanes = problem.attention, lanes_of(problem.attention.values)
    total = attention.batch * attention.heads * attention.queries
    count = ceil_div(total * lanes, THREADS)
    if count > MOST_CTAS:
        raise UnsupportedError(
            f"a gradient of attention has {total} rows, more than a launch takes: give parts of "
            "the batch"
        )
    numbers = [*attention.out[:3], *problem.grad[:3], total]
    numbers += [attention.heads, attention.queries, attention.values // CHUNK, 0]
    of_lse = "grad_lse" if problem.has_grad_lse else "lse"
    pointers = (("out", 0), ("grad", 0), (of_lse, 0), (WORKSPACE, at))
    found = spec(attention.dtype, lanes, problem.has_grad_lse)
    return Step(found, (max(1, count), 1), PARAMETERS.pack(*numbers), pointers)


def nbytes(problem: AttentionGradient) -> int:
    """Of the sums."""
    attention = problem.attention
    return 4 * attention.batch * attention.heads * attention.queries


def lanes_of(values: int) -> int:
    """Lanes that read a row of so many values: a chunk each."""
    return next(lanes for lanes in LANES if lanes * CHUNK >= values)


def spec(dtype: str, lanes: int, has_grad_lse: bool) -> KernelSpec:
    """The KernelSpec for rows of so many lanes."""
    words = [dtype, f"{lanes} lanes", *["lse"] * has_grad_lse]
    source = f"""#include "common/types.cuh"

using InputT = {DTYPES[dtype].cuda};

constexpr int LANES = {lanes};
constexpr bool HAS_GRAD_LSE = {flag(has_grad_lse)};
constexpr int PARAMETER_BYTES = {PARAMETERS.size};

#include "blocksparse/attention/deltas/deltas.cuh"
"""
    description = " ".join(["blocksparse attention deltas", *words])
    entry = "blocksparse_attention_deltas"
    return named(KernelSpec("blocksparse", source, entry, THREADS, description=description), *words)


def variants(dtypes: tuple[str, ...]) -> Iterator[KernelSpec]:
    """Every spec that :func:`step` may take."""
    for dtype, lanes, has_grad_lse in product(dtypes, LANES, (False, True)):
        yield spec(dtype, lanes, has_grad_lse)

"""What a row's gradient by its weights is relative to: the sum of out * grad, less the gradient by
its log-sum-exp, which every kernel of gradients reads; for some of these the logarithm of its sum
of exponentials too, and where a score changes logits what a float leaves of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kernlib.errors import UnsupportedError
from kernlib.families.blocksparse.kernels.attention.base import (
    CHUNK,
    AttentionKernel,
    operand_strides,
)
from kernlib.families.blocksparse.lowering.attention.problem import AttentionGradient
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import WORKSPACE, Step

THREADS = 256
MOST_CTAS = 2**31 - 1
LANES = (2, 4, 8, 16, 32)  # of a row
PADDED = 256  # rows of which a head's are a multiple beside sums: as many as any tile has
FIXED = Fields((
    "Strides out_strides", "Strides grad_strides",
    "i64 total",  # padded rows of all heads of all batches
    "int heads", "int rows", "int padded", "int chunks",
))  # fmt: skip
PARAMETERS = Parameters(8, FIXED.format)


class Deltas(AttentionKernel):
    """A row is read by as many lanes as it has chunks."""

    role = "step"
    name = "deltas"
    title = "deltas"
    header = "blocksparse/attention/gradient/deltas/deltas.cuh"
    entry = "blocksparse_attention_deltas"
    reason = "sums of out * grad of each row, which gradients read"

    class Variant(NamedTuple):
        """Everything that code generation chooses."""

        dtype: str
        lanes: int
        has_grad_lse: bool
        has_sums: bool = False
        has_rests: bool = False

    def step(self, problem: AttentionGradient, has_sums: bool = False) -> Step:
        """The launch. Deltas lie in the workspace, and behind them, if ``has_sums``, logarithms of
        sums of exponentials, and behind these what floats leave of them. Raises UnsupportedError
        for more rows than a grid holds."""
        attention, lanes = problem.attention, lanes_of(problem.attention.values)
        rows = rows_of(problem, has_sums)
        total = attention.batch * attention.heads * rows
        count = ceil_div(total * lanes, THREADS)
        if count > MOST_CTAS:
            raise UnsupportedError(
                f"a gradient of attention has {total} rows, more than a launch takes: give parts "
                "of the batch"
            )
        fixed = FIXED.pack(
            **operand_strides(attention, "out"),
            **operand_strides(problem, "grad"),
            total=total,
            heads=attention.heads,
            rows=attention.queries,
            padded=rows,
            chunks=attention.values // CHUNK,
        )
        of_lse = "grad_lse" if problem.has_grad_lse else "lse"
        behind = nbytes(problem, has_sums) if has_sums else 0
        has_rests = has_sums and attention.score.has_score
        pointers = (("out", 0), ("grad", 0), (of_lse, 0), ("lse", 0), ("rest", 0))
        pointers += tuple((WORKSPACE, n * behind) for n in (0, 1, 2 * has_rests))
        variant = self.Variant(attention.dtype, lanes, problem.has_grad_lse, has_sums, has_rests)
        return Step(self.spec(None, variant), (max(1, count), 1), fixed, pointers)

    def axes(self, subject: None, scope: tuple[list[str], bool, bool]) -> Mapping[str, Iterable]:
        """Of dtypes, and whether there are sums and rests."""
        dtypes, has_sums, has_rests = scope
        return {
            "dtype": dtypes,
            "lanes": LANES,
            "has_grad_lse": (False, True),
            "has_sums": [has_sums],
            "has_rests": [has_rests],
        }

    def spec(self, subject: None, variant: Variant, arch: str = "") -> KernelSpec:
        """The specification of a variant."""
        dtype, lanes, has_grad_lse, has_sums, has_rests = variant
        words = [dtype, f"{lanes} lanes", *["lse"] * has_grad_lse, *["sums"] * has_sums]
        facts = {
            "InputT": DTYPES[dtype].cuda,
            "LANES": lanes,
            "HAS_GRAD_LSE": has_grad_lse,
            "HAS_SUMS": has_sums,
            "HAS_RESTS": has_rests,
            "PARAMETER_BYTES": PARAMETERS.size,
        }
        includes = ("blocksparse/attention/strides.cuh",)
        source = self.source(facts, FIXED.text(), includes=includes)
        return self.described(source, THREADS, 0, words + ["rests"] * has_rests)


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

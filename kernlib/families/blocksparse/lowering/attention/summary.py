"""The kernel of kernel_sources/blocksparse/attention/summary/summary.cuh: what the gradient is told
of each row of q. It leaves two numbers of each in the workspace, one kind behind the other."""

from __future__ import annotations

from kernlib.families.blocksparse.lowering.attention.problem import AttentionGradient
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import WORKSPACE, Step

FAMILY = "blocksparse"
THREADS = 256
ROWS = 256  # of which a head's are padded to a multiple: more than any tile has
CHUNK = 16  # bytes of a lane
PARAMETERS = Parameters(6, "<6q4i")


def padded(problem: AttentionGradient) -> int:
    """Rows of q as the workspace has them."""
    return round_up(problem.attention.queries, ROWS)


def part(problem: AttentionGradient) -> int:
    """Bytes of a number of each row."""
    return 4 * problem.attention.batch * problem.attention.heads * padded(problem)


def workspace(problem: AttentionGradient) -> int:
    """Bytes of both."""
    return 2 * part(problem)


def lanes(values: int) -> int:
    """Of a row of so many values of half types: a power of two, of 16 bytes at least."""
    return 1 << (values * 2 // CHUNK - 1).bit_length()


def step(problem: AttentionGradient) -> Step:
    """The launch, of rows of whole 16 bytes."""
    of, rows, wide = problem.attention, padded(problem), lanes(problem.attention.values)
    numbers = (*of.out[:3], *problem.grad[:3], of.heads, of.queries, rows, of.values * 2 // CHUNK)
    names = [(name, 0) for name in ("out", "grad", "lse", "grad_lse")]
    pointers = (*names, (WORKSPACE, 0), (WORKSPACE, part(problem)))
    grid = of.batch * of.heads * rows // (THREADS // wide)
    return Step(spec(of.dtype, wide), (grid, 1), PARAMETERS.pack(*numbers), pointers)


def spec(dtype: str, wide: int) -> KernelSpec:
    """The KernelSpec for so many lanes a row."""
    source = f"""#include "common/types.cuh"

using InputT = {DTYPES[dtype].cuda};
constexpr int LANES = {wide};
constexpr int PARAMETER_BYTES = {PARAMETERS.size};

#include "blocksparse/attention/summary/summary.cuh"
"""
    description = f"blocksparse attention summary {dtype} {wide} lanes"
    entry = "blocksparse_attention_summary"
    found = KernelSpec(FAMILY, source, entry, THREADS, description=description)
    return named(found, dtype, f"{wide} lanes")

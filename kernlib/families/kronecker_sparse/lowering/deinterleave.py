"""The kernel of kernel_sources/kronecker_sparse/deinterleave.cuh: an operand whose l lie side by
side to one that has each l by itself, its lines padded to whole 16 bytes."""

from __future__ import annotations

from kernlib.families.kronecker_sparse.lowering.problem import Layout, Problem
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import Step

THREADS = 256
CHUNK = 8  # elements of 16 bytes
PARAMETERS = Parameters(2, "<3q4i")


def blocks_of(problem: Problem) -> int:
    """CTAs for the right operand of a gradient."""
    return ceil_div(problem.depth * problem.blocks * ceil_div(problem.columns, CHUNK), THREADS)


def size(problem: Problem) -> int:
    """Bytes of the result."""
    line = round_up(problem.columns, CHUNK) * DTYPES[problem.dtype].bytes
    return problem.depth * problem.blocks * problem.lanes * line


def layout(problem: Problem) -> Layout:
    """How the result lies."""
    line = round_up(problem.columns, CHUNK)
    block = problem.lanes * line
    return Layout(block, line, 1, problem.blocks * block, 16, True)


def step(problem: Problem, name: str) -> Step:
    """The launch for the right operand of a gradient, which has this name, into the workspace."""
    right, columns = problem.right, problem.columns
    chunks = ceil_div(columns, CHUNK)
    strides = (right.depth, right.block)
    is_aligned = right.alignment % 16 == 0 and not any(stride % CHUNK for stride in strides)
    fixed = PARAMETERS.pack(
        *strides, problem.depth * problem.blocks * chunks, columns, chunks, problem.blocks,
        is_aligned and columns % CHUNK == 0,
    )  # fmt: skip
    pointers = ((name, 0), ("workspace", 0))
    return Step(spec(problem.dtype, problem.lanes), (blocks_of(problem), 1), fixed, pointers)


def spec(dtype: str, lanes: int) -> KernelSpec:
    """The KernelSpec for operands of ``dtype``, a half type, and so many l."""
    source = f"""#include "common/types.cuh"

using InputT = {DTYPES[dtype].cuda};

constexpr int LANES = {lanes};
constexpr int PARAMETER_BYTES = {PARAMETERS.size};

#include "kronecker_sparse/deinterleave.cuh"
"""
    description = f"kronecker_sparse deinterleave {dtype} {lanes}"
    entry = "kronecker_sparse_deinterleave"
    result = KernelSpec("kronecker_sparse", source, entry, THREADS, description=description)
    return named(result, dtype, str(lanes))

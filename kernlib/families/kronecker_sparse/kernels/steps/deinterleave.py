"""Operands whose l lie side by side with each l by itself, lines padded to whole 16 bytes."""

from __future__ import annotations

from typing import NamedTuple

from kernlib.families.kronecker_sparse.lowering.problem import Layout, Problem
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Kernel
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import Step

THREADS = 256
CHUNK = 8  # elements of 16 bytes
FIXED = Fields((
    "i64 row_stride", "i64 block_stride",  # of `from`
    "i64 total",  # threads: one for 8 k of all l
    "int columns", "int chunks", "int blocks",  # c, its chunks, a
    "int vectors",  # whether all 16 bytes of `from` are aligned and of one block
))  # fmt: skip


class Deinterleave(Kernel):
    """Takes half types and up to 8 l."""

    role = "step"
    name = "deinterleave"
    header = "kronecker_sparse/deinterleave.cuh"
    entry = "kronecker_sparse_deinterleave"
    reason = "an operand with each l by itself, for gradients of a weight"

    class Variant(NamedTuple):
        """Everything that code generation chooses."""

        dtype: str
        lanes: int

    def step(self, problem: Problem, name: str) -> Step:
        """The launch for the right operand of a gradient, which has this name, into the
        workspace."""
        right, columns = problem.right, problem.columns
        chunks = ceil_div(columns, CHUNK)
        strides = (right.depth, right.block)
        is_aligned = right.alignment % 16 == 0 and not any(stride % CHUNK for stride in strides)
        fixed = FIXED.pack(
            row_stride=right.depth,
            block_stride=right.block,
            total=problem.depth * problem.blocks * chunks,
            columns=columns,
            chunks=chunks,
            blocks=problem.blocks,
            vectors=is_aligned and columns % CHUNK == 0,
        )
        spec = self.spec((), self.Variant(problem.dtype, problem.lanes))
        return Step(spec, (blocks_of(problem), 1), fixed, ((name, 0), ("workspace", 0)))

    def spec(self, subject: tuple, variant: Variant, arch: str = "") -> KernelSpec:
        """The specification of a variant."""
        dtype, lanes = variant
        size = Parameters(2, FIXED.format).size
        facts = {"InputT": DTYPES[dtype].cuda, "LANES": lanes, "PARAMETER_BYTES": size}
        source = self.source(facts, FIXED.text())
        return self.named_spec(source, THREADS, 0, dtype, [str(lanes)])


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

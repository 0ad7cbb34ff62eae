"""Right operands of any strides for the portable kernel: depth side by side."""

from __future__ import annotations

from typing import NamedTuple

from kernlib.families.kronecker_sparse.lowering.problem import Layout, Problem, depth_first
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Kernel
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import Step

THREADS = 256
FIXED = Fields((
    "FactorStrides strides",
    "i64 depth",
    "u32 lanes", "u32 lines",
    "u32 chunks", "u32 total",  # in the depth of a line, and in all
    "u32 lines_first",  # whether lines lie closer together than depths
    "u32 unused",
))  # fmt: skip


class PortablePack(Kernel):
    """Packs a right operand, its lines padded to whole 16 bytes."""

    role = "step"
    name = "weights packed"
    header = "kronecker_sparse/portable/pack.cuh"
    entry = "kronecker_sparse_portable_pack"
    reason = (
        "the weight in an order whose depth lies side by side, where many tiles of `portable` "
        "read it"
    )

    class Variant(NamedTuple):
        """Everything that code generation chooses."""

        dtype: str

    def step(self, problem: Problem, layout: Layout) -> Step:
        """The launch that brings the right operand of a problem into a layout."""
        right, chunks = problem.right, layout.line * DTYPES[problem.dtype].bytes // 16
        total = problem.blocks * problem.lanes * problem.columns * chunks
        fixed = FIXED.pack(
            strides=right[:4],
            depth=problem.depth,
            lanes=problem.lanes,
            lines=problem.columns,
            chunks=chunks,
            total=total,
            lines_first=not depth_first(problem, right, problem.columns),
            unused=0,
        )
        pointers = (("right", 0), ("workspace", 0))
        spec = self.spec((), self.Variant(problem.dtype))
        return Step(spec, (ceil_div(total, THREADS), 1), fixed, pointers)

    def spec(self, subject: tuple, variant: Variant, arch: str = "") -> KernelSpec:
        """The specification of a variant, on any GPU."""
        size = Parameters(2, FIXED.format).size
        facts = {"InputT": DTYPES[variant.dtype].cuda, "PARAMETER_BYTES": size}
        source = self.source(facts, FIXED.text(), includes=("kronecker_sparse/strides.cuh",))
        return self.named_spec(source, THREADS, 0, variant.dtype, [])

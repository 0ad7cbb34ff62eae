"""The kernel pack.cuh of kernel_sources/sparse: many vectors of x as the right operand of wgmma,
which a product behind it brings to shared memory by bulk copies.

For each block of 64 features there are ``padded`` rows of 128 bytes, one a vector, swizzled by 128
bytes: unit u of 16 bytes of vector n lies at ``(block * padded + n) * 128 + (u ^ n % 8) * 16``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.sparse.kernels.base import SparseKernel
from kernlib.families.sparse.lowering.problem import OVERLAPPING, Problem, Scope
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.parameters import Fields
from kernlib.lowering.steps import WORKSPACE, Step

THREADS = 256
DEPTH, ROW_BYTES = 64, 128  # features of a block, and bytes that they take of one vector
ROWS = 64  # vectors of a CTA
FEATURES, FRAGMENTS = 0, 1  # orders: features in their own, or in that of bitmap/fragments.cuh


class Pack(SparseKernel):
    """Lays out x of 2-byte elements, a CTA some vectors of a block."""

    role = "step"
    name = "pack of x"
    header = "sparse/pack.cuh"
    entry = "sparse_pack"
    reason = "vectors of x as wgmma reads them"
    operands = ("x", WORKSPACE)
    fixed = Fields((
        "i64 x_stride",
        "u32 cols", "u32 columns",
        "u32 padded",  # vectors of a block
        "u32 tiles",   # CTAs of a block
    ))  # fmt: skip
    finishes = False
    includes = ()

    class Variant(NamedTuple):
        """Everything that code generation chooses: one kernel serves every 2-byte dtype."""

        order: int

    def step(
        self, problem: Problem, arch: str, padded: int, order: int = FEATURES, begin: int = 0
    ) -> Step:
        """The launch that reads x and writes :func:`nbytes` of the workspace from byte ``begin``
        on, a multiple of 16. ``padded``, a multiple of 8, is the vectors with those that fill up
        tiles."""
        tiles, variant = ceil_div(padded, ROWS), self.Variant(order)
        ctas = tiles * blocks(problem), 1
        step = self.step_of((), problem, variant, arch, ctas, padded=padded, tiles=tiles)
        return step.placed({WORKSPACE: (WORKSPACE, begin)})

    def axes(self, epilogue: tuple[Epilogue, ...], scope: Scope) -> Mapping[str, Iterable]:
        """The order that products take, where there is a 2-byte dtype."""
        return {"order": (FRAGMENTS,) if scope.halves.dtypes else ()}

    def spec(self, epilogue: tuple[Epilogue, ...], variant: Variant, arch: str) -> KernelSpec:
        """The specification of an order."""
        facts = {"ORDER": variant.order, "OVERLAPS": arch in OVERLAPPING}
        words = ["fragments" if variant.order == FRAGMENTS else "features"]
        return self.spec_of((), facts, THREADS, 0, "16bit", words)


def nbytes(problem: Problem, padded: int) -> int:
    """Bytes of the workspace that hold x."""
    return blocks(problem) * padded * ROW_BYTES


def blocks(problem: Problem) -> int:
    """Blocks of 64 features."""
    return ceil_div(problem.cols, DEPTH)

"""Products whose square blocks a kernel of Hopper stores, which threads of the host run; and such
problems as lowering sees them."""

from __future__ import annotations

import math

import torch

from kernlib.families.blocksparse.layout import Layout
from kernlib.families.blocksparse.lowering import choose, hopper
from kernlib.families.blocksparse.lowering.problem import Blocks, Dense, Sdd, Values
from kernlib.lowering.kernel import Kernel
from kernlib.lowering.steps import Lowered
from tests.families.blocksparse import by_kernel
from tests.families.blocksparse.emulated import Case, guarded, layout_of
from tests.families.blocksparse.products import SampledOperands

ARCH, COUNT = hopper.ARCH, 3  # multiprocessors, so that one has several units of work
HALVES = ("float16", "bfloat16")


class Product(SampledOperands):
    """Operands of a case, and its result, whose blocks lie side by side."""

    def __init__(self, case: Case, a: str = "rows", b: str = "rows", layout: Layout | None = None):
        super().__init__(case, a, b, layout=layout_of(case, room=37) if layout is None else layout)
        values = self.out.shape
        whole = guarded((case.batch, 1, math.prod(values[1:])), "rows", case.dtype)
        self.out = whole.fill_(math.nan).view(values)

    def run(
        self, kernel: Kernel, emulator, epilogue=(), scalars=(), count=COUNT, **beside
    ) -> torch.Tensor:
        """The result by a kernel."""

        def lower(problem: Sdd) -> Lowered:
            return by_kernel.lower(kernel, epilogue, problem, ARCH, count)

        return self.launched(emulator, lower, scalars, **beside)


def taken(given: Sdd, count: int = 132) -> str:
    """The kind of kernel that is chosen."""
    return choose.default(given, count, ARCH)["kind"]


def problem(
    n: int = 4096, block: int = 16, density: float = 0.5, depth: int = 64, heads: int = 1, **changes
) -> Sdd:
    """Of n x n matrices."""
    grid, step = n // block, n * depth if heads > 1 else 0
    capacity = round(density * grid**2) * heads
    values = Values(capacity * block**2, block**2, block, 1)
    a, b = Dense(0, step, depth, 1), Dense(0, step, n, 1)
    blocks = Blocks(block, block, grid, grid, heads, capacity)
    return Sdd("float16", "fp32", blocks, 1, depth, a, b, values)._replace(**changes)

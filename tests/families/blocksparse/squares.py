"""Products whose square blocks a kernel of Hopper stores, which threads of the host run; and such
problems as lowering sees them."""

from __future__ import annotations

import math
from types import ModuleType

import torch

from kernlib.families.blocksparse.layout import NAMES, Layout
from kernlib.families.blocksparse.lowering import hopper
from kernlib.families.blocksparse.lowering.problem import Blocks, Dense, Sdd, Values
from tests.families.blocksparse.emulated import (
    Case,
    guarded,
    is_intact,
    layout_of,
    sdd_problem,
    strided,
)
from tests.support.emulation import maps
from tests.support.kernels import only

ARCH, COUNT = hopper.ARCH, 3  # multiprocessors, so that one has several units of work
HALVES = ("float16", "bfloat16")


class Product:
    """Operands of a case, whose columns are its depth, and its result by the formula in float64."""

    def __init__(self, case: Case, a: str = "rows", b: str = "rows", layout: Layout | None = None):
        self.case, self.layout = case, layout_of(case, room=37) if layout is None else layout
        rows, cols = self.layout.shape
        shape = case.batch, case.heads
        self.a = strided((*shape, rows, case.columns), a, case.dtype)
        self.b = strided((*shape, case.columns, cols), b, case.dtype)
        values = (case.batch, self.layout.capacity, *case.block)
        # Blocks lie side by side, and nothing else may be written.
        self.guarded = guarded((case.batch, 1, math.prod(values[1:])), "rows", case.dtype)
        self.guarded.fill_(math.nan)
        self.out = self.guarded.view(values)

    def wanted(self) -> torch.Tensor:
        return self.layout.to_blocks(self.a.double() @ self.b.double())

    def problem(self, beside=()) -> Sdd:
        return sdd_problem(self.case, self.layout, self.a, self.b, self.out, beside)

    def run(
        self, kind: ModuleType, emulator, epilogue=(), scalars=(), count=COUNT, **beside
    ) -> torch.Tensor:
        """The result by a kind of kernels."""
        problem = self.problem(beside.values())
        assert kind.takes(problem, ARCH)
        step = only(kind.lower(epilogue, problem, ARCH, count))
        known = dict(zip(NAMES, self.layout.tensors, strict=True))
        known |= {"a": self.a, "b": self.b, "out": self.out, **beside}
        maps.launch(emulator, step, [known[n].data_ptr() + at for n, at in step.pointers], scalars)
        assert is_intact(self.guarded) and not self.out[:, self.layout.nnz :].any()
        return self.out


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

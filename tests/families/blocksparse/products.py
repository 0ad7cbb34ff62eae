"""Operands of block-sparse products that kernels compute on the host, and these products by their
formulas in float64."""

from __future__ import annotations

import math

import torch

from kernlib.families.blocksparse.layout import NAMES, Layout
from kernlib.families.blocksparse.lowering.problem import Sdd
from kernlib.lowering.steps import WORKSPACE, Lowered
from tests.families.blocksparse.emulated import (
    Case,
    guarded,
    is_intact,
    layout_of,
    sdd_problem,
    spmm_problem,
    strided,
    whole_matrix,
)
from tests.support.emulation import maps
from tests.support.emulation.emulator import Emulator


def launch(emulator: Emulator, lowered: Lowered, layout: Layout, scalars=(), **operands) -> None:
    """The launches, as a plan makes them: ``operands`` by the names that steps have for them, None
    for those that nobody needs. The workspace begins as NaN."""
    known = {**dict(zip(NAMES, layout.tensors, strict=True)), **operands}
    known[WORKSPACE] = torch.full((lowered.workspace,), 255, dtype=torch.uint8)
    for step in lowered.steps:
        given = [(known[name], at) for name, at in step.pointers]
        addresses = [0 if t is None else t.data_ptr() + at for t, at in given]
        maps.launch(emulator, step, addresses, scalars)


class Operands:
    """Those of a case, and their product by the formula in float64. Slots without a block hold
    NaN."""

    def __init__(self, case: Case, order="rows", out_order="rows", layout: Layout | None = None):
        self.case, self.layout = case, layout_of(case, room=3) if layout is None else layout
        values = torch.randn(case.batch, self.layout.capacity, *case.block)
        values[:, self.layout.nnz :] = math.nan
        self.values = values.to(case.dtype)
        lead, (lines, depth) = (case.batch, case.heads), self.matrix.shape[-2:]
        self.dense = strided((*lead, depth, case.columns), order, case.dtype)
        self.out = guarded((*lead, lines, case.columns), out_order, case.dtype)

    @property
    def matrix(self) -> torch.Tensor:
        """(batch, heads, lines, depth) in float64."""
        whole = whole_matrix(self.layout, self.values)
        return whole.mT if self.case.transposed else whole

    def wanted(self) -> torch.Tensor:
        return self.matrix @ self.dense.double()

    def launched(self, emulator, lower, scalars=(), **beside) -> torch.Tensor:
        """The result of what ``lower`` makes of the problem, with vectors and summands beside."""
        summands = [t for name, t in beside.items() if name.startswith("summand")]
        problem = spmm_problem(self.case, self.layout, self.values, self.dense, self.out, summands)
        own = {"values": self.values, "dense": self.dense, "out": self.out}
        launch(emulator, lower(problem), self.layout, scalars, **own, **beside)
        assert is_intact(self.out)
        return self.out


class SampledOperands:
    """Those of a case, whose columns are its depth, and the stored blocks of their product by the
    formula in float64."""

    def __init__(self, case: Case, a="rows", b="rows", out="rows", layout: Layout | None = None):
        self.case, self.layout = case, layout_of(case, room=3) if layout is None else layout
        lead, (rows, cols) = (case.batch, case.heads), self.layout.shape
        self.a = strided((*lead, rows, case.columns), a, case.dtype)
        self.b = strided((*lead, case.columns, cols), b, case.dtype)
        self.out = guarded((case.batch, self.layout.capacity, *case.block), out, case.dtype)

    def wanted(self) -> torch.Tensor:
        return self.layout.to_blocks(self.a.double() @ self.b.double())

    def problem(self, summands=()) -> Sdd:
        return sdd_problem(self.case, self.layout, self.a, self.b, self.out, summands)

    def launched(self, emulator, lower, scalars=(), **beside) -> torch.Tensor:
        """The result of what ``lower`` makes of the problem, with summands beside."""
        own = {"a": self.a, "b": self.b, "out": self.out}
        lowered = lower(self.problem(beside.values()))
        launch(emulator, lowered, self.layout, scalars, **own, **beside)
        assert is_intact(self.out) and not self.out[:, self.layout.nnz :].any()
        return self.out

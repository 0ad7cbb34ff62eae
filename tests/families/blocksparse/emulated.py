"""Launches of lowered block-sparse products, whose kernels threads of the host run, and these
products by their formulas in float64."""

from __future__ import annotations

import ctypes
import math
import struct
from typing import NamedTuple

import torch

from kernlib.families.blocksparse.layout import NAMES, Layout
from kernlib.families.blocksparse.lowering.problem import Blocks, Dense, Sdd, Spmm, Values
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.steps import NUMBER, WORKSPACE, Lowered
from tests.support.emulation.emulator import Emulator

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "tf32": torch.float32,
}
GATES = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 4e-7, "tf32": 1e-3}
GUARD = 3.25  # what elements hold that nobody may write


class Case(NamedTuple):
    """A product: numbers ("tf32" too), rows and columns of a block and of the grid, density, heads,
    batch, columns (of an sdd: its depth), and whether the matrix is transposed."""

    numbers: str
    block: tuple[int, int]
    grid: tuple[int, int]
    density: float
    heads: int = 1
    batch: int = 1
    columns: int = 16
    transposed: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.numbers]

    @property
    def kind(self) -> tuple[str, str]:
        """As problems have it."""
        dtype = str(self.dtype).removeprefix("torch.")
        return dtype, "tf32" if self.numbers == "tf32" else "fp32"


def layout_of(case: Case, room: int = 0) -> Layout:
    """A random layout with ``room`` slots more than it stores."""
    mask = torch.rand(case.heads, *case.grid) < case.density
    if case.density < 1 and case.grid[0] > 1:
        mask[:, case.grid[0] // 2] = False  # a row without blocks
    return Layout(mask, case.block, int(mask.sum()) + room)


def blocks_of(layout: Layout) -> Blocks:
    return Blocks(*layout.block, *layout.grid, layout.heads or 1, layout.capacity)


def strided(shape: tuple[int, ...], order: str, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers (batch, heads, lines, columns) of which columns ("rows") or lines ("columns")
    lie side by side, or neither ("apart")."""
    if order == "columns":
        return torch.randn(*shape[:-2], shape[-1], shape[-2]).mT.to(dtype)
    if order == "apart":
        wide = torch.randn(*shape[:-1], 3 * shape[-1] + 1).to(dtype)
        return wide[..., 1::3][..., : shape[-1]]
    return torch.randn(shape).to(dtype)


def guarded(shape: tuple[int, ...], order: str, dtype: torch.dtype) -> torch.Tensor:
    """The same of a result, not yet written, amid what nobody may write."""
    turned = order == "columns"
    ends = shape[:-3:-1] if turned else shape[-2:]
    step = 2 if order == "apart" else 1
    chunk = 16 // dtype.itemsize
    wide = (ends[-1] * step + chunk) // chunk * chunk + chunk
    whole = torch.full((*shape[:-2], ends[0], wide), GUARD, dtype=dtype)
    part = whole[..., chunk : chunk + ends[-1] * step : step]
    return part.mT if turned else part


def is_intact(out: torch.Tensor) -> bool:
    """Whether nothing was written outside of a result that :func:`guarded` made."""
    whole = out._base.clone()
    whole.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(GUARD)
    return bool((whole == GUARD).all())


def dense_of(t: torch.Tensor) -> Dense:
    """A tensor (batch, heads, lines, columns) as lowering sees it."""
    strides = [
        s if n > 1 or i > 1 else 0 for i, (s, n) in enumerate(zip(t.stride(), t.shape, strict=True))
    ]
    return Dense(*strides, t.data_ptr() % 16 or 16)


def values_of(t: torch.Tensor) -> Values:
    """Values (batch, capacity, rows, columns) as lowering sees them."""
    return Values(*t.stride(), t.data_ptr() % 16 or 16)


def whole_matrix(layout: Layout, values: torch.Tensor) -> torch.Tensor:
    """(batch, heads, R, C) in float64."""
    return layout.to_dense(values.double())


def spmm_problem(case: Case, layout: Layout, values, dense, out, summands=()) -> Spmm:
    return Spmm(
        *case.kind,
        blocks_of(layout),
        out.shape[0],
        out.shape[-1],
        case.transposed,
        values_of(values),
        dense_of(dense),
        dense_of(out),
        tuple(map(dense_of, summands)),
    )


def sdd_problem(case: Case, layout: Layout, a, b, out, summands=()) -> Sdd:
    return Sdd(
        *case.kind,
        blocks_of(layout),
        out.shape[0],
        a.shape[-1],
        dense_of(a),
        dense_of(b),
        values_of(out),
        tuple(map(values_of, summands)),
    )


def launch(emulator: Emulator, lowered: Lowered, layout: Layout, scalars=(), **operands) -> None:
    """The launches, as a plan makes them: ``operands`` by the names that steps have for them. A
    workspace that is not among them begins as NaN."""
    known = {**dict(zip(NAMES, layout.tensors, strict=True)), **operands}
    if lowered.workspace and WORKSPACE not in known:
        known[WORKSPACE] = torch.full((ceil_div(lowered.workspace, 4),), math.nan)
    for step in lowered.steps:
        addresses = [known[name].data_ptr() + at for name, at in step.pointers]
        block = struct.pack(f"@{len(addresses)}P", *addresses)
        numbers = [part for value in scalars[: step.scalars] for part in (value, 0)]
        block += struct.pack("<" + NUMBER * step.scalars, *numbers) + step.fixed
        memory = ctypes.create_string_buffer(block, len(block))
        emulator.launch(step.spec, step.grid, ctypes.addressof(memory))


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, in norm; NaN where something is not a number."""
    size = wanted.norm().item()
    off = (found.double() - wanted).norm().item()
    return off / size if size else (math.inf if off else off)

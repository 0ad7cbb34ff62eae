"""The bitmap formats of fewer bits on GPUs: kernels that pack codes, which torch has made, and that
lay matrices out. Sizes are launch arguments."""

from __future__ import annotations

import torch

from kernlib.families.sparse.formats import quantised_cpu as cpu
from kernlib.families.sparse.formats.bitmap_cpu import COLUMNS, chunks_of
from kernlib.families.sparse.formats.encoding import bits
from kernlib.families.sparse.lowering.value_codes import VALUES, ValueCode
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.dtypes import BITS, DTYPES
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import Lowered, Step
from kernlib.runtime.dtypes import KERNEL_TYPES
from kernlib.runtime.sequence import StepsCache

FAMILY = "sparse"
OPERANDS = {
    "pack": ("values", "codes", "scales", "offsets", "data"),
    "unpack": ("data", "offsets", "out", "data_end"),
}
FIXED = {"pack": "<", "unpack": "<2q2i"}
PARAMETERS = {kind: Parameters(len(OPERANDS[kind]), FIXED[kind]) for kind in OPERANDS}
THREADS = 128

_plans = StepsCache()


def fill(dense: torch.Tensor, offsets: torch.Tensor, data: torch.Tensor, code: ValueCode) -> None:
    """Write the chunks of a matrix, at ``offsets``, into ``data``."""
    for block, first in cpu.blocks(dense):
        codes, scales = cpu.coded(block, code, dense.dtype)
        tensors = bits(block), codes, scales.contiguous(), offsets[first:], data
        _launch("pack", (code.values, dense.element_size(), len(block)), *tensors)


def decode(
    data: torch.Tensor,
    offsets: torch.Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype,
    code: ValueCode,
) -> torch.Tensor:
    """The dense matrix of chunks."""
    out = torch.empty(shape, dtype=dtype, device=data.device)
    if out.numel():
        write(data, offsets, out, code)
    return out


def write(data: torch.Tensor, offsets: torch.Tensor, out: torch.Tensor, code: ValueCode) -> None:
    """Lay chunks out in a contiguous matrix."""
    how = code.values, KERNEL_TYPES[out.dtype], *out.shape
    _launch("unpack", how, data, offsets, out)


def specs(code: ValueCode) -> list[KernelSpec]:
    """The kernels of a code."""
    packing = [spec("pack", code, itemsize) for itemsize in BITS]
    return [*packing, *(spec("unpack", code, dtype) for dtype in KERNEL_TYPES.values())]


def spec(kind: str, code: ValueCode, of: int | str) -> KernelSpec:
    """The KernelSpec of "pack" for values of so many bytes, or of "unpack" for a dtype."""
    values = f"BitsT = {BITS[of]}" if kind == "pack" else f"OutputT = {DTYPES[of].cuda}"
    source = f"""#include "common/types.cuh"

using {values};

#define CODES {code.values.upper()}
constexpr int PARAMETER_BYTES = {PARAMETERS[kind].size};

#include "sparse/quantised/{kind}.cuh"
"""
    word = f"{8 * of}bit" if kind == "pack" else of
    entry, words = f"sparse_bitmap_{kind}", f"sparse bitmap {kind} {code.values} {word}"
    kernel = KernelSpec(FAMILY, source, entry, THREADS, description=words)
    return named(kernel, code.values, word)


def step(kind: str, how: tuple) -> Step:
    """A launch: of "pack" for a code, an itemsize and chunks, of "unpack" for a code, a dtype, rows
    and columns."""
    values, of, *sizes = how
    pointers = tuple((name, 0) for name in OPERANDS[kind])
    kernel = spec(kind, VALUES[values], of)
    if kind == "pack":
        return Step(kernel, (sizes[0], 1), PARAMETERS[kind].pack(), pointers)
    fixed = PARAMETERS[kind].pack(*sizes, ceil_div(sizes[1], COLUMNS), 0)
    return Step(kernel, (chunks_of(sizes), 1), fixed, pointers)


def _launch(kind: str, how: tuple, *tensors: torch.Tensor) -> None:
    def lower() -> Lowered:
        return Lowered((step(kind, how),))

    plan = _plans.of((kind, how), OPERANDS[kind], tensors[0].device, lower)
    addresses = [tensor.data_ptr() for tensor in tensors]
    if kind == "unpack":
        addresses.append(addresses[0] + tensors[0].numel())
    plan.launch(addresses)

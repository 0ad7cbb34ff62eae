"""MACKO's format on GPUs: kernels that count, make and undo entries, of kernel_sources/sparse/.

They know values by their bits. Sizes are launch arguments.
"""

from __future__ import annotations

import torch

from kernlib.families.sparse.formats.encoding import INFINITY, MAGNITUDE, bits, counted
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import Lowered, Step
from kernlib.runtime.sequence import StepsCache

FAMILY = "sparse"
OPERANDS = {
    "count": ("dense", "counts"),
    "encode": ("dense", "row_ptr", "values", "deltas"),
    "decode": ("values", "deltas", "row_ptr", "out", "values_end"),
}
FIXED = {"count": "<3qQ", "encode": "<3qQ", "decode": "<2q"}
PARAMETERS = {kind: Parameters(len(OPERANDS[kind]), FIXED[kind]) for kind in OPERANDS}
THREADS = 128  # four rows
ROWS = THREADS // 32

_plans = StepsCache()


def row_counts(dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries of each row of a readable matrix, int32, and how many are no pads, in all:
    :func:`counted`."""
    counts = torch.zeros((2, dense.shape[0]), dtype=torch.int32, device=dense.device)
    if dense.numel():
        _launch("count", dense.dtype, False, reading(dense), bits(dense), counts)
    counts = counted(counts)
    return counts[0], counts[1].sum(dtype=torch.int64)


def fill(
    dense: torch.Tensor, row_ptr: torch.Tensor, entries: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``values`` and ``deltas`` of a readable matrix with these rows."""
    values = torch.zeros(entries, dtype=dense.dtype, device=dense.device)
    deltas = torch.zeros(entries // 2, dtype=torch.uint8, device=dense.device)
    if entries:
        wide = row_ptr.dtype == torch.int64
        operands = bits(dense), row_ptr, values, deltas
        _launch("encode", dense.dtype, wide, reading(dense), *operands)
    return values, deltas


def decode(
    values: torch.Tensor, deltas: torch.Tensor, row_ptr: torch.Tensor, shape: tuple[int, int]
) -> torch.Tensor:
    """The dense matrix of entries."""
    out = torch.zeros(shape, dtype=values.dtype, device=values.device)
    if out.numel() and values.numel():
        wide = row_ptr.dtype == torch.int64
        _launch("decode", values.dtype, wide, shape, values, deltas, row_ptr, out)
    return out


def specs(dtype: torch.dtype, wide: bool = False) -> list[KernelSpec]:
    """The kernels for values of a dtype."""
    return [spec(kind, dtype, wide and kind != "count") for kind in OPERANDS]


def spec(kind: str, dtype: torch.dtype, wide: bool) -> KernelSpec:
    """The KernelSpec of "count", "encode" or "decode", row_ptr ``wide`` for int64."""
    name = str(dtype).removeprefix("torch.")
    source = f"""#include "common/types.cuh"

using BitsT = {"u32" if dtype == torch.float32 else "u16"};
using RowT = {"i64" if wide else "int"};

constexpr BitsT MAGNITUDE = {MAGNITUDE[dtype]:#x}, INFINITE = {INFINITY[dtype]:#x};
constexpr int PARAMETER_BYTES = {PARAMETERS[kind].size};
#define COUNT {int(kind == "count")}

#include "sparse/macko/{"decode" if kind == "decode" else "encode"}.cuh"
"""
    words = " ".join(["sparse macko", kind, name, *["wide"] * wide])
    made = KernelSpec(FAMILY, source, f"sparse_macko_{kind}", THREADS, description=words)
    return named(made, name, *["wide"] * wide)


def reading(dense: torch.Tensor) -> tuple:
    """Rows, columns, the stride of rows, and whether runs of eight columns take 16-byte loads."""
    apart = dense.stride(0) * dense.element_size()
    whole = dense.data_ptr() % 16 == 0 and (apart % 16 == 0 or dense.shape[0] == 1)
    return *dense.shape, dense.stride(0), int(whole)


def _launch(kind: str, dtype: torch.dtype, wide: bool, how: tuple, *tensors: torch.Tensor) -> None:
    def lower() -> Lowered:
        pointers = tuple((name, 0) for name in OPERANDS[kind])
        grid = ceil_div(how[0], ROWS), 1
        return Lowered(
            (Step(spec(kind, dtype, wide), grid, PARAMETERS[kind].pack(*how), pointers),)
        )

    found = _plans.of((kind, dtype, wide, how), OPERANDS[kind], tensors[0].device, lower)
    addresses = [tensor.data_ptr() for tensor in tensors]
    if kind == "decode":
        addresses.append(addresses[0] + tensors[0].numel() * tensors[0].element_size())
    found.launch(addresses)

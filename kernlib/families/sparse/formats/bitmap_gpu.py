"""The bitmap format on GPUs: kernels that count, make and undo chunks, of kernel_sources/sparse/.

Of numbers they know only that the highest bit is the sign: values are integers of 16 or 32 bits.
Sizes are launch arguments.
"""

from __future__ import annotations

import torch

from kernlib.families.sparse.formats.bitmap_cpu import COLUMNS, chunks_of
from kernlib.families.sparse.formats.encoding import bits, readable
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.dtypes import BITS
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import Lowered, Step
from kernlib.runtime.sequence import StepsCache

FAMILY = "sparse"
ITEMSIZES = (2, 4)
OPERANDS = {
    "count": ("dense", "counts"),
    "encode": ("dense", "offsets", "data"),
    "decode": ("data", "offsets", "out", "data_end"),
}
FIXED = {"count": "<3qI3i", "encode": "<3q2i", "decode": "<2q2i"}
PARAMETERS = {kind: Parameters(len(OPERANDS[kind]), FIXED[kind]) for kind in OPERANDS}
THREADS = {"count": 256, "encode": 128, "decode": 128}
COUNTED = 8  # chunks that a CTA counts

_plans = StepsCache()


def chunk_counts(dense: torch.Tensor) -> torch.Tensor:
    """Entries of each chunk, int32."""
    dense = readable(dense)
    counts = torch.empty(chunks_of(dense.shape), dtype=torch.int32, device=dense.device)
    if counts.numel():
        _launch("count", reading(dense), bits(dense), counts)
    return counts


def fill(dense: torch.Tensor, offsets: torch.Tensor, data: torch.Tensor) -> None:
    """Write the chunks of a :func:`readable` matrix, at ``offsets``, into ``data``."""
    if data.numel():
        _launch("encode", reading(dense), bits(dense), offsets, data)


def decode(
    data: torch.Tensor, offsets: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """The dense matrix of chunks."""
    out = torch.empty(shape, dtype=dtype, device=data.device)
    if out.numel():
        how = (*shape, dtype.itemsize, shape[1] * dtype.itemsize % 16 == 0)
        _launch("decode", how, data, offsets, out)
    return out


def specs(itemsize: int) -> list[KernelSpec]:
    """The kernels for values of so many bytes."""
    return [spec(kind, itemsize) for kind in OPERANDS]


def spec(kind: str, itemsize: int) -> KernelSpec:
    """The KernelSpec of "count", "encode" or "decode"."""
    source = f"""#include "common/types.cuh"

using BitsT = {BITS[itemsize]};

constexpr int PARAMETER_BYTES = {PARAMETERS[kind].size};

#include "sparse/bitmap/{kind}.cuh"
"""
    entry, words = f"sparse_bitmap_{kind}", f"sparse bitmap {kind} {8 * itemsize} bits"
    made = KernelSpec(FAMILY, source, entry, THREADS[kind], description=words)
    return named(made, f"{8 * itemsize}bit")


def step(kind: str, how: tuple) -> Step:
    """A launch for what :func:`reading` says of a matrix, or for rows, columns, itemsize and
    whether rows take 16-byte accesses of one to write."""
    *sizes, itemsize, vectors = how
    chunks, across = chunks_of(sizes), ceil_div(sizes[1], COLUMNS)
    numbers = (chunks, across, vectors, 0) if kind == "count" else (across, vectors)
    fixed = PARAMETERS[kind].pack(*sizes, *numbers)
    blocks = ceil_div(chunks, COUNTED) if kind == "count" else chunks
    pointers = tuple((name, 0) for name in OPERANDS[kind])
    return Step(spec(kind, itemsize), (blocks, 1), fixed, pointers)


def reading(dense: torch.Tensor) -> tuple:
    """Rows, columns, the stride of rows, the itemsize, and whether rows take 16-byte loads."""
    itemsize, apart = dense.element_size(), dense.stride(0)
    whole = dense.data_ptr() % 16 == 0 and (apart * itemsize % 16 == 0 or dense.shape[0] == 1)
    return *dense.shape, apart, itemsize, whole


def _launch(kind: str, how: tuple, *tensors: torch.Tensor) -> None:
    def lower() -> Lowered:
        return Lowered((step(kind, how),))

    found = _plans.of((kind, how), OPERANDS[kind], tensors[0].device, lower)
    addresses = [tensor.data_ptr() for tensor in tensors]
    if kind == "decode":
        addresses.append(addresses[0] + tensors[0].numel())
    found.launch(addresses)

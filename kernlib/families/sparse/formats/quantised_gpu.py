"""The bitmap formats of fewer bits on GPUs: kernels that pack codes, which torch has made, and that
lay matrices out. Sizes are launch arguments."""

from __future__ import annotations

import torch

from kernlib.families.sparse.formats import quantised_cpu as cpu
from kernlib.families.sparse.formats.encoding import bits
from kernlib.families.sparse.kernels.codecs.quantised import Pack, Unpack
from kernlib.families.sparse.launching import launch
from kernlib.families.sparse.lowering.quantised import ValueCode
from kernlib.runtime.dtypes import KERNEL_TYPES


def fill(dense: torch.Tensor, offsets: torch.Tensor, data: torch.Tensor, code: ValueCode) -> None:
    """Write the chunks of a matrix, at ``offsets``, into ``data``."""
    for block, first in cpu.blocks(dense):
        codes, scales = cpu.coded(block, code, dense.dtype)
        tensors = bits(block), codes, scales.contiguous(), offsets[first:], data
        launch(Pack(), (code.values, dense.element_size(), len(block)), *tensors)


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
    launch(Unpack(), (code.values, KERNEL_TYPES[out.dtype], *out.shape), data, offsets, out)

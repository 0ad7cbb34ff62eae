"""MACKO's format on GPUs, by the kernels that count, make and undo entries. Sizes are launch
arguments."""

from __future__ import annotations

import torch

from kernlib.families.sparse.formats.encoding import bits, counted
from kernlib.families.sparse.kernels.codecs.macko import Count, Decode, Encode
from kernlib.families.sparse.launching import launch
from kernlib.runtime.dtypes import KERNEL_TYPES


def row_counts(dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries of each row of a readable matrix, int32, and how many are no pads, in all:
    :func:`counted`."""
    counts = torch.zeros((2, dense.shape[0]), dtype=torch.int32, device=dense.device)
    if dense.numel():
        launch(Count(), (KERNEL_TYPES[dense.dtype], False, *reading(dense)), bits(dense), counts)
    counts = counted(counts)
    return counts[0], counts[1].sum(dtype=torch.int64)


def fill(
    dense: torch.Tensor, row_ptr: torch.Tensor, entries: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """``values`` and ``deltas`` of a readable matrix with these rows."""
    values = torch.zeros(entries, dtype=dense.dtype, device=dense.device)
    deltas = torch.zeros(entries // 2, dtype=torch.uint8, device=dense.device)
    if entries:
        sizes = KERNEL_TYPES[dense.dtype], row_ptr.dtype == torch.int64, *reading(dense)
        launch(Encode(), sizes, bits(dense), row_ptr, values, deltas)
    return values, deltas


def decode(
    values: torch.Tensor, deltas: torch.Tensor, row_ptr: torch.Tensor, shape: tuple[int, int]
) -> torch.Tensor:
    """The dense matrix of entries."""
    out = torch.zeros(shape, dtype=values.dtype, device=values.device)
    if out.numel() and values.numel():
        sizes = KERNEL_TYPES[values.dtype], row_ptr.dtype == torch.int64, *shape
        launch(Decode(), sizes, values, deltas, row_ptr, out)
    return out


def reading(dense: torch.Tensor) -> tuple:
    """Rows, columns, the stride of rows, and whether runs of eight columns take 16-byte loads."""
    apart = dense.stride(0) * dense.element_size()
    whole = dense.data_ptr() % 16 == 0 and (apart % 16 == 0 or dense.shape[0] == 1)
    return *dense.shape, dense.stride(0), int(whole)

"""The bitmap format on GPUs, by the kernels that count, make and undo chunks. Sizes are launch
arguments."""

from __future__ import annotations

import torch

from kernlib.families.sparse.formats.bitmap_cpu import chunks_of
from kernlib.families.sparse.formats.encoding import bits, readable
from kernlib.families.sparse.kernels.codecs.bitmap import Count, Decode, Encode
from kernlib.families.sparse.launching import launch


def chunk_counts(dense: torch.Tensor) -> torch.Tensor:
    """Entries of each chunk, int32."""
    dense = readable(dense)
    counts = torch.empty(chunks_of(dense.shape), dtype=torch.int32, device=dense.device)
    if counts.numel():
        launch(Count(), reading(dense), bits(dense), counts)
    return counts


def fill(dense: torch.Tensor, offsets: torch.Tensor, data: torch.Tensor) -> None:
    """Write the chunks of a :func:`readable` matrix, at ``offsets``, into ``data``."""
    if data.numel():
        launch(Encode(), reading(dense), bits(dense), offsets, data)


def decode(
    data: torch.Tensor, offsets: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """The dense matrix of chunks."""
    out = torch.empty(shape, dtype=dtype, device=data.device)
    if out.numel():
        vectors = shape[1] * dtype.itemsize % 16 == 0
        launch(Decode(), (*shape, shape[1], dtype.itemsize, vectors), data, offsets, out)
    return out


def reading(dense: torch.Tensor) -> tuple:
    """Rows, columns, the stride of rows, the itemsize, and whether rows take 16-byte loads."""
    itemsize, apart = dense.element_size(), dense.stride(0)
    whole = dense.data_ptr() % 16 == 0 and (apart * itemsize % 16 == 0 or dense.shape[0] == 1)
    return *dense.shape, apart, itemsize, whole

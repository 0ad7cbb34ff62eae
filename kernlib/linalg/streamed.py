"""Rows of arrays in host memory or in files, on a device by chunks: the next is on its way while
work with one goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

CHUNK_BYTES = 32 << 20  # of a chunk, all arrays together, about


def rows_of(arrays: Sequence[Any]) -> int:
    """How many rows of some arrays make a chunk."""
    bytes_of_row = sum(_as_tensor(array[:1]).numel() * array.dtype.itemsize for array in arrays)
    return max(1, CHUNK_BYTES // max(1, bytes_of_row))


def chunks(
    arrays: Sequence[Any], device: torch.device, dtype: torch.dtype
) -> Iterator[list[torch.Tensor]]:
    """Rows of tensors or of what numpy can slice, memory maps among them, on a device."""
    step, count = rows_of(arrays), len(arrays[0])
    pieces = (
        [_as_tensor(array[at : at + step]) for array in arrays] for at in range(0, count, step)
    )
    if device.type != "cuda" or all(isinstance(a, torch.Tensor) and a.is_cuda for a in arrays):
        for piece in pieces:
            yield [t.to(device, dtype) for t in piece]
        return
    stream, waiting = torch.cuda.Stream(device), None
    for piece in pieces:
        with torch.cuda.stream(stream):
            there = [_sent(t, device).to(dtype) for t in piece]
            arrival = stream.record_event()
        if waiting is not None:
            yield _arrived(*waiting)
        waiting = there, arrival
    if waiting is not None:
        yield _arrived(*waiting)


def _as_tensor(rows: Any) -> torch.Tensor:
    if isinstance(rows, torch.Tensor):
        return rows
    import numpy

    rows = numpy.asarray(rows)
    return torch.from_numpy(rows if rows.flags.writeable else rows.copy())


def _sent(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    if t.is_cuda:
        return t
    return (t if t.is_pinned() else t.pin_memory()).to(device, non_blocking=True)


def _arrived(tensors: list[torch.Tensor], arrival: torch.cuda.Event) -> list[torch.Tensor]:
    current = torch.cuda.current_stream(tensors[0].device)
    current.wait_event(arrival)
    for t in tensors:
        t.record_stream(current)
    return tensors

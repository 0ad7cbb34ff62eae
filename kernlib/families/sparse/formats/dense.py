"""The format of matrices with few zeros: all values, a contiguous matrix."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kernlib.families.sparse.formats import encoding
from kernlib.families.sparse.formats.entries import Entries

FORMAT = "dense"
TENSORS = ("values",)


def measure(dense: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Bytes that :func:`encode` would take, as one number, int64, on the host."""
    return torch.tensor(nbytes(dense), dtype=torch.int64, device="cpu")


def nbytes(dense: torch.Tensor) -> int:
    """Bytes that :func:`encode` would take."""
    return dense.numel() * dense.element_size()


def encode(dense: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """A contiguous copy of a matrix (R, C) of float16, bfloat16 or float32; there are no facts.
    Raises TypeError or ValueError for what is no such matrix."""
    return {"values": encoding.matrix(dense).clone(memory_format=torch.contiguous_format)}, {}


def measure_entries(entries: Entries) -> int:
    """:func:`nbytes` of a matrix by its entries."""
    return entries.shape[0] * entries.shape[1] * entries.dtype.itemsize


def encode_entries(entries: Entries) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """:func:`encode` of a matrix by its entries."""
    values = torch.zeros(entries.shape, dtype=entries.dtype, device=entries.device)
    written = encoding.bits(values)
    for slab in entries.slabs():
        written[slab.first : slab.last][slab.rows, slab.columns] = slab.bits
    return {"values": values}, {}


def decode(
    tensors: Mapping[str, torch.Tensor],
    facts: Mapping[str, int],
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The dense matrix: a contiguous copy."""
    return tensors["values"].clone(memory_format=torch.contiguous_format)


def check(
    tensors: Mapping[str, torch.Tensor],
    facts: Mapping[str, int],
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    """Raises ValueError, naming what is wrong, unless ``tensors`` hold one contiguous matrix of
    this shape and dtype."""
    encoding.check_tensors(FORMAT, tensors, {"values": dtype})
    encoding.check_facts(FORMAT, facts, ())
    encoding.check_size("values", tensors["values"], shape)

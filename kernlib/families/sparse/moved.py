"""Tensors of a matrix that lie elsewhere than a product saw them: they are looked at, which waits
for the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from kernlib.errors import CaptureError
from kernlib.families.sparse.layout import format_of
from kernlib.families.sparse.tensors import ALIGNMENT

if TYPE_CHECKING:
    from kernlib.families.sparse.matrix import SparseMatrix


def check_place(w: SparseMatrix, addresses: list[int]) -> None:
    """Look at tensors that are not where a product saw them before, if it saw them, and remember
    them. Raises ValueError for such as kernels cannot read and for those of another matrix,
    CaptureError where that cannot be found out."""
    if addresses == w._addresses:
        return
    for index, (address, tensor) in enumerate(zip(addresses, w._operands, strict=True)):
        if address % ALIGNMENT or not tensor.is_contiguous():
            place = f"w.tensors[{[*w.tensors][index]!r}]"
            raise ValueError(
                f"{place} must be contiguous and begin at whole {ALIGNMENT} bytes of memory, got "
                f"address {address:#x} and strides {tensor.stride()}: give it memory of its own, "
                f"{place}.data = {place}.clone()"
            )
    if w._addresses is not None:
        refuse_capture(w.operands)
        with said_of(w.layout):
            found = {**w.facts, **measured(w.format, w.tensors)}
            format_of(w.format).check(w.tensors, found, w.shape, w.dtype)
        if found != w.facts:
            raise ValueError(
                f"the tensors of w lie elsewhere now and are those of another matrix: {found} for "
                f"{dict(w.facts)}; make it anew, by SparseMatrix.from_state"
            )
    object.__setattr__(w, "_addresses", addresses)


@contextmanager
def said_of(layout: str) -> Iterator[None]:
    """Says what tensors should have been where that finds them wrong."""
    try:
        yield
    except (ValueError, RuntimeError) as error:  # torch's own, of what has no such numbers
        kind = " ".join(kind_of(layout))
        raise ValueError(f"these tensors are no matrix of kind {kind!r}: {error}") from error


def measured(format: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The facts that lie in tensors. Those of the formats u8, u4 and u2 do not: a matrix of another
    width is one of another kind."""
    if format == "bitmap":
        units = tensors["offsets"].long().diff()
        return {"largest": 16 * int(units.max()) if units.numel() else 0}
    if format == "macko":
        entries = int(torch.count_nonzero(tensors["values"]))
        return format_of(format).facts_of(tensors["row_ptr"], entries)
    return {}


def kind_of(layout: str) -> list[str]:
    """Format, shape and dtype."""
    return layout.split(" ")[:3]


def refuse_capture(tensors: Sequence[torch.Tensor]) -> None:
    """Raises CaptureError while a CUDA graph is captured."""
    if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            "these tensors of a compressed matrix are not those it was made of, and have not been "
            "checked, which waits for the device: make the same call once before the capture"
        )

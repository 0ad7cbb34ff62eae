"""Tensors of a matrix that have moved since a product last used them. They are checked again, which
waits for the device."""

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
    """Check tensors that are not at the addresses where they were checked before, and note the new
    addresses. Raises ValueError for tensors that kernels cannot read, and for those of another
    matrix; CaptureError while a CUDA graph is captured, if they need a check that waits for the
    device."""
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
        check_written(w)
    object.__setattr__(w, "_addresses", addresses)


def check_written(w: SparseMatrix) -> None:
    """Check tensors that were written or have moved. Raises ValueError for what is no matrix of the
    layout, CaptureError while a CUDA graph is captured."""
    refuse_capture(w.operands)
    with said_of(w.layout):
        found = {**w.facts, **measured(w.format, w.tensors)}
        format_of(w.format).check(w.tensors, found, w.shape, w.dtype)
    if found != w.facts:
        raise ValueError(
            f"the tensors of w were written or lie elsewhere now, and are those of another matrix: "
            f"{found} for {dict(w.facts)}; make it anew, by SparseMatrix.from_state"
        )


@contextmanager
def said_of(layout: str) -> Iterator[None]:
    """A context in which errors of a check also say which layout the tensors should have had."""
    try:
        yield
    except (ValueError, RuntimeError) as error:  # RuntimeError is torch's own, for odd tensors
        kind = " ".join(kind_of(layout))
        raise ValueError(f"these tensors are no matrix of kind {kind!r}: {error}") from error


def measured(format: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The facts of a matrix as its tensors have them. For u8, u4 and u2 there are none: their width
    cannot be found in the tensors."""
    if format == "bitmap":
        units = tensors["offsets"].long().diff()
        return {"largest": 16 * int(units.max()) if units.numel() else 0}
    if format == "macko":
        entries = int(torch.count_nonzero(tensors["values"]))
        return format_of(format).facts_of(tensors["row_ptr"], entries)
    return {}


def kind_of(layout: str) -> list[str]:
    """Format, shape and dtype of a layout, as text."""
    return layout.split(" ")[:3]


def refuse_capture(tensors: Sequence[torch.Tensor]) -> None:
    """Raises CaptureError while a CUDA graph is captured."""
    if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            "these tensors of a compressed matrix are not those it was made of, and have not been "
            "checked, which waits for the device: make the same call once before the capture"
        )

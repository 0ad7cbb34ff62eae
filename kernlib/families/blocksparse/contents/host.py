"""What the host knows of layouts on a GPU without waiting for it: contents that were made there."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from kernlib.families.blocksparse.contents.given import has_values

if TYPE_CHECKING:
    from kernlib.families.blocksparse.layout import Layout

CPU = torch.device("cpu")
# The contents on the CPU, and how often torch had counted a write to those on the GPU.
_contents: WeakKeyDictionary[Layout, tuple[tuple[torch.Tensor, ...], int]] = WeakKeyDictionary()


def source(mask: torch.Tensor, device: torch.device) -> torch.device:
    """Where the contents of a layout on a device are made: on the CPU if a mask has values there,
    for a GPU to get copies."""
    here = device.type == "cuda" and mask.device.type == "cpu" and has_values(mask)
    return CPU if here else device


def note(layout: Layout, tensors: tuple[torch.Tensor, ...]) -> None:
    """Know the contents of a layout on a GPU, until they are written, if these are on the CPU."""
    if layout.device.type == "cuda" and tensors[0].device.type == "cpu":
        _contents[layout] = tensors, _writes(layout)


def copy(layout: Layout, other: Layout) -> None:
    """Note for a copy what the host knows of a layout."""
    twin = on_host(layout)
    if twin is not None:
        note(other, twin.tensors)


def on_host(layout: Layout) -> Layout | None:
    """The layout on the CPU; None if the host does not know its contents, or torch has counted a
    write since."""
    tensors, writes = _contents.get(layout, ((), -1))
    return type(layout).from_layout(layout.text, tensors) if _writes(layout) == writes else None


def _writes(layout: Layout) -> int:
    return sum([t._version for t in layout.tensors if not t.is_inference()])

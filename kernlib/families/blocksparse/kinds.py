"""The operators' fields for a layout and for a scale."""

from __future__ import annotations

import torch

from kernlib.families.blocksparse.layout import Layout
from kernlib.runtime.numbers import host_value
from kernlib.runtime.schema import Kind


def _scale_fields(scale: float | torch.Tensor) -> tuple[torch.Tensor | None, float]:
    if isinstance(scale, torch.Tensor):
        return scale, 1.0
    if isinstance(scale, (torch.SymInt, torch.SymFloat)):
        return None, torch.sym_float(scale)
    return None, host_value("scale", scale, 0)


LAYOUT = Kind(
    "layout",
    ("Tensor[] layout", "str layout_text"),
    lambda layout: ([*layout.flat], layout.form),
    lambda tensors, text: Layout.from_layout(text, tensors),
    "torch.vmap over a layout is not known: it is one for all",
)
# A tensor or, where that is None, a number.
SCALE = Kind(
    "scale",
    ("Tensor? scale", "float factor"),
    _scale_fields,
    lambda scale, factor: factor if scale is None else scale,
)

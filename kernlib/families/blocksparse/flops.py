"""Operations of each operator, as torch's FlopCounterMode counts them: two for a product that is
added up. Slots of a layout count, whether they hold a block or not: nobody waits for the device."""

from __future__ import annotations

import torch

from kernlib.descriptors.text import from_text


def _product(result: torch.Tensor, /, *, a, b, layout, descriptor: str, **_) -> int:
    made = from_text(descriptor)
    if made.mode == "sdd":
        return 2 * result.numel() * a.shape[-2 if made.transpose_a else -1]
    values, turned = (a, made.transpose_a) if made.mode == "dsd" else (b, made.transpose_b)
    slots, rows, columns = values.shape[-3:]
    is_by_rows = turned == (made.mode == "dds")  # whether the result has a line for each of S
    # Lines of blocks of all heads, and of these the ends of each block.
    lines = layout[0].shape[0] * rows if is_by_rows else layout[2].shape[0] * columns
    return 2 * slots * rows * columns * result.numel() // max(1, lines)


def heads_of(q: torch.Tensor, layout: list[torch.Tensor], layout_text: str) -> int:
    """Heads of the layout of attention: 1 where it has none."""
    rows = int(layout_text.split("x")[0])
    return max(1, layout[0].shape[0] // max(1, -(-q.shape[2] // rows)))


def _pairs(q, layout, layout_text: str) -> int:
    """Products of a query and a key."""
    rows, columns = map(int, layout_text.split(" ")[0].split("x"))
    heads = heads_of(q, layout, layout_text)
    return q.shape[0] * q.shape[1] // heads * layout[3].shape[0] * rows * columns


def _attention(result: tuple, /, *, q, v, layout, layout_text: str, **_) -> int:
    return 2 * _pairs(q, layout, layout_text) * (q.shape[-1] + v.shape[-1])


def _attention_gradient(result: list, /, *, q, v, layout, layout_text: str, **_) -> int:
    """With the scores anew, as torch counts its own."""
    return 2 * _pairs(q, layout, layout_text) * (3 * q.shape[-1] + 2 * v.shape[-1])


FORMULAS = {
    "blocksparse_attention": _attention,
    "blocksparse_attention_gradient": _attention_gradient,
    "blocksparse_attention_scored": _attention,
    "blocksparse_matmul": _product,
    "blocksparse_matmul_product": _product,
    "blocksparse_scaled": _product,
}

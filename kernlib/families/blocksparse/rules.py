"""What torch asks of the operators besides their results. FlopCounterMode gets the number of
operations: two for each product that is added up, in every slot of a layout, as no one waits for
the device to learn which hold a block. DTensors get the tensors that may be sharded, and how the
result is sharded then."""

from __future__ import annotations

import torch

from kernlib.descriptors.text import from_text
from kernlib.families.blocksparse.contents.sizes import SIZES, is_form
from kernlib.sharding import Choice

# Operations.


def _lines(layout: list[torch.Tensor], layout_text: str) -> tuple[int, int]:
    """Rows and columns of blocks of all heads."""
    if not is_form(layout_text):
        return layout[0].shape[0], layout[2].shape[0]
    heads, rows, columns, _ = layout[SIZES].shape
    return max(1, heads - 2) * (rows - 2), max(1, heads - 2) * (columns - 2)


def _count_product(
    result: torch.Tensor, /, *, a, b, layout, layout_text: str, descriptor: str, **_
) -> int:
    product = from_text(descriptor)
    if product.mode == "sdd":
        return 2 * result.numel() * a.shape[-2 if product.transpose_a else -1]
    values, turned = (a, product.transpose_a) if product.mode == "dsd" else (b, product.transpose_b)
    slots, rows, columns = values.shape[-3:]
    is_by_rows = turned == (product.mode == "dds")  # whether the result has a line for each of S
    of_rows, of_columns = _lines(layout, layout_text)
    lines = of_rows * rows if is_by_rows else of_columns * columns
    return 2 * slots * rows * columns * result.numel() // max(1, lines)


def _count_gradients(result: list, /, *, grad, needs, **operands) -> int:
    """Each as many as the product."""
    return sum(needs) * _count_product(grad, **operands)


def heads_of(q: torch.Tensor, layout: list[torch.Tensor], layout_text: str) -> int:
    """Heads of the layout of attention: 1 where it has none."""
    if is_form(layout_text):
        return max(1, layout[SIZES].shape[0] - 2)
    rows = int(layout_text.split("x")[0])
    return max(1, layout[0].shape[0] // max(1, -(-q.shape[2] // rows)))


def _pairs(q, layout, layout_text: str) -> int:
    """Products of a query and a key."""
    rows, columns = map(int, layout_text.split(" ")[0].split("x"))
    heads = heads_of(q, layout, layout_text)
    return q.shape[0] * q.shape[1] // heads * layout[3].shape[0] * rows * columns


def _count_attention(result: tuple, /, *, q, v, layout, layout_text: str, **_) -> int:
    return 2 * _pairs(q, layout, layout_text) * (q.shape[-1] + v.shape[-1])


def _count_attention_gradient(result: list, /, *, q, v, layout, layout_text: str, **_) -> int:
    """With the scores anew, as torch counts its own."""
    return 2 * _pairs(q, layout, layout_text) * (3 * q.shape[-1] + 2 * v.shape[-1])


FORMULAS = {
    "blocksparse_attention": _count_attention,
    "blocksparse_attention_gradient": _count_attention_gradient,
    "blocksparse_attention_scored": _count_attention,
    "blocksparse_matmul": _count_product,
    "blocksparse_matmul_gradients": _count_gradients,
    "blocksparse_matmul_product": _count_product,
    "blocksparse_scaled": _count_product,
}


# Shardings.


def _shard_product(*, a, b, descriptor: str, tensors=(), **_) -> list[Choice]:
    """Lines of the dense operand; of a sparse result, the lines that are added up."""
    product = from_text(descriptor)
    if any(t.dim() > 1 for t in tensors):  # summands
        return []
    if product.mode == "dsd":
        dim = b.dim() - (2 if product.transpose_b else 1)
        return [Choice({"b": dim}, (b.dim() - 1,))]
    if product.mode == "dds":
        dim = a.dim() - (1 if product.transpose_a else 2)
        return [Choice({"a": dim}, (a.dim() - 2,))]
    sides = {
        "a": a.dim() - (2 if product.transpose_a else 1),
        "b": b.dim() - (1 if product.transpose_b else 2),
    }
    return [] if product.epilogue else [Choice(sides, (None,))]


def _shard_attention(
    *, q, layout, layout_text, captured, scale, dropout_p, descriptor: str, **given
) -> list[Choice]:
    """Batches, where nothing else has one, and nothing goes by its number."""
    given |= {"q": q}
    if captured or scale is not None or dropout_p or "batch" in descriptor:
        return []
    if heads_of(q, layout, layout_text) not in (1, q.shape[1]):  # a layout for each batch
        return []
    lengths = {name: 0 for name in ("q_lengths", "kv_lengths") if given[name] is not None}
    sides = dict.fromkeys(("grad", "grad_lse", "out", "lse", "q", "k", "v"), 0)
    inputs = {name: dim for name, dim in (sides | lengths).items() if given.get(name) is not None}
    return [Choice(inputs, (0,) * 3)]


SHARDINGS = {
    "blocksparse_attention": _shard_attention,
    "blocksparse_attention_gradient": _shard_attention,
    "blocksparse_matmul": _shard_product,
    "blocksparse_matmul_product": _shard_product,
}

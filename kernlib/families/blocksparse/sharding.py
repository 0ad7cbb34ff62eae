"""Which tensors of an operator may be sharded, and what its result is then."""

from __future__ import annotations

from kernlib.descriptors.text import from_text
from kernlib.families.blocksparse.flops import heads_of
from kernlib.sharding import Choice


def _product(*, a, b, descriptor: str, tensors=(), **_) -> list[Choice]:
    """Lines of the dense operand; of a sparse result, the lines that are added up."""
    made = from_text(descriptor)
    if any(t.dim() > 1 for t in tensors):  # summands
        return []
    if made.mode == "dsd":
        dim = b.dim() - (2 if made.transpose_b else 1)
        return [Choice({"b": dim}, (b.dim() - 1,))]
    if made.mode == "dds":
        dim = a.dim() - (1 if made.transpose_a else 2)
        return [Choice({"a": dim}, (a.dim() - 2,))]
    sides = {
        "a": a.dim() - (2 if made.transpose_a else 1),
        "b": b.dim() - (1 if made.transpose_b else 2),
    }
    return [] if made.epilogue else [Choice(sides, (None,))]


def _attention(
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


RULES = {
    "blocksparse_attention": _attention,
    "blocksparse_attention_gradient": _attention,
    "blocksparse_matmul": _product,
    "blocksparse_matmul_product": _product,
}

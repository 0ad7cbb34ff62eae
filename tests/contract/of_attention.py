"""Block-sparse attention that stores no scores."""

from __future__ import annotations

import numpy as np
import torch

import kernlib as kl
from kernlib.families.blocksparse.layout import Layout
from tests.contract import plain
from tests.contract.cases import Context, Entry
from tests.contract.of_blocksparse import KINDS as KINDS_OF_PRODUCTS
from tests.contract.of_blocksparse import NAMES as NAMES_OF_PRODUCTS
from tests.contract.of_blocksparse import scalar
from tests.families.blocksparse.attention.cases import Shape, formula

KINDS = KINDS_OF_PRODUCTS | {
    "causal": "flag", "window": "int", "score": "text", "mask": "text", "dropout_p": "number",
    "seed": "int", "return_lse": "flag", "axes": "any", "captured": "any", "is_causal": "flag",
    "enable_gqa": "flag",
}  # fmt: skip
FLAGS = {"window": "flag", "lengths": "flag", "dropout": "flag"}
NAMES = (
    *NAMES_OF_PRODUCTS, "q", "k", "v", "causal", "window", "score", "mask", "q_lengths",
    "kv_lengths", "dropout_p", "seed", "return_lse", "axes", "captured", "dropout", "lengths",
)  # fmt: skip
LARGEST = 1e30  # of scales: beyond, products are infinite in float32 and not in float64
FARTHEST = 2**40  # that columns can be from their row, and more
SHAPES = (
    Shape(2, 2, 1, 20, 40, 4, 3, (16, 32)),
    Shape(1, 2, 2, 32, 16, 5, 8, (16, 16)),
)


def operands(c: Context) -> dict:
    shape, dtype = c.random.choice(SHAPES), c.float_type()
    torch.manual_seed(c.random.randrange(1 << 30))
    made = shape.layout(c.random.choice([None, shape.heads, shape.batch * shape.heads]))
    tensors = [t.to(c.device, dtype) for t in shape.tensors()]
    return dict(zip("qkv", tensors, strict=True)) | {"layout": made.to(c.device)}


def options(c: Context, given: dict) -> dict:
    """Some of what a call may be given besides."""
    batch, _, rows, _ = given["q"].shape
    cols, made = given["k"].shape[2], {}
    if c.random.random() < 0.3:
        made["window"] = c.random.choice([3, 8, (4, 9), (2, None)])
    for name, most in (("q_lengths", rows), ("kv_lengths", cols)):
        if c.random.random() < 0.3:
            lengths = [c.random.randrange(1, most + 1) for _ in range(batch)]
            made[name] = torch.tensor(lengths, device=c.device)
    if c.random.random() < 0.5:
        made["scale"] = c.random.choice([0.5, 2, torch.tensor(0.7)])
    return made


def called(c: Context) -> dict:
    given = operands(c)
    given |= options(c, given) | {"causal": c.random.random() < 0.5}
    if c.random.random() < 0.4:
        given |= {"score": "v + bias", "mask": "row != col", "axes": {"bias": ("head", "col")}}
        given["bias"] = c.randn(given["q"].shape[1], given["k"].shape[2])
    if c.random.random() < 0.2:
        given |= {"dropout_p": 0.0, "seed": 3}
    if c.random.random() < 0.3:
        shape = (*given["q"].shape[:3], given["v"].shape[3])
        given["out"] = torch.zeros(shape, dtype=given["q"].dtype, device=c.device)
    return given | {"return_lse": c.random.random() < 0.3}


def call(q, k, v, layout, **rest):
    return kl.blocksparse.attention(q, k, v, layout, **rest)


def wanted(
    q, k, v, layout, *, scale=None, causal=False, window=None, score=None, mask=None,
    q_lengths=None, kv_lengths=None, dropout_p=0.0, seed=None, return_lse=False, axes=None,
    out=None, bias=None,
):  # fmt: skip
    plain.flag(causal, return_lse)
    if type(layout) is not Layout or (score, bias is None) not in (
        (None, True), ("v + bias", False),
    ):  # fmt: skip
        raise TypeError("no layout, or no score")
    plain.same_kind(q, k, v)
    made = layout.to("cpu")
    if out is not None and (out.dtype != q.dtype or tuple(out.shape) != (*q.shape[:3], v.shape[3])):
        raise ValueError("out")
    p = plain.number(dropout_p, 0, -1, 1)
    if p > 2**-17:
        return None
    given = {"causal": causal, "q_lengths": _lengths(q_lengths), "kv_lengths": _lengths(kv_lengths)}
    if window is not None:
        sides = window if isinstance(window, tuple) else (window, window)
        left, right = (FARTHEST if n is None else _side(n) for n in sides)
        given["window"] = min(left, FARTHEST), min(right, FARTHEST)
    if scale is not None:
        given["scale"] = scale = scalar(scale)
        if abs(scale) > LARGEST:
            return None
    if bias is not None:
        if axes is not None and axes != {"bias": ("head", "col")}:
            raise ValueError("axes")
        whole = bias.dtype in (torch.int32, torch.int64)  # which a score takes too
        added = bias.double() if whole else plain.wide(bias)
        given["score"] = lambda v, *places: v + added[:, None]
    if mask is not None:
        if mask != "row != col":
            raise ValueError("mask")
        given["mask"] = lambda b, h, i, j: i != j
    found, lse = formula(plain.wide(q), plain.wide(k), plain.wide(v), made, **given)
    if not all(t.isfinite().all() for t in (q, k, v)):
        return None
    return (found, lse) if return_lse else found


def _side(value) -> int:
    whole = int(value) if isinstance(value, np.integer) else value
    return plain.integer(whole, 0, 10**40)


def _lengths(value):
    if value is not None and value.dtype not in (torch.int32, torch.int64):
        raise TypeError("lengths")
    return value if value is None else value.cpu()


def described(c: Context) -> dict:
    given = operands(c)
    rest = options(c, given)
    lengths = bool({"q_lengths", "kv_lengths"} & {*rest})
    causal = c.random.random() < 0.5
    made = kl.BlockSparseAttention(causal=causal, window="window" in rest, lengths=lengths)
    return {"descriptor": made, "layout": given.pop("layout")} | given | rest


def wanted_described(descriptor, layout, q, k, v, **rest):
    if type(descriptor) is not kl.BlockSparseAttention or descriptor.score or descriptor.dropout:
        raise TypeError("no attention of these")
    lengths = any(rest.get(n) is not None for n in ("q_lengths", "kv_lengths"))
    if (rest.get("window") is not None, lengths) != (descriptor.window, descriptor.lengths):
        raise ValueError("window, or lengths")
    return wanted(q, k, v, layout, causal=descriptor.causal, **rest)


def descriptor(c: Context) -> dict:
    made = {"score": "v + bias", "mask": "col <= row", "captured": {"bias": ("row", "col")}}
    flags = ("causal", "window", "lengths", "dropout")
    return made | {name: c.random.random() < 0.5 for name in flags}


def as_torch(c: Context) -> dict:
    given = operands(c)
    layout, shape = given.pop("layout"), (given["q"].shape[1:3], given["k"].shape[2])
    made = dict(zip(("query", "key", "value"), given.values(), strict=True))
    made |= {"attn_mask": None, "dropout_p": 0.0, "is_causal": c.random.random() < 0.5}
    made |= {"scale": c.random.choice([None, 0.5]), "enable_gqa": True, "layout": layout}
    if c.random.random() < 0.6:
        mask = c.randn(*shape[0], shape[1])
        made["attn_mask"] = c.random.choice([mask, mask[0], mask > 0])
    return made


def wanted_as_torch(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
    enable_gqa=False, *, layout,
):  # fmt: skip
    plain.flag(is_causal, enable_gqa)
    heads, own = query.shape[-3], key.shape[-3]
    if heads != own and not enable_gqa:
        raise ValueError("heads")
    rest = {"scale": scale, "causal": is_causal, "dropout_p": dropout_p}
    if attn_mask is None:
        return wanted(query, key, value, layout, **rest)
    torch.broadcast_shapes(attn_mask.shape, (*query.shape[:-1], key.shape[-2]))
    return None


ENTRIES = {
    "kernlib.BlockSparseAttention": Entry(
        kl.BlockSparseAttention, descriptor, 0, KINDS | FLAGS, None, NAMES, 2
    ),
    "kernlib.run_kernel block-sparse attention": Entry(
        kl.run_kernel, described, 5, KINDS, wanted_described, NAMES, 3
    ),
    "kernlib.blocksparse.scaled_dot_product_attention": Entry(
        kl.blocksparse.scaled_dot_product_attention, as_torch, 8, KINDS, wanted_as_torch, NAMES, 3
    ),
    "kernlib.blocksparse.attention": Entry(call, called, 4, KINDS, wanted, NAMES, 4),
}

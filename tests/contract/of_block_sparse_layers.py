"""Softmax, attention and layers of block-sparse matrices."""

from __future__ import annotations

import math

import torch
from torch import nn

import kernlib as kl
from kernlib.families.blocksparse.layout import Layout
from kernlib.nn.block_sparse.attention import block_sparse_attention
from tests.contract import plain
from tests.contract.cases import Context, Entry
from tests.contract.of_blocksparse import KINDS as KINDS_OF_PRODUCTS
from tests.contract.of_blocksparse import NAMES as NAMES_OF_PRODUCTS
from tests.contract.of_blocksparse import a_layout, scalar
from tests.families.blocksparse import cases
from tests.families.blocksparse.softmax import cases as by_formula

KINDS = KINDS_OF_PRODUCTS | {
    "key_padding_mask_mode": "text", "attn_mask_mode": "text", "causal": "flag",
    "key_padding_mask_kind": "text", "attn_mask_kind": "text", "rpe_kind": "flag",
    "key_transposed": "flag", "in_features": "int", "out_features": "int", "bias": "flag",
    "dtype": "dtype", "activation": "epilogue", "criterion": "text", "per": "text",
    "linear": "any", "model": "any", "match": "text", "embed_dim": "int", "num_heads": "int",
    "dropout": "number", "add_bias_kv": "flag", "add_zero_attn": "flag", "kdim": "int",
    "vdim": "int", "batch_first": "flag", "in_channels": "int", "out_channels": "int",
    "kernel_size": "int", "padding": "int", "dilation": "int", "groups": "int",
    "padding_mode": "text", "stride_of": "int",
}  # fmt: skip
NAMES = (
    *NAMES_OF_PRODUCTS, "w", "rpe", "key_padding_mask", "attn_mask", "causal", "q", "v",
    "key_transposed", "query", "key", "value", "input", "weight", "in_features", "out_features",
    "dtype", "activation", "criterion", "per", "linear", "model", "match", "kernel_size",
    "padding", "dilation", "groups", "padding_mode", "in_channels", "out_channels", "features",
)  # fmt: skip


LARGEST = 1e30  # of scales: beyond, products are infinite in float32 and not in float64


# Softmax.


def of_scores(c: Context) -> dict:
    """x of a layout, and some of what is added."""
    made, dtype = a_layout(c), c.float_type()
    lead = c.random.choice([(), (2,), (2, 3)])
    heads = () if made.heads is None else (made.heads,)
    rows, cols = made.shape
    given = {
        "x": c.randn(*lead, made.capacity, *made.block, dtype=dtype),
        "layout": made,
        "scale": c.random.choice([1.0, 0.5, 2, torch.tensor(0.7)]),
    }
    if c.random.random() < 0.4:
        given["rpe"] = c.randn(*c.random.choice([lead, ()]), *heads, rows, cols, dtype=dtype)
    if c.random.random() < 0.4:
        mask = c.randn(cols, dtype=dtype)
        given["key_padding_mask"] = c.random.choice([mask, mask > -1])
        given["key_padding_mask_mode"] = c.random.choice(["add", "mul"])
    if c.random.random() < 0.4:
        mask = c.randn(rows, cols, dtype=dtype)
        given["attn_mask"] = c.random.choice([mask, mask > -1])
        given["attn_mask_mode"] = c.random.choice(["add", "mul"])
    return given | {"causal": c.random.random() < 0.5}


def call_softmax(x, layout, **rest):
    return kl.blocksparse.softmax(x, layout, **rest)


def wanted_softmax(
    x, layout, scale=1.0, rpe=None, key_padding_mask=None, attn_mask=None,
    key_padding_mask_mode="add", attn_mask_mode="add", causal=False, out=None,
):  # fmt: skip
    plain.flag(causal)
    if type(layout) is not Layout or {key_padding_mask_mode, attn_mask_mode} - {"add", "mul"}:
        raise TypeError("no layout, or no mode")
    made = layout.to("cpu")
    if x.dim() < 3 or tuple(x.shape[-3:]) != (made.capacity, *made.block):
        raise ValueError("x")
    masks = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
    floats = [m for m in masks.values() if m is not None and m.dtype != torch.bool]
    plain.same_kind(x, *([] if rpe is None else [rpe]), *floats)
    lead, (rows, cols) = tuple(x.shape[:-3]), made.shape
    heads = () if made.heads is None else (made.heads,)
    _broadcasts(rpe, (*lead, *heads, rows, cols))
    _broadcasts(key_padding_mask, (*lead, cols))
    if attn_mask is not None and tuple(attn_mask.shape) != (rows, cols):
        raise ValueError("attn_mask")
    if out is not None and (out.shape != x.shape or out.dtype != x.dtype):
        raise ValueError("out")
    scale = scalar(scale)
    if abs(scale) > LARGEST:
        return None
    found = by_formula.formula(
        made, plain.wide(x), scale, _wide(rpe), _wide(key_padding_mask), _wide(attn_mask),
        key_padding_mask_mode, attn_mask_mode, causal,
    )  # fmt: skip
    return cases.blocks(made, found)


def _wide(t):
    return t if t is None or t.dtype == torch.bool else plain.wide(t)


def _broadcasts(t, shape: tuple) -> None:
    if t is not None and (t.dim() > len(shape) or torch.broadcast_shapes(t.shape, shape) != shape):
        raise ValueError("it does not broadcast")


def with_descriptor(c: Context) -> dict:
    given = of_scores(c)
    modes = {name: given.pop(f"{name}_mode", None) for name in ("key_padding_mask", "attn_mask")}
    made = kl.BlockSparseSoftmax(causal=given.pop("causal"), rpe="rpe" in given, **modes)
    x = given.pop("x")
    return {"descriptor": made, "layout": given.pop("layout"), "x": x} | given


def wanted_with_descriptor(descriptor, layout, x, **rest):
    if type(descriptor) is not kl.BlockSparseSoftmax:
        raise TypeError("no softmax")
    given = {"rpe"} if descriptor.rpe else set()
    for name in ("key_padding_mask", "attn_mask"):
        mode = getattr(descriptor, name)
        if mode is not None:
            given.add(name)
            rest[f"{name}_mode"] = mode
    names = {n for n, v in rest.items() if v is not None and not n.endswith("_mode")}
    if names - {"scale", "out"} != given:
        raise ValueError("parameters")
    return wanted_softmax(x, layout, causal=descriptor.causal, **rest)


def softmax_descriptor(c: Context) -> dict:
    mode = [None, "add", "mul"]
    return {"causal": c.random.random() < 0.5, "key_padding_mask": c.random.choice(mode),
            "attn_mask": c.random.choice(mode), "rpe": c.random.random() < 0.5}  # fmt: skip


# Attention.


def of_attention(c: Context) -> dict:
    made, dtype = a_layout(c), c.float_type()
    rows, cols = made.shape
    heads = 2 if made.heads is None else made.heads
    lead = c.random.choice([(), (3,)])
    q, k, v = (
        c.randn(*lead, heads, length, size, dtype=dtype)
        for length, size in ((rows, 5), (cols, 5), (cols, 3))
    )
    across = c.random.random() < 0.3
    return {"q": q, "k": k.mT.contiguous() if across else k, "v": v, "layout": made,
            "scale": c.random.choice([None, 0.5]), "causal": c.random.random() < 0.3,
            "key_transposed": across}  # fmt: skip


def wanted_attention(
    q, k, v, layout, scale=None, *, causal=False, key_transposed=False, precision=None
):
    plain.flag(causal, key_transposed)
    if type(layout) is not Layout or precision not in (None, "fp32", "tf32", "bf16"):
        raise TypeError("no layout, or no precision")
    plain.same_kind(q, k, v)
    q, k, v, made = plain.wide(q), plain.wide(k), plain.wide(v), layout.to("cpu")
    k = k.mT if key_transposed else k
    rows, cols = made.shape
    if min(q.dim(), k.dim(), v.dim()) < 3 or q.shape[-2] != rows or k.shape[-2] != cols:
        raise ValueError("lengths")
    if any(made.heads is not None and t.shape[-3] not in (1, made.heads) for t in (q, k, v)):
        raise ValueError("heads")
    scale = 1 / math.sqrt(max(1, q.shape[-1])) if scale is None else scalar(scale)
    if abs(scale) > LARGEST:
        return None
    logits = (q @ k.mT) * scale
    kept = by_formula.stored(made)
    if causal:
        kept = kept & torch.ones(made.shape, dtype=torch.bool).tril()
    logits = torch.where(kept, logits, -torch.inf)
    weights = torch.softmax(logits, -1).nan_to_num(0.0) if torch.isfinite(q).all() else None
    return None if weights is None else weights @ v


# Layers.


def dense_linear(c: Context) -> nn.Linear:
    return nn.Linear(64, 32, device=c.device)


def layer(c: Context) -> dict:
    dtype = c.random.choice((torch.float32, torch.float64))
    return {"in_features": 64, "out_features": 32, "layout": c.random.choice([16, (16, 32)]),
            "bias": True, "device": c.device, "dtype": dtype, "activation": "relu",
            "density": 0.5, "capacity": None, "precision": None,
            "input": c.randn(3, 64, dtype=dtype)}  # fmt: skip


def call_layer(in_features, out_features, layout, bias, device, dtype, *, input, **named):
    made = kl.nn.BlockSparseLinear(in_features, out_features, layout, bias, device, dtype, **named)
    return made(input)


def pruned(c: Context) -> dict:
    return {"linear": dense_linear(c), "block": 16, "density": 0.5, "criterion": "magnitude",
            "per": c.random.choice(["matrix", "row"]), "activation": None, "capacity": 8,
            "precision": None, "input": c.randn(3, 64)}  # fmt: skip


def call_pruned(linear, block, density, criterion, per, *, input, **named):
    made = kl.nn.BlockSparseLinear.from_linear(
        linear, block, density=density, criterion=criterion, per=per, **named
    )
    return made(input)


def swapped(c: Context) -> dict:
    return {"model": nn.Sequential(dense_linear(c)), "block": 16, "match": None, "density": 0.5,
            "criterion": "magnitude", "per": "matrix", "precision": None}  # fmt: skip


def convolution(c: Context) -> dict:
    return {"in_channels": 16, "out_channels": 32, "kernel_size": 3, "stride_of": 1, "padding": 1,
            "dilation": 1, "groups": 1, "bias": True, "padding_mode": "zeros", "device": c.device,
            "dtype": torch.float32, "layout": 16, "activation": None, "density": 0.5,
            "capacity": None, "precision": None, "input": c.randn(2, 16, 5, 6)}  # fmt: skip


def call_convolution(*sizes, input, **named):
    return kl.nn.BlockSparseConv2d(*sizes, **named)(input)


def taps(c: Context) -> dict:
    mask = c.randn(2, 1, 3, 3) > 0
    return {"mask": mask, "block": 16, "capacity": None, "device": c.device}


def call_taps(mask, block, capacity=None, device=None):
    return kl.nn.taps_layout(mask, block, capacity, device).mask()


def heads(c: Context) -> dict:
    return {"embed_dim": 32, "num_heads": 2, "layout": Layout([[1, 0], [1, 1]], 16),
            "block": None, "dropout": 0.0, "bias": True, "add_bias_kv": False,
            "add_zero_attn": False, "kdim": None, "vdim": None, "key_padding_mask_mode": "add",
            "attn_mask_mode": "add", "batch_first": False, "device": c.device,
            "dtype": torch.float32, "precision": None, "query": c.randn(32, 3, 32)}  # fmt: skip


def call_heads(*arguments, query, precision, **named):
    made = kl.nn.BlockSparseMultiheadAttention(*arguments, precision=precision, **named)
    return made(query, query, query)[0]


def entry(call, arguments, positional, wanted=None, weight=1, kinds=None) -> Entry:
    return Entry(call, arguments, positional, KINDS | (kinds or {}), wanted, NAMES, weight)


OF_DESCRIPTOR = {"key_padding_mask": "text", "attn_mask": "text", "rpe": "flag"}
ENTRIES = {
    "kernlib.BlockSparseSoftmax": entry(
        kl.BlockSparseSoftmax, softmax_descriptor, 0, None, 2, OF_DESCRIPTOR
    ),
    "kernlib.run_kernel block-sparse softmax": entry(
        kl.run_kernel, with_descriptor, 3, wanted_with_descriptor, 3
    ),
    "kernlib.blocksparse.softmax": entry(call_softmax, of_scores, 2, wanted_softmax, 3),
    "kernlib.nn.block_sparse_attention": entry(
        block_sparse_attention, of_attention, 5, wanted_attention, 2
    ),
    "kernlib.nn.BlockSparseLinear": entry(call_layer, layer, 6, None, 2),
    "kernlib.nn.BlockSparseLinear from_linear": entry(call_pruned, pruned, 5),
    "kernlib.nn.block_sparsify": entry(kl.nn.block_sparsify, swapped, 2),
    "kernlib.nn.BlockSparseConv2d": entry(call_convolution, convolution, 11),
    "kernlib.nn.taps_layout": entry(call_taps, taps, 2),
    "kernlib.nn.BlockSparseMultiheadAttention": entry(call_heads, heads, 15),
}

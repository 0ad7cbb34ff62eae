"""Block-sparse attention with the arguments of torch's, beside that."""

import re

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as by_torch

from kernlib.families.blocksparse.attention.as_torch import scaled_dot_product_attention
from tests.families.blocksparse.attention.cases import BF16, F32, Shape, stored

SHAPE = Shape(heads=4, kv_heads=4)
Z = torch.zeros
MASKS = {
    "none": lambda: None,
    "bools": lambda: torch.rand(50, 70) < 0.7,
    "heads": lambda: torch.rand(4, 50, 70) < 0.7,
    "a row": lambda: torch.rand(70) < 0.7,
    "floats": lambda: torch.randn(2, 1, 50, 70),
    "all": lambda: torch.randn(2, 4, 50, 70),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_it_is_torchs_where_blocks_are_left_out_as_a_mask(name, is_causal, seed):
    made, tensors, mask = SHAPE.layout(4), SHAPE.tensors(F32, grad=True), MASKS[name]()
    keep = stored(made, 2, 4)[..., :50, :70]
    if is_causal:
        keep = keep & torch.ones(50, 70, dtype=torch.bool).tril()
    whole = torch.where(keep, 0.0, -torch.inf)
    if mask is not None:
        whole = whole + (torch.where(mask, 0.0, -torch.inf) if mask.dtype == torch.bool else mask)
    alone = (whole == -torch.inf).all(-1, keepdim=True)
    y = scaled_dot_product_attention(*tensors, mask, 0.0, is_causal, 0.3, layout=made)
    wanted = by_torch(*tensors, torch.where(alone, 0.0, whole), scale=0.3)
    wanted = torch.where(alone, 0.0, wanted)
    torch.testing.assert_close(y, wanted)
    grad = torch.randn_like(y)
    for ours, theirs in zip(*(torch.autograd.grad(t, tensors, grad) for t in (y, wanted)),
                            strict=True):  # fmt: skip
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lead", [(), (3,), (3, 1, 2)])
def test_dimensions_in_front(lead, seed):
    made = SHAPE.dense()
    q, k, v = (torch.randn(*lead, *t.shape[1:]) for t in SHAPE.tensors(F32))
    mask = torch.randn(*lead[-1:], *[4] * bool(lead), 50, 70)
    y = scaled_dot_product_attention(q, k, v, mask, layout=made)
    torch.testing.assert_close(y, by_torch(q, k, v, mask))


def test_grouped_queries(seed):
    shape = SHAPE._replace(kv_heads=2)
    made, tensors = shape.dense(), shape.tensors(F32)
    y = scaled_dot_product_attention(*tensors, enable_gqa=True, layout=made)
    torch.testing.assert_close(y, by_torch(*tensors, enable_gqa=True))
    with pytest.raises(ValueError, match=r"^key must have 4 heads as query has, or with"):
        scaled_dot_product_attention(*tensors, layout=made)


@pytest.mark.few(6)
@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("queries", [50, 70, 90])
@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_a_causal_bias_is_what_it_stands_for(bias, queries, seed):
    """Its memory holds nothing. Rows that see no key are 0."""
    shape = SHAPE._replace(queries=queries)
    made, (q, k, v) = shape.dense(), shape.tensors(F32)
    sees = torch.ones(queries, 70, dtype=torch.bool)
    sees = sees.tril(70 - queries if bias is causal_lower_right else 0)
    wanted = by_torch(q, k, v, torch.where(sees, 0.0, -torch.inf)).nan_to_num()
    found = scaled_dot_product_attention(q, k, v, bias(queries, 70), layout=made)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("kind", [torch.nn.Parameter, torch.nn.Buffer])
def test_parameters_and_buffers_compile(kind, seed):
    made, tensors = SHAPE.dense(), SHAPE.tensors(F32)
    given = [kind(t) for t in (*tensors, torch.randn(50, 70))]

    def call(*given):
        return scaled_dot_product_attention(*given, layout=made)

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given), call(*given))


def test_dropout(seed):
    made, tensors = SHAPE.dense(), SHAPE.tensors(F32)
    one, other = (scaled_dot_product_attention(*tensors, dropout_p=0.5, layout=made)
                  for _ in range(2))  # fmt: skip
    assert not torch.equal(one, other)


def test_autocast(seed):
    made, (q, k, v) = SHAPE.dense(), SHAPE.tensors(F32)
    with torch.autocast("cpu", BF16):
        y = scaled_dot_product_attention(q, k.to(BF16), v, layout=made)
    assert y.dtype == BF16


MADE, (Q, K, V) = SHAPE.dense(), SHAPE.tensors(F32)
CALLS = {
    "query must be (..., heads, length, features), got (50, 8)": {"query": Q[0, 0]},
    "key must have (2,) in front as query has, got (1, 4, 70, 8)": {"key": K[:1]},
    "key must have 8 features as query has, got 7": {"key": K[..., 1:]},
    "key must have 4 heads as query has, or a number that divides it, got 3": {
        "key": K[:, 1:], "value": V[:, 1:], "enable_gqa": True
    },
    "value must have heads and length of key, (4, 70), got (4, 69)": {"value": V[:, :, 1:]},
    "attn_mask must hold bools or floats, got torch.int64": {"attn_mask": Z(50, 70).long()},
    "attn_mask must broadcast to (2, 4, 50, 70), got (50, 69)": {"attn_mask": Z(50, 69)},
    "attn_mask must be a CausalBias of 50 queries and 70 keys, got one of 4 and 70": {
        "attn_mask": causal_upper_left(4, 70)
    },
    "query must be a dense tensor, got a CausalBias, whose memory holds nothing": {
        "query": causal_upper_left(50, 8)
    },
    "dropout_p must be a number from 0 to 1, without 1, got 1.5": {"dropout_p": 1.5},
}  # fmt: skip


@pytest.mark.parametrize("message", CALLS)
def test_errors(message):
    given = {"query": Q, "key": K, "value": V, "layout": MADE, **CALLS[message]}
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        scaled_dot_product_attention(**given)

"""What is wrong with a block-sparse attention is said by the name of the argument."""

import math
import pickle
import re

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from kernlib.descriptors.text import from_text, to_text
from kernlib.families.blocksparse.attention import dropout
from kernlib.families.blocksparse.attention.descriptor import BlockSparseAttention
from kernlib.families.blocksparse.attention.functions import attention
from kernlib.families.blocksparse.layout import Layout
from kernlib.run import run_kernel
from tests.families.blocksparse.attention.cases import F32, Shape

SHAPE = Shape()
MADE, (Q, K, V) = SHAPE.dense(), SHAPE.tensors(F32)
Z = torch.zeros

DESCRIPTORS = {
    "causal must be a bool, got 'no'": {"causal": "no"},
    "dropout must be a bool, got 0.1: whether there is one": {"dropout": 0.1},
    "window must be a bool, got (3, 0): whether there is one": {"window": (3, 0)},
    "score 'v +' does not parse": {"score": "v +"},
    "score 'v + bias': 'bias' is not known to a score": {"score": "v + bias"},
    "mask 'v - 1': 'v' is the logit, which a mask does not see": {"mask": "v - 1"},
    "captured must be a dict such as": {"captured": "bias"},
    "captured name 'v' is taken by a variable of scores and masks; choose": {"captured": {"v": ()}},
    "captured name 'layout' is taken by an argument of attention; choose": {
        "captured": {"layout": ()}
    },
    "captured name 'is' is taken by a word of Python; choose": {"captured": {"is": ()}},
    "axes of captured bias must be a tuple of": {"captured": {"bias": 3}},
    "axes of captured bias must be of ('batch', 'head', 'row', 'col'), got 'key'": {
        "captured": {"bias": ("row", "key")}
    },
    "axes of captured bias repeat one: ('row', 'row')": {"captured": {"bias": ("row", "row")}},
    "captured repeats a name: ['bias', 'bias']": {
        "captured": (("bias", ()), ("bias", ("row",))), "score": "v + bias"
    },
    "neither score nor mask reads captured tensor(s) ['gain']": {
        "captured": {"bias": (), "gain": ()}, "score": "v + bias"
    },
}  # fmt: skip


@pytest.mark.parametrize("message", DESCRIPTORS)
def test_descriptors(message):
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        BlockSparseAttention(**DESCRIPTORS[message])


def test_a_descriptor_is_its_text():
    made = BlockSparseAttention(
        score="v + bias", mask="row > col", captured={"bias": ["head", "row"]}, causal=True
    )
    assert made.captured == (("bias", ("head", "row")),) and made.names == ("bias",)
    assert from_text(to_text(made)) == made == pickle.loads(pickle.dumps(made))
    assert hash(made) == hash(made.replace()) and made != made.replace(causal=False)
    assert made.describe() == "BlockSparseAttention(causal, score='v + bias', mask='row > col')"
    assert BlockSparseAttention(captured={"s": "head"}, score="s * v").captured[0][1] == ("head",)
    assert "bias=..." in made.call and "dropout_p" in made.replace(dropout=True).call


CALLS = {
    "layout must be a kernlib.blocksparse.Layout, got Tensor": {"layout": Z(4, 3)},
    "layout must be a kernlib.blocksparse.Layout, got BlockMask; Layout.from_block_mask makes": {
        "layout": create_block_mask(lambda b, h, i, j: j <= i, 1, None, 50, 70, "cpu")
    },
    "q must be (B, H, LQ, E), got (4, 50, 8)": {"q": Q[0]},
    "k must be torch.float32 as q is, got torch.float16": {"k": K.half()},
    "k must have batch and features of q, 2 and 8, got (2, 2, 70, 7)": {"k": K[..., 1:]},
    "v must have (2, 2, 70) in front as k has, got (2, 2, 69, 5)": {"v": V[:, :, 1:]},
    "q must have a multiple of k's 2 heads, got 3": {"q": Q[:, 1:]},
    "layout must have a grid of 2x3 blocks of 16x32 for 20 queries and 70 keys, got 16x32": {
        "q": Q[:, :, :20]
    },
    "layout must have no heads, H = 4 or B * H = 8, got 3": {"layout": SHAPE.layout(3)},
    "layout must be on the device of q, meta, got cpu": {
        "q": Q.to("meta"), "k": K.to("meta"), "v": V.to("meta")
    },
    "scale requires a gradient, which attention (but of a captured tensor": {
        "scale": torch.tensor(1.0, requires_grad=True)
    },
    "window must be an int or two (left, right), None for an open side, got 'wide'": {
        "window": "wide"
    },
    "window must be at least 0 on both sides, got (3, -1); None leaves a side open": {
        "window": (3, -1)
    },
    "q_lengths must be int32 or int64, got torch.float32": {"q_lengths": Z(2)},
    "q_lengths must be from 0 to the 50 queries, got 51": {"q_lengths": torch.tensor([0, 51])},
    "kv_lengths must be from 0 to the 70 keys, got -1": {
        "kv_lengths": torch.tensor([-1, 71], dtype=torch.int32)
    },
    "dropout_p must be a number from 0 to 1, without 1, got 1.0": {"dropout_p": 1.0},
    "seed must be an int, or int64 of shape (), got 0.5": {"seed": 0.5, "dropout_p": 0.1},
    "seed must be an int from 0 to 2**53 - 1, or an int64 tensor, got -1": {
        "seed": -1, "dropout_p": 0.1
    },
    "seed must be an int from 0 to 2**53 - 1, or an int64 tensor, got 9007199254740992": {
        "seed": 2**53, "dropout_p": 0.1
    },
    "axes has 'bias', which is no argument of the call": {"axes": {"bias": ()}},
    "axes must say what the 1 dimension(s) of bias are": {"score": "v + bias", "bias": Z(50)},
    "bias must be a tensor that score or mask names, got 1.0; torch.tensor(1.0) is one": {
        "score": "v + bias", "bias": 1.0
    },
    "neither score nor mask reads captured tensor(s) ['attn_mask']; attention has no argument "
    "attn_mask: score='v + attn_mask' adds floats, mask='attn_mask' keeps": {
        "attn_mask": Z(50, 70)
    },
    "neither score nor mask reads captured tensor(s) ['key_padding_mask']; attention has no "
    "argument key_padding_mask: mask='key_padding_mask' with axes={'key_padding_mask': ('batch', "
    "'col')} keeps the keys where it is True, mask='not key_padding_mask' the others": {
        "key_padding_mask": Z(2, 70).bool()
    },
    "axes must say what the 1 dimension(s) of alibi_slopes are: axes={'alibi_slopes': (...)} of "
    "('batch', 'head', 'row', 'col'); attention has no argument alibi_slopes: score='v - "
    "alibi_slopes * abs(row - col)' with axes={'alibi_slopes': ('head',)} is its bias": {
        "alibi_slopes": Z(4)
    },
    "attention has no argument softcap; a cap is score='cap * tanh(v / cap)'; it was 2.0": {
        "softcap": 2.0
    },
    "attention has no argument slop; it was 2": {"slop": 2, "score": "v + slope", "slope": Z(())},
    "softcap must be a tensor that score or mask names, got 2.0; torch.tensor(2.0) is one": {
        "softcap": 2.0, "score": "softcap * tanh(v / softcap)"
    },
    "attention has no argument is_causal; did you mean causal?; it was True": {"is_causal": True},
    "attention has no argument enable_gqa; leave it out: which heads share k and v is taken from "
    "the shapes": {"enable_gqa": True},
    "neither score nor mask reads captured tensor(s) ['key']; did you mean k?": {"key": K},
    "attention has no argument block_mask; layout=Layout.from_block_mask(block_mask) has its "
    "blocks; it was a BlockMask": {
        "block_mask": create_block_mask(lambda b, h, i, j: j <= i, 1, None, 50, 70, "cpu")
    },
    "axes must say what the 1 dimension(s) of value are: axes={'value': (...)} of ('batch', 'head',"
    " 'row', 'col'); did you mean v?": {"value": Z(5)},
    "bias must have shape (50, 70) of its axes ('row', 'col'), or 1 there, got (50, 69); these are "
    "the axes of 2 dimensions by default, axes={'bias': (...)} says others": {
        "score": "v + bias", "bias": Z(50, 69)
    },
    "score 'v * scale': 'scale' is an argument of attention; give the tensor another name": {
        "score": "v * scale", "scale": Z(())
    },
    "score 'v + bias': 'bias' is a condition": {"score": "v + bias", "bias": Z(50, 70).bool()},
    "out must have shape (2, 4, 50, 5), got (2, 4, 50, 8)": {"out": Q.clone()},
    "out must be torch.float32 as q is, got torch.float16": {"out": Z(2, 4, 50, 5).half()},
    "out overlaps itself": {"out": Z(1, 4, 50, 5).expand(2, -1, -1, -1)},
}  # fmt: skip


@pytest.mark.parametrize("message", CALLS)
def test_calls(message):
    given = {"q": Q, "k": K, "v": V, "layout": MADE, **CALLS[message]}
    with pytest.raises((TypeError, ValueError, RuntimeError), match=f"^{re.escape(message)}"):
        attention(**given)


@pytest.mark.parametrize(
    ("q", "k"),
    [
        pytest.param((2, 50, 4, 8), (2, 70, 2, 8), id="other lengths"),
        pytest.param((2, 40, 4, 8), (2, 40, 4, 8), id="one length"),
    ],
)
def test_heads_behind_rows_are_found(q, k):
    made = Layout(torch.ones(-(-q[1] // 16), -(-k[1] // 32), dtype=bool), (16, 32))
    found = r"^(q|layout) must have a .*; q is \(B, H, LQ, E\) and k .*are they transposed\?"
    with pytest.raises(ValueError, match=found):
        attention(Z(q), Z(k), Z(k), made)
    with pytest.raises(ValueError, match=r"got 16x32 blocks, [^;]*$"):
        attention(Z(q)[:, :1], Z(k)[:, :1], Z(k)[:, :1], made)


def test_the_order_of_operands_is_said():
    found = (
        "^layout must be a kernlib.blocksparse.Layout, got Tensor: the order is "
        r"attention\(q, k, v, layout\), but run_kernel\(descriptor, layout, q, k, v\)$"
    )
    wrong = (
        lambda: attention(MADE, Q, K, V),
        lambda: attention(MADE, Q, K, V, dropout_p=0.5),
        lambda: attention(MADE, Q.clone().requires_grad_(), K, V),
        lambda: run_kernel(BlockSparseAttention(), Q, K, V, MADE),
        lambda: run_kernel(BlockSparseAttention(window=True), Q, K, V, MADE, window=3),
    )
    for call in wrong:
        with pytest.raises(TypeError, match=found):
            call()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=found):
        attention(MADE, Q, K, V)


def test_the_largest_part_that_is_dropped():
    below = math.nextafter(dropout.ALL, 0)
    assert dropout.threshold(dropout.ALL) == dropout.LEVELS == dropout.threshold(below) + 1
    for largest in (65535 / 65536, below):
        attention(Q, K, V, MADE, dropout_p=largest, seed=3)
    for p in (dropout.ALL, 1 - 2.0**-17):
        with pytest.raises(ValueError, match=r"^dropout_p must be at most .*, which rounds to 1$"):
            attention(Q, K, V, MADE, dropout_p=p, seed=3)


def test_what_a_descriptor_has_and_a_call_has_not():
    plain = BlockSparseAttention()
    whole = BlockSparseAttention(score="v + bias", captured={"bias": ()}, window=True, lengths=True)
    whole = whole.replace(dropout=True)
    given = {"bias": Z(()), "window": 3, "kv_lengths": Z(2).long(), "dropout_p": 0.0}
    run_kernel(whole, MADE, Q, K, V, **given)
    for name, message in {
        "bias": "needs bias, a tensor of ()",
        "window": "needs window",
        "dropout_p": "needs dropout_p",
        "kv_lengths": "needs q_lengths or kv_lengths",
    }.items():
        rest = {n: value for n, value in given.items() if n != name}
        with pytest.raises(ValueError, match=re.escape(message)):
            run_kernel(whole, MADE, Q, K, V, **rest)
    for rest, message in (
        ({"window": 3}, r"^window is given, .* make one with window=True"),
        ({"q_lengths": Z(2).long()}, r"^q_lengths or kv_lengths is given, .* with lengths=True"),
        ({"dropout_p": 0.5}, r"^dropout_p or seed is given, .* with dropout=True"),
    ):
        with pytest.raises(ValueError, match=message):
            run_kernel(plain, MADE, Q, K, V, **rest)
    with pytest.raises(TypeError, match=r"^bias is no argument of BlockSparseAttention\(\)"):
        run_kernel(plain, MADE, Q, K, V, bias=Z(()))
    with pytest.raises(TypeError, match=r"takes layout, q, k and v, got 3 operands"):
        run_kernel(plain, MADE, Q, K)


def test_out_shares_memory_with_nothing():
    shape = (2, 4, 50, 5)
    long = torch.zeros(V.numel() + 2000)
    v, out = long[: V.numel()].view(V.shape), long[-2000:].view(shape)
    assert attention(Q, K, v, MADE, out=out) is out
    with pytest.raises(ValueError, match=r"^out shares memory with v"):
        attention(Q, K, v, MADE, out=long[:2000].view(shape))
    bias = out[:, :, :, :1]
    with pytest.raises(ValueError, match=r"^out shares memory with bias"):
        attention(Q, K, V, MADE, score="v + bias", bias=bias, out=out)


def test_no_out_while_gradients_are_recorded():
    q, out = Q.clone().requires_grad_(), Z(2, 4, 50, 5)
    with pytest.raises(RuntimeError, match=r"^out takes no result whose gradient is recorded"):
        attention(q, K, V, MADE, out=out)
    with torch.no_grad():
        assert attention(q, K, V, MADE, out=out) is out


def test_contents_that_change_before_the_gradient(seed):
    made, tensors = SHAPE.layout(spare=20), SHAPE.tensors(grad=True)
    y = attention(*tensors, made)
    made.update_(torch.ones(SHAPE.grid).bool())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_seed_without_dropout_drops_nothing(seed):
    """As evaluation may leave it there."""
    wanted = attention(Q, K, V, MADE)
    for given in (3, torch.tensor(3)):
        assert attention(Q, K, V, MADE, dropout_p=0.0, seed=given).equal(wanted)

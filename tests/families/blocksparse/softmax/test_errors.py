"""What is wrong with a block-sparse softmax is said by the name of the argument."""

import pickle
import re

import pytest
import torch

from kernlib.descriptors.text import from_text, to_text
from kernlib.families.blocksparse.softmax.descriptor import BlockSparseSoftmax
from kernlib.families.blocksparse.softmax.functions import softmax
from kernlib.run import run_kernel
from tests.families.blocksparse.softmax.cases import layout, values

MADE = layout([[[1, 0], [1, 1]], [[1, 1], [1, 0]]], (16, 32), 1)  # 2 heads of (32, 64)
X = torch.zeros(3, MADE.capacity, 16, 32)
F = torch.zeros

DESCRIPTORS = {
    "causal must be a bool, got 'no'": {"causal": "no"},
    "rpe must be a bool, got 1": {"rpe": 1},
    "key_padding_mask must be None or one of ('add', 'mul'), got True": {"key_padding_mask": True},
    "attn_mask must be None or one of ('add', 'mul'), got 'or'": {"attn_mask": "or"},
}


@pytest.mark.parametrize("message", DESCRIPTORS)
def test_descriptors(message):
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        BlockSparseSoftmax(**DESCRIPTORS[message])


def test_a_descriptor_is_its_text():
    made = BlockSparseSoftmax(causal=True, key_padding_mask="mul", rpe=True)
    assert from_text(to_text(made)) == made == pickle.loads(pickle.dumps(made))
    assert hash(made) == hash(made.replace()) and made != made.replace(rpe=False)
    assert made.describe() == "BlockSparseSoftmax(causal, rpe, key_padding_mask=mul)"
    assert made.parameters == ("rpe", "key_padding_mask")


CALLS = {
    "x must hold the layout's blocks, (..., 7, 16, 32), got (3, 6, 16, 32)": {"x": X[:, 1:]},
    "scale must be real, got torch.bool": {"scale": torch.tensor(True)},
    "rpe must broadcast to (3, 2, 32, 64), got (2, 2, 32, 64)": {"rpe": F(2, 2, 32, 64)},
    "rpe must be torch.float32 as x is, got torch.float16": {"rpe": F(32, 64).half()},
    "key_padding_mask must broadcast to (3, 64), got (3, 2, 64)": {"key_padding_mask": F(3, 2, 64)},
    "key_padding_mask must be torch.float32 as x is, or torch.bool, got torch.float64": {
        "key_padding_mask": F(3, 64).double()
    },
    "attn_mask must have shape (32, 64), got (64,)": {"attn_mask": F(64)},
    "attn_mask must be torch.float32 as x is, or torch.bool, got torch.int64": {
        "attn_mask": F(32, 64).long()
    },
    "layout must be on the device of x, meta, got cpu": {"x": X.to("meta")},
    "key_padding_mask_mode must be one of ('add', 'mul'), got 'or'": {
        "key_padding_mask_mode": "or"
    },
    "out must have shape (3, 7, 16, 32), got (7, 16, 32)": {"out": X[0].clone()},
    "out must be torch.float32 as x is, got torch.float16": {"out": X.half()},
}


@pytest.mark.parametrize("message", CALLS)
def test_calls(message):
    given = {"x": X, "layout": MADE, **CALLS[message]}
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        softmax(**given)


def test_what_a_descriptor_has_and_a_call_has_not():
    plain, masked = BlockSparseSoftmax(), BlockSparseSoftmax(attn_mask="add", rpe=True)
    with pytest.raises(ValueError, match=r"rpe=True"):
        run_kernel(plain, MADE, X, rpe=F(32, 64))
    with pytest.raises(ValueError, match=r"^attn_mask is given, .* attn_mask='add' or 'mul'"):
        run_kernel(plain, MADE, X, attn_mask=F(32, 64))
    with pytest.raises(ValueError, match=r"^BlockSparseSoftmax\(rpe, attn_mask=add\) needs rpe"):
        run_kernel(masked, MADE, X, attn_mask=F(32, 64))
    with pytest.raises(TypeError, match=r"takes layout and x, got 3 operands"):
        run_kernel(plain, MADE, X, X)
    with pytest.raises(TypeError, match=r"takes layout and x, got 0 operands"):
        run_kernel(plain)


def test_out_shares_memory_with_nothing_but_x():
    long = torch.zeros(X.numel() + 1)
    x, out = long[:-1].view(X.shape), long[1:].view(X.shape)
    with pytest.raises(ValueError, match=r"^out shares memory with x"):
        softmax(x, MADE, out=out)
    rpe = X[:, :4].reshape(3, 1, 32, 64)
    with pytest.raises(ValueError, match=r"^out shares memory with rpe"):
        softmax(X.clone(), MADE, rpe=rpe, out=X)


def test_no_out_while_gradients_are_recorded():
    x = X.clone().requires_grad_()
    with pytest.raises(RuntimeError, match=r"^out takes no result whose gradient is recorded"):
        softmax(x, MADE, out=x)
    with torch.no_grad():
        assert softmax(x, MADE, out=x) is x


def test_contents_that_change_before_the_gradient(seed):
    made = layout([[1, 0], [1, 1]], 16)
    x = values(made, grad=True)
    y = softmax(x, made)
    made.update_([[1, 1], [1, 0]])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()

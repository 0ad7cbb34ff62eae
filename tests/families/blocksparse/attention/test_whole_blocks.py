"""Attention over the blocks of a rule that is finer than they are, told nothing of it, warns."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, noop_mask

import kernlib as kl
from kernlib import nn
from kernlib.blocksparse import (
    Layout,
    attention,
    causal,
    dense,
    scaled_dot_product_attention,
    sliding_window,
)


def earlier(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def padded(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (kv_idx < 50)


def of_documents(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & ((q_idx < 40) == (kv_idx < 40))


def without_a_rule() -> Layout:
    """Of a slice of torch 2.8: its own rule leaves nothing out."""
    mask = create_block_mask(earlier, 2, 1, 64, 64, "cpu", BLOCK_SIZE=32)[0:1]
    mask.mask_mod = noop_mask
    return Layout.from_block_mask(mask)


def by_blocks(b, h, q_idx, kv_idx):
    return q_idx // 32 >= kv_idx // 32


def of_mask(mod) -> Layout:
    return Layout.from_block_mask(create_block_mask(mod, 1, 1, 64, 64, "cpu", BLOCK_SIZE=32))


FINER = {  # what the warning says to pass
    "causal": (lambda: causal(64, 32), "causal=True"),
    "window": (lambda: sliding_window(64, 32, (40, 0)), r"window=\(40, 0\)"),
    "block mask": (lambda: of_mask(earlier), "what its mask_mod says as mask= or causal="),
    "slice": (without_a_rule, "what its mask_mod says as mask= or causal="),
}
MORE = {"padding": padded, "documents": of_documents}  # than causal leaves out
WHOLE = {
    "dense": lambda: dense(64, 64, 32),
    "window to both sides": lambda: sliding_window(64, 32, 8),
    "mask of whole blocks": lambda: of_mask(by_blocks),
    "mask of nothing": lambda: of_mask(noop_mask),
    "copied": lambda: copy.copy(causal(64, 32)),
    "written since": lambda: causal(64, 32).update_(torch.eye(2, dtype=torch.bool)),
    "listed since": lambda: causal(64, 32).update_indices_([0], [1]),
}
WAYS = {
    "attention": lambda q, layout, **rest: attention(q, q, q, layout, **rest),
    "of torch's shape": lambda q, layout, **rest: scaled_dot_product_attention(
        q, q, q, layout=layout, **{f"is_{name}": value for name, value in rest.items()}
    ),
    "of Torch-Blocksparse's": lambda q, layout, **rest: nn.block_sparse_attention(
        q, q, q, layout, **rest
    ),
}


def drawn() -> torch.Tensor:
    return torch.randn(1, 2, 64, 16)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FINER)
def test_blocks_of_a_finer_rule_warn(name, way):
    make, condition = FINER[name]
    with pytest.warns(kl.KernlibWarning, match=f"pass {condition} too, or copy") as seen:
        WAYS[way](drawn(), make())
    assert seen[0].filename == __file__


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MORE)
def test_a_block_mask_that_leaves_more_out_than_is_said_warns(name, way):
    for options in ({}, {"causal": True}):
        with pytest.warns(kl.KernlibWarning, match="pass what its mask_mod says as mask=, more th"):
            WAYS[way](drawn(), of_mask(MORE[name]), **options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WHOLE)
def test_whole_blocks_do_not(name, way):
    layout = WHOLE[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        WAYS[way](drawn(), layout)


@pytest.mark.parametrize("way", WAYS)
def test_nor_what_is_told_the_rule(way):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        WAYS[way](drawn(), causal(64, 32), causal=True)


def test_nor_an_attention_with_a_condition_of_its_own():
    q = drawn()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted = attention(q, q, q, causal(64, 32), causal=True)
        for options in ({"mask": "col <= row"}, {"window": (64, 0)}):
            torch.testing.assert_close(attention(q, q, q, causal(64, 32), **options), wanted)
        attention(q, q, q, causal(64, 32), score="where(col > row, -inf, v)")
        rest = {"causal": True, "kv_lengths": torch.tensor([50])}
        attention(q, q, q, of_mask(padded), **rest)
        attention(q, q, q, of_mask(earlier), causal=True)
        keys = (torch.arange(64) < 50)[None]
        nn.block_sparse_attention(q, q, q, of_mask(padded), causal=True, key_padding_mask=keys)

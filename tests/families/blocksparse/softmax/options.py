"""Calls of block-sparse softmax with each option alone, and several."""

from __future__ import annotations

import torch

from kernlib.families.blocksparse.layout import Layout
from tests.families.blocksparse.softmax.cases import dense, layout


def option_values(made: Layout, dtype) -> dict:
    """Each option alone, and several."""
    rows, cols = made.shape
    attn, key = torch.randn(rows, cols).to(dtype), torch.randn(3, cols).to(dtype)
    zeros = torch.rand(rows, cols) < 0.3
    padded = torch.rand(3, cols) < 0.3
    # As masks are made of numbers alone: the last rows have nothing that is left.
    least = torch.zeros(rows, cols, dtype=dtype).masked_fill(zeros, torch.finfo(dtype).min)
    least[-5:] = torch.finfo(dtype).min
    ones = {"key_padding_mask_mode": "mul", "attn_mask_mode": "mul"}
    return {
        "rpe": {"rpe": dense(made, 3, dtype=dtype)},
        "one rpe": {"rpe": dense(made, dtype=dtype)},
        "rpe of a row": {"rpe": torch.randn(rows, 1).to(dtype)},
        "rpe of one head": {"rpe": torch.randn(3, 1, rows, cols).to(dtype)},
        "key": {"key_padding_mask": key},
        "one key": {"key_padding_mask": key[0]},
        "key of -inf": {"key_padding_mask": torch.where(padded, -torch.inf, 0.0).to(dtype)},
        "attn": {"attn_mask": attn},
        "least attn": {"attn_mask": least},
        "key mul": {"key_padding_mask": torch.where(padded, 0.0, key).to(dtype), **ones},
        "attn mul": {"attn_mask": torch.where(zeros, 0.0, attn).to(dtype), **ones},
        "bools": {"key_padding_mask": ~padded, "attn_mask": ~zeros},
        "bools mul": {"key_padding_mask": ~padded, "attn_mask": ~zeros, **ones},
        "causal": {"causal": True},
        "all": {
            "rpe": dense(made, 1, dtype=dtype),
            "key_padding_mask": key,
            "attn_mask": ~zeros,
            "causal": True,
        },
    }


NAMES = (*option_values(layout(torch.ones(2, 1, 1), 16), torch.float64),)

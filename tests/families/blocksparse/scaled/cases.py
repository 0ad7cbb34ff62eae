"""Scaled products by their formula in float64, on the matrix laid out."""

from __future__ import annotations

import torch

from kernlib.families.blocksparse.layout import Layout
from kernlib.families.blocksparse.scaled.functions import quantize
from tests.families.blocksparse.softmax.cases import layout

__all__ = ("formula", "layout", "operands")
F8 = torch.float8_e4m3fn


def operands(made: Layout, mode: str, turned: tuple[bool, bool], batches=((), ()), size=5) -> list:
    """a, b and their scales, one for each column that is multiplied; of slots without a block what
    reaches no result."""
    rows, cols = made.shape
    stored = 0 if mode == "dsd" else 1
    heads = () if made.heads is None else (made.heads,)
    values = torch.randn(*batches[stored], made.capacity, *made.block)
    values, slots = quantize(values)
    slots[..., made.nnz :] = torch.nan
    depth = cols if (mode == "dsd") != turned[stored] else rows
    dense, columns = quantize(torch.randn(*batches[1 - stored], *heads, size, depth), -1)
    if (mode == "dsd") != turned[1 - stored]:
        dense = dense.mT
    pairs = [(values, slots), (dense, columns)]
    (a, scale_a), (b, scale_b) = pairs if mode == "dsd" else pairs[::-1]
    return [a, b, scale_a, scale_b]


def formula(made: Layout, mode: str, turned: tuple[bool, bool], a, b, scale_a, scale_b):
    """In float64."""
    wide = [a.double(), b.double()]
    stored = 0 if mode == "dsd" else 1
    slots, columns = (scale_a, scale_b) if mode == "dsd" else (scale_b, scale_a)
    wide[stored] = made.to_dense(wide[stored] * slots.double()[..., None, None])
    left, right = (t.mT if flip else t for t, flip in zip(wide, turned, strict=True))
    scales = columns.double()
    if columns.dim():
        scales = scales.unsqueeze(-2 if mode == "dsd" else -1)
    return left @ right * scales

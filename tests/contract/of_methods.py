"""Methods of public classes, and what predecessors' modules of layers have."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

import kernlib as kl
from kernlib import events
from kernlib.blocksparse import Layout
from kernlib.compat import torch_blocksparse
from kernlib.compat.fastkron import fastkronnumpy, fastkrontorch
from kernlib.nn import (
    BlockSparseConv2d,
    BlockSparseLinear,
    BlockSparseMultiheadAttention,
    KroneckerLinear,
    KSLinear,
    SparseLinear,
)
from kernlib.sparse import SparseMatrix, compress
from tests.contract import of_block_sparse_layers, of_products, of_service
from tests.contract.cases import Context, Entry

MASK = [[1, 0], [1, 1]]
ONES = torch.ones(2, 2, 2, dtype=torch.long)
KINDS = {
    **of_products.KINDS, **of_block_sparse_layers.KINDS, "optimizer": "any", "watch": "flag",
    "candidates": "any", "count": "int", "query_length": "int", "key_length": "int",
    "non_blocking": "flag", "need_weights": "flag", "average_attn_weights": "flag",
    "is_causal": "flag", "bench": "flag", "trans_a": "flag", "trans_b": "flag", "inplace": "flag",
    "num_heads": "int", "num_blocks": "int", "block_stride": "int", "unidirectional": "flag",
    "numverts": "int", "vertsize": "int", "info": "any", "in_order": "text", "out_order": "text",
    "order": "text", "sparsity": "any", "stride": "int", "fs": "any", "alpha": "number",
    "beta": "number", "approximate": "flag", "in_sizes": "any", "out_sizes": "any",
    "columns": "int",
    "condition": "text", "heads": "int", "block": "int", "mode": "text", "changes": "any",
    "epilogue": "epilogue", "symmetric": "flag", "operator": "text", "text": "text",
}  # fmt: skip
NAMES = (
    *of_products.NAMES, *of_block_sparse_layers.NAMES, *of_service.NAMES, "optimizer", "state",
    "tensor", "output", "values", "mask", "header", "linear", "matrix", "factors", "fs", "y",
    "residual", "in_order", "out_order", "order", "info", "sparsity", "mode", "model",
)  # fmt: skip


def layout() -> Layout:
    return Layout(MASK, 16)


def block_sparse() -> BlockSparseLinear:
    torch.manual_seed(0)
    return BlockSparseLinear(32, 32, layout(), dtype=torch.float32)


def convolution() -> BlockSparseConv2d:
    return BlockSparseConv2d(16, 32, 1, layout=Layout([[1], [1]], 16))


def attention() -> BlockSparseMultiheadAttention:
    return BlockSparseMultiheadAttention(32, 2, layout(), batch_first=True)


def factors() -> KSLinear:
    return KSLinear([(2, 3, 4, 5)])


def product() -> KroneckerLinear:
    return KroneckerLinear([2, 3], [4, 2])


def compressed() -> SparseLinear:
    linear = nn.Linear(24, 6)
    return SparseLinear.from_linear(linear, density=0.5)


def block_mask():
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, i, j: i >= j, None, None, 64, 64, "cpu", BLOCK_SIZE=32)


def matrix() -> SparseMatrix:
    return compress(torch.eye(6), "u8")


def dense() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(32, 32)


def grown() -> BlockSparseLinear:
    """A layer that has seen a gradient by blocks that it lacks."""
    made = block_sparse().watch_growth()
    made(torch.ones(3, 32)).sum().backward()
    return made.drop_(1)


def random(*shape: int) -> Callable[[Context], torch.Tensor]:
    return lambda c: c.randn(*shape)


def called(call: Callable, kinds: dict | None = None, **arguments) -> Entry:
    """An entry of a function, whose arguments are values, or are made by functions of a context."""

    def made(c: Context) -> dict:
        return {
            name: value(c) if getattr(value, "__name__", "") == "<lambda>" else value
            for name, value in arguments.items()
        }

    return Entry(call, made, 0, KINDS | (kinds or {}), None, NAMES, 1)


def method(owner: Callable, name: str, kinds: dict | None = None, **arguments) -> Entry:
    """An entry of a method of what ``owner`` makes."""

    def call(**given):
        return getattr(owner(), name)(**given)

    return called(call, kinds, **arguments)


OF_LAYERS = {
    "kernlib.nn.BlockSparseLinear": (block_sparse, random(3, 32)),
    "kernlib.nn.BlockSparseConv2d": (convolution, random(2, 16, 3, 3)),
    "kernlib.nn.KSLinear": (factors, random(3, 40)),
    "kernlib.nn.KroneckerLinear": (product, random(3, 6)),
    "kernlib.nn.SparseLinear": (compressed, random(3, 24)),
}
MASKS = {"mask": lambda c: torch.tensor(MASK)}
SIZES = {
    "num_heads": 2, "num_blocks": 4, "mode": "fixed", "block_stride": 4, "unidirectional": False,
    "numverts": 1, "vertsize": 1,
}  # fmt: skip
HEADS = (2, 2, 32, 16)
ENTRIES = {
    **{
        f"{name} forward": method(owner, "forward", input=x)
        for name, (owner, x) in OF_LAYERS.items()
    },
    "kernlib.blocksparse.Layout write_": method(layout, "write_", **MASKS),
    "kernlib.blocksparse.Layout update_indices_": method(
        layout, "update_indices_", rows=[0, 1], cols=[1, 1], heads=None,
        kinds={"rows": "any", "cols": "any", "heads": "any"},
    ),
    "kernlib.blocksparse.Layout to": method(layout, "to", device="cpu", non_blocking=False),
    "kernlib.blocksparse.Layout set_condition": method(layout, "set_condition", condition=""),
    "kernlib.blocksparse.Layout from_block_mask": called(
        Layout.from_block_mask, block_mask=lambda c: block_mask(), capacity=None,
        kinds={"block_mask": "any"},
    ),
    "kernlib.sparse.SparseMatrix to": method(matrix, "to", device="cpu", non_blocking=False),
    "kernlib.sparse.SparseMatrix convert": method(matrix, "convert", format="u4", columns=1),
    "kernlib.nn.BlockSparseLinear update_": method(
        block_sparse, "update_", **MASKS, optimizer=None
    ),
    "kernlib.nn.BlockSparseLinear drop_ count": method(
        block_sparse, "drop_", count=1, optimizer=None
    ),
    "kernlib.nn.BlockSparseLinear drop_ density": method(
        block_sparse, "drop_", density=0.5, optimizer=None
    ),
    "kernlib.nn.BlockSparseLinear watch_growth": method(
        block_sparse, "watch_growth", watch=True, candidates=None
    ),
    "kernlib.nn.BlockSparseLinear regrow_": method(grown, "regrow_", count=1, optimizer=None),
    "kernlib.nn.BlockSparseLinear remap": method(grown, "remap", tensor=random(3, 16, 16)),
    "kernlib.nn.SparseLinear from_matrix": called(
        SparseLinear.from_matrix, matrix=lambda c: matrix(), bias=random(6), activation=None
    ),
    "kernlib.nn.KSLinear from_linear": called(
        KSLinear.from_linear, linear=lambda c: dense(), patterns=[(2, 16, 16, 1)],
        approximate=True, algo="auto", activation=None, precision=None, init="linear",
    ),
    "kernlib.nn.KroneckerLinear from_linear": called(
        KroneckerLinear.from_linear, linear=lambda c: dense(), in_sizes=[4, 8], out_sizes=[8, 4],
        activation=None, precision=None,
    ),
    "kernlib.nn.KSLinear estimate": method(factors, "estimate", rows=64),
    "kernlib.nn.KSLinear forward_bs_first": method(
        factors, "forward_bs_first", output=random(3, 40)
    ),
    "kernlib.nn.KSLinear forward_bs_last": method(
        factors, "forward_bs_last", output=random(40, 3)
    ),
    "kernlib.nn.KSLinear post_process": method(
        factors, "post_process", tensor=random(3, 40), output=random(3, 30)
    ),
    "kernlib.nn.KSLinear pre_process": method(factors, "pre_process", tensor=random(3, 40)),
    "kernlib.nn.BlockSparseMultiheadAttention forward": method(
        attention, "forward", query=random(2, 32, 32), key=random(2, 32, 32),
        value=random(2, 32, 32), key_padding_mask=None, need_weights=False, attn_mask=None,
        average_attn_weights=True, is_causal=False, rpe=None,
        kinds={"key_padding_mask": "any", "attn_mask": "any", "rpe": "any"},
    ),
    "kernlib.nn.BlockSparseMultiheadAttention layout_of": method(
        attention, "layout_of", query_length=32, key_length=32
    ),
    "kernlib.Pairwise replace": method(
        kl.gaussian, "replace", symmetric=True, epilogue=(kl.Gaussian(),), operator="dot"
    ),
    "kernlib.compat.torch_blocksparse.MatMul": called(
        lambda a, b, **given: torch_blocksparse.MatMul(**given)(a, b),
        layout=lambda c: ONES.clone(), block=16, mode="sdd", trans_a=False, trans_b=False,
        bench=False, a=random(*HEADS), b=random(2, 2, 16, 32),
    ),
    "kernlib.compat.torch_blocksparse.Softmax": called(
        lambda x, layout, block, **given: torch_blocksparse.Softmax(layout, block)(x, **given),
        layout=lambda c: ONES.clone(), block=16, x=random(2, 8, 16, 16), scale=1.0, rpe=None,
        key_padding_mask=None, attn_mask=None, key_padding_mask_mode="add", attn_mask_mode="mul",
        is_causal=False, inplace=False,
        kinds={"rpe": "any", "key_padding_mask": "any", "attn_mask": "any"},
    ),
    "kernlib.compat.torch_blocksparse.MultiheadAttention": called(
        lambda x, **given: torch_blocksparse.MultiheadAttention(**given)(x, x, x)[0],
        embed_dim=32, num_heads=2, layout=lambda c: ONES.clone(), block=16, dropout=0.0, bias=True,
        key_padding_mask_mode="add", attn_mask_mode="mul", x=random(32, 2, 32),
        kinds={"layout": "tensor"},
    ),
    "kernlib.compat.torch_blocksparse.MultiheadAttention sparsity": called(
        torch_blocksparse.MultiheadAttention, embed_dim=32, num_heads=2,
        sparsity=lambda c: torch_blocksparse.SparsityInfo("dense", 16), dropout=0.0, bias=True,
        add_bias_kv=False, add_zero_attn=False, kdim=None, vdim=None,
    ),
    "kernlib.compat.torch_blocksparse.DeepSpeedSparseSelfAttention": called(
        lambda query, key, value, rpe, key_padding_mask, attn_mask, **given: (
            torch_blocksparse.DeepSpeedSparseSelfAttention(**given)(
                query, key, value, rpe, key_padding_mask, attn_mask
            )
        ),
        embed_dim=32, num_heads=2, mode="fixed", block=16, stride=32, unidirectional=False,
        numverts=1, vertsize=1, key_padding_mask_mode="add", attn_mask_mode="mul",
        query=random(1, 2, 64, 16), key=random(1, 2, 64, 16), value=random(1, 2, 64, 16), rpe=None,
        key_padding_mask=None, attn_mask=None,
        kinds={"rpe": "any", "key_padding_mask": "any", "attn_mask": "any"},
    ),
    "kernlib.compat.torch_blocksparse.Linear": called(
        lambda input, **given: torch_blocksparse.Linear(**given)(input),
        in_features=32, out_features=32, block=16, layout=lambda c: ONES[:1].clone(),
        input=random(3, 32), kinds={"layout": "tensor"},
    ),
    "kernlib.compat.torch_blocksparse.ReLU": called(
        lambda **given: torch_blocksparse.ReLU()(**given), x=random(2, 3), scale=random(1),
        bias=random(1), residual=random(2, 3), kinds={"scale": "tensor", "bias": "tensor"},
    ),
    "kernlib.compat.torch_blocksparse.Permute": called(
        lambda x, **given: torch_blocksparse.Permute(**given)(x), in_order="NCHW",
        out_order="CHWN", x=random(2, 3, 4, 5),
    ),
    "kernlib.compat.torch_blocksparse.make_layout": called(torch_blocksparse.make_layout, **SIZES),
    "kernlib.compat.torch_blocksparse.SparsityInfo": called(
        lambda heads, query_length, key_length, **given: (
            torch_blocksparse.SparsityInfo(**given).layout(heads, query_length, key_length)
        ),
        mode="fixed", block=16, stride=32, unidirectional=True, numverts=1, vertsize=1, heads=2,
        query_length=64, key_length=64,
    ),
    "kernlib.compat.torch_blocksparse.replace_mha": called(
        torch_blocksparse.replace_mha,
        model=lambda c: nn.Sequential(nn.MultiheadAttention(32, 2)),
        info=lambda c: torch_blocksparse.SparsityInfo("dense", 16),
    ),
    "kernlib.compat.fastkron.fastkrontorch.gemkm": called(
        fastkrontorch.gemkm, x=random(3, 6), fs=lambda c: [c.randn(2, 4), c.randn(3, 2)],
        alpha=1.0, beta=0.0, y=None, precision=None, out=None, kinds={"y": "any", "out": "any"},
    ),
    "kernlib.compat.fastkron.fastkrontorch.gekmm": called(
        fastkrontorch.gekmm, fs=lambda c: [c.randn(2, 4), c.randn(3, 2)], x=random(8, 3),
        alpha=1.0, beta=0.0, y=None, precision=None, out=None, kinds={"y": "any", "out": "any"},
    ),
    "kernlib.compat.fastkron.fastkronnumpy.gemkm": called(
        fastkronnumpy.gemkm, x=lambda c: np.ones((3, 6), np.float32),
        fs=lambda c: [np.ones((2, 4), np.float32), np.ones((3, 2), np.float32)], alpha=1.0,
        beta=0.0, y=None, out=None, kinds={"x": "any", "y": "any", "out": "any"},
    ),
    "kernlib.events.subscribe": called(
        lambda listener: events.subscribe(listener)(), listener=lambda c: print,
        kinds={"listener": "function"},
    ),
}  # fmt: skip

"""Torch-Blocksparse's modules of attention, and the layouts that it makes of lengths."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import nn

from kernlib.compat.torch_blocksparse.matmul import OnDevices
from kernlib.descriptors.base import shown
from kernlib.families.blocksparse import builders
from kernlib.families.blocksparse.contents.sizes import checked_count
from kernlib.families.blocksparse.layout import Layout
from kernlib.hints.calls import hinted
from kernlib.nn.block_sparse.attention import (
    BlockSparseMultiheadAttention,
    block_sparse_attention,
)
from kernlib.runtime.tensors import check_dense

MODES = ("dense", "fixed")


@hinted
class SparsityInfo:
    """What layouts of attention are made of. Attributes may be set later, before a layout is made.

    - ``mode``: "dense" or "fixed". ``block``: the size of a block.
    - ``stride``, ``unidirectional``, ``numverts``, ``vertsize``: of "fixed", as those of
      :func:`kernlib.blocksparse.fixed`.

    What is wrong with them :meth:`layout` raises.
    """

    def __init__(
        self,
        mode: str | None = None,
        block: int | None = None,
        stride: int = 128,
        unidirectional: bool | None = None,
        numverts: int = 1,
        vertsize: int = 1,
    ):
        self.mode, self.block, self.stride = mode, block, stride
        self.unidirectional, self.numverts, self.vertsize = unidirectional, numverts, vertsize

    def layout(self, heads: int, query_length: int, key_length: int) -> Layout:
        """The layout of ``heads`` matrices (``query_length``, ``key_length``), which "fixed" has
        for equal lengths alone. Raises ValueError for other modes and lengths, TypeError and
        ValueError for attributes of other kinds."""
        if self.mode not in MODES:
            raise ValueError(f"mode of the sparsity must be one of {MODES}, got {shown(self.mode)}")
        if self.mode == "dense":
            return builders.dense(query_length, key_length, self.block, heads, "cpu")
        query_length = checked_count("query_length", query_length, 0)
        key_length = checked_count("key_length", key_length, 0)
        if query_length != key_length:
            raise ValueError(
                "a fixed layout is of one length and needs query_length == key_length, got "
                f"{query_length} of queries and {key_length} of keys"
            )
        attention = "unidirectional" if self.unidirectional else "bidirectional"
        return builders.fixed(
            query_length, self.block, self.stride, attention, self.numverts, self.vertsize, heads,
            "cpu",
        )  # fmt: skip


Sparsity = SparsityInfo | Layout  # what modules take; one of them has the first as an attribute


class _OfLengths:
    """The function of lengths that a module of attention asks for layouts; it can be pickled."""

    def __init__(self, sparsity: SparsityInfo, heads: int):
        self.sparsity, self.heads = sparsity, heads

    def __call__(self, query_length: int, key_length: int) -> Layout:
        return self.sparsity.layout(self.heads, query_length, key_length)


def _arguments(
    embed_dim: int,
    num_heads: int,
    sparsity: Sparsity,
    dropout: float = 0.0,
    bias: bool = True,
    add_bias_kv: bool = False,
    add_zero_attn: bool = False,
    kdim: int | None = None,
    vdim: int | None = None,
    key_padding_mask_mode: str = "add",
    attn_mask_mode: str = "mul",
) -> dict[str, Any]:
    """The arguments of a module by name, as Torch-Blocksparse's last published version has them."""
    return locals()


_arguments.__qualname__ = "MultiheadAttention"  # errors name these
_arguments = hinted(_arguments)


@hinted
class MultiheadAttention(BlockSparseMultiheadAttention):
    """:class:`kernlib.nn.BlockSparseMultiheadAttention` with Torch-Blocksparse's arguments.

    ``sparsity`` is a :class:`SparsityInfo`, of which the module makes a layout for each length that
    it meets, or a :class:`kernlib.blocksparse.Layout`. In its place there may be a ``layout``, a
    tensor of 0 and 1 [H, rows / block, cols / block], and its ``block``, which come in this order
    before all that follows, as in the project's newest commit. Called ``op(query, key, value,
    key_padding_mask=None, need_weights=True, attn_mask=None)`` with (L, B, E) inputs it returns
    ``(output, None)``.

    ``embed_dim``, ``num_heads``, ``dropout``, ``bias``, ``add_bias_kv``, ``add_zero_attn``,
    ``kdim``, ``vdim``, ``key_padding_mask_mode`` and ``attn_mask_mode`` are as those of
    :class:`kernlib.nn.BlockSparseMultiheadAttention`. ``attn_mask_mode`` is "mul" by default, by
    which an ``attn_mask`` is 0 or False where nothing is seen.

    Raises TypeError and ValueError for other arguments, NotImplementedError for ``add_bias_kv`` and
    ``add_zero_attn``.
    """

    SparsityInfo = SparsityInfo
    __signature__ = signature(_arguments)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        sparsity: Sparsity | torch.Tensor | None = None,
        *arguments: Any,
        layout: torch.Tensor | Layout | None = None,
        block: int | None = None,
        **named: Any,
    ):
        if layout is None and isinstance(sparsity, torch.Tensor):
            sparsity, layout = None, sparsity
        if layout is not None:
            if sparsity is not None:
                raise TypeError("sparsity and layout both say what is stored: give either")
            if block is None and arguments:
                block, *arguments = arguments
            sparsity = OnDevices(layout, block).on_any()
        elif block is not None:
            raise TypeError(
                "block goes with a layout, a tensor; a sparsity has its own: leave it out"
            )
        if not isinstance(sparsity, (SparsityInfo, Layout)):
            raise TypeError(
                "sparsity must be a SparsityInfo, a Layout, or a tensor of 0 and 1 with its block "
                f"behind it, got {shown(sparsity)}"
            )
        stored = sparsity if isinstance(sparsity, Layout) else _OfLengths(sparsity, num_heads)
        options = _arguments(embed_dim, num_heads, stored, *arguments, **named)
        super().__init__(block=None, layout=options.pop("sparsity"), **options)
        self.sparsity = sparsity


@hinted
class DeepSpeedSparseSelfAttention(nn.Module):
    """Attention of projected queries, keys and values, called ``op(query, key, value, rpe=None,
    key_padding_mask=None, attn_mask=None)`` with [B, H, L, D]; a ``key`` [B, H, D, L], transposed
    already, is taken where its last sizes say so. Scores are multiplied by ``1 / sqrt(D)``.

    - ``embed_dim``: of the model, H * D; it is kept and not used. ``num_heads``: H.
    - ``mode``, ``block``, ``stride``, ``unidirectional``, ``numverts``, ``vertsize``: of the
      layout, as those of :class:`SparsityInfo`.
    - ``key_padding_mask_mode``, ``attn_mask_mode``: "add" or "mul". Masks are those of
      :func:`kernlib.nn.block_sparse_attention`.

    Raises TypeError and ValueError for other arguments.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        mode: str = "fixed",
        block: int = 16,
        stride: int = 64,
        unidirectional: bool = False,
        numverts: int = 1,
        vertsize: int = 1,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
    ):
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.mode, self.block, self.stride = mode, block, stride
        self.unidirectional, self.numverts, self.vertsize = unidirectional, numverts, vertsize
        self.key_padding_mask_mode, self.attn_mask_mode = key_padding_mask_mode, attn_mask_mode
        self._made: dict[tuple, Layout] = {}

    def layout_of(self, query_length: int, key_length: int, device: torch.device) -> Layout:
        """The layout of a ``query_length`` and a ``key_length`` on a ``device``, made once. Raises
        what :meth:`SparsityInfo.layout` does."""
        key = query_length, key_length, device
        if key not in self._made:
            info = SparsityInfo(
                self.mode, self.block, self.stride, self.unidirectional, self.numverts,
                self.vertsize,
            )  # fmt: skip
            self._made[key] = info.layout(self.num_heads, query_length, key_length).to(device)
        return self._made[key]

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rpe: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[B, H, L, D]."""
        check_dense(("query", "key", "value"), query=query, key=key, value=value)
        for name, t in (("query", query), ("key", key), ("value", value)):
            if t.dim() != 4 or t.shape[1] != self.num_heads:
                raise ValueError(
                    f"{name} must be [B, {shown(self.num_heads)}, L, D], got {tuple(t.shape)}"
                )
        length, size = value.shape[-2], query.shape[-1]
        transposed = key.shape[-2:] == (size, length) and size != length
        layout = self.layout_of(query.shape[-2], length, query.device)
        return block_sparse_attention(
            query, key, value, layout, rpe=rpe, key_padding_mask=key_padding_mask,
            attn_mask=attn_mask, key_padding_mask_mode=self.key_padding_mask_mode,
            attn_mask_mode=self.attn_mask_mode, key_transposed=transposed,
        )  # fmt: skip


def make_layout(
    num_heads: int,
    num_blocks: int,
    mode: str,
    block_stride: int,
    unidirectional: bool,
    numverts: int,
    vertsize: int,
) -> torch.Tensor:
    """The layout of attention over ``num_blocks`` blocks for ``num_heads`` heads, as int64
    [num_heads, num_blocks, num_blocks]; sizes are counted in blocks: ``block_stride`` is a stride
    of so many. ``mode``, ``unidirectional``, ``numverts`` and ``vertsize`` are as those of
    :class:`SparsityInfo`. Raises what :meth:`SparsityInfo.layout` does. Where Torch-Blocksparse
    indexes out of range, in a last window that is cut, and sees columns behind the diagonal, this
    does not."""
    num_heads = checked_count("num_heads", num_heads, 1)
    length = 16 * checked_count("num_blocks", num_blocks, 0)
    stride = 16 * checked_count("block_stride", block_stride, 1)
    info = SparsityInfo(mode, 16, stride, unidirectional, numverts, vertsize)
    return info.layout(num_heads, length, length).mask().long()


def replace_mha(model: nn.Module, info: Sparsity) -> None:
    """Swap the ``nn.MultiheadAttention`` layers of ``model`` for :class:`MultiheadAttention` in
    place; ``info`` is the ``sparsity`` of the new ones. Parameters, dtype, device, ``batch_first``
    and training mode stay, and masks mean what they meant: both are added. Raises what the new
    layers do, with ``model`` as it was."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.MultiheadAttention):
        raise TypeError("model is an nn.MultiheadAttention itself, in no place to be swapped")
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()  # all names of one that has several
        if type(child) is nn.MultiheadAttention
    ]
    new = {child: _replacement(child, info) for _, _, child in places}
    for parent, name, child in places:
        setattr(parent, name, new[child])
    for part in model.modules():
        if isinstance(part, nn.TransformerEncoder) and any(
            isinstance(layer, MultiheadAttention) for layer in part.modules()
        ):
            part.use_nested_tensor = False  # for padded inputs, in evaluation


def _replacement(layer: nn.MultiheadAttention, info: Sparsity) -> MultiheadAttention:
    weight = layer.out_proj.weight
    new = MultiheadAttention(
        layer.embed_dim, layer.num_heads, info, layer.dropout, layer.in_proj_bias is not None,
        layer.bias_k is not None, layer.add_zero_attn, layer.kdim, layer.vdim, "add", "add",
    )  # fmt: skip
    new = new.to(weight.device, weight.dtype)
    new.batch_first = layer.batch_first
    new.load_state_dict(layer.state_dict())
    for mine, theirs in zip(new.parameters(), layer.parameters(), strict=True):
        mine.requires_grad_(theirs.requires_grad)
    return new.train(layer.training)

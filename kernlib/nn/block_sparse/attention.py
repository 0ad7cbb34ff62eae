"""Attention over the stored blocks of a layout, as a function and in place of
``nn.MultiheadAttention``."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.compiler import is_dynamo_compiling

from kernlib.descriptors.base import as_int, check_flag, real, shown
from kernlib.families.blocksparse.attention.arguments import checked_dropout
from kernlib.families.blocksparse.checks import check_layout
from kernlib.families.blocksparse.conditions import BEYOND_CAUSAL, warn_of_whole_blocks
from kernlib.families.blocksparse.contents.given import Mask, checked_device
from kernlib.families.blocksparse.contents.sizes import checked_count
from kernlib.families.blocksparse.descriptor import BlockSparseMatmul
from kernlib.families.blocksparse.functions import dsd, sdd
from kernlib.families.blocksparse.layout import Layout
from kernlib.families.blocksparse.softmax.functions import softmax
from kernlib.hints.calls import hinted
from kernlib.nn import traced
from kernlib.nn.block_sparse.fused import fused, takes
from kernlib.nn.block_sparse.weight import check_kind, checked_dtype
from kernlib.nn.kronecker_sparse_algorithms import autocasts
from kernlib.runtime.arguments import check_broadcast
from kernlib.runtime.tensors import broadcast_shapes, check_dense

MODES = ("add", "mul")


def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    scale: float | torch.Tensor | None = None,
    *,
    rpe: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    key_padding_mask_mode: str = "add",
    attn_mask_mode: str = "add",
    causal: bool = False,
    key_transposed: bool = False,
    precision: str | None = None,
    dropout_p: float = 0.0,
    seed: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """``softmax(q k^T * scale + rpe + masks) v`` over the stored blocks of a layout of (Lq, Lk).

    - ``q`` (..., H, Lq, D), ``k`` (..., H, Lk, D), or with ``key_transposed`` (..., H, D, Lk), and
      ``v`` (..., H, Lk, Dv) of one dtype, of any strides; the result is (..., H, Lq, Dv).
    - ``layout``: of H heads, or without heads one for all.
    - ``scale``: a number or a tensor of shape (), by default ``1 / sqrt(D)``.
    - ``rpe``: added to scores, broadcasts to (Z, H, Lq, Lk), Z being the dimensions in front of H.
    - ``key_padding_mask`` broadcasts to (Z, Lk), ``attn_mask`` is (Lq, Lk);
      ``key_padding_mask_mode`` and ``attn_mask_mode`` are ``"add"`` or ``"mul"``, as those of
      :func:`kernlib.blocksparse.softmax`. In a mask of bools True takes part. ``causal=True``
      leaves out columns behind the row. Rows that nothing is left of are 0, and so are their
      gradients.
    - ``precision``: of float32, as in :class:`kernlib.BlockSparseMatmul`.
    - ``dropout_p``, ``seed``: the part of the probabilities that is dropped, by a counter, as those
      of :func:`kernlib.blocksparse.attention`.

    float16 and bfloat16 on a GPU, and all with a dropout, are computed as
    :func:`kernlib.blocksparse.attention` is, half types by one kernel; of others scores and
    probabilities are stored, three kernels one after the other. The operation is that of
    Torch-Blocksparse, after Child et al., "Generating Long Sequences with Sparse Transformers"
    (2019).

    Raises ValueError for shapes that do not fit the layout and unknown modes, TypeError for other
    dtypes, mixed devices and what is no Layout.

    Example:
        >>> layout = kl.blocksparse.Layout(torch.eye(4) > 0, 16)  # blocks on the diagonal
        >>> q, v = torch.zeros(1, 2, 64, 8), torch.randn(1, 2, 64, 8)
        >>> y = kl.nn.block_sparse_attention(q, q, v, layout)  # all scores are equal
        >>> torch.allclose(y[..., :16, :], v[..., :16, :].mean(-2, keepdim=True), atol=1e-6)
        True
    """
    check_dense(("q", "k", "v"), q=q, k=k, v=v)
    check_flag("key_transposed", key_transposed)
    _check_sizes(q, k, v, layout, key_transposed)
    modes = {"key_padding_mask": key_padding_mask_mode, "attn_mask": attn_mask_mode}
    for name, mode in modes.items():
        _check_mode(f"{name}_mode", mode)
    if scale is None:
        scale = 1.0 / math.sqrt(max(1, q.shape[-1]))
    is_padded = key_padding_mask is not None
    told = causal is not False and (is_padded or layout.condition != BEYOND_CAUSAL)
    unsaid = not told and rpe is None and attn_mask is None
    if unsaid and layout.condition and not is_dynamo_compiling():
        warn_of_whole_blocks(layout.condition)
    if checked_dropout(dropout_p) != 0.0 or takes(q, k, v, key_transposed):
        BlockSparseMatmul("sdd", precision=precision)  # raises for a wrong precision
        tensors = {"rpe": rpe, "key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        masks = {name: mask for name, mask in tensors.items() if mask is not None}
        rest = {"dropout_p": dropout_p, "seed": seed} if dropout_p != 0.0 else {}
        k = k.mT if key_transposed else k
        return fused(q, k, v, layout, scale, masks, modes, causal=causal, **rest)
    scores = sdd(q, k, layout, transpose_b=not key_transposed, precision=precision)
    if key_padding_mask is not None and layout.heads is None:
        check_dense((), key_padding_mask=key_padding_mask)
        lead = scores.shape[:-4]  # a batch, in front of the heads, which are of Z here
        check_broadcast((*lead, layout.shape[1]), "key_padding_mask", key_padding_mask)
        if key_padding_mask.dim() > 1:
            key_padding_mask = key_padding_mask.unsqueeze(-2)
    weights = softmax(
        scores, layout, scale, rpe, key_padding_mask, attn_mask, key_padding_mask_mode,
        attn_mask_mode, causal,
    )  # fmt: skip
    return dsd(weights, v, layout, precision=precision)


def _check_mode(name: str, mode) -> None:
    """Raises ValueError."""
    if not isinstance(mode, str) or mode not in MODES:
        raise ValueError(f"{name} must be one of {MODES}, got {shown(mode)}")


def _check_sizes(q, k, v, layout, key_transposed: bool) -> None:
    """Raises TypeError and ValueError."""
    check_layout(layout)
    (rows, cols), heads = layout.shape, layout.heads
    for name, t, axis, size, end in (
        ("q", q, -2, rows, "{}, D"),
        ("k", k, -1 if key_transposed else -2, cols, "D, {}" if key_transposed else "{}, D"),
        ("v", v, -2, cols, "{}, Dv"),
    ):
        if t.dim() < 3 or t.shape[axis] != size:
            end = end.format(size)  # not before, as Dynamo would make a constant of a symbol
            raise ValueError(
                f"{name} must be (..., H, {end}) for a layout of {layout.text}, got "
                f"{tuple(t.shape)}"
            )
        if heads is not None and t.shape[-3] not in (1, heads):
            raise ValueError(f"{name} must have {heads} heads as layout does, got {t.shape[-3]}")
        if t.device != q.device or (t.dtype != q.dtype and not autocasts(q.device)):
            raise TypeError(
                f"{name} must be {q.dtype} on {q.device} as q is, got {t.dtype} on {t.device}"
            )
    depth = k.shape[-2 if key_transposed else -1]
    if depth != q.shape[-1]:
        raise ValueError(f"k must have D = {q.shape[-1]} as q has, got {depth}")
    leads = [tuple(t.shape[:-2]) for t in (q, k, v)]
    if not leads[0] == leads[1] == leads[2]:
        try:
            broadcast_shapes(*leads)
        except RuntimeError:
            raise ValueError(
                f"q, k and v must broadcast in front of lengths and features, got {leads}; "
                "kernlib.blocksparse.attention takes fewer heads of k and v"
            ) from None


@hinted
class BlockSparseMultiheadAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` over the stored blocks of a layout.

    - ``embed_dim``, ``num_heads``, ``bias``, ``kdim``, ``vdim``, ``batch_first``, ``device``,
      ``dtype``: as those of ``nn.MultiheadAttention``, whose parameters these are, drawn in the
      same order: either's ``state_dict`` loads into the other.
    - ``layout``: a :class:`kernlib.blocksparse.Layout` of (query length, key length), of
      ``num_heads`` heads or without heads; or its mask, of blocks of size ``block``; or a function
      of the two lengths that makes one, which each module asks once a pair of lengths. It is no
      part of ``state_dict``, moves with the layer, and several modules may share it.
    - ``block``: the size of a mask's blocks, an int or two (rows, columns); None for other layouts.
    - ``dropout``: the part of the probabilities that is dropped in training, 0 to 1, without 1.
    - ``add_bias_kv``, ``add_zero_attn``: must be False, else NotImplementedError is raised: they
      would change the length of keys.
    - ``key_padding_mask_mode``, ``attn_mask_mode``: ``"add"`` for masks as
      ``nn.MultiheadAttention`` has them: floats are added, and of bools True is left out. ``"mul"``
      for factors: 0 and False are left out, anything else takes part.
    - ``precision``: of float32, as in :class:`kernlib.BlockSparseMatmul`.

    ``layer(query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None,
    average_attn_weights=True, is_causal=False, rpe=None)`` with (L, B, E) inputs, or (B, L, E) if
    ``batch_first``, or without B, returns ``(output, None)``: weights are never returned. Keys and
    values of other lengths and sizes than queries are taken. ``is_causal`` leaves out columns
    behind the row, with or without an ``attn_mask``, which is (Lq, Lk). ``rpe`` broadcasts to
    (B, H, Lq, Lk) and is added. Rows that masks leave nothing of have an attention of 0, where
    ``nn.MultiheadAttention`` has NaN.

    The layer is Torch-Blocksparse's ``MultiheadAttention``, whose ``attn_mask_mode`` is "mul" by
    default.

    Raises ValueError for sizes, lengths and heads that are not the layout's, TypeError for
    arguments of other kinds, NotImplementedError for ``add_bias_kv`` and ``add_zero_attn``.

    Example:
        >>> layout = kl.blocksparse.sliding_window(64, 16, 16)
        >>> layer = kl.nn.BlockSparseMultiheadAttention(32, 4, layout, batch_first=True)
        >>> x = torch.randn(2, 64, 32)
        >>> layer(x, x, x)[0].shape, layer.layout.shape
        (torch.Size([2, 64, 32]), (64, 64))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        layout: Layout | Mask | Callable[[int, int], Layout],
        block: int | tuple[int, int] | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "add",
        batch_first: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        precision: str | None = None,
    ):
        dropout = _checked_rate(dropout)
        _refuse(add_bias_kv, add_zero_attn)
        _check_sizes_of(embed_dim, num_heads, kdim, vdim)
        check_flag("bias", bias)
        check_flag("batch_first", batch_first)
        device = None if device is None else checked_device(device)
        modes = {"key_padding_mask_mode": key_padding_mask_mode, "attn_mask_mode": attn_mask_mode}
        for name, mode in modes.items():
            _check_mode(name, mode)
        dtype = checked_dtype(dtype)
        BlockSparseMatmul("sdd", precision=precision)  # raises for a wrong precision
        source = _as_layout(layout, block, num_heads)
        super().__init__(
            embed_dim, num_heads, dropout, bias=bias, kdim=kdim, vdim=vdim,
            batch_first=batch_first, device=device, dtype=dtype,
        )  # fmt: skip
        # Layers of transformers that find True here multiply by the weights themselves.
        self._qkv_same_embed_dim = False
        self.key_padding_mask_mode, self.attn_mask_mode = key_padding_mask_mode, attn_mask_mode
        self.precision = precision
        self._layout = source if isinstance(source, Layout) else None
        self._of_lengths = None if self._layout is source else source
        self._made: dict[tuple[int, int], Layout] = {}  # of lengths
        self._settle()

    @property
    def layout(self) -> Layout | None:
        """Which blocks are stored, None where a function makes it of lengths: see
        :meth:`layout_of`. Its ``update_`` changes them."""
        return self._layout

    def layout_of(self, query_length: int, key_length: int) -> Layout:
        """The layout of a ``query_length`` and a ``key_length``, on the layer's device. Raises
        ValueError where there is none, TypeError where the function makes something else.

        Example:
            >>> layer = kl.nn.BlockSparseMultiheadAttention(
            ...     32, 4, lambda rows, cols: kl.blocksparse.dense(rows, cols, 16))
            >>> layer.layout_of(32, 64).shape
            (32, 64)
        """
        query_length = _checked_length("query_length", query_length)
        key_length = _checked_length("key_length", key_length)
        layout, key = self._layout, (query_length, key_length)
        if layout is None:
            layout = self._made.get(key)
        if layout is None:
            new = self._of_lengths(*key)
            if not isinstance(new, Layout):
                raise TypeError(f"layout{key} must be a Layout, got {type(new).__name__}")
            _check_layout_heads(new, self.num_heads)
            layout = self._made[key] = new
            self._settle()
            layout = self._made[key]
        if layout.shape != key:
            raise ValueError(
                f"query and key have lengths {shown(key)}, and the layout is of {layout.shape}; "
                "pad them, or make another layout"
            )
        return layout.to(self.out_proj.weight.device)  # itself but for meta

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        rpe: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """See the class."""
        if isinstance(query, traced.Proxy):
            return traced.recorded(
                self, query, key, value, key_padding_mask, need_weights, attn_mask,
                average_attn_weights, is_causal, rpe,
            )  # fmt: skip
        check_dense(("query", "key", "value"), query=query, key=key, value=value)
        _check_inputs(self, query, key, value)
        check_flag("is_causal", is_causal)
        query, key, value = _recordable(query, key, value)
        axis = 0 if query.dim() == 2 or not self.batch_first else 1
        layout = self.layout_of(query.shape[axis], key.shape[axis])
        q, k, v = (self._heads(t) for t in self._projected(query, key, value))
        key_mask = _as_softmax("key_padding_mask", key_padding_mask, self.key_padding_mask_mode)
        mask = _as_softmax("attn_mask", attn_mask, self.attn_mask_mode)
        out = block_sparse_attention(
            q, k, v, layout, rpe=rpe, key_padding_mask=key_mask, attn_mask=mask,
            key_padding_mask_mode=self.key_padding_mask_mode, attn_mask_mode=self.attn_mask_mode,
            causal=is_causal, precision=self.precision,
            dropout_p=self.dropout if self.training else 0.0,
        )  # fmt: skip
        out = out.transpose(-3, -2).flatten(-2)  # (B, L, E), or without B
        if query.dim() == 3 and not self.batch_first:
            out = out.transpose(0, 1)
        return F.linear(out, self.out_proj.weight, self.out_proj.bias), None

    def _projected(self, query, key, value) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values of the heads, side by side in the last dimension."""
        weight, bias = self.in_proj_weight, self.in_proj_bias
        if weight is None:
            biases = (None,) * 3 if bias is None else bias.chunk(3)
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        elif query is key and key is value:
            return F.linear(query, weight, bias).chunk(3, -1)
        else:
            biases = (None,) * 3 if bias is None else bias.chunk(3)
            weights = weight.chunk(3)
        inputs = query, key, value
        return tuple(F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """(L, B, E) or (B, L, E) as (B, H, L, D), a view; (L, E) as (H, L, D)."""
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        if x.dim() == 4 and not self.batch_first:
            x = x.transpose(0, 1)
        return x.transpose(-3, -2)

    def _apply(self, fn: Callable, recurse: bool = True):
        super()._apply(fn, recurse)
        self._settle()
        return self

    def _settle(self) -> None:
        """Move layouts to where the weights are, but to meta, where their contents would be
        lost."""
        place = self.out_proj.weight.device
        if place.type == "meta":
            return
        if self._layout is not None:
            self._layout = self._layout.to(place)
        self._made = {key: layout.to(place) for key, layout in self._made.items()}


def _checked_length(name: str, length) -> int:
    """Raises TypeError for what is no number of rows, ValueError for one below 0."""
    if isinstance(length, torch.SymInt):
        return length
    length = as_int(name, length)
    if length < 0:
        raise ValueError(f"{name} must be at least 0, got {shown(length)}")
    return length


def _recordable(query, key, value) -> tuple[torch.Tensor, ...]:
    """The inputs, with copies of inference-mode tensors where a gradient may keep them. A tensor
    passed twice stays one."""
    # Dynamo cannot ask a tensor for that, and hands no such tensor to a program that records.
    if is_dynamo_compiling() or not torch.is_grad_enabled():
        return query, key, value
    copies = {id(x): x.clone() if x.is_inference() else x for x in (query, key, value)}
    return copies[id(query)], copies[id(key)], copies[id(value)]


def _checked_rate(dropout) -> float:
    """Raises TypeError and ValueError."""
    number = real(dropout)
    if number is None:
        raise TypeError(f"dropout must be a number from 0 to 1, without 1, got {shown(dropout)}")
    if not 0 <= number < 1:
        raise ValueError(f"dropout must be a number from 0 to 1, without 1, got {shown(dropout)}")
    return float(number)


def _refuse(add_bias_kv, add_zero_attn) -> None:
    for name, value in (("add_bias_kv", add_bias_kv), ("add_zero_attn", add_zero_attn)):
        check_flag(name, value)
        if value:
            raise NotImplementedError(
                f"{name} is not supported: it would change the length of keys, which is the "
                "layout's"
            )


def _check_sizes_of(embed_dim, num_heads, kdim, vdim) -> None:
    """Raises TypeError and ValueError."""
    checked_count("embed_dim", embed_dim, 1)
    checked_count("num_heads", num_heads, 1)
    for name, size in (("kdim", kdim), ("vdim", vdim)):
        if size is not None:
            checked_count(name, size, 1)
    if embed_dim % num_heads:
        raise ValueError(
            f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}"
        )


def _as_layout(layout, block, heads: int) -> Layout | Callable:
    """A layout, or what makes one of lengths. Raises TypeError and ValueError."""
    is_layout = isinstance(layout, Layout)
    if block is not None and (is_layout or callable(layout)):
        raise ValueError(
            "block goes with a mask; a Layout, and what makes one, has its own: leave it out"
        )
    if not is_layout and callable(layout):
        return layout
    if not is_layout:
        if isinstance(layout, (int, float, str)) or layout is None:
            raise TypeError(
                "layout must be a Layout, a mask of blocks, or what makes a Layout of two lengths, "
                f"got {shown(layout)}"
            )
        if block is None:
            raise ValueError("block must be given with a mask: the size of its blocks")
        layout = Layout(layout, block)
    _check_layout_heads(layout, heads)
    return layout


def _check_layout_heads(layout: Layout, heads: int) -> None:
    if layout.heads not in (None, heads):
        raise ValueError(f"layout must have num_heads = {heads} heads, or none, got {layout.heads}")


def _check_inputs(layer: nn.MultiheadAttention, query, key, value) -> None:
    """Raises TypeError and ValueError."""
    inputs = {"query": query, "key": key, "value": value}
    order = "(B, L, {0}) or (L, {0})" if layer.batch_first else "(L, B, {0}) or (L, {0})"
    sizes = layer.embed_dim, layer.kdim, layer.vdim
    for (name, x), size in zip(inputs.items(), sizes, strict=True):
        if x.dim() not in (2, 3) or x.dim() != query.dim() or x.shape[-1] != size:
            raise ValueError(f"{name} must be {order.format(size)}, got {tuple(x.shape)}")
        check_kind(name, x, layer.out_proj.weight)
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"key and value must have one length and batch, got {tuple(key.shape)} and "
            f"{tuple(value.shape)}"
        )
    batch = 0 if layer.batch_first else 1
    if query.dim() == 3 and query.shape[batch] != key.shape[batch]:
        raise ValueError(
            f"query and key must have one batch, got {tuple(query.shape)} and {tuple(key.shape)}"
        )


def _as_softmax(name: str, mask, mode: str) -> torch.Tensor | None:
    """A mask as softmax takes it: of bools True takes part there."""
    check_dense((), **{name: mask})
    if mask is None or mask.dtype != torch.bool or mode == "mul":
        return mask
    return ~mask

"""Block-sparse attention with the arguments of torch's ``scaled_dot_product_attention``."""

from __future__ import annotations

import torch

from kernlib.descriptors.base import check_flag, shown
from kernlib.families.blocksparse.attention.arguments import CAPTURED_TYPES
from kernlib.families.blocksparse.attention.functions import attention
from kernlib.families.blocksparse.checks import check_dtype, check_layout
from kernlib.families.blocksparse.layout import Layout
from kernlib.runtime.arguments import check_broadcast
from kernlib.runtime.tensors import check_dense, is_of

NAMES = ("query", "key", "value")


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    layout: Layout,
    debug: bool = False,
) -> torch.Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` over the stored blocks of a layout.

    - ``query`` (..., H, L, E), ``key`` (..., HK, S, E) and ``value`` (..., HK, S, EV) of one dtype
      and the same dimensions in front; HK is H, or with ``enable_gqa`` divides it.
    - ``attn_mask``: broadcasts to (..., H, L, S); of bools True takes part, floats are added. Or a
      ``torch.nn.attention.bias.CausalBias`` of L and S: row i sees the columns up to i, of a lower
      right one those up to i + S - L. Unlike torch's a mask may stand beside ``is_causal``, by
      which row i sees the columns up to i.
    - ``dropout_p``, from 0 to 1 without 1, is applied whenever it is above 0, as torch's is.
    - ``scale``: a number, 1 / sqrt(E) by default.
    - ``layout``: as that of :func:`kernlib.blocksparse.attention`, whose rules this has for queries
      that no key is left of.
    - ``debug=True`` writes what runs to stderr.

    The result is (..., H, L, EV). Raises ValueError for shapes, devices and a layout that do not
    fit each other, TypeError for other dtypes and kinds of arguments; each names the argument.

    Example:
        >>> q, k, v = torch.randn(3, 2, 4, 64, 16)
        >>> layout = kl.blocksparse.causal(64, block=16)
        >>> attend = kl.blocksparse.scaled_dot_product_attention
        >>> out = attend(q, k, v, is_causal=True, layout=layout)
        >>> dense = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        >>> torch.allclose(out, dense, atol=1e-5)
        True
    """
    tensors = {"query": query, "key": key, "value": value}
    check_dense(NAMES, **tensors)
    check_layout(layout)
    check_flag("is_causal", is_causal)
    check_flag("enable_gqa", enable_gqa)
    _check_shapes(tensors, enable_gqa)
    *lead, heads, rows, _ = query.shape
    batched = {name: _one_batch(t) for name, t in tensors.items()}
    rest = {"scale": scale, "causal": is_causal, "dropout_p": dropout_p, "debug": debug}
    if attn_mask is not None and is_of(attn_mask, "CausalBias"):
        rest |= _causal(attn_mask, rows, key.shape[-2], query.device)
    elif attn_mask is not None:
        shape = (*lead, heads, rows, key.shape[-2])
        rest |= _masked(attn_mask, shape, query)
    _check_kinds(tensors)
    out = attention(batched["query"], batched["key"], batched["value"], layout, **rest)
    return out.reshape(*lead, heads, rows, value.shape[-1])


def _check_shapes(tensors: dict, enable_gqa: bool) -> None:
    """Raises ValueError."""
    query, key, value = tensors.values()
    for name, t in tensors.items():
        if t.dim() < 3:
            raise ValueError(f"{name} must be (..., heads, length, features), got {tuple(t.shape)}")
    lead = tuple(query.shape[:-3])
    for name, t in (("key", key), ("value", value)):
        if tuple(t.shape[:-3]) != lead:
            raise ValueError(f"{name} must have {lead} in front as query has, got {tuple(t.shape)}")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"key must have {query.shape[-1]} features as query has, got {key.shape[-1]}"
        )
    if value.shape[-3:-1] != key.shape[-3:-1]:
        raise ValueError(
            f"value must have heads and length of key, {tuple(key.shape[-3:-1])}, got "
            f"{tuple(value.shape[-3:-1])}"
        )
    heads, key_heads = query.shape[-3], key.shape[-3]
    if heads != key_heads and not (enable_gqa and key_heads and heads % key_heads == 0):
        advice = "a number that divides it" if enable_gqa else "with enable_gqa=True a part of them"
        raise ValueError(f"key must have {heads} heads as query has, or {advice}, got {key_heads}")


def _check_kinds(tensors: dict) -> None:
    """Raises TypeError and ValueError; autocast may make one dtype of several."""
    query = tensors["query"]
    casts = query.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(query.device.type)
    for name, t in tensors.items():
        check_dtype(name, t)
        if t.dtype != query.dtype and not casts:
            raise TypeError(f"{name} must be {query.dtype} as query is, got {t.dtype}")
        if t.device != query.device:
            raise ValueError(
                f"{name} must be on the device of query, {query.device}, got {t.device}"
            )


def _one_batch(t: torch.Tensor) -> torch.Tensor:
    """With one dimension in front of the last three."""
    return t.unsqueeze(0) if t.dim() == 3 else t.flatten(0, -4)


def _causal(bias, rows: int, cols: int, device: torch.device) -> dict:
    """The arguments of attention for a CausalBias, whose memory holds nothing. Raises
    ValueError."""
    if (bias.seq_len_q, bias.seq_len_kv) != (rows, cols):
        raise ValueError(
            f"attn_mask must be a CausalBias of {rows} queries and {cols} keys, got one of "
            f"{bias.seq_len_q} and {bias.seq_len_kv}"
        )
    shift = cols - rows if bias.variant.name == "LOWER_RIGHT" else 0
    if shift == 0:
        return {"causal": True}
    if shift > 0:
        return {"window": (None, shift)}
    # A window has no sides below 0.
    before = torch.full((), shift, dtype=torch.int64, device=device)
    return {"mask": "col <= row + before", "before": before}


def _masked(mask, shape: tuple[int, ...], query: torch.Tensor) -> dict:
    """The arguments of attention for a mask. Raises TypeError and ValueError."""
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"attn_mask must be a tensor, got {shown(mask)}")
    check_dense(("attn_mask",), attn_mask=mask)
    if mask.dtype != torch.bool and (
        mask.dtype not in CAPTURED_TYPES or not mask.is_floating_point()
    ):
        raise TypeError(f"attn_mask must hold bools or floats, got {mask.dtype}")
    if mask.device != query.device:
        raise ValueError(
            f"attn_mask must be on the device of query, {query.device}, got {mask.device}"
        )
    check_broadcast(shape, "attn_mask", mask)
    lead = shape[:-3]
    mask = mask.reshape(*(1,) * (len(shape) - mask.dim()), *mask.shape)
    if len(lead) > 1:  # batches of batches
        mask = mask.expand(*lead, *mask.shape[-3:])
    mask = _one_batch(mask)
    text = {"mask": "attn_mask"} if mask.dtype == torch.bool else {"score": "v + attn_mask"}
    return text | {"attn_mask": mask}

"""Attention of layers by one kernel that stores no scores: the calls that it takes, and its
arguments for their masks."""

from __future__ import annotations

import torch
from torch._C import _are_functorch_transforms_active

from kernlib.families.blocksparse.attention.functions import attention
from kernlib.families.blocksparse.layout import Layout
from kernlib.families.blocksparse.softmax.arguments import wrong_mask
from kernlib.runtime.arguments import check_broadcast
from kernlib.runtime.tensors import broadcast_shapes, check_dense

HALF_TYPES = (torch.float16, torch.bfloat16)
MOST = 256  # features of queries and values


def takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_transposed: bool) -> bool:
    """Whether one kernel computes attention: of half types on a GPU, outside of transforms of
    torch.func, where attention goes by torch and products do not."""
    if q.device.type != "cuda" or _are_functorch_transforms_active():
        return False
    casts = torch.is_autocast_enabled("cuda")
    dtype = torch.get_autocast_dtype("cuda") if casts else q.dtype
    if dtype not in HALF_TYPES or (casts and q.dtype == torch.float64):
        return False
    return max(k.shape[-2 if key_transposed else -1], v.shape[-1]) <= MOST


def fused(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    scale: float | torch.Tensor,
    masks: dict,
    modes: dict[str, str],
    **rest: object,
) -> torch.Tensor:
    """What :func:`kernlib.nn.block_sparse_attention` computes of q, k and v (..., H, L, D): with
    ``masks`` by name, rpe among them, and the modes of those that have one; ``rest`` are causal and
    a dropout. Raises TypeError and ValueError that name a mask."""
    of_layout = () if layout.heads is None else (layout.heads,)  # though all operands have one
    lead = broadcast_shapes(*(t.shape[:-2] for t in (q, k, v)), of_layout)
    *batch, heads = lead
    operands = [_flat(t.expand(*lead, *t.shape[-2:]), len(batch)) for t in (q, k, v)]
    rows, cols = q.shape[-2], k.shape[-2]
    shapes = {
        "rpe": (*batch, heads, rows, cols),
        "key_padding_mask": (*batch, cols),
        "attn_mask": (rows, cols),
    }
    captured, axes = {}, {}
    score, conditions = ["v"], []
    if isinstance(scale, torch.Tensor) and scale.requires_grad:
        captured["gain"], axes["gain"], score[0] = scale.to(q.device), (), "v * gain"
        scale = 1.0
    for name, t in masks.items():
        check_dense((name,), **{name: t})
        if name == "attn_mask" and tuple(t.shape) != shapes[name]:
            raise ValueError(wrong_mask(shapes[name], tuple(t.shape)))
        check_broadcast(shapes[name], name, t)
        captured[name], axes[name] = _captured(name, t, shapes[name], len(batch))
        if t.dtype == torch.bool:
            conditions.append(name)
        elif modes.get(name, "add") == "mul":
            conditions.append(f"{name} != 0")
        else:
            score.append(name)
    out = attention(
        *operands, layout, scale=scale, axes=axes,
        score=" + ".join(score) if score != ["v"] else None,
        mask=" and ".join(conditions) or None, **rest, **captured,
    )  # fmt: skip
    return out.reshape(*lead, rows, v.shape[-1])


def _flat(t: torch.Tensor, batch: int) -> torch.Tensor:
    """With so many dimensions in front as one."""
    return t.unsqueeze(0) if not batch else t.flatten(0, batch - 1)


def _captured(name: str, t: torch.Tensor, shape: tuple[int, ...], batch: int) -> tuple:
    """A mask as a captured tensor, and its axes."""
    if name == "attn_mask":
        return t, ("row", "col")
    t = t.reshape(*(1,) * (len(shape) - t.dim()), *t.shape)
    if batch > 1:
        t = t.expand(*shape[:batch], *t.shape[batch:])
    axes = ("batch", "col") if name == "key_padding_mask" else ("batch", "head", "row", "col")
    return _flat(t, batch), axes

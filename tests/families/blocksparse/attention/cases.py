"""Block-sparse attention by its formula in float64, on whole matrices of logits."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from kernlib.families.blocksparse.attention import dropout
from kernlib.families.blocksparse.layout import Layout
from kernlib.lowering.arithmetic import ceil_div

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
GATES = {F64: 1e-13, F32: 2e-6, F16: 2e-3, BF16: 1.6e-2}
LOWEST = -torch.inf


class Shape(NamedTuple):
    """Of a call: (B, H, LQ, E), (B, HK, LK, E) and (B, HK, LK, EV), and the layout's block."""

    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    queries: int = 50
    keys: int = 70
    features: int = 8
    values: int = 5
    block: tuple[int, int] = (16, 32)

    @property
    def grid(self) -> tuple[int, int]:
        return ceil_div(self.queries, self.block[0]), ceil_div(self.keys, self.block[1])

    def layout(self, heads: int | None = None, density: float = 0.5, spare: int = 2) -> Layout:
        """A random one, whose first row of blocks is empty and whose last is full."""
        mask = torch.rand(*(() if heads is None else (heads,)), *self.grid) < density
        mask[..., :1, :], mask[..., -1:, :] = False, True
        return Layout(mask, self.block, capacity=int(mask.sum()) + spare)

    def dense(self) -> Layout:
        return Layout(torch.ones(self.grid, dtype=torch.bool), self.block)

    def tensors(self, dtype=F64, grad: bool = False) -> tuple[torch.Tensor, ...]:
        """q, k and v."""
        shapes = (
            (self.batch, self.heads, self.queries, self.features),
            (self.batch, self.kv_heads, self.keys, self.features),
            (self.batch, self.kv_heads, self.keys, self.values),
        )
        made = (torch.randn(*shape, dtype=F64).to(dtype) for shape in shapes)
        return tuple(t.requires_grad_(grad) for t in made)


def formula(
    q, k, v, layout: Layout, *, scale=None, causal=False, window=None, score=None, mask=None,
    q_lengths=None, kv_lengths=None, dropout_p=0.0, seed=None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """out and lse in float64. ``score`` takes logits, batch, head, row and column, ``mask`` the
    last four, all of which broadcast to (B, H, LQ, LK)."""
    q, k, v = q.double(), k.double(), v.double()
    batch, heads, queries, features = q.shape
    keys, group = k.shape[2], heads // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = 1 / math.sqrt(features) if scale is None else float(scale)
    logits = scale * (q @ k.mT)
    b, h, i, j = (
        torch.arange(n).reshape(shape)
        for n, shape in (
            (batch, (-1, 1, 1, 1)), (heads, (-1, 1, 1)), (queries, (-1, 1)), (keys, (-1,)),
        )
    )  # fmt: skip
    if score is not None:
        logits = score(logits, b, h, i, j)
    taken = [stored(layout, batch, heads)[..., :queries, :keys]]
    if causal:
        taken.append(j <= i)
    if window is not None:
        left, right = window if isinstance(window, tuple) else (window, window)
        taken.append((j >= i - left) & (j <= i + right))
    if q_lengths is not None:
        taken.append(i < q_lengths[:, None, None, None])
    if kv_lengths is not None:
        taken.append(j < kv_lengths[:, None, None, None])
    if mask is not None:
        taken.append(mask(b, h, i, j))
    for keep in taken:
        logits = torch.where(keep, logits, LOWEST)
    alone = (logits == LOWEST).all(-1, keepdim=True)
    weights = torch.where(alone, 0.0, torch.softmax(torch.where(alone, 0.0, logits), -1))
    if dropout_p:
        keep = dropout.kept(seed, dropout_p, b * heads + h, i, j)
        weights = torch.where(keep, weights * dropout.share(dropout_p), 0.0)
    lse = torch.logsumexp(torch.where(alone, 0.0, logits), -1)
    return weights @ v, torch.where(alone[..., 0], LOWEST, lse)


def stored(layout: Layout, batch: int, heads: int) -> torch.Tensor:
    """Of each element, (B, H, rows, columns), whether it is."""
    mask = layout.mask()
    mask = mask.repeat_interleave(layout.block[0], -2).repeat_interleave(layout.block[1], -1)
    if layout.heads is None:
        return mask.expand(batch, heads, *mask.shape)
    return mask.reshape(-1, heads, *layout.shape).expand(batch, heads, *layout.shape)


def check(found: torch.Tensor, wanted: torch.Tensor, gate: float) -> None:
    """Values, and the same infinities."""
    endless = wanted == LOWEST
    assert torch.equal(found == LOWEST, endless)
    found, wanted = found.detach().double()[~endless], wanted.detach()[~endless]
    if wanted.numel():
        assert (found - wanted).abs().max() <= gate * max(1.0, float(wanted.abs().max()))

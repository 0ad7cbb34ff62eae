"""Modules whose layers read one x, as transformers names them; with fused layers and without."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from kernlib.nn import sparsify

QKV = ["q_proj", "k_proj", "v_proj"]
DENSITY = 0.4


class LlamaAttention(nn.Module):
    """As transformers has it, without positions: k and v have fewer heads than q."""

    def __init__(self, bias: bool = False):
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(64, 64, bias), nn.Linear(64, 64, bias)
        self.k_proj, self.v_proj = nn.Linear(64, 32, bias), nn.Linear(64, 32, bias)

    def forward(self, x):
        shape = (*x.shape[:-1], -1, 16)
        q = self.q_proj(x).view(shape).transpose(-2, -3)
        k = self.k_proj(x).view(shape).transpose(-2, -3).repeat_interleave(2, -3)
        v = self.v_proj(x).view(shape).transpose(-2, -3).repeat_interleave(2, -3)
        y = (torch.softmax(q @ k.mT / 4, -1) @ v).transpose(-2, -3)
        return self.o_proj(y.reshape(*x.shape[:-1], -1))


class LlamaMLP(nn.Module):
    def __init__(self, bias: bool = False):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 96, bias), nn.Linear(64, 96, bias)
        self.down_proj = nn.Linear(96, 64, bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, bias: bool = False):
        super().__init__()
        self.self_attn, self.mlp = LlamaAttention(bias), LlamaMLP(bias)

    def forward(self, x):
        x = x + self.self_attn(x)
        return x + self.mlp(x)


def block(bias: bool = False, dtype=torch.float32) -> Block:
    torch.manual_seed(0)
    return Block(bias).to(dtype)


def pair(kind=block, bias: bool = False, **options) -> tuple[nn.Module, nn.Module]:
    """A model of fused layers, and one of the same weights that are not."""
    fused, apart = kind(bias), kind(bias)
    apart.load_state_dict(fused.state_dict())
    sparsify(fused, density=DENSITY, fuse=True, **options)
    sparsify(apart, density=DENSITY, fuse=False, **options)
    return fused, apart


def inputs(*batch: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*batch, 64, generator=torch.Generator().manual_seed(seed))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def sparsified(seed: int, fuse: bool = False, bias: bool = True) -> nn.Module:
    torch.manual_seed(seed)
    model = LlamaAttention(bias)
    sparsify(model, density=DENSITY, fuse=fuse)
    return model


# What may happen to x between the calls of two layers.


def write(x):
    x.add_(1)


def write_a_view(x):
    x[0].mul_(2)

"""A model whose linear layers tests swap, and where these are."""

from __future__ import annotations

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(12, 12, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(12, 12)

    def forward(self, x):
        weights = torch.softmax(self.q_proj(x) @ self.k_proj(x).mT, -1)
        return self.o_proj(weights @ self.v_proj(x))


def model(**factory) -> nn.Sequential:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.Linear(48, 12))
    return nn.Sequential(Attention(), mlp, nn.Linear(12, 5)).to(**factory)


def names(module: nn.Module, kind: type) -> set[str]:
    return {name for name, part in module.named_modules() if type(part) is kind}

"""A training step of adapters (LoRA) on a frozen pruned llama, beside the same on the dense model.

Each linear layer of the decoder has an adapter of rank 16 beside it, ``y = base(x) + B(A x)``. A
step is one sequence of 2048 tokens in bf16, forward, cross-entropy, backward, and AdamW for the
adapters.
"""

from __future__ import annotations

import re
from functools import partial

import torch
from torch import nn

from benchmarks.programs import llama
from benchmarks.programs.problems import OURS, device_ms, in_turn, warmed

RANK, TOKENS, VOCABULARY = 16, 2048, 32000
STEPS, ROUNDS = 3, 5


class Adapted(nn.Module):
    """A frozen layer with an adapter."""

    def __init__(self, base: nn.Module, like: torch.Tensor):
        super().__init__()
        options = {"bias": False, "dtype": like.dtype, "device": like.device}
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, **options)
        self.up = nn.Linear(RANK, base.out_features, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted(model: nn.Module) -> nn.Module:
    """The model, frozen, with an adapter beside each linear layer of the decoder."""
    torch.manual_seed(1)
    model.requires_grad_(False)
    like = model.get_input_embeddings().weight
    for name, layer in list(model.named_modules()):
        if re.search(llama.PRUNED, name) and hasattr(layer, "in_features"):
            model.set_submodule(name, Adapted(layer, like))
    return model.train()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    optimizer.step()
    return loss


def measure(row: llama.Llama, device: str = "cuda") -> dict[str, float]:
    """Milliseconds of a step."""
    dtype = llama.DTYPES[row.kind]
    tokens = torch.randint(0, VOCABULARY, (1, TOKENS), device=device)
    models = {
        OURS: llama.compressed(row.layers, row.density, device, False, dtype, row.columns),
        "dense": llama.dense(row.layers, device, dtype=dtype),
    }
    calls = {}
    for name, model in models.items():
        trained = [p for p in adapted(model).parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        calls[name] = warmed(partial(step, model, optimizer, tokens))
    return in_turn(calls, device_ms, STEPS, ROUNDS)

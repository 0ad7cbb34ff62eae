"""Training steps of block-sparse MLPs with GELU in bf16, beside dense ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

import kernlib as kl
from benchmarks.programs.problems import Call, Calls, Program, step, sum_step


class Mlp(NamedTuple):
    """Features, those between the two layers, and how the weights of both are stored. ``must`` is
    how many times kernlib's time the dense MLP's has to be."""

    features: int
    between: int
    block: int
    density: float
    rows: int
    must: float

    @property
    def name(self) -> str:
        shape = f"{self.features}-{self.between} block={self.block} density={self.density}"
        return f"block-sparse mlp {shape} train bf16 eager"


MLPS = (
    Mlp(4096, 11008, 64, 0.2, 4096, 1.6),
    Mlp(4096, 11008, 128, 0.3, 8192, 2.0),
    Mlp(1024, 4096, 32, 0.25, 8192, 0.9),
)
SUM_MUST = 1.1  # times the step whose gradient is given, for the first two


def sparse(mlp: Mlp, device: str) -> nn.Module:
    options = {"density": mlp.density, "device": device, "dtype": torch.bfloat16}
    layer = partial(kl.nn.BlockSparseLinear, **options)
    up = layer(mlp.features, mlp.between, mlp.block, activation="gelu")
    return nn.Sequential(up, layer(mlp.between, mlp.features, mlp.block))


def dense(mlp: Mlp, device: str) -> nn.Module:
    options = {"device": device, "dtype": torch.bfloat16}
    up = nn.Linear(mlp.features, mlp.between, **options)
    return nn.Sequential(up, nn.GELU(), nn.Linear(mlp.between, mlp.features, **options))


def tensors(mlp: Mlp, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x, and the gradient of the result."""
    x, grad = torch.randn(2, mlp.rows, mlp.features, device=device).bfloat16().unbind()
    return x.requires_grad_(), grad


def train_calls(mlp: Mlp, device: str) -> Calls:
    x, grad = tensors(mlp, device)

    def of(make: Callable) -> Call:
        model = make(mlp, device)
        return step(partial(model, x), [x, *model.parameters()], grad)

    return Calls(of(sparse), {"dense": lambda: of(dense)})


def sum_calls(mlp: Mlp, device: str) -> Calls:
    """Steps of one model behind ``.sum()``, and with a gradient given."""
    x, grad = tensors(mlp, device)
    model = sparse(mlp, device)
    forward, leaves = partial(model, x), [x, *model.parameters()]
    return Calls(sum_step(forward, leaves), {"given": lambda: step(forward, leaves, grad)})


def programs() -> list[Program]:
    train = [
        Program(mlp.name, partial(train_calls, mlp), "ms", "dense", 1 / mlp.must) for mlp in MLPS
    ]
    sums = [
        Program(f"{mlp.name} sum", partial(sum_calls, mlp), "ms", "given", SUM_MUST)
        for mlp in MLPS[:2]
    ]
    return train + sums

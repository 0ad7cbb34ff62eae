"""Adapters (LoRA) that train beside frozen compressed layers, plain and fused, with and without
gradient checkpointing, against the same beside dense weights."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kernlib.nn import SparseLinear, sparsify
from tests.nn.fused.models import Block

RANK = 4


class Adapted(nn.Module):
    """``base(x) + up(down(x))``."""

    def __init__(self, base: nn.Module):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted(model: nn.Module) -> nn.Module:
    """The model, frozen, with an adapter beside each linear layer; the same for the same names."""
    model.requires_grad_(False)
    torch.manual_seed(1)
    for name, layer in list(model.named_modules()):
        if name.endswith("_proj"):
            model.set_submodule(name, Adapted(layer))
    return model


def dense_of(model: nn.Module) -> nn.Module:
    """The same weights, laid out densely."""
    dense = copy.deepcopy(model)
    for name, layer in list(dense.named_modules()):
        if isinstance(layer, SparseLinear) and "joint" not in name:
            dense.set_submodule(name, layer.to_linear())
    return dense


def trained(model: nn.Module, x: torch.Tensor, way: str) -> dict[str, torch.Tensor]:
    """Gradients of adapters and of x."""
    x = x.clone().requires_grad_()
    forward = model if way == "plain" else partial(checkpoint, model, use_reentrant=way != "not")
    y = forward(x)
    y.square().mean().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None} | {"x": x.grad}


@pytest.mark.parametrize("way", ("plain", "reentrant", "not"))
@pytest.mark.parametrize(
    "fuse", (False, [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]])
)
@pytest.mark.parametrize("format", ("bitmap", "u2"))
def test_adapters_train_beside_compressed_layers(format, fuse, way, seed):
    model = Block(bias=True)
    sparsify(model, density=0.5, format=format, fuse=fuse)
    dense, x = adapted(dense_of(model)), torch.randn(3, 5, 64)
    grads, expected = trained(adapted(model), x, way), trained(dense, x, way)
    assert grads.keys() == expected.keys() and len(grads) == 15
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_results_of_fused_layers_may_be_written_in_place(seed):
    """As those of others: their gradients are put together of parts, which are no views."""
    model = Block()
    sparsify(model, density=0.5, fuse=[["gate_proj", "up_proj"]])
    x = torch.randn(2, 64, requires_grad=True)
    gate, up = model.mlp.gate_proj(x), model.mlp.up_proj(x)
    expected = torch.autograd.grad((gate * 2 + up * 3).sum(), x, retain_graph=True)[0]
    gate.mul_(2)
    up.mul_(3)
    assert torch.allclose(torch.autograd.grad((gate + up).sum(), x)[0], expected, rtol=1e-4)


def test_a_fused_layer_that_is_called_behind_a_gradient_computes_anew(seed):
    """The product that it would have taken its rows of has a graph that is gone."""
    model = Block(bias=True)
    sparsify(model, density=0.5, fuse=[["gate_proj", "up_proj"]])
    x = torch.randn(2, 64, requires_grad=True)
    model.mlp.gate_proj(x).sum().backward()
    model.mlp.up_proj(x).sum().backward()
    other = x.detach().requires_grad_()
    (model.mlp.gate_proj(other).sum() + model.mlp.up_proj(other).sum()).backward()
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-5, atol=1e-6)

"""block_sparsify: the layers of a model in blocks."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from kernlib.nn.block_sparse.linear import BlockSparseLinear, block_sparsify


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.again = self.mlp[0]
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.mlp(x))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_names_and_order_of_arguments():
    assert list(inspect.signature(block_sparsify).parameters) == [
        "model", "block", "match", "density", "criterion", "per", "precision",
    ]  # fmt: skip


FILTERS = {"name": "mlp", "function": lambda name, layer: layer.out_features != 10}


@pytest.mark.parametrize("filter", FILTERS.values(), ids=FILTERS)
def test_layers_are_swapped_in_all_places(filter):
    model, x = Model().eval(), torch.randn(3, 32)
    wanted = model(x)
    head = model.head
    new = block_sparsify(model, 16, density=1.0, match=filter)
    assert sorted(new) == ["again", "mlp.0", "mlp.2"] and model.again is model.mlp[0]
    assert all(type(layer) is BlockSparseLinear and not layer.training for layer in new.values())
    assert model.head is head and torch.allclose(model(x), wanted, atol=1e-6)


def test_densities_and_criteria():
    model = Model().double()
    new = block_sparsify(model, (16, 32), density=0.5, match="mlp", per="row")
    assert new["mlp.2"].layout.mask().sum(1).tolist() == [1, 1]
    assert new["mlp.0"].layout.block == (16, 32) and new["mlp.0"].weight.dtype == torch.float64
    drawn = block_sparsify(Model(), 16, density=0.25, match="mlp.2", criterion="random")
    assert list(drawn) == ["mlp.2"] and drawn["mlp.2"].layout.nnz == 2
    model(torch.randn(2, 32).double()).sum().backward()
    assert new["mlp.2"].weight.grad.any() and new["mlp.0"].layout.nnz == 0


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({}, ValueError, "head: out_features must be a multiple of 16"),
        ({"match": "["}, ValueError, r"match '\[' is no regular expression"),
        ({"match": 3}, TypeError, "match must be None, a regular expression, or a function"),
        ({"match": nn.Linear}, TypeError, "got the class Linear: None takes every nn.Linear"),
        ({"density": 1.5, "match": "mlp"}, ValueError, "density must be from 0 to 1"),
        ({"block": 8, "match": "mlp"}, ValueError, "block must have rows and columns in 16"),
        ({"match": "mlp", "criterion": "size"}, ValueError, "criterion must be one of"),
        ({"match": "mlp", "per": "column"}, ValueError, "per must be one of"),
        ({"match": "mlp", "precision": "fp8"}, ValueError, "precision"),
    ],
)
def test_what_is_refused_leaves_the_model(arguments, kind, words):
    model = Model()
    with pytest.raises(kind, match=words):
        block_sparsify(model, **{"block": 16, "density": 0.5} | arguments)
    assert type(model.mlp[0]) is nn.Linear and type(model.mlp[2]) is nn.Linear


@pytest.mark.parametrize("padded", [False, True])
def test_encoders_of_torch_call_their_layers_in_evaluation_too(padded):
    """Their fused path would multiply by weights that are no matrices."""
    part = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    model = nn.TransformerEncoder(part, 2)
    block_sparsify(model, 16, density=0.5, match=r"linear[12]")
    model.eval()
    x, options = torch.randn(3, 16, 32), {}
    if padded:
        options["src_key_padding_mask"] = (torch.arange(16) > 10).expand(3, -1)
    with torch.no_grad():
        found = model(x, **options)
    torch.testing.assert_close(found, model(x, **options).detach())


def test_models_that_are_refused():
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got dict"):
        block_sparsify({}, 16, density=0.5)
    with pytest.raises(TypeError, match="in no place to be swapped"):
        block_sparsify(nn.Linear(16, 16), 16, density=0.5)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32, dtype=torch.complex64))
    with pytest.raises(TypeError, match="1: dtype must be one of"):
        block_sparsify(model, 16, density=0.5)
    tied = nn.ModuleDict({"embedding": nn.Embedding(64, 32), "head": nn.Linear(32, 64)})
    tied["head"].weight = tied["embedding"].weight
    with pytest.raises(ValueError, match="head shares its weight"):
        block_sparsify(tied, 16, density=0.5)
    with pytest.raises(ValueError, match="0: the weight of linear is computed of other tensors"):
        block_sparsify(nn.Sequential(nn.utils.spectral_norm(nn.Linear(32, 32))), 16, density=0.5)

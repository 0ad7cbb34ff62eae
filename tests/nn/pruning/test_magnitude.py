"""Pruning of models by magnitude: exact counts, ties, and what is refused; N:M masks."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from kernlib import KernlibWarning
from kernlib.families.sparse import prune as weights
from kernlib.sparse import magnitude, prune

MIXED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 16), nn.Linear(16, 8))


@pytest.mark.parametrize("per", ["matrix", "row"])
def test_each_weight_is_pruned_as_its_tensor_is(per):
    model = net()
    expected = {n: magnitude(model.get_submodule(n).weight, 0.3, per) for n in ("0", "2", "3")}
    before = [*model.parameters()]
    prune.magnitude(model, density=0.3, per=per)
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    for name, weight in expected.items():
        assert torch.equal(model.get_submodule(name).weight, weight)


@pytest.mark.parametrize("dtypes", [MIXED[:1] * 3, MIXED[1:2] * 3, MIXED[2:3] * 3, MIXED[:3],
                                    MIXED[3:] * 3, MIXED[1:]], ids=str)  # fmt: skip
@pytest.mark.parametrize("ties", [True, False])
def test_all_layers_together(dtypes, ties, monkeypatch):
    monkeypatch.setattr(weights, "PIECE_CPU", 64)
    for density in (0, 0.01, 1 / 3, 0.5, 0.9, 1):
        model = net()
        layers = [model[0], model[2], model[3]]
        for layer, dtype in zip(layers, dtypes, strict=True):
            layer.to(dtype)
            if ties:
                layer.weight.data = torch.randint(-2, 3, layer.weight.shape).to(dtype) * 0.375
        every = torch.cat([layer.weight.detach().double().flatten() for layer in layers])
        order = every.abs().argsort(dim=0, descending=True, stable=True)
        expected = torch.zeros_like(every)
        stays = order[: round(density * len(every))]
        expected[stays] = every[stays]
        prune.magnitude(model, density=density, per="model")
        result = torch.cat([layer.weight.detach().double().flatten() for layer in layers])
        assert torch.equal(result, expected), density


def test_nan_is_the_largest_of_all_layers():
    model = net()
    with torch.no_grad():
        model[2].weight[3, 4] = torch.nan
    prune.magnitude(model, density=1 / (240 + 320 + 128), per="model")
    assert model[2].weight.isnan().sum() == 1 and model[0].weight.count_nonzero() == 0


@pytest.mark.parametrize("shape", [(37, 53), (5,), (), (2, 3, 40), (1, 300), (300, 1), (0, 4)])
@pytest.mark.parametrize("dtype", MIXED, ids=str)
def test_pieces_change_nothing(shape, dtype, monkeypatch, seed):
    weight = torch.randint(-9, 10, shape).to(dtype) / 7
    for density in (0.1, 0.5):
        for per in ("matrix", "row"):
            expected = magnitude(weight, density, per)
            with monkeypatch.context() as patch:
                patch.setattr(weights, "PIECE_CPU", 60)
                assert torch.equal(magnitude(weight, density, per), expected)
                assert torch.equal(magnitude(weight.clone(), density, per, inplace=True), expected)


@pytest.mark.parametrize("pattern", [(2, 4), (1, 2), (0, 4), (4, 4), (3, 8), (5, 9)])
@pytest.mark.parametrize("dtype", MIXED, ids=str)
def test_masks_of_patterns(dtype, pattern, monkeypatch, seed):
    n, m = pattern
    monkeypatch.setattr(weights, "PIECE_CPU", 50)
    for shape in ((6, 4 * m), (3, 2, m), (2 * m,), (0, m), (4, 0)):
        weight = torch.randint(-3, 4, shape).to(dtype)
        groups = weight.double().abs().reshape(-1, m)
        order = groups.argsort(dim=1, descending=True, stable=True)[:, :n]
        expected = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, order, True)
        assert torch.equal(prune.n_m(weight, n, m), expected.reshape(shape))
        assert torch.equal(prune.n_m(weight.mT.contiguous().mT if len(shape) > 1 else weight, n, m),
                           expected.reshape(shape))  # fmt: skip
    assert prune.n_m(torch.ones(130), 65, 130).tolist() == [True] * 65 + [False] * 65
    nan = torch.tensor([1.0, 2.0, torch.nan, torch.inf])
    assert prune.n_m(nan, 1).tolist() == [False, False, True, False]


def test_patterns_of_models():
    model = net()
    expected = {n: w * prune.n_m(w) for n, w in weights_of(model).items()}
    assert set(prune.magnitude(model, pattern=(2, 4)).values()) == {0.5}
    assert all(torch.equal(w, expected[n]) for n, w in weights_of(model).items())


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: model.get_submodule(name).weight.detach().clone() for name in ("0", "2", "3")}


def test_densities_by_layer():
    for density in (
        {"^0$": 0.25, re.compile("[23]"): 0.75},
        {"^0$": 0.25, "": 0.75},
        lambda name, layer: 0.25 if layer.in_features == 12 else 0.75,
    ):
        assert prune.magnitude(net(), density=density) == {"0": 0.25, "2": 0.75, "3": 0.75}
    assert prune.magnitude(net(), density={"": 0.25}, match="2") == {"2": 0.25}
    assert prune.magnitude(net()) == {"0": 0.5, "2": 0.5, "3": 0.5}


class Conv1D(nn.Module):
    """As transformers' own: an nn.Linear with its weight transposed."""

    def __init__(self, rows: int, columns: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(columns, rows))

    def forward(self, x):
        return x @ self.weight


Conv1D.__module__ = "transformers.pytorch_utils"


def test_transposed_layers_are_pruned_by_their_rows(seed):
    layer = Conv1D(8, 12)
    expected = layer.weight.detach().mT.clone()
    prune.magnitude(nn.Sequential(copy.deepcopy(layer)), density=0.25, per="row")
    for name, call in {
        "row": lambda m: prune.magnitude(m, density=0.25, per="row"),
        "wanda": lambda m: prune.wanda(m, [torch.eye(12)], density=0.25),
    }.items():
        model = nn.Sequential(copy.deepcopy(layer))
        call(model)
        assert torch.equal(model[0].weight.mT, magnitude(expected, 0.25, "row")), name
    prune.sparsegpt(nn.Sequential(layer), [torch.randn(50, 12)], density=0.25)
    assert layer.weight.count_nonzero() == 24


def tied() -> nn.Module:
    model = net()
    model.append(nn.Linear(16, 8))
    model[4].weight = model[3].weight
    return model


def on_meta() -> nn.Module:
    return net().to("meta")


def computed() -> nn.Module:
    model = net()
    parametrizations.weight_norm(model[0])
    return model


REFUSED = {
    "tensor": (lambda: prune.magnitude(torch.ones(3)), TypeError, "nn.Module.*sparse.magnitude"),
    "tied": (lambda: prune.magnitude(tied()), ValueError, "^3 shares its weight"),
    "meta": (lambda: prune.magnitude(on_meta()), ValueError, "^0: the weight is on meta"),
    "computed": (lambda: prune.magnitude(computed()), ValueError, "^0: the weight is computed"),
    "both": (
        lambda: prune.magnitude(net(), density=0.5, pattern=(2, 4)), ValueError, "leave one of"
    ),
    "pattern": (lambda: prune.magnitude(net(), pattern=2), TypeError, "pattern must be a pair"),
    "more than m": (lambda: prune.magnitude(net(), pattern=(5, 4)), ValueError, "n of pattern"),
    "groups": (
        lambda: prune.magnitude(net(), pattern=(2, 8)), ValueError, "weight of 0 must be divisible"
    ),
    "per": (lambda: prune.magnitude(net(), per="column"), ValueError, "per must be one of model"),
    "per beside": (
        lambda: prune.magnitude(net(), per="row", pattern=(2, 4)), ValueError, "per must be left"
    ),
    "above": (lambda: prune.magnitude(net(), density=1.5), ValueError, "density must be from 0"),
    "text": (lambda: prune.magnitude(net(), density="x"), TypeError, "density must be a number"),
    "of a layer": (
        lambda: prune.magnitude(net(), density={"": 2}), ValueError, "density of 0: .*from 0 to 1"
    ),
    "missing": (
        lambda: prune.magnitude(net(), density={"0": 0.5}), ValueError, "in the name of 2: add one"
    ),
    "unused": (
        lambda: prune.magnitude(net(), density={"": 0.5, "up": 0.5}), ValueError, "expression 'up'"
    ),
    "expression": (
        lambda: prune.magnitude(net(), density={"(": 0.5}), ValueError, "no regular expression"
    ),
    "layers together": (
        lambda: prune.magnitude(net(), density={"": 0.5}, per="model"), ValueError, "one number"
    ),
    "m": (lambda: prune.n_m(torch.ones(8), 2, 0), ValueError, "m must be 1 or more"),
    "n": (lambda: prune.n_m(torch.ones(8), -1), ValueError, "n must be from 0 to m = 4, got -1"),
    "row": (lambda: prune.n_m(torch.ones(3, 6)), ValueError, "must be divisible by m = 4"),
    "ints": (lambda: prune.n_m(torch.ones(4).int()), TypeError, "a tensor of floats"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    call, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        call()


def test_a_refusal_leaves_the_model_as_it_was():
    model = tied()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="shares"):
        prune.magnitude(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert len(prune.magnitude(model, match="[02]")) == 2


def test_nothing_to_prune_is_said():
    with pytest.warns(KernlibWarning, match="magnitude prunes nothing: match='x'"):
        assert prune.magnitude(net(), match="x") == {}

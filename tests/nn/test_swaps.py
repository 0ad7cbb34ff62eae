"""What every swap of layers takes in a model, and what it says of the rest."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import kernlib as kl
from kernlib.nn import (
    BlockSparseLinear,
    KroneckerLinear,
    KSLinear,
    SparseLinear,
    block_sparsify,
    replace_linear,
    sparsify,
)

SWAPS = {
    "sparsify": lambda model: sparsify(model, format="dense"),
    "block_sparsify": lambda model: block_sparsify(model, 16, density=1.0),
    "replace_linear": lambda model: replace_linear(
        model, lambda name, cols, rows: [(1, rows, cols, 1)], approximate=True
    ),
}
each_swap = pytest.mark.parametrize("swap", SWAPS)


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).mT


def symmetric(layer: nn.Linear, name: str = "weight") -> nn.Linear:
    return parametrize.register_parametrization(layer, name, Symmetric())


class Conv1D(nn.Module):
    """transformers' layer of that name, which has a weight (in, out)."""

    def __init__(self, nf: int, nx: int):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.reshape(-1, self.nx), self.weight).view(
            *x.shape[:-1], self.nf
        )


def conv1d() -> nn.Module:
    return type("Conv1D", (Conv1D,), {"__module__": "transformers.pytorch_utils"})(32, 48)


LAYERS = {
    "symmetric": lambda: symmetric(nn.Linear(48, 48)),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(48, 32)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(48, 32)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(48, 32)),
    "bias": lambda: parametrize.register_parametrization(nn.Linear(48, 32), "bias", nn.Tanh()),
    "Conv1D": conv1d,
}


@pytest.mark.few(100)
@pytest.mark.parametrize("layer", LAYERS)
@each_swap
def test_computed_and_transposed_weights_are_taken_as_they_are(swap, layer):
    torch.manual_seed(0)
    model, x = nn.Sequential(LAYERS[layer]()), torch.randn(2, 3, 48)
    wanted = model.eval()(x)
    model.train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    old = model[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (new,) = SWAPS[swap](model).values()
    assert type(new) is type(model[0]) and type(new) is not type(old) and new.training
    torch.testing.assert_close(model(x), wanted, rtol=1e-4, atol=1e-5)
    after = nn.Sequential(old).state_dict()
    assert all(torch.equal(after[name], t) for name, t in before.items())  # no power iteration


MAKES = {
    "SparseLinear": lambda layer: SparseLinear.from_linear(layer, format="u8"),
    "BlockSparseLinear": lambda layer: BlockSparseLinear.from_linear(layer, 16),
    "KSLinear": lambda layer: KSLinear.from_linear(
        layer, [(1, layer.out_features, 48, 1)], approximate=True
    ),
}


@pytest.mark.few(100)
@pytest.mark.parametrize("layer", [name for name in LAYERS if name != "Conv1D"])
@pytest.mark.parametrize("kind", MAKES)
def test_computed_weights_are_read_once_of_a_single_layer_too(kind, layer):
    torch.manual_seed(0)
    old, x = LAYERS[layer](), torch.randn(2, 3, 48)
    old(x)
    before = {name: t.clone() for name, t in old.state_dict().items()}
    new = MAKES[kind](old)
    assert old.training and new.training
    assert all(torch.equal(t, before[name]) for name, t in old.state_dict().items())
    torch.testing.assert_close(new(x), old.eval()(x), rtol=1e-4, atol=1e-5)


@each_swap
def test_a_parametrized_weight_that_another_module_holds_is_refused(swap):
    model = nn.Sequential(symmetric(nn.Linear(48, 48)), nn.Linear(48, 48))
    model[1].weight = model[0].parametrizations["weight"].original
    with pytest.raises(ValueError, match="0 shares its weight with another module; leave it out"):
        SWAPS[swap](model)


class Quantized(nn.Module):
    """What has features as an nn.Linear, and is none."""

    def __init__(self):
        super().__init__()
        self.in_features = self.out_features = 48


Quantized.__qualname__ = Quantized.__name__ = "Linear"


@each_swap
def test_layers_that_stay_are_warned_of_with_their_module(swap):
    derived = type("Adapted", (nn.Linear,), {"__module__": "library"})(48, 48)
    model = nn.ModuleDict({"up": nn.Linear(48, 48), "mine": derived, "low": Quantized()})
    words = r"leaves 2 layers .*'mine' \(library.Adapted\), 'low' \(tests.nn.test_swaps.Linear\)"
    with pytest.warns(kl.KernlibWarning, match=words) as caught:
        SWAPS[swap](model)
    assert [w.filename for w in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of ours, of those that match leaves out, of torch's
        SWAPS[swap](nn.ModuleDict({"up": nn.Linear(48, 48), "ours": model["up"]}))
        rest = nn.ModuleDict({"up": nn.Linear(48, 48), "low": Quantized()})
        sparsify(rest, match="up", format="dense")
        SWAPS[swap](nn.TransformerEncoderLayer(48, 3, 48, batch_first=True))


class Adapter(nn.Module):
    """One of a layer that is swapped inside of it."""

    def __init__(self):
        super().__init__()
        self.base_layer, self.in_features, self.out_features = nn.Linear(48, 48), 48, 48


def test_a_match_is_asked_about_linear_layers_and_adapters_of_swapped_ones_are_no_rest():
    model = nn.ModuleDict({"up": nn.Linear(48, 48), "low": Quantized(), "adapted": Adapter()})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        swapped = sparsify(model, match=lambda _, layer: layer.weight.shape[0] > 3, density=0.5)
    assert [*swapped] == ["up", "adapted.base_layer"]


class Halved(nn.Module):
    def forward(self, x):
        return x / 2


@each_swap
def test_a_parametrized_layer_keeps_its_modes_and_what_requires_a_gradient(swap):
    layer = nn.Linear(48, 48)
    layer.bias.requires_grad_(False)
    for name in ("weight", "bias"):
        parametrize.register_parametrization(layer, name, Halved())
    layer.parametrizations.weight[0].eval()
    modes = [part.training for part in layer.modules()]
    model = nn.ModuleDict({"up": layer})
    SWAPS[swap](model)
    assert not model["up"].bias.requires_grad
    assert [part.training for part in layer.modules()] == modes


FROM = {
    "SparseLinear": SparseLinear.from_linear,
    "BlockSparseLinear": lambda layer: BlockSparseLinear.from_linear(layer, 16),
    "KSLinear": lambda layer: KSLinear.from_linear(layer, [(1, 48, 48, 1)]),
    "KroneckerLinear": lambda layer: KroneckerLinear.from_linear(layer, [48], [48]),
}


@pytest.mark.parametrize("make", FROM)
def test_what_is_no_linear_is_named_with_its_module(make):
    with pytest.raises(TypeError, match=r"must be an nn.Linear, got tests.nn.test_swaps.Linear$"):
        FROM[make](Quantized())
    quantized = type("Linear", (nn.Module,), {"__module__": "torch.ao.nn.quantized"})()
    with pytest.raises(TypeError, match=r"got torch.ao.nn.quantized.Linear; dequantize it first"):
        FROM[make](quantized)


class Wrapper(torch.Tensor):
    """A weight whose memory holds no values, as torchao's quantized ones."""

    @staticmethod
    def __new__(cls, like):
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Wrapper(args[0])
        raise NotImplementedError(f"{func} of a quantized weight")


@pytest.mark.parametrize("make", FROM)
def test_a_weight_whose_memory_holds_no_values_is_refused(make):
    layer = nn.Linear(48, 48)
    layer.weight = nn.Parameter(Wrapper(layer.weight), requires_grad=False)
    with pytest.raises(ValueError, match=r"^the weight of linear is a .*Wrapper, whose"):
        FROM[make](layer)


@each_swap
def test_a_swap_names_the_layer_whose_memory_holds_no_values(swap):
    model = nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 48))
    model[1].weight = nn.Parameter(Wrapper(model[1].weight), requires_grad=False)
    with pytest.raises(ValueError, match=r"^1: the weight of linear is a .*Wrapper, whose"):
        SWAPS[swap](model)
    assert type(model[0]) is nn.Linear

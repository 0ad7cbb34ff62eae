"""What makes layers of dense ones is called alike, and so is what makes dense ones of them."""

from __future__ import annotations

import inspect
import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from kernlib.nn import (
    BlockSparseLinear,
    KroneckerLinear,
    KSLinear,
    SparseLinear,
    block_sparsify,
    replace_linear,
    sparsify,
)

CHAINS = {(16, 32): [(1, 32, 16, 1)]}
SWAPS = {  # with what each must be given beside the model
    "sparsify": (sparsify, (), {"density": 0.5}),
    "block_sparsify": (block_sparsify, (16,), {"density": 1.0}),
    "replace_linear": (replace_linear, (CHAINS,), {"approximate": True}),
}
LAYERS = {  # with what each must be given beside the dense layer
    "SparseLinear": (SparseLinear, (), {"density": 0.5}),
    "BlockSparseLinear": (BlockSparseLinear, (16,), {"density": 0.5}),
    "KSLinear": (KSLinear, ([(2, 16, 8, 1)],), {}),
    "KroneckerLinear": (KroneckerLinear, ([4, 4], [8, 4]), {}),
}
each_swap = pytest.mark.parametrize("name", SWAPS)
each_layer = pytest.mark.parametrize("name", LAYERS)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def dense(**options) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(16, 32, **options)


def made(name: str, linear: nn.Linear, **options) -> nn.Module:
    kind, given, named = LAYERS[name]
    return kind.from_linear(linear, *given, **named, **options)


# Names and order.


@each_swap
def test_a_swap_takes_model_and_structure_by_place_and_all_else_by_name(name):
    swap, given, _ = SWAPS[name]
    parameters = inspect.signature(swap).parameters
    placed = [key for key, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert placed[0] == "model" and len(placed) == 1 + len(given)
    assert list(parameters)[len(placed)] == "match" and parameters["match"].default is None


@each_layer
def test_a_layer_is_made_of_a_linear_and_structure_by_place_and_all_else_by_name(name):
    kind, given, _ = LAYERS[name]
    parameters = inspect.signature(kind.from_linear).parameters
    placed = [key for key, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert placed[0] == "linear" and len(placed) == 1 + len(given)
    assert "activation" in parameters


@each_swap
@pytest.mark.parametrize(
    "match",
    ["^0$", re.compile("^0$"), lambda name, layer: layer.in_features == 16],
    ids=["text", "compiled", "function"],
)
def test_match_is_an_expression_or_a_function(name, match):
    swap, given, named = SWAPS[name]
    assert list(swap(model(), *given, match=match, **named)) == ["0"]


@each_swap
def test_what_is_no_match_or_no_model_is_refused(name):
    swap, given, named = SWAPS[name]
    for match, words in (
        (nn.Linear, "match must be .*got the class Linear: None takes every nn.Linear"),
        (3, "match must be None, a regular expression, or a function .*got 3"),
        ("[", r"match '\[' is no regular expression"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            swap(model(), *given, match=match, **named)
    for value, words in (
        (nn.Sequential, "got the class Sequential"),
        ([nn.ReLU()], "got list"),
        (nn.Linear(16, 32), r"an nn.Linear itself.* use \w+.from_linear"),
    ):
        with pytest.raises(TypeError, match=f"model .*{words}"):
            swap(value, *given, **named)


# Former spellings.

FORMER = {
    "sparsify, filter": (lambda m: sparsify(m, filter="0", density=0.5), "match= for filter="),
    "sparsify, positions": (
        lambda m: sparsify(m, "0", 0.5, "u8"), "match= by name, density= by name, format= by name"
    ),
    "block_sparsify, positions": (
        lambda m: block_sparsify(m, 16, 1.0, "0"), "density= by name, match= by name"
    ),
    "block_sparsify, filter": (
        lambda m: block_sparsify(m, 16, 1.0, filter="0"), "density= by name, match= for filter="
    ),
    "replace_linear": (lambda m: replace_linear(module=m, patterns=CHAINS), "model= for module="),
    "SparseLinear": (
        lambda m: SparseLinear.from_linear(m[0], "u8", 0.5), "format= by name, density= by name"
    ),
    "BlockSparseLinear": (
        lambda m: BlockSparseLinear.from_linear(m[0], 16, 0.5, "random"),
        "density= by name, criterion= by name",
    ),
    "KroneckerLinear": (
        lambda m: KroneckerLinear.from_dense(m[0], [4, 4], out_sizes=[8, 4]), "is from_linear()"
    ),
}  # fmt: skip
PRESENT = {
    "sparsify, filter": lambda m: sparsify(m, match="0", density=0.5),
    "sparsify, positions": lambda m: sparsify(m, match="0", density=0.5, format="u8"),
    "block_sparsify, positions": lambda m: block_sparsify(m, 16, match="0", density=1.0),
    "block_sparsify, filter": lambda m: block_sparsify(m, 16, match="0", density=1.0),
    "replace_linear": lambda m: replace_linear(m, CHAINS),
    "SparseLinear": lambda m: SparseLinear.from_linear(m[0], format="u8", density=0.5),
    "BlockSparseLinear": lambda m: BlockSparseLinear.from_linear(
        m[0], 16, density=0.5, criterion="random"
    ),
    "KroneckerLinear": lambda m: KroneckerLinear.from_linear(m[0], [4, 4], [8, 4]),
}


@pytest.mark.few(1000)
@pytest.mark.parametrize("case", FORMER)
def test_a_former_spelling_warns_and_does_the_same(case):
    call, words = FORMER[case]

    def drawn(function):
        torch.manual_seed(0)
        result = function(model())
        return str(result), [t.clone() for layer in _layers(result) for t in layer.parameters()]

    with pytest.warns(DeprecationWarning, match=re.escape(words)) as said:
        text, values = drawn(call)
    assert said[0].filename == __file__ and "kernlib 0.3" in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wanted, others = drawn(PRESENT[case])
    assert text == wanted and all(map(torch.equal, values, others))


def _layers(result) -> list[nn.Module]:
    return list(result.values()) if isinstance(result, dict) else [result]


@pytest.mark.filterwarnings("ignore:.*takes:DeprecationWarning")
def test_a_former_spelling_with_a_wrong_value_says_what_is_wrong():
    with pytest.raises(ValueError, match="density must be from 0 to 1"):
        sparsify(model(), filter="0", density=2)
    with pytest.raises(TypeError, match="argument 'filter'"):
        sparsify(model(), filter="0", match="0")
    with pytest.raises(
        TypeError, match=r"takes 1 positional argument but 7 .*the call is sparsify"
    ):
        sparsify(model(), "0", 0.5, "u8", "row", 1, 2)


# There and back.


@each_layer
@pytest.mark.parametrize("bias", [True, False])
def test_what_is_made_of_a_linear_keeps_what_it_is(name, bias):
    linear = dense(bias=bias, dtype=torch.bfloat16).eval()
    layer = made(name, linear)
    assert (layer.in_features, layer.out_features) == (16, 32) and not layer.training
    assert (layer.bias is None) == (not bias)
    if bias:
        assert torch.equal(layer.bias, linear.bias)
    assert layer.to_dense().dtype == torch.bfloat16


@each_layer
@pytest.mark.parametrize("bias", [True, False])
def test_to_dense_is_the_matrix_and_to_linear_a_layer_of_it(name, bias):
    layer = made(name, dense(bias=bias)).eval()
    matrix, back = layer.to_dense(), layer.to_linear()
    assert type(matrix) is torch.Tensor and matrix.shape == (32, 16)
    assert type(back) is nn.Linear and not back.training
    assert torch.equal(back.weight, matrix) and (back.bias is None) == (not bias)
    assert all(p.requires_grad and p.is_leaf for p in back.parameters())
    assert not bias or back.bias is not layer.bias
    x = torch.randn(5, 16)
    torch.testing.assert_close(layer(x), back(x), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        back.weight.zero_()  # which is a copy
    assert layer.to_dense().any()
    again = made(name, layer.to_linear())
    torch.testing.assert_close(again.to_dense(), matrix, rtol=1e-5, atol=1e-5)


def test_a_factor_is_the_nearest_to_a_weight():
    linear = dense()
    layer = KSLinear.from_linear(linear, [(2, 16, 8, 1)], activation="relu")
    mask = torch.block_diag(torch.ones(16, 8), torch.ones(16, 8)).bool()
    assert torch.equal(layer.to_dense(), linear.weight.where(mask, 0))
    drawn = KSLinear.from_linear(linear, [(1, 8, 16, 1), (1, 32, 8, 1)], approximate=False)
    assert drawn.num_mat == 2 and torch.equal(drawn.bias, linear.bias)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((nn.ReLU(), [(1, 32, 16, 1)]), r"linear must be an nn.Linear, got torch\.\S*\.ReLU"),
        ((nn.Linear, [(1, 32, 16, 1)]), "linear must be an nn.Linear, got the class Linear"),
        ((nn.LazyLinear(3), [(1, 32, 16, 1)]), "linear is a lazy layer"),
        ((nn.Linear(16, 32), [(1, 32, 8, 1)]), "linear takes 16 features to 32, its patterns"),
        ((nn.Linear(16, 32), [(1, 8, 16, 1), (1, 32, 8, 1)]), "approximate=True takes one factor"),
    ],
)
def test_what_makes_no_factor_is_refused(arguments, words):
    with pytest.raises((TypeError, ValueError), match=words):
        KSLinear.from_linear(*arguments)


# What is swapped.


def parametrized() -> nn.Sequential:
    net = model()
    net[0] = parametrizations.weight_norm(net[0])
    with torch.no_grad():
        net[0].parametrizations.weight.original0.mul_(3)
    return net


@each_swap
def test_weights_that_a_parametrization_computes_are_taken_as_they_are(name):
    net = parametrized()
    weight = net[0].weight.detach().clone()
    swap, given, named = SWAPS[name]
    layer = swap(net, *given, match="^0$", **named | ({"density": 1.0} if not given else {}))["0"]
    torch.testing.assert_close(layer.to_dense(), weight)
    assert net[0] is layer


@pytest.mark.parametrize("name", ["KSLinear", "KroneckerLinear"])
def test_a_layer_is_made_of_a_computed_weight_as_it_is(name):
    linear = parametrizations.spectral_norm(dense())
    before = {key: value.clone() for key, value in linear.state_dict().items()}
    layer, plain = made(name, linear), dense()
    assert layer.training and linear.training and layer.factors[0].requires_grad
    plain.weight = nn.Parameter(linear.eval().weight.detach())
    assert torch.equal(layer.to_dense(), made(name, plain).to_dense())
    after = linear.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())  # no iteration


def test_a_class_named_linear_elsewhere_is_named_with_its_module():
    quantized = torch.ao.nn.quantized.Linear(4, 4)
    with pytest.raises(TypeError, match=r"got torch\.ao\.nn\.quantized\.\S*Linear"):
        SparseLinear.from_linear(quantized)

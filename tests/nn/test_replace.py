"""Swapping nn.Linear layers of a model for KSLinear."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import kernlib
from kernlib.nn import VIT_S16, KSLinear, replace_linear
from tests.nn.kronecker_sparse_cases import ALGOS, product
from tests.nn.models import model, names
from tests.support.defaults import default_device, default_dtype

CHAINS = {
    (12, 12): [(2, 3, 6, 1), (1, 6, 3, 2)],
    (12, 48): [(2, 6, 6, 1), (1, 24, 6, 2)],
    (48, 12): [(6, 2, 8, 1)],
}


def test_layers_whose_sizes_are_listed_are_swapped():
    net = model()
    swapped = replace_linear(net, CHAINS)
    wanted = {"0.q_proj", "0.k_proj", "0.v_proj", "0.o_proj", "1.0", "1.2"}
    assert set(swapped) == names(net, KSLinear) == wanted and names(net, nn.Linear) == {"2"}
    for name, layer in swapped.items():
        assert net.get_submodule(name) is layer
        assert layer.patterns == tuple(CHAINS[layer.in_features, layer.out_features])
        assert (layer.bias is None) == name.startswith(("0.q_proj", "0.k_proj", "0.v_proj"))
    out = net(torch.randn(2, 7, 12))
    assert out.shape == (2, 7, 5)
    out.sum().backward()
    assert all(p.grad is not None for layer in swapped.values() for p in layer.parameters())


@pytest.mark.parametrize(
    ("match", "wanted"),
    [
        ("[qkv]_proj", {"0.q_proj", "0.k_proj", "0.v_proj"}),
        (r"^1\.", {"1.0", "1.2"}),
        (re.compile(r"^1\."), {"1.0", "1.2"}),
        (lambda name, layer: layer.bias is None, {"0.q_proj", "0.k_proj", "0.v_proj"}),
        ("nothing", set()),
    ],
    ids=["regex", "anchored", "compiled", "function", "none"],
)
def test_match_says_which(match, wanted):
    net = model()
    assert set(replace_linear(net, CHAINS, match=match)) == names(net, KSLinear) == wanted


def test_a_function_gives_the_chain():
    seen = []

    def chain(name, in_features, out_features):
        seen.append((name, in_features, out_features))
        return [(1, out_features, in_features, 1)] if name == "1.0" else None

    net = model()
    assert set(replace_linear(net, chain, algo="bmm")) == {"1.0"}
    assert net[1][0].algo == "bmm"
    assert ("2", 12, 5) in seen and len(seen) == 7


def test_dtype_device_bias_mode_and_gradients_stay():
    net = model(dtype=torch.bfloat16).eval()
    net[1][0].requires_grad_(False)
    biases = {name: p.clone() for name, p in net.named_parameters() if name.endswith("bias")}
    for name, layer in replace_linear(net, CHAINS).items():
        assert layer.factors[0].dtype == torch.bfloat16 and not layer.training
        assert all(p.requires_grad == (name != "1.0") for p in layer.parameters())
        assert layer.bias is None or torch.equal(layer.bias, biases[f"{name}.bias"])
    meta = model(device="meta")
    assert all(layer.factors[0].is_meta for layer in replace_linear(meta, CHAINS).values())


@pytest.mark.parametrize("pattern", [(6, 2, 8, 1), (2, 3, 12, 2), (1, 2, 8, 6)])
def test_approximate_takes_the_values_on_the_support(pattern):
    net = model()
    dense = net[1][2].weight.detach().clone()
    layer = replace_linear(net, {(48, 12): [pattern]}, approximate=True)["1.2"]
    found, support = layer.to_dense().detach(), KSLinear([pattern], [torch.ones(pattern)]).weight
    assert torch.equal(found, torch.where(support != 0, dense, 0))
    torch.testing.assert_close(found.double(), product(layer))


@pytest.mark.parametrize("match", ["^a", "^b", lambda name, layer: name == "b.0"])
def test_one_of_its_places_is_enough(match):
    shared = nn.Linear(12, 12)
    net = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": nn.Linear(12, 12)})
    swapped = replace_linear(net, CHAINS, match=match)
    assert list(swapped) == ["a", "b.0"]
    assert net["a"] is net["b"][0] is swapped["a"] and type(net["c"]) is nn.Linear


def test_what_derives_from_linear_stays():
    attention = nn.MultiheadAttention(12, 3)
    assert replace_linear(attention, CHAINS) == {}
    encoder = nn.TransformerEncoderLayer(12, 3, 48, batch_first=True, dropout=0.0)
    assert set(replace_linear(encoder, CHAINS)) == {"linear1", "linear2"}
    x = torch.randn(2, 5, 12)
    wanted = encoder(x)
    with torch.no_grad():
        torch.testing.assert_close(encoder.eval()(x), wanted, rtol=1e-4, atol=1e-5)


WRONG = {
    "sizes": (
        dict(patterns={(12, 48): [(1, 48, 13, 1)]}),
        ValueError,
        "1.0: linear takes 12 features to",
    ),
    "chain": (
        dict(patterns={(12, 48): [(1, 5, 12, 1), (1, 48, 6, 1)]}),
        ValueError,
        r"1.0: factors\[1\].*takes 6 features",
    ),
    "pattern": (dict(patterns={(12, 48): [(1, 48, 12)]}), TypeError, r"1.0: patterns\[0\] must"),
    "several": (dict(approximate=True), ValueError, "0.q_proj: approximate=True takes one factor"),
    "no mapping": (dict(patterns=[(1, 48, 12, 1)]), TypeError, "patterns must be a mapping"),
    "layout": (dict(bs_last=True), ValueError, "0.q_proj has the batch first"),
    "algo": (dict(algo="fast"), ValueError, "0.q_proj: algo must be one of"),
    "no expression": (dict(match="("), ValueError, r"match '\(' is no regular expression"),
    "match": (dict(match=5), TypeError, "match must be None, a"),
    "flag": (dict(approximate="no"), TypeError, "approximate must be a bool, got 'no'"),
    "a function's": (
        dict(patterns=lambda *_: 5),
        TypeError,
        r"2: patterns must be a list of tuples .*got 5",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_names_the_layer_and_changes_nothing(case):
    arguments, kind, message = WRONG[case]
    net = model()
    before = copy.deepcopy(net)
    with pytest.raises(kind, match=message):
        replace_linear(net, **({"patterns": CHAINS} | arguments))
    assert names(net, KSLinear) == set() and str(net) == str(before)


def test_a_masked_weight_is_that_of_what_was_loaded():
    net, trained = (nn.Sequential(nn.Linear(12, 8)) for _ in range(2))
    for layer in (net[0], trained[0]):
        prune.l1_unstructured(layer, "weight", 0.5)
        prune.l1_unstructured(layer, "bias", 0.5)
    net.load_state_dict(trained.state_dict())
    replace_linear(net, {(12, 8): [(1, 8, 12, 1)]}, approximate=True)
    x = torch.randn(3, 12)
    torch.testing.assert_close(net(x), trained(x))


def test_no_module_a_linear_itself_and_tied_weights_are_refused():
    for wrong in (None, nn.Linear):
        with pytest.raises(TypeError, match="model must be an nn"):
            replace_linear(wrong, CHAINS)
    with pytest.raises(TypeError, match=r"model is an nn.Linear itself"):
        replace_linear(nn.Linear(12, 12), CHAINS)
    net = nn.ModuleDict({"embedding": nn.Embedding(48, 12), "head": nn.Linear(12, 48, bias=False)})
    net["head"].weight = net["embedding"].weight
    with pytest.raises(ValueError, match="head shares its weight"):
        replace_linear(net, CHAINS)
    assert replace_linear(net, CHAINS, match="body") == {}


def test_the_published_chains_of_vit_s16():
    assert set(VIT_S16) == {(384, 384), (384, 1536), (1536, 384)}
    for (in_features, out_features), chain in VIT_S16.items():
        layer = kernlib.nn.KSLinear(chain, device="meta")
        assert (layer.in_features, layer.out_features) == (in_features, out_features)
        count = sum(math.prod(pattern) for pattern in chain)
        assert count < in_features * out_features
    assert sum(math.prod(pattern) for pattern in VIT_S16[384, 1536]) == 24576 + 294912


@pytest.mark.parametrize("approximate", [False, True])
def test_new_layers_are_where_the_old_ones_are_whatever_the_defaults(approximate):
    """Neither torch's default device and dtype nor autocast decide of parameters or of products."""
    chains = {sizes: [(1, *reversed(sizes), 1)] for sizes in CHAINS} if approximate else CHAINS
    net = model()
    wanted = copy.deepcopy(net)
    x = torch.ones(1, 3, 12)
    defaults = default_dtype(torch.float64), default_device("meta")
    with defaults[0], defaults[1], torch.autocast("cpu", torch.bfloat16):
        swapped = replace_linear(net, chains, approximate=approximate)
        for algo in ALGOS:
            for layer in swapped.values():
                layer.algo = algo
            assert net(x).device.type == "cpu"
    for layer in swapped.values():
        assert {(p.dtype, p.device.type) for p in layer.parameters()} == {(torch.float32, "cpu")}
    if approximate:
        x = torch.randn(2, 7, 12)
        torch.testing.assert_close(net(x), wanted(x))

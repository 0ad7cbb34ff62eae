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
from kernlib.nn.replace import nearest_factor
from tests.nn.kronecker_sparse_cases import ALGOS, product

CHAINS = {
    (12, 12): [(2, 3, 6, 1), (1, 6, 3, 2)],
    (12, 48): [(2, 6, 6, 1), (1, 24, 6, 2)],
    (48, 12): [(6, 2, 8, 1)],
}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(12, 12, bias=False) for _ in range(3))
        self.to_out = nn.Linear(12, 12)

    def forward(self, x):
        weights = torch.softmax(self.to_q(x) @ self.to_k(x).mT, -1)
        return self.to_out(weights @ self.to_v(x))


def model(**factory) -> nn.Sequential:
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.Linear(48, 12))
    return nn.Sequential(Attention(), mlp, nn.Linear(12, 5)).to(**factory)


def names(module: nn.Module, kind: type) -> set[str]:
    return {name for name, part in module.named_modules() if type(part) is kind}


def test_layers_whose_sizes_are_listed_are_swapped():
    net = model()
    swapped = replace_linear(net, CHAINS)
    wanted = {"0.to_q", "0.to_k", "0.to_v", "0.to_out", "1.0", "1.2"}
    assert set(swapped) == names(net, KSLinear) == wanted and names(net, nn.Linear) == {"2"}
    for name, layer in swapped.items():
        assert net.get_submodule(name) is layer
        assert layer.patterns == tuple(CHAINS[layer.in_features, layer.out_features])
        assert (layer.bias is None) == name.startswith(("0.to_q", "0.to_k", "0.to_v"))
    out = net(torch.randn(2, 7, 12))
    assert out.shape == (2, 7, 5)
    out.sum().backward()
    assert all(p.grad is not None for layer in swapped.values() for p in layer.parameters())


@pytest.mark.parametrize(
    ("match", "wanted"),
    [
        ("to_[qkv]", {"0.to_q", "0.to_k", "0.to_v"}),
        (r"^1\.", {"1.0", "1.2"}),
        (lambda name, layer: layer.bias is None, {"0.to_q", "0.to_k", "0.to_v"}),
        ("nothing", set()),
    ],
    ids=["regex", "anchored", "function", "none"],
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


def test_approximate_is_exact_for_a_dense_pattern():
    net, x = model().double(), torch.randn(3, 12, dtype=torch.float64)
    wanted = net(x)
    every = lambda name, n, m: [(1, m, n, 1)]  # noqa: E731
    assert len(replace_linear(net, every, approximate=True)) == 7
    torch.testing.assert_close(net(x), wanted)


def test_the_nearest_factor_is_the_inverse_of_the_dense_matrix():
    weight = torch.randn(2, 3, 5, 4)
    dense = KSLinear([(2, 3, 5, 4)], [weight]).to_dense()
    assert torch.equal(nearest_factor(dense, (2, 3, 5, 4)), weight)


def test_a_layer_in_several_places_is_swapped_in_all():
    shared = nn.Linear(12, 12)
    net = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": nn.Linear(12, 12)})
    swapped = replace_linear(net, CHAINS)
    assert set(swapped) == {"a", "b.0", "c"}
    assert net["a"] is net["b"][0] is swapped["a"] and net["c"] is not net["a"]


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
    "sizes": (dict(patterns={(12, 48): [(1, 48, 13, 1)]}), ValueError, "1.0 takes 12 features to"),
    "chain": (
        dict(patterns={(12, 48): [(1, 5, 12, 1), (1, 48, 6, 1)]}),
        ValueError,
        r"1.0: factors\[1\].*takes 6 features",
    ),
    "pattern": (dict(patterns={(12, 48): [(1, 48, 12)]}), TypeError, r"1.0: patterns\[0\] must"),
    "several": (dict(approximate=True), ValueError, "0.to_q: approximate=True takes one factor"),
    "no mapping": (dict(patterns=[(1, 48, 12, 1)]), TypeError, "patterns must be a mapping"),
    "layout": (dict(bs_last=True), ValueError, "0.to_q has the batch first"),
    "algo": (dict(algo="fast"), ValueError, "0.to_q: algo must be one of"),
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


def test_a_linear_itself_and_tied_weights_are_refused():
    with pytest.raises(TypeError, match=r"module is an nn.Linear itself"):
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


BAD = {
    "None": (lambda: replace_linear(None, CHAINS), TypeError, r"module must be an nn.M.*None"),
    "a class": (lambda: replace_linear(nn.Linear, CHAINS), TypeError, "module must be an nn"),
    "patterns": (lambda: replace_linear(model(), 5), TypeError, "patterns must be a mapping"),
    "no expression": (
        lambda: replace_linear(model(), CHAINS, match="("),
        ValueError,
        r"match '\(' is no regular expression",
    ),
    "match": (lambda: replace_linear(model(), CHAINS, match=5), TypeError, "match must be None, a"),
    "approximate": (
        lambda: replace_linear(model(), CHAINS, approximate="no"),
        TypeError,
        "approximate must be a bool, got 'no'",
    ),
    "a chain": (
        lambda: replace_linear(model(), lambda *_: 5),
        TypeError,
        r"2: patterns must be a list of tuples .*got 5",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named(case):
    call, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        call()


def test_a_compiled_expression_is_one():
    assert set(replace_linear(model(), CHAINS, match=re.compile(r"^1\."))) == {"1.0", "1.2"}


@pytest.mark.parametrize("approximate", [False, True])
def test_new_layers_are_where_the_old_ones_are_whatever_the_defaults(approximate):
    """Neither torch's default device and dtype nor autocast decide of parameters or of products."""
    chains = {sizes: [(1, *reversed(sizes), 1)] for sizes in CHAINS} if approximate else CHAINS
    net = model()
    wanted = copy.deepcopy(net)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        with torch.autocast("cpu", torch.bfloat16):
            swapped = replace_linear(net, chains, approximate=approximate)
            for algo in ALGOS:
                for layer in swapped.values():
                    layer.algo = algo
                x = torch.ones(3, 12, device="cpu", dtype=torch.float32)
                assert net(x[None]).device.type == "cpu"
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)
    for layer in swapped.values():
        assert {(p.dtype, p.device.type) for p in layer.parameters()} == {(torch.float32, "cpu")}
    if approximate:
        x = torch.randn(2, 7, 12)
        torch.testing.assert_close(net(x), wanted(x))

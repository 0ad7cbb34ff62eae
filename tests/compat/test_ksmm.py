"""KSMM's functions under their names: storage of every algorithm, layers, and what is gone."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kernlib.nn import KSLinear, compat
from tests.nn.kronecker_sparse_cases import CHAIN, LAYOUTS, matrix, random

PATTERNS = [(2, 3, 5, 4), (2, 4, 6, 3), (1, 4, 7, 1), (3, 2, 2, 1)]
SHAPES = {
    "kernel": lambda a, b, c, d: (a * d * c, b),
    "bmm": lambda a, b, c, d: (a * d, b, c),
    "einsum": lambda a, b, c, d: (a, b, c, d),
    "dense": lambda a, b, c, d: (a * b * d, a * c * d),
    "sparse": lambda a, b, c, d: (a * b * d, a * c * d),
    "bsr": lambda a, b, c, d: (a * d * b, a * d * c),
}


def test_names_and_order_of_arguments():
    def arguments(function):
        return list(inspect.signature(function).parameters)

    assert arguments(compat.generate_factor) == [*"abcd", "algo", "weights", "dtype", "device"]
    assert arguments(compat.get_linear_layer) == [
        "patterns", "algo", "dtype", "bs_last", "bias", "weights", "device", "others",
    ]  # fmt: skip
    assert arguments(compat.from_kernel_format_to_dense) == ["factor", "pattern"]
    assert arguments(compat.from_bmm_format_to_dense) == ["factor", "pattern"]
    assert arguments(compat.from_abcd_to_dense) == ["factor"]
    for function in (compat.bmm_bs_first, compat.bmm_bs_last):
        assert arguments(function) == ["x", "w_kron", "pattern"]
    linear = ["in_features", "out_features", "bias", "device", "dtype"]
    assert arguments(compat.UnfusedLinear) == [*linear, "weights"]
    assert arguments(compat.LinearBsl) == [*linear, "version", "weights"]


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("algo", compat.FORMATS)
def test_storage_and_back(algo, pattern):
    weight = random(*pattern)
    factor = compat.generate_factor(*pattern, algo, weight)
    assert tuple(factor.shape) == SHAPES[algo](*pattern)
    assert factor.dtype == torch.float64 and not factor.requires_grad
    assert torch.equal(compat.to_abcd(factor, pattern, algo), weight)
    drawn = compat.generate_factor(*pattern, algo, dtype=torch.float32)
    found = compat.to_abcd(drawn, pattern, algo)
    assert 0 < found.abs().max() <= pattern[2] ** -0.5 and found.shape == pattern


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_dense_matrices(pattern):
    weight = random(*pattern)
    wanted = matrix(weight)
    assert torch.equal(compat.from_abcd_to_dense(weight), wanted)
    kernel = compat.generate_factor(*pattern, "kernel", weight)
    assert torch.equal(compat.from_kernel_format_to_dense(kernel, pattern), wanted)
    bmm = compat.generate_factor(*pattern, "bmm", weight)
    assert torch.equal(compat.from_bmm_format_to_dense(bmm, pattern), wanted)
    a, b, c, d = pattern
    assert torch.equal(compat.from_bmm_format_to_dense(bmm.view(a, d, b, c), pattern), wanted)


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_bmm_trains(pattern):
    weight = random(*pattern)
    stored = compat.generate_factor(*pattern, "bmm", weight).requires_grad_()
    x = random(2, 3, matrix(weight).shape[1], requires_grad=True)
    found = compat.bmm_bs_first(x, stored, pattern)
    torch.testing.assert_close(found, x @ matrix(weight).T)
    last = compat.bmm_bs_last(x.movedim(-1, 0), stored, pattern)
    torch.testing.assert_close(last.movedim(0, -1), found)
    found.sum().backward()
    assert stored.grad is not None and x.grad is not None


def test_linear_layers():
    weights = [random(*pattern, seed=i) for i, pattern in enumerate(CHAIN)]
    layer = compat.get_linear_layer(CHAIN, "einsum", torch.float64, True, True, weights, "cpu")
    assert type(layer) is KSLinear and layer.algo == "einsum" and layer.bs_last
    assert layer.bias is not None and torch.equal(layer.factors[1], weights[1])
    drawn = compat.get_linear_layer(CHAIN)
    assert drawn.bias is None and drawn.init == "ksmm"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bs_last", LAYOUTS)
@pytest.mark.parametrize("algo", ["nn_linear", "unfused_linear"])
def test_dense_layers(algo, bs_last, bias):
    weight = random(5, 7)
    arguments = ([(1, 5, 7, 1)], algo, torch.float64, bs_last, bias, [weight])
    if algo == "nn_linear" and bs_last:
        with pytest.raises(ValueError, match="use 'unfused_linear'"):
            compat.get_linear_layer(*arguments)
        return
    layer = compat.get_linear_layer(*arguments)
    x = random(2, 3, 7)
    wanted = F.linear(x, weight, layer.bias)
    found = layer(x.movedim(-1, 0)).movedim(0, -1) if bs_last else layer(x)
    torch.testing.assert_close(found, wanted)
    twin = nn.Linear(7, 5, bias, dtype=torch.float64)
    twin.load_state_dict(layer.state_dict())
    torch.testing.assert_close(twin(x), wanted)


def test_linear_bsl():
    for version in compat.VERSIONS:
        layer = compat.LinearBsl(7, 5, dtype=torch.float64, version=version, weights=random(5, 7))
        x = random(7, 2, 3)
        wanted = torch.tensordot(random(5, 7), x, 1) + layer.bias[:, None, None]
        torch.testing.assert_close(layer(x), wanted)
    state = {"weight": layer.weight.detach(), "bias": layer.bias.detach()[:, None]}
    layer.load_state_dict(state)
    assert layer.bias.shape == (5,)
    with pytest.raises(ValueError, match="version must be one of"):
        compat.LinearBsl(7, 5, version="fast")


def test_what_is_wrong():
    with pytest.raises(TypeError, match=r"vsize is gone.*leave it out"):
        compat.get_linear_layer(CHAIN, "kernel", vsize=4)
    with pytest.raises(TypeError, match=r"vsize is gone.*bias got 4"):
        compat.get_linear_layer(CHAIN, "kernel", torch.float32, False, 4)
    with pytest.raises(TypeError, match="no argument width"):
        compat.get_linear_layer(CHAIN, width=4)
    for pattern in ((2, 5, 7, 1), (1, 5, 7, 2)):
        with pytest.raises(ValueError, match=r"needs one pattern \(1, out, in, 1\)"):
            compat.get_linear_layer([pattern], "nn_linear")
    with pytest.raises(ValueError, match=r"weights must have shape \(5, 7\), got \(7, 5\)"):
        compat.get_linear_layer([(1, 5, 7, 1)], "nn_linear", weights=[random(7, 5)])
    for function in (compat.generate_factor, lambda *a: compat.to_abcd(random(2), a[:4], a[4])):
        with pytest.raises(ValueError, match="algo must be one of kernel, einsum"):
            function(1, 2, 3, 4, "coo")
    with pytest.raises(ValueError, match=r"weights must have shape \(1, 2, 3, 4\), got"):
        compat.generate_factor(1, 2, 3, 4, "bmm", random(1, 2, 3, 5))


def test_a_layer_of_weights_is_where_they_are():
    weights = random(4, 3).to(torch.float16)
    with torch.device("meta"):
        made = [
            compat.LinearBsl(3, 4, weights=weights),
            compat.UnfusedLinear(3, 4, weights=weights),
        ]
        made.append(compat.get_linear_layer([(1, 4, 3, 1)], "nn_linear", weights=[weights]))
    for layer in made:
        assert layer.weight.dtype == torch.float16 and layer.weight.device.type == "cpu"
        assert torch.equal(layer.weight, weights)

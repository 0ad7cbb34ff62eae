"""Gradients of products and sums with a kernel matrix of many features on the GPU, by tensor cores
and on the lanes, term by term in float64."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise.kernels import points as kernels
from kernlib.families.pairwise.lowering import points as lowering
from tests.gpu.families.pairwise.cases import lowered_by, points
from tests.gpu.families.pairwise.test_backward import BOUND, compare
from tests.gpu.families.pairwise.trained import (
    PARTIAL_BYTES,
    assert_same_bits,
    beside_float64,
    captured,
    gradients_of,
    leaves,
    peak_of_gradients,
)
from tests.support.gpus import on_hopper

GAUSSIAN, LANES = kl.gaussian(), kl.gaussian(direct=True)
# Descriptor, hyperparameters, those of them with gradients.
CASES = {
    "gaussian": (GAUSSIAN, {"bandwidth": 5.0}, ["bandwidth"]),
    "on the lanes": (LANES, {"bandwidth": 5.0}, ["bandwidth"]),
    "laplace l2": (kl.laplace_l2(), {"bandwidth": 4.0}, ["bandwidth"]),
    "matern32": (kl.matern32(), {"bandwidth": 4.0}, ["bandwidth"]),
    "matern52": (kl.matern52(), {"bandwidth": 4.0}, ["bandwidth"]),
    "cauchy": (kl.cauchy(), {"bandwidth": 4.0}, ["bandwidth"]),
    "rational quadratic": (
        kl.rational_quadratic(), {"bandwidth": 4.0, "alpha": 1.5}, ["bandwidth", "alpha"],
    ),
    "l2": (kl.l2_distance(), {}, []),
    "squares": (kl.squared_distance(), {}, []),
    "norm": (kl.p_distance(), {"p": 2.0}, []),
    "dot": (kl.dot_product(epilogue=kl.Custom("tanh(s * v)", ("s",))), {"s": 0.05}, ["s"]),
    "custom": (
        kl.squared_distance(
            epilogue=(kl.Custom("s * log(1 + t * v)", ("s", "t")), kl.Custom("v / (v + 1)"))
        ),
        {"s": 0.7, "t": 0.3}, ["s", "t"],
    ),
    "regularized": (
        GAUSSIAN, {"bandwidth": 5.0, "regularization": 0.7}, ["bandwidth", "regularization"],
    ),
    "epsilon": (kl.laplace_l2(), {"bandwidth": 4.0, "epsilon": 5.5}, ["bandwidth"]),
}  # fmt: skip


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """All calls by these kernels, into memory of NaN; what was lowered for them."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    known = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    always = mock.patch.object(lowering, "pays", lambda *given: True)
    with always, lowered_by(kernels, name="lower") as made:
        yield made
    torch.use_deterministic_algorithms(known)


def whether_products(made) -> set[bool]:
    """Whether tensor cores took part in the launches."""
    return {len(each.steps) > 1 for each in made}


SIZES = [
    (101, 237, 17, 1), (1, 1, 20, 1), (193, 257, 20, 3), (257, 129, 64, 1), (67, 150, 37, 4),
    (200, 333, 64, 6), (130, 70, 128, 1), (90, 65, 100, 3), (60, 300, 65, 16),
]  # fmt: skip


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", ["gaussian", "on the lanes"])
def test_sizes(name, size, launched, seed):
    m, n, k, columns = size
    descriptor, values, wanted = CASES[name]
    compare(descriptor, values, wanted, points(m, k), points(n, k), points(n, columns))
    assert whether_products(launched) == {descriptor is GAUSSIAN and on_hopper()}


@pytest.mark.parametrize("name", CASES)
def test_two_sets_of_points(name, launched, seed):
    """Some of which coincide, or nearly so."""
    descriptor, values, wanted = CASES[name]
    a, b = points(140, 24), points(131, 24)
    b[5], b[9], b[60] = a[3], a[11] + 1e-3, a[100] + 1e-6
    b[7, 0] = a[4, 0]
    compare(descriptor, values, wanted, a, b, points(131, 2))
    assert launched


@pytest.mark.parametrize(("n", "k", "columns"), [(131, 24, 1), (200, 64, 4), (77, 128, 1)])
@pytest.mark.parametrize("name", CASES)
def test_one_x(name, n, k, columns, launched, seed):
    descriptor, values, wanted = CASES[name]
    compare(descriptor, values, wanted, points(n, k), None, points(n, columns))
    assert len(launched) == 1


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ["gaussian", "on the lanes", "custom", "dot"])
def test_sums(name, shared, launched, seed):
    descriptor, values, wanted = CASES[name]
    compare(descriptor, values, wanted, points(99, 30), None if shared else points(140, 30), None)
    assert launched


@pytest.mark.parametrize("leaves", ["a", "b", "v", "bandwidth", "a v", "v bandwidth", "b v"])
def test_what_is_wanted_alone(leaves, seed):
    named = {"a": points(100, 20), "b": points(130, 20), "v": points(130, 2)}
    named["bandwidth"] = torch.tensor(4.0, device="cuda")
    for x, y in beside_float64(named, points(100, 2), leaves.split()):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)


def hostile(name: str, count: int, features: int) -> torch.Tensor:
    x = points(count, features)
    middles = points(20, features)[torch.arange(count, device="cuda") % 20]
    sides = torch.where(torch.arange(count, device="cuda") % 2 == 0, 3.0, -3.0)[:, None]
    return {
        "offset 1e3": lambda: x + 1e3,
        "offset 1e6": lambda: x + 1e6,
        "clusters": lambda: middles + 1e-2 * x,
        "clusters 1e-7 apart": lambda: middles + 1e-7 * x,
        "two clusters": lambda: sides + 0.5 * x,
        "two clusters just apart": lambda: sides + 1.1 * x,
        "one large feature": lambda: torch.cat((1e6 * x[:, :1], x[:, 1:]), 1),
        "tails": lambda: torch.empty_like(x).cauchy_(),
        "integers": lambda: torch.randint(0, 3, x.shape, device="cuda").float(),
        "1e-3": lambda: 1e-3 * x,
        "a duplicate of each": lambda: torch.cat((x[: count // 2], x[: count - count // 2])),
    }[name]()


HOSTILE = [
    "offset 1e3", "offset 1e6", "clusters", "clusters 1e-7 apart", "two clusters",
    "two clusters just apart", "one large feature", "tails", "integers", "1e-3",
    "a duplicate of each",
]  # fmt: skip
WORDS = 2**-22  # of a place, that two words of float16 lose
# Where squared distances are taken by products as long as they lose 5 bits, 2e-5 of an exponent.
COARSE = {"tails": 1e-4, "two clusters just apart": 6e-6}


def exact(x, v, g, bandwidth):
    """The gradients of K(x, x) v for a Gaussian in float64, the sums of their absolute terms, with
    what the rounding of exponents is allowed, and what words may lose: where one pair is most of
    a row's sum, and its points agree in a feature, products of their places do not."""
    x, v, g = (t.detach().double() for t in (x, v, g))
    differences = x[:, None] - x
    squares = differences.square().sum(-1)
    matrix = torch.exp(-squares / (2 * bandwidth**2))
    allowed = 1 + squares / (16 * bandwidth**2)
    worth = g @ v.mT
    both, size = worth + worth.mT, worth.abs() + worth.mT.abs()  # of both roles of x
    slope = matrix[..., None] * differences / -(bandwidth**2)
    by_bandwidth = worth * matrix * squares / bandwidth**3
    found = (both[..., None] * slope).sum(1), matrix @ g, by_bandwidth.sum()
    place = (x - x.mean(0)).abs()
    reach = ((size * matrix)[..., None] * (place[:, None] + place)).sum(1) / bandwidth**2
    wholes = (
        ((size * allowed)[..., None] * slope.abs()).sum(1),
        (matrix * allowed) @ g.abs(),
        (by_bandwidth.abs() * allowed).sum(),
    )
    return zip(found, wholes, (WORDS * reach, 0.0, 0.0), strict=True)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("features", (20, 64))
@pytest.mark.parametrize("narrow", (False, True))
@pytest.mark.parametrize("positive", (False, True))
def test_hostile_points(name, features, narrow, positive, launched, seed):
    x, v, g = hostile(name, 700, features), points(700, 1), points(700, 1)
    v, g = (t.abs() if positive else t for t in (v, g))
    distances = torch.cdist(x.double(), x.double())
    unit = distances.median().item()
    if narrow:
        unit = distances.masked_fill(distances == 0, math.inf).amin(1).median().item()
    bandwidth = torch.tensor(unit, device="cuda", requires_grad=True)
    leaves = [t.requires_grad_() for t in (x, v)] + [bandwidth]
    out = kl.kernel_matmul(GAUSSIAN, x, x, v, bandwidth=bandwidth)
    found = torch.autograd.grad(out, leaves, g)
    wanted = exact(x, v, g, bandwidth.item())
    for gradient, (value, whole, lost) in zip(found, wanted, strict=True):
        error = ((gradient.double() - value).abs() - lost - 1e-30).clamp(min=0)
        assert (error <= COARSE.get(name, BOUND) * whole).all(), (error / whole).max()
    assert whether_products(launched) == {on_hopper()}


@pytest.mark.parametrize("side", ("v", "g"))
def test_numbers_of_all_sizes(side, seed):
    x, v, g = points(300, 20), points(300, 1), points(300, 1)
    sizes = 10 ** torch.linspace(-6, 6, 300, device="cuda")[torch.randperm(300, device="cuda")]
    v, g = (t * sizes[:, None] if side == name else t for name, t in (("v", v), ("g", g)))
    leaves = [t.requires_grad_() for t in (x, v)]
    found = torch.autograd.grad(kl.kernel_matmul(GAUSSIAN, x, x, v, bandwidth=4.0), leaves, g)
    for gradient, (wanted, whole, _) in zip(found, exact(x, v, g, 4.0), strict=False):
        assert ((gradient.double() - wanted).abs() <= BOUND * whole).all()


def test_equal_points_add_nothing(seed):
    same = torch.ones(300, 20, device="cuda", requires_grad=True)
    out = kl.kernel_matmul(GAUSSIAN, same, same, points(300, 1), bandwidth=2.0)
    assert torch.equal(*torch.autograd.grad(out.sum(), same), torch.zeros_like(same))


def test_a_bandwidth_below_all_distances(seed):
    """The values of all pairs but those of a point with itself are 0."""
    x, v, g = points(700, 64).requires_grad_(), points(700, 1).requires_grad_(), points(700, 1)
    found = torch.autograd.grad(kl.kernel_matmul(GAUSSIAN, x, x, v, bandwidth=1e-3), (x, v), g)
    assert torch.equal(found[0], torch.zeros_like(x)) and torch.equal(found[1], g)


@pytest.mark.parametrize("descriptor", [GAUSSIAN, LANES], ids=["products", "lanes"])
def test_few_rows_of_many_lines_and_equal_terms(descriptor, launched, seed):
    """40000 terms of one size and sign a row: the rounding of chains shows."""
    a = torch.zeros(3, 20, device="cuda", requires_grad=True)
    b = torch.ones(40_000, 20, device="cuda")
    v = torch.full((40_000, 1), 0.1, device="cuda")
    out = kl.kernel_matmul(descriptor, a, b, v, bandwidth=5.0)
    (found,) = torch.autograd.grad(out, a, torch.ones_like(out))
    wanted = 40_000 * v[0, 0].double() * math.exp(-0.4) / 25
    assert (found.double() / wanted - 1).abs().max() <= BOUND
    assert launched[0].parts > 1


@pytest.mark.parametrize("where", ["a", "b", "v", "g"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_where_it_belongs(where, value, seed):
    given = {"a": points(260, 20), "b": points(190, 20), "v": points(190, 1), "g": points(260, 1)}
    given[where][7, 0] = value
    *leaves, g = (t.requires_grad_(name != "g") for name, t in given.items())
    found = torch.autograd.grad(kl.kernel_matmul(GAUSSIAN, *leaves, bandwidth=5.0), leaves, g)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    out = kl.kernel_matmul(GAUSSIAN, *wide, bandwidth=5.0)
    for x, y in zip(found, torch.autograd.grad(out, wide, g.double()), strict=True):
        whole = y.isfinite() & x.isfinite()
        assert (x.isfinite() | ~y.isfinite()).float().mean() >= 0.99  # 0 times an infinity
        torch.testing.assert_close(x.double()[whole], y[whole], rtol=1e-4, atol=1e-5)
    hit = {"a": found[0][7], "b": found[1][7], "v": found[1][7], "g": found[0][7]}[where]
    assert value == math.inf or hit.isnan().any()


@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_points_and_bandwidth_far_from_one(scale, launched, seed):
    named = {"a": scale * points(140, 20), "b": scale * points(140, 20), "v": points(140, 1)}
    for x, y in beside_float64(named, points(140, 1), ("a", "b"), bandwidth=5 * scale):
        torch.testing.assert_close(x.double() * scale, y * scale, rtol=1e-4, atol=1e-5)
    assert launched


@pytest.mark.parametrize("shared", ["", "a", "b", "v"])
def test_batches_with_a_bandwidth_each(shared, launched, seed):
    sizes = {"a": (3, 90, 24), "b": (3, 70, 24), "v": (3, 70, 2)}
    named = {name: points(*(size[1:] if name == shared else size)) for name, size in sizes.items()}
    named["bandwidth"] = torch.tensor([3.0, 4.0, 6.0], device="cuda")
    for x, y in beside_float64(named, points(3, 90, 2)):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)
    assert launched


def test_any_strides(seed):
    a, b, v, g = points(150, 24), points(130, 24), points(130, 2), points(150, 2)

    def gradients(a, b, v, g):
        leaves = [t.detach().requires_grad_() for t in (a, b, v)]
        out = kl.kernel_matmul(GAUSSIAN, *leaves, bandwidth=5.0)
        return torch.autograd.grad(out, leaves, g)

    wanted = gradients(a, b, v, g)
    turned = (t.mT.contiguous().mT for t in (a, torch.stack((b, b), 2)[..., 0], v, g))
    for x, y in zip(gradients(*turned), wanted, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("features", [20, 64])
def test_the_same_bits_each_time(features, launched, seed):
    given = leaves(3000, features, 6.0)
    assert_same_bits(lambda: gradients_of(*given))
    assert launched[0].parts > 1


def test_gradients_wait_for_nothing_and_are_captured(seed):
    """From products to what is behind their gate, in one capture."""
    torch.use_deterministic_algorithms(False)
    given = x, _, bandwidth = leaves(500, 20, 5.0)
    graph, kept = captured(lambda: gradients_of(*given))
    clusters = points(2, 20)[torch.arange(500, device="cuda") % 2] + 0.01 * points(500, 20)
    for data in (points(500, 20), clusters):
        with torch.no_grad():
            bandwidth.fill_(4.0)
            x.copy_(data)
        graph.replay()
        for s, t in zip(kept, gradients_of(*given), strict=True):
            assert torch.equal(s, t)


@pytest.mark.parametrize("shared", [False, True])
def test_memory_grows_with_the_points_alone(shared, launched, seed):
    count = 60_000  # whose matrix takes 14.4 GB
    # A point's words for rows and lines, and as features: 4 bytes a feature each, as its gradients.
    most = PARTIAL_BYTES + 8 * 4 * 64 * count
    assert peak_of_gradients(count, 64, 11.0, shared) <= most
    assert peak_of_gradients(4000, 64, 11.0, shared) <= 64 << 20
    assert launched

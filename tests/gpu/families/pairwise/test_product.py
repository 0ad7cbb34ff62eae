"""Products with many columns by tensor cores, on a GPU: every way of summing, beside float64."""

from unittest import mock

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise.kernels import product
from kernlib.families.pairwise.lowering import reduce
from tests.gpu.families.pairwise.cases import lowered_by
from tests.gpu.watched import capture
from tests.support.gpus import on_hopper

ERROR = 3e-6  # of products relative to the sum of absolute terms of a row, for every value
GAUSSIAN = kl.gaussian()


@pytest.fixture(autouse=True)
def launched():
    """All calls by this kernel where the GPU has it; what was lowered for it."""
    always = mock.patch.object(reduce, "product_pays", lambda descriptor, problem: True)
    with always, lowered_by(product.Product) as made:
        yield made


def points(m, n, k, c, dtype=torch.float32):
    made = (torch.randn(size, device="cuda") for size in ((m, k), (n, k), (n, c)))
    return [t.to(dtype) for t in made]


def error(found, descriptor, a, b, v, **values):
    """The largest of a result's entries, relative to the sum of absolute terms."""
    values = {k: x.double() if isinstance(x, torch.Tensor) else x for k, x in values.items()}
    matrix = kl.run_kernel(descriptor, a.double(), b.double(), **values)
    v = v.double()
    wanted, whole = matrix @ v, matrix.abs() @ v.abs()
    return ((found.double() - wanted).abs() / whole.clamp_min(1e-30)).max().item()


def check(launched, descriptor, a, b, v, bound=ERROR, **values):
    """A product by this kernel, where the GPU has it."""
    found = kl.kernel_matmul(descriptor, a, b, v, **values)
    assert bool(launched) == on_hopper()
    assert error(found, descriptor, a, b, v, **values) <= bound
    return found


SHAPES = [
    (1, 1, 3, 5), (64, 64, 3, 8), (193, 257, 3, 7), (777, 1300, 4, 64), (515, 3001, 10, 10),
    (400, 700, 1, 17), (777, 1111, 64, 64), (300, 500, 67, 96), (300, 2000, 128, 128),
    (500, 700, 17, 130), (333, 444, 100, 16), (130, 520, 20, 300),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("width", (1.0, 0.45))
def test_gaussians_wide_and_narrow(shape, width, launched):
    """Narrow ones have points too far from each other for folded exponents."""
    check(launched, GAUSSIAN, *points(*shape), bandwidth=width * shape[2] ** 0.5)


DESCRIPTORS = {
    "matern32": (kl.matern32(), {"bandwidth": 2.0}),
    "laplace_l2": (kl.laplace_l2(), {"bandwidth": 2.0}),
    "rational quadratic": (kl.rational_quadratic(), {"bandwidth": 2.0, "alpha": 1.5}),
    "dot product": (kl.dot_product(), {}),
    "polynomial": (kl.polynomial(3), {"gamma": 0.3, "offset": 1.0}),
    "distance": (kl.l2_distance(), {}),
    "own exponent": (
        kl.Pairwise("difference", kl.Square(), kl.Identity(), (kl.Custom("exp(-s * v)", ("s",)),)),
        {"s": 0.1},
    ),
    "growing exponent": (
        kl.Pairwise("difference", kl.Square(), kl.Identity(), (kl.Custom("exp(s * v)", ("s",)),)),
        {"s": 0.02},
    ),
}


@pytest.mark.parametrize("name", DESCRIPTORS)
@pytest.mark.parametrize(
    "shape", [(193, 257, 3, 7), (515, 1301, 10, 20), (300, 700, 40, 64)], ids=str
)
def test_other_kernels(name, shape, launched):
    descriptor, values = DESCRIPTORS[name]
    check(launched, descriptor, *points(*shape), **values)


@pytest.mark.parametrize("features", (1, 5, 16))
def test_norms_without_products(features, launched):
    check(launched, kl.laplace_l1(), *points(300, 700, features, 30), bandwidth=3.0)


@pytest.mark.parametrize("p", (1.0, 2.0, 1.5))
def test_terms_with_numbers_of_the_call_go_another_way(p):
    a, b, v = points(300, 700, 8, 30)
    values = {"p": p, "inner_scale": -0.5}
    found = kl.kernel_matmul(kl.exp_power_sum(), a, b, v, **values)
    assert error(found, kl.exp_power_sum(), a, b, v, **values) <= ERROR


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("features", (3, 20))
def test_half_types_are_summed_in_float32(dtype, features, launched):
    a, b, v = points(515, 1301, features, 20, dtype)
    out = torch.empty(515, 20, device="cuda")
    kl.kernel_matmul(GAUSSIAN, a, b, v, out=out, bandwidth=3.0)
    assert bool(launched) == on_hopper()
    assert error(out, GAUSSIAN, a, b, v, bandwidth=3.0) <= ERROR


def test_tf32_takes_one_word(launched):
    descriptor = kl.gaussian(precision="tf32")
    check(launched, descriptor, *points(300, 700, 20, 40), bound=1e-3, bandwidth=4.0)


def powers(most, count):
    return 10 ** torch.linspace(-most, most, count, device="cuda")


# Of points, of which tensor cores make words in a range that they know.
HOSTILE = {
    "far rows": lambda a, b, v: (a * 3, b, v),
    "sorted": lambda a, b, v: (a.sort(0)[0] * 3, b.sort(0)[0] * 3, v),
    "the same points": lambda a, b, v: (a, torch.cat((a, b[len(a) :])), v),
    "far from the origin": lambda a, b, v: (a + 1000, b + 1000, v),
    "v of all sizes": lambda a, b, v: (a, b, v * powers(6, len(v))[:, None]),
    "columns of all sizes": lambda a, b, v: (a, b, v * powers(20, v.shape[1])),
    "v of zeros": lambda a, b, v: (a, b, v * 0),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("features", (3, 10))
def test_hostile_data(name, features, launched):
    a, b, v = HOSTILE[name](*points(300, 3000, features, 20))
    check(launched, GAUSSIAN, a, b, v, bandwidth=1.5 * features**0.5)


@pytest.mark.parametrize("scale", (1e-36, 1e-12, 1e12))
def test_values_of_all_sizes(scale, launched):
    """Scales of rows follow values that grow from tile to tile."""
    descriptor = kl.Pairwise(
        "difference", kl.Square(), kl.Identity(), (kl.Custom("v * s", ("s",)),)
    )
    a, b, v = points(200, 2000, 3, 20)
    b *= torch.linspace(0.1, 100, 2000, device="cuda")[:, None]
    v *= min(1.0, 1 / scale) if scale < 1e-30 else 1.0
    check(launched, descriptor, a, b, v, s=scale)


@pytest.mark.parametrize("features", (3, 10))
@pytest.mark.parametrize("size", (1e30, 1e36))
def test_large_v_whose_scaled_sums_leave_the_range(size, features, launched):
    a, b, v = points(300, 3000, features, 20)
    v = v.abs() * (size / 100)
    assert check(launched, GAUSSIAN, a, b, v, bandwidth=3.0).isfinite().all()


@pytest.mark.parametrize("where", ("a", "b", "v"))
@pytest.mark.parametrize("value", (float("nan"), float("inf")))
@pytest.mark.parametrize("features", (3, 10))
def test_what_is_not_finite_stays_where_it_belongs(where, value, features, launched):
    given = dict(zip("abv", points(300, 700, features, 20), strict=True))
    given[where][7, 1] = value
    found = kl.kernel_matmul(GAUSSIAN, *given.values(), bandwidth=3.0)
    matrix = kl.run_kernel(GAUSSIAN, given["a"].double(), given["b"].double(), bandwidth=3.0)
    torch.testing.assert_close(
        found.double(), matrix @ given["v"].double(), rtol=1e-4, atol=1e-4, equal_nan=True
    )
    assert bool(launched) == on_hopper()


def test_values_that_are_infinite():
    descriptor = kl.Pairwise("difference", kl.Square(), kl.Identity(), (kl.Custom("1 / v"),))
    a, b, v = points(300, 700, 3, 20)
    b[5] = a[9]
    v = v.abs()
    found = kl.kernel_matmul(descriptor, a, b, v)
    assert (found[9] == float("inf")).all()
    assert found[torch.arange(300) != 9].isfinite().all()


@pytest.mark.parametrize("features", (3, 20))
def test_regularization_and_offsets(features, launched):
    a, _, v = points(700, 700, features, 20)
    options = {"bandwidth": 1.5, "regularization": 0.5, "row_offset": 100}
    check(launched, GAUSSIAN, a[100:400], a, v, **options)


@pytest.mark.parametrize("shared", ("", "a", "b", "v"))
@pytest.mark.parametrize("features", (3, 20))
def test_batches_with_a_bandwidth_each(shared, features, launched):
    sizes = {"a": (3, 200, features), "b": (3, 300, features), "v": (3, 300, 20)}
    given = {
        name: torch.randn(size[1:] if name == shared else size, device="cuda")
        for name, size in sizes.items()
    }
    bandwidth = torch.tensor([0.5, 1.0, 2.0], device="cuda") * features**0.5
    found = kl.kernel_matmul(GAUSSIAN, *given.values(), bandwidth=bandwidth)
    a, b, v = (t.expand(3, *t.shape[-2:]) for t in given.values())
    assert bool(launched) == on_hopper()
    assert error(found, GAUSSIAN, a, b, v, bandwidth=bandwidth) <= ERROR


def test_any_strides(launched):
    a, b, v = points(300, 700, 20, 33)
    wanted = kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=4.0)
    left, right = a.T.contiguous().T, torch.stack((b, b), 2)[..., 0]
    found = kl.kernel_matmul(GAUSSIAN, left, right, v.T.contiguous().T, bandwidth=4.0)
    assert torch.equal(found, wanted)
    assert bool(launched) == on_hopper()


def test_the_same_bits_each_time(launched):
    a, b, v = points(1000, 5000, 10, 40)
    first = kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=3.0)
    for _ in range(3):
        assert torch.equal(kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=3.0), first)
    assert not on_hopper() or launched[0].parts > 1


def test_a_graph_follows_its_bandwidth(launched):
    """From folded exponents to those behind them, in one capture."""
    a, b, v = points(300, 700, 10, 20)
    bandwidth = torch.tensor(4.0, device="cuda")
    kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=bandwidth)
    with capture() as graph:
        out = kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=bandwidth)
    for value in (4.0, 1.4, 3.0):
        bandwidth.fill_(value)
        graph.replay()
        assert error(out, GAUSSIAN, a, b, v, bandwidth=value) <= ERROR
    assert bool(launched) == on_hopper()

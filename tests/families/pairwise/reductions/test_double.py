"""The kernel of float64, run by threads of the host, from ``kernel_matmul`` and ``kernel_sum`` on,
by long doubles."""

import math

import numpy as np
import pytest
import torch

import kernlib as kl
from kernlib import ahead
from kernlib.families.pairwise.kernels import double
from tests.families.pairwise.cases import draw
from tests.families.pairwise.forwards import bandwidth
from tests.families.pairwise.reductions.double_cases import DESCRIPTORS, GAUSSIAN, ON_LANES
from tests.support import hostile
from tests.support.emulation.gpus import gpu, host
from tests.support.speeds import slow_but

pytestmark = [pytest.mark.emulated, pytest.mark.usefixtures("gpus")]


def squares(a, b):
    """Squared distances, as long doubles."""
    a, b = (t.numpy().astype(np.longdouble) for t in (a, b))
    return np.square(b[None] - a[:, None]).sum(-1)


def exactly(matrix, v) -> torch.Tensor:
    """A product of long doubles, rounded."""
    return torch.from_numpy((matrix @ v.numpy()).astype(float))


def of_words(gpus) -> list[bool]:
    """Of each launch of sums, whether tensor cores multiplied."""
    sums = [spec.description for spec in gpus.specs if " pack" not in spec.description]
    return [" tensor" in text for text in sums]


SIZES = [(k, columns) for k in (1, 8, 17, 40) for columns in (1, 8, 9)]


@pytest.mark.parametrize("size", slow_but(((1, 1), (17, 9)), SIZES), ids=str)
def test_sizes_and_columns(size, gpus):
    k, columns = size
    for m, n in ((1, 1), (63, 65), (64, 128), (65, 300)):
        a, b, v = draw(m, k), draw(n, k, seed=1), draw(n, columns, seed=2)
        width = 2 * math.sqrt(k)
        found = kl.kernel_matmul(GAUSSIAN, *map(gpu, (a, b, v)), bandwidth=width)
        matrix = np.exp(-squares(a, b) / (2 * np.longdouble(width) ** 2))
        wanted, terms = exactly(matrix, v), exactly(matrix, v.abs())
        hostile.check(host(found), wanted, terms, where=f"{m} x {n}")
    assert set(of_words(gpus)) == {k >= double.LEAST_FEATURES}
    assert len(of_words(gpus)) == 4 * -(-columns // double.WIDTH)


@pytest.mark.parametrize("k", [5, 20])
@pytest.mark.parametrize("name", slow_but(("gaussian", "maximum"), DESCRIPTORS))
def test_every_kind_of_sum(name, k, gpus):
    descriptor, values = DESCRIPTORS[name]
    a, b, v = draw(70, k), draw(200, k, seed=1), draw(200, 3, seed=2)
    b[5] = a[3]
    found = kl.kernel_matmul(descriptor, *map(gpu, (a, b, v)), **values)
    sums = kl.kernel_sum(descriptor, gpu(a), gpu(b), **values)
    matrix = kl.run_kernel(descriptor, a, b, **values)
    size = matrix.abs()
    hostile.check(host(found), matrix @ v, size @ v.abs(), where=name)
    hostile.check(host(sums), matrix.sum(1), size.sum(1), where=name)
    assert of_words(gpus) == 2 * [name not in ON_LANES and k > 7]


@pytest.mark.parametrize("name", slow_but(("clusters 1e-7",), hostile.NAMES))
def test_hostile_points(name, gpus):
    for features in (3, 19):
        case = hostile.case(name, torch.float64, rows=70, columns=130, features=features)
        width, v = bandwidth(case), draw(130, 2)
        made = [gpu(t) for t in (case.a, case.b, v)]
        with np.errstate(all="ignore"):
            apart = squares(case.a, case.b)
            matrix = np.exp(-apart / (2 * np.longdouble(width) ** 2))
            wanted, terms = exactly(matrix, v), v.abs().sum(0)
            wide = torch.from_numpy(apart.sum(1).astype(float))
        found = kl.kernel_matmul(GAUSSIAN, *made, bandwidth=width)
        hostile.check(host(found), wanted, terms, where=f"gaussian {name}")
        found = kl.kernel_sum(kl.squared_distance(), *made[:2])
        hostile.check(host(found), wide, where=f"squared distance {name}")


@pytest.mark.parametrize("k", [3, 16])
def test_equal_points_are_at_0_and_no_others(k, gpus):
    a = draw(100, k) + 1e3
    b = a.repeat(2, 1)
    b[100:] += 1e-9
    found = host(kl.kernel_sum(GAUSSIAN, gpu(a), gpu(b), bandwidth=1e-20))
    assert found.tolist() == [1.0] * 100
    found = host(kl.kernel_sum(GAUSSIAN, gpu(a), gpu(b), bandwidth=1e-9 * k**0.5))
    assert ((found - 1 - math.exp(-0.5)).abs() < 1e-3).all()  # what 1e-9 beside 1e3 comes to


@pytest.mark.parametrize("k", [3, 16])
def test_what_is_not_finite_stays_where_it_is(k, gpus):
    a, b, v = draw(70, k), draw(130, k, seed=1), torch.ones(130, 1, dtype=torch.float64)
    a[3, 1], a[66, 0] = math.nan, math.inf
    b[128, 1] = math.inf
    found = host(kl.kernel_matmul(GAUSSIAN, *map(gpu, (a, b, v)), bandwidth=3.0))
    wanted = kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=3.0)
    torch.testing.assert_close(found, wanted, equal_nan=True)
    assert found.isnan().sum() == 1 and found[66] == 0


BATCHES = {
    "all": ((3, 70, 9), (3, 130, 9), (3, 130, 2)),
    "b shared": ((3, 70, 9), (130, 9), (130, 2)),
    "a shared": ((70, 9), (3, 130, 9), (1, 130, 2)),
    "few features": ((3, 70, 2), (3, 130, 2), (3, 130, 2)),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches_and_numbers_of_each(name, gpus):
    a, b, v = (draw(*shape, seed=i) for i, shape in enumerate(BATCHES[name]))
    if a.dim() == 3:
        a += torch.tensor([0.0, 1e3, -1e3], dtype=torch.float64)[:, None, None]
    widths = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    found = kl.kernel_matmul(kl.cauchy(), *map(gpu, (a, b, v)), bandwidth=gpu(widths))
    matrix = kl.run_kernel(kl.cauchy(), a if a.dim() == 3 else a[None], b, bandwidth=widths)
    hostile.check(host(found), matrix @ v, matrix @ v.abs(), where=name)


@pytest.mark.parametrize("k", [3, 9])
def test_powers_of_each_batch_entry(k, gpus):
    """Long doubles: 1 + s/2 alpha to a power that differs, and roots of powers of each p."""
    a, b = draw(3, 70, k), draw(3, 130, k, seed=1)
    b[:, 7] = a[:, 3]
    v = draw(3, 130, 2, seed=2)
    exponents = torch.tensor([0.3, 3.7, 50.0], dtype=torch.float64)
    values = {"bandwidth": 0.7, "alpha": gpu(exponents)}
    rational = kl.kernel_matmul(kl.rational_quadratic(), *map(gpu, (a, b, v)), **values)
    norms = kl.kernel_sum(kl.p_distance(), gpu(a), gpu(b), p=gpu(exponents))
    for i, each in enumerate(exponents.numpy().astype(np.longdouble)):
        below = 1 + squares(a[i], b[i]) / (2 * each * np.longdouble(0.7) ** 2)
        wanted, terms = (exactly(below**-each, t) for t in (v[i], v[i].abs()))
        hostile.check(host(rational)[i], wanted, terms, where=f"alpha {each}")
        left, right = (t[i].numpy().astype(np.longdouble) for t in (a, b))
        apart = (np.abs(right[None] - left[:, None]) ** each).sum(-1) ** (1 / each)
        sums = torch.from_numpy(apart.sum(1).astype(float))
        hostile.check(host(norms)[i], sums, where=f"p {each}")


@pytest.mark.parametrize("descriptor", [kl.p_distance(), kl.power_sum()])
def test_exponents_of_tensors_that_take_no_logarithm(descriptor, gpus):
    """Beside the same as numbers, and one that takes one, each in a batch entry of its own."""
    a, b = draw(5, 20, 3).round(decimals=1), draw(5, 30, 3, seed=1).round(decimals=1)
    exponents = [0.0, 1.0, 2.0, math.inf if descriptor == kl.p_distance() else 3.0, 1.7]
    given = gpu(torch.tensor(exponents, dtype=torch.float64))
    found = host(kl.kernel_sum(descriptor, gpu(a), gpu(b), p=given))
    for i, p in enumerate(exponents):
        wanted = kl.run_kernel(descriptor, a[i], b[i], p=p).sum(1)
        hostile.check(found[i], wanted, where=f"p {p}")


@pytest.mark.few(1)
def test_strides_and_out(gpus):
    a, b = draw(9, 70).mT, draw(130, 40)[:, ::4][:, :9]
    v = draw(130, 8)[..., 1::3].flip(0)
    wanted = kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=3.0)
    out = torch.full((70, 3), math.nan, dtype=torch.float64)
    found = kl.kernel_matmul(GAUSSIAN, gpu(a), gpu(b), gpu(v), out=gpu(out), bandwidth=3.0)
    torch.testing.assert_close(host(found), wanted, rtol=1e-13, atol=1e-13)
    first = host(kl.kernel_matmul(GAUSSIAN, gpu(a), gpu(b), gpu(v), bandwidth=3.0))
    assert torch.equal(first, host(found)) and torch.equal(out, first)


@pytest.mark.few(1)
def test_equal_terms_of_long_rows(gpus):
    """Whose rounding has one sign: of 40000 terms one chain would be off by 1.1e-12."""
    a, b = torch.full((1, 1), 0.3, dtype=torch.float64), torch.zeros(40000, 1, dtype=torch.float64)
    found = host(kl.kernel_sum(GAUSSIAN, gpu(a), gpu(b), bandwidth=1.0))
    exact = 40000 * math.exp(-0.045)
    assert abs(found.item() - exact) <= 1e-14 * exact


@pytest.mark.few(1)
def test_what_is_prepared_is_what_is_launched(gpus):
    a, b, v = draw(70, 9), draw(130, 9, seed=1), draw(130, 9, seed=2)
    kl.kernel_matmul(GAUSSIAN, gpu(a), gpu(b), gpu(v), bandwidth=3.0)
    arguments = {"reduction": "kernel_matmul", "bandwidth": 3.0}
    wanted = ahead.specs(GAUSSIAN, "sm_90a", (a, b, v), arguments)
    assert set(wanted) == set(gpus.specs) and len(wanted) == 2

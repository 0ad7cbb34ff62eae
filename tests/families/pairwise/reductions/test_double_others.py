"""Log-sum-exps and minima in float64, by the kernel that keeps rows of few features in registers,
run by threads of the host, from calls on."""

import math

import pytest
import torch

import kernlib as kl
from kernlib import ahead
from kernlib.families.pairwise.kernels import double
from kernlib.families.pairwise.reductions import gradients, kernels
from kernlib.families.pairwise.reductions.arguments import request_of, shape_of
from tests.families.pairwise import reduction_hostile
from tests.families.pairwise.cases import draw
from tests.families.pairwise.reductions.double_cases import DESCRIPTORS, GAUSSIAN
from tests.support import fakes, hostile
from tests.support.emulation.gpus import gpu, host
from tests.support.speeds import slow_but

pytestmark = [pytest.mark.emulated, pytest.mark.usefixtures("gpus")]

DOT, MANHATTAN = kl.dot_product(), kl.l1_distance()
MOST = torch.finfo(torch.float64).max
# Values of any sign and size: those of b where a is 1.
GIVEN = torch.ones(1, 1, dtype=torch.float64)


def check(descriptor, a, b, where="", **values):
    """All three reductions by the matrix of the CPU."""
    on = {name: gpu(t) if isinstance(t, torch.Tensor) else t for name, t in values.items()}
    matrix = kl.run_kernel(descriptor, a, b, **values)
    found = host(kl.kernel_logsumexp(descriptor, gpu(a), gpu(b), **on))
    assert found.dtype == torch.float64
    wanted = matrix.logsumexp(-1)
    hostile.check(found, wanted, 1 + wanted.abs(), where=where)
    low, places = (host(t) for t in kl.kernel_min(descriptor, gpu(a), gpu(b), **on))
    hostile.check(low, matrix.amin(-1), matrix.abs().amax(-1), where=where)
    chosen = matrix.gather(-1, places[..., None])[..., 0]
    hostile.check(chosen, matrix.amin(-1), matrix.abs().amax(-1), where=where)
    assert torch.equal(host(kl.kernel_argmin(descriptor, gpu(a), gpu(b), **on)), places)


def logarithms(values: list[float], descriptor=DOT, **arguments) -> float:
    """The log-sum-exp of values."""
    column = torch.tensor(values, dtype=torch.float64)[:, None]
    return host(kl.kernel_logsumexp(descriptor, gpu(GIVEN), gpu(column), **arguments)).item()


def least(values: list[float]) -> tuple[float, int]:
    """The smallest of values and its place."""
    column = torch.tensor(values, dtype=torch.float64)[:, None]
    low, place = kl.kernel_min(DOT, gpu(GIVEN), gpu(column))
    return host(low).item(), host(place).item()


def is_of_kernels(gpus) -> bool:
    """Whether every launch was one that keeps rows in registers."""
    return bool(gpus.specs) and all(" small float64 " in s.description for s in gpus.specs)


@pytest.mark.parametrize("k", slow_but((1, 8), range(1, double.SMALL_FEATURES + 1)))
def test_sizes(k, gpus):
    for m, n in ((1, 1), (63, 65), (300, 257), (2, 3000)):
        check(kl.squared_distance(), draw(m, k), draw(n, k, seed=1), where=f"{m} x {n}")
    assert is_of_kernels(gpus)


TAKEN = [name for name in DESCRIPTORS if name not in ("pq", "1.3")]  # others are by logarithms


@pytest.mark.parametrize("name", slow_but(("gaussian", "regularized"), TAKEN))
def test_every_kind_of_sum(name, gpus):
    descriptor, values = DESCRIPTORS[name]
    a, b = draw(100, 5), draw(200, 5, seed=1)
    b[5] = a[3]
    check(descriptor, a, b, where=name, **values)
    assert is_of_kernels(gpus)


@pytest.mark.parametrize("m, n", [(1100, 300), (3, 5000)])
def test_several_rows_of_a_thread_and_several_blocks(m, n, gpus, monkeypatch):
    a, b = draw(m, 3), 3 * draw(n, 3, seed=1)
    for rows in (1, 2, 4):
        cut = kernels.lowering.Cut(rows, 1, 208)
        monkeypatch.setattr(kernels.lowering, "small_cut", lambda *_, given=cut, **__: given)
        fakes.forget()
        check(kl.squared_distance(epilogue=kl.Custom("-3 * v")), a, b, where=f"{rows} rows")
    assert len({spec.description for spec in gpus.specs}) == 6


BATCHES = {
    "all": ((3, 70, 2), (3, 130, 2)),
    "b shared": ((3, 70, 9), (130, 9)),
    "a shared": ((70, 3), (3, 130, 3)),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches_and_numbers_of_each(name, gpus):
    a, b = (draw(*shape, seed=i) for i, shape in enumerate(BATCHES[name]))
    widths = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    a = a if a.dim() == 3 else a[None]
    check(kl.cauchy(), a, b, bandwidth=widths, regularization=widths - 1.5, row_offset=3)
    assert is_of_kernels(gpus)


def test_strides(gpus):
    check(MANHATTAN, draw(9, 70).mT, draw(130, 40)[:, ::4][:, :9].flip(0))
    assert is_of_kernels(gpus)


@pytest.mark.few(1)
@pytest.mark.parametrize("count", [7, 3000])
def test_equal_values_and_nan(count, gpus):
    """By one block and by several, whose partial results are put together."""
    values = [1.0] * count
    values[5] = values[-1] = -2.0
    assert least(values) == (-2.0, 5)
    values[-2] = math.nan
    assert math.isnan(least(values)[0]) and least(values)[1] == count - 2
    assert math.isnan(logarithms(values))
    values[3] = -math.nan
    assert least(values)[1] == 3 and math.isnan(logarithms([*values, math.inf, 1.0]))
    assert least([math.inf] * count) == (math.inf, 0)
    assert least([math.inf, -math.inf] * count) == (-math.inf, 1)


@pytest.mark.parametrize("count", [1, 3000])
def test_infinite_values_of_a_log_sum_exp(count, gpus):
    inf = math.inf
    for values in (
        [-inf], [inf], [inf, inf, 1.0], [1.0, inf, inf, -inf], [-inf, 2.0, -inf], [MOST, inf, 0.0],
        [-MOST], [-MOST, -inf, 1.0], [1e308, -1e308], [-1e308], [0.0, 1e308, 1.0], [-745.0, 0.0],
        [700.0, 1400.0, -1400.0, 708.5], [-inf, inf], [1e-310, -1e-310, 5e-324], [-0.0, 0.0],
    ):  # fmt: skip
        given = values * count
        wanted = torch.tensor(given, dtype=torch.float64).logsumexp(0).item()
        found = logarithms(given)
        assert found == pytest.approx(wanted, rel=4e-16, abs=4e-16), values


def test_what_is_all_but_the_largest_number_counts_as_infinite(gpus):
    assert logarithms([1.79769227e308, 1.0]) == 1.79769227e308
    assert logarithms([1.79769228e308, 1.0]) == math.inf
    assert logarithms([MOST, 1.0]) == math.inf


def test_the_regularization_is_added_to_its_value(gpus):
    same = kl.dot_product(epilogue=kl.Custom("v"))
    assert logarithms([-math.inf, 3.0], same, regularization=5.0) == 3.0
    found = logarithms([-1.0, 3.0], same, regularization=5.0)
    assert found == pytest.approx(4 + math.log1p(1 / math.e), rel=4e-16)


def test_equal_terms_of_long_rows(gpus):
    """Whose rounding has one sign: of 40000 terms one chain would be off by 1.1e-12."""
    found = logarithms([0.3, -0.7] * 20000)
    wanted = 0.3 + math.log(20000) + math.log1p(math.exp(-1.0))
    assert abs(found - wanted) <= 4e-15


@pytest.mark.few(1)
def test_values_that_rise_and_fall(gpus):
    rising = [0.37 * i - 300.0 for i in range(2000)]
    for values in (rising, rising[::-1], [x * (-1) ** i for i, x in enumerate(rising)]):
        wanted = torch.tensor(values, dtype=torch.float64).logsumexp(0).item()
        assert abs(logarithms(values) - wanted) <= 4e-16 * abs(wanted)


@pytest.mark.parametrize("name", slow_but(("clusters 1e-7",), hostile.FINITE))
def test_hostile_points(name, gpus):
    case = hostile.case(name, torch.float64, rows=70, columns=130, features=3)
    a, b = case.exact
    matrix = (b[None] - a[:, None]).abs().sum(-1)
    values, places = (host(t) for t in kl.kernel_min(MANHATTAN, gpu(case.a), gpu(case.b)))
    hostile.check(values, matrix.amin(1), where=name)
    hostile.check(matrix.gather(1, places[:, None])[:, 0], matrix.amin(1), where=name)
    width = reduction_hostile.bandwidth(case)
    wanted = torch.exp(-matrix / width).logsumexp(1)
    found = kl.kernel_logsumexp(kl.laplace_l1(), gpu(case.a), gpu(case.b), bandwidth=width)
    hostile.check(host(found), wanted, 1 + wanted, where=name)


@pytest.mark.parametrize("reduction", ["kernel_logsumexp", "kernel_min", "kernel_argmin"])
def test_what_is_prepared_is_what_is_launched(reduction, gpus):
    a, b = draw(70, 9), draw(130, 9, seed=1)
    getattr(kl, reduction)(GAUSSIAN, gpu(a), gpu(b), bandwidth=3.0)
    arguments = {"reduction": reduction, "bandwidth": 3.0}
    wanted = ahead.specs(GAUSSIAN, "sm_90a", (a, b), arguments)
    assert set(wanted) == set(gpus.specs) and len(wanted) == 1


def test_gradients_begin_from_what_the_kernel_found(gpus):
    a, b, along = draw(30, 3), draw(200, 3, seed=1), draw(30, 1)[None, :, 0]
    out = host(kl.kernel_logsumexp(kl.squared_distance(), gpu(a), gpu(b)))
    request = request_of(kl.squared_distance(), a, b, None, 0, 0, {})
    shape = shape_of(request)
    with torch.no_grad():
        found = gradients.gradients("logsumexp", request, shape, ["a", "b"], along, out[None])
    given = [t.clone().requires_grad_() for t in (a, b)]
    matrix = (given[1][None] - given[0][:, None]).square().sum(-1)
    wanted = torch.autograd.grad(matrix.logsumexp(1), given, along[0])
    for name, value in zip("ab", wanted, strict=True):
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)

"""Few pairs, whose kernel threads of the host run from the call on, against float64."""

import math

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise import matrix
from kernlib.runtime.plan import forget_plans
from tests.support.emulation import gpus as emulated
from tests.support.emulation.emulator import kernels_of
from tests.support.emulation.gpus import gpu, host

pytestmark = pytest.mark.emulated
BOUND = {torch.float32: 2e-6, torch.float64: 1e-13, torch.float16: 1e-3, torch.bfloat16: 8e-3}
INF = math.inf


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return kernels_of(tmp_path_factory)


@pytest.fixture
def gpus(monkeypatch, folder):
    forget_plans()
    made = emulated.install(monkeypatch, folder, matrix)
    yield made
    assert made.specs and all("few pairs" in spec.description for spec in made.specs)


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wide(value):
    return value.double() if isinstance(value, torch.Tensor) else value


def check(descriptor, a, b=None, out=None, accumulate=False, bound=None, **arguments):
    """A call, with its result beside that of float64 on the CPU."""
    operands = [t for t in (a, b) if t is not None]
    exact = {name: wide(value) for name, value in arguments.items()}
    wanted = kl.run_kernel(descriptor, *map(wide, operands), **exact)
    if accumulate:
        wanted = wanted + out.double()
    arguments = {name: gpu(value) for name, value in arguments.items()}
    if out is not None:
        arguments |= {"out": gpu(out), "accumulate": accumulate}
    found = host(kl.run_kernel(descriptor, *map(gpu, operands), **arguments))
    bound = BOUND[a.dtype] if bound is None else bound
    torch.testing.assert_close(found.double(), wanted.double(), rtol=bound, atol=bound)
    return found


@pytest.mark.parametrize("p", [0, 0.5, 1, 1.3, 1.5, 2, 2.5, 3, 4, 6, INF])
@pytest.mark.parametrize("k", [0, 1, 7, 32, 33, 100, 300, 1100])
def test_every_exponent_and_number_of_slices(p, k, gpus):
    bound = 5e-6 * max(1, 1 / p if p else 1)
    check(kl.p_distance(), drawn(5, k), drawn(10, k, seed=1), p=p, bound=bound)


@pytest.mark.parametrize("p", [0.0, 1.0, 1.3, 2.0, INF])
@pytest.mark.parametrize("descriptor", [kl.p_distance(), kl.power_sum()], ids=str)
def test_exponents_on_the_device(descriptor, p, gpus):
    if descriptor == kl.power_sum() and p == INF:
        p = 3.7
    given = torch.tensor(p)
    check(descriptor, drawn(6, 70), drawn(3, 70, seed=1), p=given, bound=5e-6)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 9), (4, 4), (5, 3), (13, 37), (67, 2), (33, 34)])
@pytest.mark.parametrize("k", [5, 40, 70, 130])
def test_every_size(m, n, k, gpus):
    check(kl.l1_distance(), drawn(m, k), drawn(n, k, seed=1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [1, 1.3, 3, INF])
def test_every_type(dtype, p, gpus):
    a, b = drawn(6, 150, dtype=dtype), drawn(9, 150, dtype=dtype, seed=1)
    check(kl.p_distance(), a, b, p=p)
    if dtype != torch.float64:
        check(kl.p_distance(), a, b, p=p, out=torch.empty(6, 9), bound=5e-6)


DESCRIPTORS = [
    (kl.l2_distance(), {}),
    (kl.squared_distance(), {}),
    (kl.dot_product(), {}),
    (kl.gaussian(), {"bandwidth": 9.0}),
    (kl.laplace_pq(), {"bandwidth": 9.0, "p": 1.3, "q": 0.9}),
    (kl.matern52(), {"bandwidth": 9.0}),
    (kl.rational_quadratic(), {"bandwidth": 9.0, "alpha": 1.7}),
    (kl.polynomial(3), {"gamma": 0.01, "offset": 1.0}),
    (kl.Pairwise(inner=kl.Identity()), {}),
    (kl.Pairwise("dot", kl.Abs(), kl.Sqrt()), {}),
    (kl.Pairwise(epilogue=(kl.Custom("tanh(gain * v)", ("gain",)), kl.Scale())),
     {"gain": 0.01, "scale": -3.0}),
]  # fmt: skip


@pytest.mark.parametrize(("descriptor", "arguments"), DESCRIPTORS, ids=lambda x: str(x)[:50])
def test_every_kind_of_term_and_epilogue(descriptor, arguments, gpus):
    check(descriptor, drawn(7, 90), drawn(10, 90, seed=1), bound=2e-5, **arguments)


@pytest.mark.parametrize(
    "descriptor", [kl.exp_power_sum(), kl.Pairwise(inner=kl.PowerLog())], ids=str
)
def test_terms_that_count_what_is_not_there(descriptor, gpus):
    """Zeros are terms of exp: features past the last one must not be summed. In float64 alone, as
    the others are PTX."""
    given = {"inner_p": 1.3} | ({"inner_scale": -0.3} if descriptor == kl.exp_power_sum() else {})
    a, b = drawn(5, 37, dtype=torch.float64), drawn(6, 37, dtype=torch.float64, seed=1)
    check(descriptor, a, b, bound=1e-12, **given)


def test_operands_and_outputs_of_any_strides(gpus):
    a, b = drawn(7, 66), drawn(9, 66, seed=1)
    columns, shifted = b.T.contiguous().T, torch.empty(7, 67)[:, 1:].copy_(a)
    wide_a = torch.empty(14, 132)[::2, ::2].copy_(a)
    for first, second in ((a, columns), (shifted, b), (wide_a, columns), (a[:1].expand(7, 66), b)):
        check(kl.l1_distance(), first, second)
        check(kl.l1_distance(), first, second, out=torch.full((9, 7), math.nan).T)
        memory = torch.full((14, 30), 5.0)
        out = memory[::2, 1:28:3]
        found = check(kl.l1_distance(), first, second, out=out, accumulate=True)
        assert (memory == 5).sum() == memory.numel() - found.numel()


def test_signed_terms_of_an_output_by_columns(gpus):
    a, b = drawn(7, 20), drawn(9, 20, seed=1)
    check(kl.Pairwise(inner=kl.Identity()), a, b, out=torch.empty(9, 7).T, bound=1e-5)


@pytest.mark.parametrize("k", [20, 300])
def test_batches_and_their_numbers(k, gpus):
    a, b = drawn(3, 5, k), drawn(3, 6, k, seed=1)
    bandwidth = torch.tensor([9.0, 18.0, 27.0])
    check(kl.laplace_l1(), a, b, bandwidth=bandwidth, bound=1e-5)
    check(kl.laplace_l1(), a[0], b, bandwidth=9.0, bound=1e-5)
    check(kl.p_distance(), a * bandwidth[:, None, None] ** 8, b, p=1.3, bound=5e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("row_offset", [-5, 0, 3, 100])
def test_the_diagonal_is_regularized(row_offset, gpus):
    arguments = {"bandwidth": 9.0, "regularization": 0.5, "row_offset": row_offset}
    check(kl.laplace_l1(), drawn(7, 50), drawn(9, 50, seed=1), bound=1e-5, **arguments)


@pytest.mark.parametrize("p", [1.0, 1.3, 3.0])
@pytest.mark.parametrize(("m", "k"), [(3, 40), (22, 70), (41, 20), (9, 300)])
def test_a_symmetric_result_is_so_bit_by_bit(m, k, p, gpus):
    """Of points whose units differ by patch."""
    a = drawn(m, k) * 10.0 ** torch.linspace(-10, 10, m)[:, None]
    descriptor = kl.p_distance(symmetric=True)
    found = check(descriptor, a, p=p, out=torch.ones(m, m), bound=5e-6)
    assert torch.equal(found, found.T)
    old = drawn(m, m)
    check(descriptor, a, p=p, out=old + old.T, accumulate=True, bound=5e-6)


@pytest.mark.parametrize("p", [0.5, 1.3, 3.0])
@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1e-5, 1e5, 1e20, 1e30])
def test_magnitudes(p, scale, gpus):
    """Of a unit for each patch, and where sums of powers leave float32."""
    a, b = drawn(9, 70) * scale, drawn(6, 70, seed=1) * scale
    check_norms(a, b, p, gpus)
    a[:4], b[:4] = 0, 0  # a patch of zeros beside others of its block
    a[8] *= 1e-3
    check_norms(a, b, p, gpus)


def check_norms(a, b, p, gpus):
    wanted = (a.double()[:, None] - b.double()).abs().pow(p).sum(-1).pow(1 / p)
    found = host(kl.cdist(gpu(a), gpu(b), p=p)).double()
    finite = wanted < 3e38
    torch.testing.assert_close(found[finite], wanted[finite], rtol=1e-5 / min(p, 1), atol=0)
    assert found[~finite].isinf().all()


@pytest.mark.few(1)
@pytest.mark.parametrize("k", [19, 150, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("descriptor", "scale"),
    [(kl.dot_product(), 1e20), (kl.Pairwise(inner=kl.Identity()), 2e38)],
    ids=["dot", "difference"],
)
def test_sums_of_both_signs_that_leave_float32(descriptor, scale, dtype, k, gpus):
    """Infinities of the right sign, where those of lanes would meet as a NaN."""
    a = (drawn(9, k) * scale).clamp(-3e38, 3e38).to(dtype)
    b = (drawn(6, k, seed=1) * scale).clamp(-3e38, 3e38).to(dtype)
    wanted = kl.run_kernel(descriptor, a.double(), b.double())
    found = host(kl.run_kernel(descriptor, gpu(a), gpu(b))).double()
    overflow = wanted.to(dtype).isinf()
    assert overflow.any() and torch.equal(found[overflow], wanted.sign()[overflow] * INF)
    bound = BOUND[dtype]
    torch.testing.assert_close(found[~overflow], wanted[~overflow], rtol=bound, atol=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("value", [math.nan, INF])
def test_products_with_numbers_that_are_none(value, gpus):
    a, b = drawn(7, 70), drawn(9, 70, seed=1)
    a[1, 3], b[4, 69], b[5, 3] = value, -value, 0.0
    wanted = a.double() @ b.double().T
    found = host(kl.run_kernel(kl.dot_product(), gpu(a), gpu(b))).double()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert wanted[1, 5].isnan() and not wanted[0].isnan().all()


@pytest.mark.parametrize("p", [0, 0.5, 1, 1.3, 2, 3, INF])
def test_numbers_that_are_none(p, gpus):
    a, b = drawn(7, 40), drawn(9, 40, seed=1)
    a[1, 3], a[2, 39], b[4, 0], b[8, 5] = math.nan, INF, -INF, INF
    differences = (a.double()[:, None] - b.double()).abs()
    wanted = differences.amax(-1) if p == INF else torch.cdist(a.double(), b.double(), p=p)
    found = host(kl.cdist(gpu(a), gpu(b), p=p)).double()
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=1e-6, equal_nan=True)
    assert wanted.isnan().any() and (p == 0 or wanted.isinf().any())


@pytest.mark.parametrize("k", [16384, 16640, 100_000])
@pytest.mark.parametrize("value", [0.1, 1 / 3])
def test_long_sums_of_equal_terms(k, value, gpus):
    """Whose rounding has one sign: a chain of a lane has 64, and totals keep what they lose."""
    found = host(kl.cdist(gpu(torch.zeros(1, k)), gpu(torch.full((2, k), value)), p=1))
    wanted = torch.full((2, k), value).double().sum(-1)
    torch.testing.assert_close(found[0].double(), wanted, rtol=1.2e-6, atol=0)


def test_infinities_of_long_sums_stay(gpus):
    a, b = torch.zeros(2, 40_000), torch.ones(3, 40_000)
    b[0, 0], b[1, 39_999] = INF, math.nan
    found = host(kl.cdist(gpu(a), gpu(b), p=1))[1]
    assert found[0] == INF and found[1].isnan() and found[2] == 40_000
    assert host(kl.cdist(gpu(a), gpu(b[2:]), p=INF)).tolist() == [[1.0]] * 2

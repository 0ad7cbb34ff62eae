"""Norms, kernel functions, sums and reductions on points where they go wrong, on a GPU."""

from __future__ import annotations

import math

import pytest
import torch

import kernlib as kl
from tests.families.pairwise import bandwidths, magnitudes
from tests.families.pairwise.forwards import FORWARDS, bandwidth, norm
from tests.support import hostile

SHAPES = ((140, 260, 19), (70, 90, 150), (33, 129, 3), (1, 1, 1))  # rows, columns, features
OTHER = {torch.float64: (33, 65, 19), torch.float16: (70, 90, 2049), torch.bfloat16: (70, 90, 150)}
# The root of a denormal is taken as 0: its special function would cost a third more.
FLUSHED = ("power sum p=0.5", "denormals")
# The error of a power by logarithms is 6e-8 of the logarithm, beside a tile's largest difference.
# Norms are computed anew where that is more than 1e-6, sums of powers where it is more than this.
POWER_SUMS = hostile.FORWARD | {torch.float32: 6e-6}
# Squares of 1e-20 are denormals, which have lost half of their digits, in torch as here.
SQUARES = ("power sum p=2.0", "gaussian", "cauchy", "quadratic")
DENORMAL_SQUARES = hostile.FORWARD | {torch.float32: 1e-3}


def check(name: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    forward = FORWARDS[name]
    rows, columns, features = shape
    for case in hostile.cases(dtype, "cuda", rows=rows, columns=columns, features=features):
        bars = POWER_SUMS if name == "power sum p=1.3" else hostile.FORWARD
        if (name, case.name) == FLUSHED and dtype != torch.float64:
            continue
        if case.name == "magnitude 1e-20" and any(each in name for each in SQUARES):
            bars = DENORMAL_SQUARES
        where = f"{name}, {case.name}, {shape}"
        exact, terms = forward.exact(case)
        hostile.check(forward.ours(case), exact, terms, forward.theirs(case), where, bars)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("name", FORWARDS)
def test_forwards_meet_the_bar_on_hostile_points(name):
    for shape in SHAPES:
        check(name, torch.float32, shape)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", OTHER, ids=str)
@pytest.mark.parametrize("name", FORWARDS)
def test_so_do_other_types(name, dtype):
    check(name, dtype, OTHER[dtype])


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("p", (0.5, 0.7, 1.3, 1.5, 2.5, 3.0, 4.0, 6.0, 7.0, 20.0))
@pytest.mark.parametrize("features", (3, 19, 150))
def test_norms_are_right_where_their_powers_leave_the_range_of_float32(p, features):
    """Whatever torch makes of them."""
    for case in hostile.cases(torch.float32, "cuda", names=hostile.FINITE, features=features):
        exact = norm(*case.exact, p)
        for given in (p, torch.tensor(p, dtype=torch.float64, device="cuda")):
            out = kl.cdist(case.a, case.b, p=given)
            bars = {torch.float32: 1e-6 * max(1.0, 1 / p)}
            hostile.check(out, exact, where=f"{case.name}, {given}", bars=bars)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("features", (3, 40, 150))
@pytest.mark.parametrize("p", magnitudes.EXPONENTS)
def test_matrices_of_any_magnitude_are_right_where_float32_has_them(p, features):
    for name, points in magnitudes.points(70, 90, features, p):
        a, b = (x.cuda() for x in points)
        for root in (True, False):
            wanted, bar = magnitudes.exact(a, b, p, root), magnitudes.bar(p, root)
            for given in (p, torch.tensor(p, dtype=torch.float64, device="cuda")):
                where = f"{name}, root={root}, {given}"
                magnitudes.check(kl.cdist(a, b, p=given, root=root), wanted, bar, where)


@pytest.mark.parametrize(("rows", "features"), ((300, 3), (300, 40), (3000, 40)))
@pytest.mark.parametrize("p", (2.0, 10.0, 20.0))
def test_reductions_of_any_magnitude_are_right_where_float32_has_them(p, rows, features):
    """Distances in every precision, and sums of powers."""
    norms = [kl.l2_distance(precision=each) for each in ("fp32", "tf32", "bf16")]
    for name, points in magnitudes.points(rows, rows + 77, features, p):
        a, b = (x.cuda() for x in points)
        wanted = magnitudes.exact(a, b, p, p == 2)
        low = wanted.sort(1).values
        for descriptor in norms if p == 2 else [kl.power_sum()]:
            # Of tensor cores, where a squared distance is 1/32 of both norms or more.
            bar = magnitudes.bar(p, False) if descriptor.precision in (None, "fp32") else 0.05
            given, where = {} if p == 2 else {"p": p}, f"{descriptor}, {name}"
            bar *= 3 if p == 2 else 1
            values, places = kl.kernel_min(descriptor, a, b, **given)
            magnitudes.check(values, low[:, 0], bar, where)
            magnitudes.check(wanted.gather(1, places[:, None])[:, 0], low[:, 0], bar, where)
            magnitudes.check(
                kl.kernel_topk(descriptor, a, b, 5, **given)[0], low[:, :5], bar, where
            )
            magnitudes.check(kl.kernel_sum(descriptor, a, b, **given), wanted.sum(1), bar, where)


@pytest.mark.parametrize("precision", ("fp32", "tf32", "bf16"))
@pytest.mark.parametrize(("rows", "features"), ((300, 3), (300, 40), (3000, 3), (3000, 40)))
@pytest.mark.parametrize("columns", (1, 40))
def test_kernels_of_distances_take_a_bandwidth_of_the_size_of_the_points(
    columns, rows, features, precision
):
    v = torch.rand(rows + 77, columns, device="cuda")
    for name, points in magnitudes.points(rows, rows + 77, features, 2.0):
        if not name.startswith("size"):
            continue
        a, b = (x.cuda() for x in points)
        norms = magnitudes.exact(a, b, 2.0, True)
        width = norms.median().item()
        t = norms / width
        kernels = {
            kl.laplace_l2: torch.exp(-t),
            kl.matern32: (1 + 3**0.5 * t) * torch.exp(-(3**0.5) * t),
            kl.matern52: (1 + 5**0.5 * t + 5 / 3 * t * t) * torch.exp(-(5**0.5) * t),
        }
        for make, matrix in kernels.items():
            found = kl.kernel_matmul(make(precision=precision), a, b, v, bandwidth=width)
            off = (found - matrix @ v.double()).abs() / v.double().sum(0)
            assert off.max() <= (1e-5 if precision == "fp32" else 0.02), (make, name, off.max())


@pytest.mark.parametrize("p", (1.0, 2.0))
def test_an_exponent_on_the_device_leaves_integers_exact(p):
    a = torch.randint(-50, 50, (130, 70), device="cuda").float()
    b = torch.randint(-50, 50, (90, 70), device="cuda").float()
    on_device = torch.tensor(p, device="cuda")
    assert torch.equal(kl.cdist(a, b, p=on_device), kl.cdist(a, b, p=p))
    sums = kl.cdist(a, b, p=on_device, root=False)
    assert torch.equal(sums.double().cpu(), ((a - b[:, None]).cpu().double().abs() ** p).sum(-1).T)


@pytest.mark.parametrize("precision", ("fp32", "tf32", "bf16"))
@pytest.mark.parametrize("make", (kl.gaussian, kl.cauchy, kl.rational_quadratic))
def test_no_bandwidth_makes_a_nan(make, precision):
    numbers = {"alpha": 1.5} if make is kl.rational_quadratic else {}
    descriptor = make(precision=precision)
    for rows in (100, 3000):
        for scale, width in ((1e20, 1e20), (1e17, 1e20), (1e-20, 1e-20), (1.0, 1e-30)):
            case = hostile.case("duplicates", torch.float32, "cuda", rows=rows, columns=rows,
                                features=64)  # fmt: skip
            a, b = case.a * scale, case.b * scale
            matrix = kl.run_kernel(descriptor, a, b, bandwidth=width, **numbers)
            sums = kl.kernel_sum(descriptor, a, b, bandwidth=width, **numbers)
            assert matrix.isfinite().all() and sums.isfinite().all(), (rows, scale, width)
            assert (matrix[torch.arange(1, rows, 2), torch.arange(1, rows, 2)] == 1).all()


@pytest.mark.parametrize("features", (3, 16, 40))
@pytest.mark.parametrize("p", (1.3, 3.0, 7.0))
def test_reductions_see_the_same_norms_as_matrices(p, features):
    for case in hostile.cases(torch.float32, "cuda", rows=300, columns=500, features=features):
        width = bandwidth(case)
        v = torch.rand(500, 1, device="cuda")
        norms = kl.cdist(case.a, case.b, p=p).double()
        found = kl.kernel_min(kl.p_distance(), case.a, case.b, p=p)[0]
        wanted = norms.amin(1)
        bars = {torch.float32: 2e-6}  # each is right to half of it
        hostile.check(found, wanted, where=case.name, bars=bars)
        arguments = {"bandwidth": width, "p": p, "q": 0.8}
        matrix = kl.run_kernel(kl.laplace_pq(), case.a, case.b, **arguments).double()
        found = kl.kernel_matmul(kl.laplace_pq(), case.a, case.b, v, **arguments)
        finite = (matrix @ v.double()).isfinite()
        terms = (matrix.abs() @ v.double()).clamp(min=1.0)
        hostile.check(
            torch.where(finite, found, 0.0),
            torch.where(finite, matrix @ v.double(), 0.0),
            terms,
            where=case.name,
            bars=bars,
        )


@pytest.mark.parametrize("name", hostile.NAMES)
def test_products_of_tensor_cores_meet_the_bar(name):
    """Of torch's own matrix products: a squared distance of 1/32 of both norms has lost 5 bits."""
    case = hostile.case(name, torch.float32, "cuda", rows=3000, columns=3000, features=256)
    mode = "donot_use_mm_for_euclid_dist"
    exact = torch.cdist(case.a.double(), case.b.double(), compute_mode=mode)
    rival = torch.cdist(case.a, case.b)
    out = kl.cdist(case.a, case.b)
    bars = {torch.float32: 2e-5 if name == "heavy tails" else 1e-6}
    hostile.check(out, exact, rival=rival, where=name, bars=bars)
    width = bandwidth(case)
    out = kl.run_kernel(kl.gaussian(precision="fp32"), case.a, case.b, bandwidth=width)
    exact, rival = (torch.exp(-((x / width) ** 2) / 2) for x in (exact, rival))
    hostile.check(out, exact, torch.ones_like(exact), rival, name, bars)


@pytest.mark.parametrize("length", (1e-30, 1e-16, 1e-5, 3.0, 1e5, 1e20, 1e29, 5e37))
@pytest.mark.parametrize("p", (0.7, 1.3, 2.0))
def test_sums_of_exponentials_for_any_lengthscale(p, length):
    case = hostile.case("normal", torch.float32, "cuda")
    a, b = case.a * length, case.b * length
    v = (b.double()[None] - a.double()[:, None]).abs() / length
    exact = torch.exp(-(v**p)).sum(-1)
    terms = torch.full_like(exact, float(a.shape[-1]))
    for given in (length, torch.tensor(length, device="cuda", dtype=torch.float64)):
        out = kl.cdist_expadd(a, b, p=p, lengthscale=given)
        hostile.check(out, exact, terms, where=f"{length}")
    assert math.isfinite(out.sum().item())


@pytest.mark.parametrize("exponent", (-120, -83, -31, 30, 83, 120))
@pytest.mark.parametrize("name", bandwidths.KERNELS)
def test_kernels_and_gradients_of_a_bandwidth_of_any_magnitude(name, exponent):
    bandwidths.check(name, "number", exponent, "cuda", bound=1e-5)

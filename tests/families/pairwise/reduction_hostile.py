"""Reductions of kernel matrices, array gradients and agop on hostile points, by float64; for the
CPU and for a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

import kernlib as kl
from tests.families.pairwise.forwards import bandwidth
from tests.support import hostile

NUMBERS = {
    torch.float32: 3e-6,
    torch.float64: 1e-12,
    torch.float16: 2.0**-11 + 3e-6,
    torch.bfloat16: 2.0**-8 + 3e-6,
}

# The root of a denormal is taken as 0 there, as in sums of roots.
FLUSHED = (torch.float32, "cuda")


def matrix(case: hostile.Case) -> torch.Tensor:
    """That of a Laplace kernel in float64."""
    a, b = case.exact
    return torch.exp(-(b[None] - a[:, None]).abs().sum(-1) / bandwidth(case))


def check_sums(dtype: torch.dtype, device: str, **sizes: int) -> None:
    for case in hostile.cases(dtype, device, names=hostile.FINITE, **sizes):
        numbers = {"bandwidth": bandwidth(case)}
        v = hostile.case("normal", dtype, device, rows=len(case.b), features=3).a
        k, wide = matrix(case), v.double().cpu()
        ones = torch.ones_like(k)
        found = kl.kernel_matmul(kl.laplace_l1(), case.a, case.b, v, **numbers)
        hostile.check(found, k @ wide, ones @ wide.abs(), where=f"matmul {case.name}")
        found = kl.kernel_sum(kl.laplace_l1(), case.a, case.b, **numbers)
        hostile.check(found, k.sum(1), ones.sum(1), where=f"sum {case.name}")
        found = kl.kernel_logsumexp(kl.laplace_l1(), case.a, case.b, **numbers)
        hostile.check(found, k.logsumexp(1), 1 + k.logsumexp(1), where=f"logsumexp {case.name}")


def check_choices(dtype: torch.dtype, device: str, **sizes: int) -> None:
    for case in hostile.cases(dtype, device, names=hostile.FINITE, **sizes):
        a, b = case.exact
        wanted = (b[None] - a[:, None]).abs().sum(-1)
        places = kl.kernel_argmin(kl.l1_distance(), case.a, case.b).cpu()
        values, smallest = kl.kernel_min(kl.l1_distance(), case.a, case.b)
        assert torch.equal(places, smallest.cpu())
        hostile.check(values, wanted.amin(1), where=case.name)
        chosen = wanted.gather(1, places[:, None])[:, 0]
        hostile.check(chosen.to(dtype), wanted.amin(1), where=case.name)
        values = kl.kernel_topk(kl.l1_distance(), case.a, case.b, 4)[0]
        hostile.check(values, wanted.sort(1).values[:, :4], where=case.name)


def check_array_gradients(dtype: torch.dtype, device: str, **sizes: int) -> None:
    """cdist_grad, and agop of few queries, whose slopes it multiplies."""
    for case in hostile.cases(dtype, device, names=hostile.FINITE, **sizes):
        count, queries = len(case.b), len(case.a)
        weights = hostile.case("normal", dtype, device, rows=count, features=queries).a
        c = hostile.case("normal", dtype, device, seed=1, rows=3, features=count).a
        x, z = case.exact
        for p in (1.0, 1.5):
            if case.name == "denormals" and p == 1.5 and (dtype, device) == FLUSHED:
                continue
            v = x.mT[:, None] - z.mT[:, :, None]  # (N, K, M)
            slopes = v.sign() * v.abs() ** (p - 1)
            both = c.double().cpu()[:, :, None] * weights.double().cpu()
            wanted, terms = (
                torch.einsum("okm,nkm->onm", *t)
                for t in ((both, slopes), (both.abs(), slopes.abs()))
            )
            found = kl.cdist_grad(weights, case.b.mT, c, case.a.mT, p=p)
            where = f"cdist_grad {p} {case.name}"
            hostile.check(found, wanted, terms.clamp(min=least(dtype)), where=where, bars=NUMBERS)


def check_agop(dtype: torch.dtype, device: str) -> None:
    for name in ("normal", "offset 1e3", "duplicates", "one huge feature", "heavy tails"):
        case = hostile.case(name, dtype, device)
        x, z = case.exact
        c = hostile.case("normal", dtype, device, seed=1, rows=2, features=len(z)).a
        width = bandwidth(case)
        found = kl.agop(kl.laplace_l1(), case.a, case.b, c, bandwidth=width)
        k = matrix(case)[..., None]
        slopes = (z[None] - x[:, None]).sign() * k / width
        rounded = slopes.abs() * (1 - k.log().clamp(-1000, 0) / 8)  # exponents of these are
        made = torch.einsum("ot,qtk->oqk", c.double().cpu(), slopes).flatten(0, 1)
        size = torch.einsum("ot,qtk->oqk", c.double().cpu().abs(), rounded).flatten(0, 1)
        wanted, terms = (t.mT @ t / len(t) for t in (made, size))
        hostile.check(found, wanted, terms, where=f"agop {name}", bars=NUMBERS)


SUMS = {  # the bar of the matrix, and that of sums
    torch.float32: 2e-6,
    torch.float64: 2e-13,
    torch.float16: 2.0**-11 + 2e-6,
    torch.bfloat16: 2.0**-8 + 2e-6,
}
OF_SQUARES = {
    "gaussian": lambda t: torch.exp(-t / 2),
    "cauchy": lambda t: 1 / (1 + t),
    "rational_quadratic": lambda t: (1 + t / 2.6) ** -1.3,
}


def numbers_of(descriptor: kl.Pairwise, bandwidth: float) -> dict[str, float]:
    """The hyperparameters of a kernel."""
    more = {"alpha": 1.3} if "alpha" in descriptor.parameters else {}
    return {"bandwidth": bandwidth, **more}


def check_bandwidths(dtype: torch.dtype, device: str, rows=70, columns=90, features=20) -> None:
    """As small or large as the points, whatever the range of their squares."""
    small, large = (1e-100, 1e100) if dtype == torch.float64 else (1e-30, 1e18)
    points = hostile.case("normal", dtype, device, rows=rows, features=features).a
    others = hostile.case("normal", dtype, device, seed=1, rows=columns, features=features).a
    v = torch.ones(columns, 2, dtype=dtype, device=device)
    for name, width in ((n, w) for n in OF_SQUARES for w in (small, 1e-20, 1.0, large)):
        a, b, bandwidth = points * width, others * width, width * 3
        squares = (b.double().cpu()[None] - a.double().cpu()[:, None]).div(bandwidth).square()
        k = OF_SQUARES[name](squares.sum(-1))
        descriptor, where = getattr(kl, name)(), f"{name} {width}"
        numbers = numbers_of(descriptor, bandwidth)
        found = kl.kernel_sum(descriptor, a, b, **numbers)
        hostile.check(found, k.sum(1), where=where, bars=SUMS)
        found = kl.kernel_matmul(descriptor, a, b, v, **numbers)
        hostile.check(found, k @ v.double().cpu(), where=where, bars=SUMS)
        nearest = kl.kernel_min(descriptor, a, b, **numbers)[1].cpu()
        chosen = k.gather(1, nearest[:, None])[:, 0]
        torch.testing.assert_close(chosen, k.amin(1), rtol=1e-5, atol=0, msg=where)


def check_far_points(dtype: torch.dtype, device: str, **_: int) -> None:
    """Points far from each other beside a bandwidth: equal ones are 1, others 0, and none NaN."""
    rows = [[1000.0, 0, 0], [1000.0, 0, 0], [1.0, 2, 3], [-3e37, 0, 1]]
    a = torch.tensor(rows, dtype=dtype, device=device).requires_grad_()
    wanted = torch.tensor([2.0, 2.0, 1.0, 1.0], dtype=dtype)
    for name in (*OF_SQUARES, "laplace_l1", "laplace_l2"):
        descriptor = getattr(kl, name)()
        for width in (1e-20, 1e-31, 1e-36, 1e-38, 1e-44):
            numbers, where = numbers_of(descriptor, width), f"{name} {width}"
            found = kl.kernel_sum(descriptor, a.detach(), a.detach(), **numbers)
            torch.testing.assert_close(found.cpu(), wanted, msg=where)
            recorded = kl.kernel_sum(descriptor, a, a.detach(), **numbers)
            (slopes,) = torch.autograd.grad(recorded.sum(), a)
            assert torch.equal(recorded.detach().cpu(), found.cpu()), where
            assert not slopes.isnan().any(), where


def check_equal_terms(dtype: torch.dtype, device: str, features=20, **_: int) -> None:
    """Thousands, whose rounding has one sign."""
    count = 20000
    b = torch.zeros(count, features, dtype=dtype, device=device)
    for value in torch.linspace(0.3, 0.9, 7).tolist():
        a = torch.full((40, features), value, dtype=dtype, device=device)
        k = torch.exp(-a.double().cpu().square().sum(1) / 18)
        found = kl.kernel_sum(kl.gaussian(), a, b, bandwidth=3.0)
        hostile.check(found, k * count, where=f"sum {value}", bars=SUMS)
        for columns in (1, 8):
            v = torch.ones(count, columns, dtype=dtype, device=device)
            found = kl.kernel_matmul(kl.gaussian(), a, b, v, bandwidth=3.0)
            wanted = (k[:, None] * count).expand(-1, columns)
            rival = k.to(device, dtype)[:, None].expand(-1, count).contiguous() @ v
            where = f"{columns} columns of {value}"
            hostile.check(found, wanted, rival=rival, where=where, bars=SUMS)


def least(dtype: torch.dtype) -> float:
    """Below which products of weights and slopes are denormals."""
    return 4 * torch.finfo(dtype).tiny


def check_coinciding_points(
    dtype: torch.dtype, device: str, rows=40, columns=20000, features=40
) -> None:
    """One row that coincides with every column, whose squared distances cancel in products."""
    a = hostile.case("normal", dtype, device, rows=rows, features=features).a
    b = a[:1].expand(columns, -1).contiguous()
    k = torch.exp(-(a.double().cpu() - b[0].double().cpu()).square().sum(1) / 2 / features)
    for count in (1, 8):
        v = torch.full((columns, count), 0.7, dtype=dtype, device=device)
        wanted = (k * v[0, 0].item() * columns)[:, None].expand(-1, count)
        rival = k.to(device, dtype)[:, None].expand(-1, columns).contiguous() @ v
        found = kl.kernel_matmul(kl.gaussian(), a, b, v, bandwidth=features**0.5)
        hostile.check(found, wanted, rival=rival, where=f"{count} columns", bars=SUMS)


CHECKS: dict[str, Callable] = {
    "sums": check_sums,
    "choices": check_choices,
    "array gradients": check_array_gradients,
    "agop": check_agop,
    "bandwidths": check_bandwidths,
    "far points": check_far_points,
    "equal terms": check_equal_terms,
    "coinciding points": check_coinciding_points,
}

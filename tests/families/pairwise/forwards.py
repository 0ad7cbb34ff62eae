"""Every norm, kernel function and sum of the pairwise family, its formula in plain PyTorch and what
a user of torch would call instead: for tests on the points of ``pairwise_hostile.py``."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

import kernlib as kl
from tests.support.hostile import Case

EXPONENTS = (0.0, 0.5, 0.7, 1.0, 1.3, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 7.0, math.inf)


class Forward(NamedTuple):
    """``run`` is kernlib's; ``formula``, of float64 points, gives the value and its sum of absolute
    terms; ``rival`` is torch's, None where it has none. All take points and the bandwidth."""

    run: Callable
    formula: Callable
    rival: Callable | None = None

    def exact(self, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
        return self.formula(*case.exact, bandwidth(case))

    def ours(self, case: Case) -> torch.Tensor:
        return self.run(case.a, case.b, bandwidth(case))

    def theirs(self, case: Case) -> torch.Tensor | None:
        """Torch's, of half types in float32 as ours is, rounded once."""
        if self.rival is None:
            return None
        wide = torch.float64 if case.a.dtype == torch.float64 else torch.float32
        made = self.rival(case.a.to(wide), case.b.to(wide), bandwidth(case))
        return made.to(case.a.dtype)


def bandwidth(case: Case) -> float:
    """A sensible one, about half the distance of two points, but never a denormal."""
    wide = torch.float64 if case.a.dtype == torch.float64 else torch.float32
    return max(case.scale, 4 * torch.finfo(wide).tiny) * case.a.shape[-1] ** 0.5


def differences(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (b[None] - a[:, None]).abs()


def norm(a: torch.Tensor, b: torch.Tensor, p: float) -> torch.Tensor:
    """The p-norms of differences, scaled so that no power leaves float64."""
    v = differences(a, b)
    if p == 0:
        return torch.where(v.isnan(), v, (v != 0).to(v.dtype)).sum(-1)
    largest = v.amax(-1)
    if p == math.inf:
        return largest
    unit = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    return unit * ((v / unit[..., None]) ** p).sum(-1) ** (1 / p)


def _itself(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return value, value.abs()


def _distance(p: float) -> Forward:
    return Forward(
        lambda a, b, _: kl.cdist(a, b, p=p),
        lambda a, b, _: _itself(norm(a, b, p)),
        lambda a, b, _: torch.cdist(a, b, p=p, compute_mode="donot_use_mm_for_euclid_dist"),
    )


def _distance_by_tensor(p: float) -> Forward:
    """``p`` on the points' device."""
    return _distance(p)._replace(
        run=lambda a, b, _: kl.cdist(a, b, p=torch.tensor(p, dtype=torch.float64, device=a.device))
    )


def _power_sum(p: float) -> Forward:
    return Forward(
        lambda a, b, _: kl.cdist(a, b, p=p, root=False),
        lambda a, b, _: _itself((differences(a, b) ** p).sum(-1)),
        lambda a, b, _: (differences(a, b) ** p).sum(-1),
    )


def _kernel(descriptor, function: Callable, order: float, **numbers) -> Forward:
    """``function`` of the norm divided by the bandwidth, at most 1."""

    def formula(a, b, width):
        value = function(norm(a, b, order) / width)
        return value, torch.ones_like(value)

    def rival(a, b, width):
        mode = "donot_use_mm_for_euclid_dist"
        return function(torch.cdist(a, b, p=order, compute_mode=mode) / width)

    run = partial(_run_kernel, descriptor, numbers)
    return Forward(run, formula, rival)


def _run_kernel(descriptor, numbers, a, b, width) -> torch.Tensor:
    return kl.run_kernel(descriptor, a, b, bandwidth=width, **numbers)


def _expadd(p: float) -> Forward:
    def formula(a, b, width):
        value = torch.exp(-((differences(a, b) / width) ** p)).sum(-1)
        return value, torch.full_like(value, a.shape[-1])

    return Forward(
        lambda a, b, width: kl.cdist_expadd(a, b, p=p, lengthscale=width),
        formula,
        lambda a, b, width: formula(a, b, width)[0],
    )


def _polynomial(degree: int) -> Forward:
    def rival(a, b, _):
        return (a @ b.T / 64 + 1) ** degree

    return Forward(
        lambda a, b, _: kl.run_kernel(kl.polynomial(degree), a, b, gamma=1 / 64, offset=1.0),
        lambda a, b, _: (rival(a, b, _), degree * rival(a.abs(), b.abs(), _)),
        rival,
    )


ROOT3, ROOT5 = 3**0.5, 5**0.5
FORWARDS: dict[str, Forward] = {
    **{f"cdist p={p}": _distance(p) for p in EXPONENTS},
    **{f"cdist p=tensor({p})": _distance_by_tensor(p) for p in (0.0, 1.0, 1.3, 2.0, 7.0)},
    **{f"power sum p={p}": _power_sum(p) for p in (0.5, 1.3, 1.5, 2.0, 3.0)},
    "laplace_l1": _kernel(kl.laplace_l1(), lambda t: torch.exp(-t), 1),
    "laplace_l2": _kernel(kl.laplace_l2(), lambda t: torch.exp(-t), 2),
    "laplace_pq": _kernel(kl.laplace_pq(), lambda t: torch.exp(-(t**0.8)), 1.3, p=1.3, q=0.8),
    "gaussian": _kernel(kl.gaussian(), lambda t: torch.exp(-t * t / 2), 2),
    "matern32": _kernel(kl.matern32(), lambda t: (1 + ROOT3 * t) * torch.exp(-ROOT3 * t), 2),
    "matern52": _kernel(
        kl.matern52(), lambda t: (1 + ROOT5 * t + 5 / 3 * t * t) * torch.exp(-ROOT5 * t), 2
    ),
    "cauchy": _kernel(kl.cauchy(), lambda t: 1 / (1 + t * t), 2),
    "rational_quadratic": _kernel(
        kl.rational_quadratic(), lambda t: (1 + t * t / 3) ** -1.5, 2, alpha=1.5
    ),
    **{f"expadd p={p}": _expadd(p) for p in (0.7, 1.0, 1.3, 2.0)},
    "dot": Forward(
        lambda a, b, _: kl.run_kernel(kl.dot_product(), a, b),
        lambda a, b, _: (a @ b.T, a.abs() @ b.abs().T),
        lambda a, b, _: a @ b.T,
    ),
    "polynomial": _polynomial(3),
}

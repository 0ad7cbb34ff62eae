"""Gradients and second derivatives of pairwise functions, ours beside torch's of the formula and
beside float64, with the sums of absolute terms that errors are relative to.

Functions of a bandwidth are ones of differences divided by it, so that nothing overflows. Those of
the 2-norm have the derivatives of ``f`` by the squared norm in closed form, as torch's own of a
Matérn kernel are wrong next to 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

import kernlib as kl
from tests.support.hostile import GRADIENT, Case, check


class Function(NamedTuple):
    """``ours(a, b, bandwidth)``, ``plain(v)`` of differences (Q, T, K) in units of the bandwidth,
    recorded by torch, and, of functions of the squared 2-norm, their first and second derivatives.
    A distance is ``plain`` times the bandwidth."""

    ours: Callable
    plain: Callable
    slopes: Callable | None = None
    is_distance: bool = False


def bandwidth(case: Case) -> float:
    """A sensible one, but never a denormal."""
    wide = torch.float64 if case.a.dtype == torch.float64 else torch.float32
    return max(case.scale, 4 * torch.finfo(wide).tiny) * case.a.shape[-1] ** 0.5


def _power(x: torch.Tensor, exponent: float) -> torch.Tensor:
    """With 0, and so its derivatives, at 0."""
    zero = x == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x) ** exponent)


def _norm(v: torch.Tensor, p: float) -> torch.Tensor:
    if p == 1:  # of a slope that keeps a NaN
        return (v * torch.where(v.isnan(), v, v.sign()).detach()).sum(-1)
    return _power((v.abs() ** p).sum(-1), 1 / p)


def _distance(p: float) -> Function:
    slopes = (lambda s: (_power(s, -0.5) / 2, -_power(s, -1.5) / 4)) if p == 2 else None
    return Function(
        lambda a, b, _: kl.cdist(a, b, p=p), lambda v: _norm(v, p), slopes, is_distance=True
    )


def _run(make: Callable, numbers: dict, a, b, bandwidth: float) -> torch.Tensor:
    return kl.run_kernel(make(), a, b, bandwidth=bandwidth, **numbers)


def _radial(make: Callable, value: Callable, slopes: Callable, **numbers) -> Function:
    return Function(
        partial(_run, make, numbers), lambda v: value((v * v).sum(-1)), lambda s: slopes(s)
    )


def _laplace_slopes(s):
    k = torch.exp(-s.sqrt())
    return -k * _power(s, -0.5) / 2, k * (_power(s, -1.0) + _power(s, -1.5)) / 4


def _matern(s, nu: float):
    t = _power(2 * nu * s, 0.5)
    return (1 + t + (t * t / 3 if nu == 2.5 else 0)) * torch.exp(-t)


def _matern32_slopes(s):
    t = (3 * s).sqrt()
    return -1.5 * torch.exp(-t), 2.25 * torch.exp(-t) * _power(t, -1.0)


def _matern52_slopes(s):
    t = (5 * s).sqrt()
    finite = t.clamp(max=800)  # an infinity times 0 would be NaN
    return -5 / 6 * (1 + finite) * torch.exp(-t), 25 / 12 * torch.exp(-t)


def _rational(s, exponent: float = -1.3):
    return (1 + s / 2.6) ** exponent


FUNCTIONS = {
    "cdist p=1": _distance(1.0),
    "cdist p=1.5": _distance(1.5),
    "cdist p=2": _distance(2.0),
    "cdist p=3": _distance(3.0),
    "laplace_l1": Function(partial(_run, kl.laplace_l1, {}), lambda v: torch.exp(-_norm(v, 1))),
    "laplace_l2": _radial(kl.laplace_l2, lambda s: torch.exp(-_power(s, 0.5)), _laplace_slopes),
    "gaussian": _radial(
        kl.gaussian,
        lambda s: torch.exp(-s / 2),
        lambda s: (-torch.exp(-s / 2) / 2, torch.exp(-s / 2) / 4),
    ),
    "matern32": _radial(kl.matern32, lambda s: _matern(s, 1.5), _matern32_slopes),
    "matern52": _radial(kl.matern52, lambda s: _matern(s, 2.5), _matern52_slopes),
    "cauchy": _radial(
        kl.cauchy, lambda s: 1 / (1 + s), lambda s: (-((1 + s) ** -2), 2 * (1 + s) ** -3)
    ),
    "rational_quadratic": _radial(
        kl.rational_quadratic,
        _rational,
        lambda s: (-_rational(s, -2.3) / 2, 2.3 / 5.2 * _rational(s, -3.3)),
        alpha=1.3,
    ),
}
SQUARES = tuple(name for name, function in FUNCTIONS.items() if function.slopes)


class Derivatives(NamedTuple):
    """By a and by b: what is asked for, and the sums of its absolute terms."""

    by_a: torch.Tensor
    by_b: torch.Tensor
    terms_a: torch.Tensor | None = None
    terms_b: torch.Tensor | None = None


def _leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


def gradient(call: Callable, a, b, weights, along=None) -> Derivatives:
    """The gradients of ``sum weights * call(a, b)``, or with ``along`` those of ``sum along * (its
    gradient by a)``."""
    a, b = _leaves(a, b)
    if along is None:
        return Derivatives(*torch.autograd.grad(call(a, b), (a, b), weights))
    (first,) = torch.autograd.grad(call(a, b), a, weights, create_graph=True)
    return Derivatives(*torch.autograd.grad(first, (a, b), along))


def rival(function: Function, width: float, a, b) -> torch.Tensor:
    """torch's own of the formula; of a distance as one writes it."""
    v = b[None] - a[:, None]
    return function.plain(v if function.is_distance else v / width)


def exact(function: Function, width: float, a, b, weights, along=None) -> Derivatives:
    """The gradient, or with ``along`` the second derivative, in float64 on the CPU."""
    a, b, weights = (t.detach().cpu().double() for t in (a, b, weights))
    v = (b[None] - a[:, None]) / width
    scale = weights if function.is_distance else weights / width
    if along is not None:
        made, size = _second(function, v, along.detach().cpu().double())
        made, size = (t * scale[..., None] / width for t in (made, size))
    elif function.slopes is not None:
        made = -2 * function.slopes((v * v).sum(-1))[0][..., None] * v * scale[..., None]
        size = made
    else:
        (leaf,) = _leaves(v)
        (made,) = torch.autograd.grad(function.plain(leaf), leaf, -scale)
        size = made
    size = size.abs() * _exponents(function, v)
    return Derivatives(made.sum(1), -made.sum(0), size.sum(1), size.sum(0))


def _exponents(function: Function, v) -> torch.Tensor:
    """How often the terms of pairs count, where a kernel is a power: its rounded exponent has an
    error of so many roundings, which is its own relative one."""
    if function.is_distance:
        return torch.ones_like(v[..., :1])
    return 1 - function.plain(v).log().clamp(-1000, 0)[..., None] / 8


def _second(function: Function, v, along) -> tuple[torch.Tensor, torch.Tensor]:
    """Of ``sum_k along[q,k] d/da f`` by a of each pair, and its absolute terms."""
    first, second = (f[..., None] for f in function.slopes((v * v).sum(-1)))
    u = along[:, None]
    made = 4 * second * v * (v * u).sum(-1, keepdim=True) + 2 * first * u
    size = 4 * second * v * (v * u).abs().sum(-1, keepdim=True)
    return made, size.abs() + (2 * first * u).abs()


def compare(function: Function, case: Case, along: bool) -> None:
    """Fails where a derivative of a function on a case's points misses the bar."""
    generator = torch.Generator().manual_seed(7)
    a, b = case.a, case.b
    width = bandwidth(case)
    given = [torch.randn(len(a), len(b), generator=generator, dtype=torch.float64).to(a)]
    if along:
        given.append(torch.randn(a.shape, generator=generator, dtype=torch.float64).to(a))
    found = gradient(lambda a, b: function.ours(a, b, width), a, b, *given)
    theirs = gradient(partial(rival, function, width), a, b, *given)
    wanted = exact(function, width, a, b, *given)
    least = 4 * torch.finfo(a.dtype).tiny  # below which weights are denormals
    for side in ("a", "b"):
        check(
            getattr(found, f"by_{side}"),
            getattr(wanted, f"by_{side}"),
            getattr(wanted, f"terms_{side}").clamp(min=least),
            getattr(theirs, f"by_{side}"),
            f"{case.name} by {side}",
            GRADIENT,
        )

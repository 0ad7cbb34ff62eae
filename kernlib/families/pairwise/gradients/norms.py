"""Derivatives of norms ``N = (sum_k |v_k|^p)^(1/p)`` and of what follows them, from the norms
themselves: the slope by a coordinate is ``sign(v) (|v| / N)^(p-1)``. Powers of v leave the range of
their type where norms do not; those of ``|v| / N``, which is 1 at most, come to 0 where they do not
count.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from kernlib.families.pairwise import checks, stages
from kernlib.families.pairwise import stages_reference as formulas
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.gradients import formula
from kernlib.families.pairwise.gradients.formula import Sums
from kernlib.families.pairwise.matrix import calls, matrix

_PLAIN = (0.0, 1.0, 2.0, float("inf"))  # exponents whose norms take no power but a square


def are_values(descriptor: Pairwise, values: dict) -> bool:
    """Whether the values of a call are made of norms of powers, of which this module knows the
    derivatives."""
    if descriptor.categories or not checks.follows_inner(descriptor, values):
        return False
    p = values.get("p", values.get("inner_p"))
    return isinstance(p, torch.Tensor) or p not in _PLAIN


def of(made: Sums, x, z) -> torch.Tensor:
    """The norms whose powers the sums ``made`` add up, without a record; ``z`` is None for x."""
    return calls.execute(root_of(made.descriptor), x, z, None, False, 0, 0, made.given)


@lru_cache(maxsize=1024)
def root_of(sums: Pairwise) -> Pairwise:
    """Norms alone, of sums of powers alone."""
    return sums.replace(outer=stages.Root())


def shared(p: float | torch.Tensor, weights: torch.Tensor, n: torch.Tensor) -> tuple:
    """Weights and scales of pair gradients, which give ``sum_t W dN / dx``: differences times
    ``1 / N``. Powers below 1 leave no range, and take no scales but weights ``W N^(1-p) / p``."""
    if isinstance(p, torch.Tensor):  # whose slopes are 0 where it is
        weights = torch.where(formulas.entries(p, weights.dim()) == 0, 0.0, weights)
    elif p < 1:
        return weights * (n ** (1 - p) / p), None
    # Finite, lest a norm of 0 make NaN of differences of 0.
    return weights, n.reciprocal().clamp_(max=torch.finfo(n.dtype).max)


def by_exponent(made: Sums, x, z, norms: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``sum_qt W dN / dp``, (L,), of points (L, Q, K) and (L, T, K), N and W (L, Q, T): recorded
    where gradients are. ``dN / dp = N / p sum_k u^p ln u`` with ``u = |v| / N``."""
    create = torch.is_grad_enabled()
    if not create and x.device.type != "cpu":
        grad = _by_exponent_in_unit(made, x, z, norms, weights)
    else:
        grad = _by_exponent(made, x, z, norms, weights, create)
    constant = (made.p == 0) | torch.isinf(made.p)
    return torch.where(constant, 0.0, grad)


def _by_exponent(made: Sums, x, z, norms, weights, create: bool) -> torch.Tensor:
    """By differences, a block of rows at a time."""
    features = max(1, x.shape[-1])
    rows = max(1, formula.BLOCK_ELEMENTS // max(1, norms.shape[0] * norms.shape[2] * features))
    rows = max(1, x.shape[1]) if create else rows
    p, total = formulas.entries(made.p, 4), 0.0
    for first in range(0, max(1, x.shape[1]), rows):
        part = slice(first, first + rows)
        n = norms[:, part]
        size = _differences(made, x[:, part], z, True).abs()
        zero = (size == 0) | (n == 0)[..., None]
        u = torch.where(zero, 1.0, size) / torch.where(n == 0, 1.0, n)[..., None]
        logs = torch.where(zero, 0.0, u**p * u.log()).sum(-1)
        total = total + (weights[:, part] * (n / formulas.entries(made.p, 3)) * logs).sum((1, 2))
    return total


def _by_exponent_in_unit(made: Sums, x, z, norms, weights) -> torch.Tensor:
    """By a kernel, of points divided by a power of two near the largest norm: what norms receive
    whose powers vanish beside that one's is left out."""
    largest = torch.where(norms.isfinite(), norms, 0.0).amax()
    unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent.clamp(-120, 120))
    logarithms = made._replace(descriptor=made.descriptor.replace(inner=stages.PowerLog()))
    second = None if made.descriptor.symmetric else z / unit
    logs = matrix(logarithms.descriptor, x / unit, second, **logarithms.given)
    p, u = formulas.entries(made.p, 3), norms / unit
    powers = u**p
    counts = powers >= 2.0**20 * torch.finfo(powers.dtype).tiny
    logs = torch.where(counts, logs / powers - torch.where(counts, u, 1.0).log(), 0.0)
    return (weights * (norms / p) * logs).sum((1, 2))


def slopes(made: Sums, x, z, weights, norms, first: bool) -> torch.Tensor:
    """``sum_t W dN / dx``, (L, Q, K), of all differences at once, recorded."""
    p = formulas.entries(made.p, 4)
    v = _differences(made, x, z, first)
    zero, n = v == 0, torch.where(norms == 0, 1.0, norms)[..., None]
    # The derivative of the slope is 0 where v is 0, but for p = 2, where it is that of v / N.
    at_zero = (p == 2) * torch.ones_like(v) if isinstance(p, torch.Tensor) else 0.0
    u = torch.where(zero, 1.0, v.abs() / n)
    slope = v / n * torch.where(zero, at_zero, u ** (p - 2))
    if isinstance(p, torch.Tensor):
        slope = torch.where(p == 0, 0.0, slope)
    weights = weights[..., None]
    if made.descriptor.operator == "dot":
        return (weights * slope * z[:, None]).sum(2)
    return (weights * (-slope if first else slope)).sum(2)


def _differences(made: Sums, x, z, first: bool) -> torch.Tensor:
    """``op(x, z)``, (L, Q, T, K)."""
    left, right = (x[:, :, None], z[:, None]) if first else (z[:, None], x[:, :, None])
    return left * right if made.descriptor.operator == "dot" else right - left


def second(made: Sums, x, z, weights, norms, first: bool, along, needs: tuple) -> list:
    """The gradients of ``sum_qk along * slopes`` with respect to x, z, W, N and p, None where there
    is no need."""

    def value(x, z, weights, norms, p):
        return slopes(made.having(p, None), x, z, weights, norms, first)

    tensors = x, z, weights, norms, made.p
    return formula.by_rows(value, tensors, needs, along, torch.is_grad_enabled(), (0, 2, 3))

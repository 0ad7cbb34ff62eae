"""Pair gradients that are matrix products: of dot products, and of squared differences.

``sum_t W[q,t] z[t,k]`` is a product as it stands. ``sum_t W[q,t] (x[q,k] - z[t,k])`` is
``x[q,k] sum_t W[q,t] - sum_t W[q,t] z[t,k]``, whose terms cancel, the less the smaller x and z: so
the mean of z is taken from both first. What is left of the cancellation is an error of about
2^-22 of ``sum_t |W| (|x| + |z|)``.
"""

from __future__ import annotations

import torch

from kernlib.families.pairwise.descriptor import dot_product
from kernlib.families.pairwise.gradients.products import centre
from kernlib.run import run_kernel

FEWEST = 1 << 31  # of (query, point, feature), from which products of squared differences pay
_DOT = dot_product(precision="fp32")


def dot(target: torch.Tensor, z, weights, coefficients, accumulate: bool) -> None:
    """``target[l,o,q,k] (+)= sum_t c[l,o,t] W[l,q,t] z[l,t,k]``."""
    if coefficients is None:
        run_kernel(_DOT, weights, z.mT, out=target[:, 0], accumulate=accumulate)
        return
    for l in range(target.shape[0]):
        points = _weighted(_entry(coefficients, l), _entry(z, l).mT, 1.0)
        run_kernel(_DOT, _entry(weights, l), points, out=target[l], accumulate=accumulate)


def square(
    target: torch.Tensor, x, z, weights, coefficients, factor: float, accumulate: bool
) -> None:
    """``target[l,o,q,k] (+)= factor sum_t c[l,o,t] W[l,q,t] (x[l,q,k] - z[l,t,k])``."""
    mean = centre(z)
    x, z = x - mean, z - mean
    for l in range(target.shape[0]):
        w, own = _entry(weights, l), None
        if coefficients is not None:
            own = _entry(coefficients, l)
        _square(target[l], _entry(x, l), _entry(z, l), w, own, factor, accumulate)


def _square(target, x, z, weights, coefficients, factor: float, accumulate: bool) -> None:
    """One batch entry: target (O, Q, K)."""
    if coefficients is None:
        sums, points = weights.sum(-1, keepdim=True)[None], z.mT.contiguous().mul(-factor)[None]
    else:
        sums = run_kernel(_DOT, coefficients, weights)[..., None]
        points = _weighted(coefficients, z.mT, -factor)
    if accumulate:  # sums (O, Q, 1), points (O, K, T)
        target.addcmul_(x, sums, value=factor)
    else:
        torch.mul(x * factor, sums, out=target)
    run_kernel(_DOT, weights, points, out=target, accumulate=True)


def _weighted(coefficients: torch.Tensor, points: torch.Tensor, factor: float) -> torch.Tensor:
    """``factor c[o,t] z[k,t]`` as (O, K, T), each line of points contiguous."""
    shape = (coefficients.shape[0], *points.shape)
    made = torch.empty(shape, dtype=points.dtype, device=points.device)
    return torch.mul(coefficients[:, None] * factor, points, out=made)


def _entry(t: torch.Tensor, index: int) -> torch.Tensor:
    """A batch entry of (L, ...), (1, ...) or, without a batch, the whole."""
    if t.dim() == 2:
        return t
    return t[index if t.shape[0] > 1 else 0]

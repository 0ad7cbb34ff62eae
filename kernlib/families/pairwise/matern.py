"""Matérn kernels of squared distances, whose derivatives of every order are accurate next to 0.

torch's of ``(1 + t) exp(-t)`` with ``t = sqrt(u)`` subtract numbers near 1 from each other, and
divide by t: for points 1e-7 apart nothing is left in float32, and 1e-9 of it wrong in float64.
"""

from __future__ import annotations

import torch

from kernlib.families.pairwise.powers import square_root

_VANISHED = 800.0  # minus a logarithm that no float64 has


def matern(u: torch.Tensor, nu: float) -> torch.Tensor:
    """That of ``nu`` 0.5, 1.5 or 2.5 and ``u = t ** 2``, where t is ``sqrt(2 nu)`` times the
    distance over the bandwidth. Recorded; derivatives are those of smaller ``nu``."""
    return torch.exp(-square_root(u)) if nu == 0.5 else _Matern.apply(u, nu)


class _Matern(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, nu):
        ctx.save_for_backward(u)
        ctx.nu = nu
        t = u.sqrt()
        finite = t.clamp(max=_VANISHED)  # an infinity times 0 would be NaN
        return (1 + finite + (finite * finite / 3 if nu == 2.5 else 0)) * torch.exp(-t)

    @staticmethod
    def backward(ctx, grad):
        (u,) = ctx.saved_tensors
        factor = -1 / 6 if ctx.nu == 2.5 else -1 / 2
        return factor * grad * matern(u, ctx.nu - 1), None

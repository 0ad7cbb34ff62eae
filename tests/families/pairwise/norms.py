"""Norms of points of any magnitude, and their derivatives in float64."""

from __future__ import annotations

import torch

import kernlib as kl

EXPONENTS = (0.3, 0.7, 1.3, 1.5, 2.5, 3.0, 4.0, 7.3, 10.0, 20.0)
MAGNITUDES = (1e-30, 1e-20, 1e-9, 1e-3, 1.0, 1e4, 1e20, 1e30)
BOUND = 5e-6  # of slopes: the rounding of |v| / N counts p - 1 times


def points(kind: str, scale: float, device="cpu", m=40, n=33, k=5) -> tuple:
    """Points, of which some are equal, nearly equal, or have one feature beside which the others
    vanish."""
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(s, k, generator=generator, dtype=torch.float64) for s in (m, n))
    if kind == "equal":
        b[:9] = a[:9]
    if kind == "near":
        b[:9] = a[:9] + 1e-6 * torch.randn(9, k, generator=generator, dtype=torch.float64)
    if kind == "one feature":
        a[:, 0] *= 1e3
        b[:, 0] *= 1e3
    return tuple((t * scale).float().to(device) for t in (a, b))


def norms(a, b, p: float) -> torch.Tensor:
    """In float64, differentiable as often as is asked for."""
    v = (a.double()[:, None] - b.double()).abs()
    unit = v.detach().amax(-1, keepdim=True)
    unit = torch.where(unit == 0, 1.0, unit)
    u = torch.where(v == 0, 1.0, v / unit)
    s = torch.where(v == 0, 0.0, u**p).sum(-1)
    zero = s == 0
    return unit[..., 0] * torch.where(zero, 0.0, torch.where(zero, 1.0, s) ** (1 / p))


def check_slopes(a, b, p: float, weights, grads, bound: float) -> None:
    """Holds gradients of both sides, of a sum of norms with weights, beside the sum of their
    absolute terms."""
    v = a.double()[:, None] - b.double()
    u = torch.where(v == 0, 1.0, v.abs() / norms(a, b, p)[..., None])
    terms = weights.double()[..., None] * torch.where(v == 0, 0.0, v.sign() * u ** (p - 1))
    least = 1e-36 * max(1.0, float(weights.abs().max()))  # powers below may be 0
    for one, sign, over in zip(grads, (1, -1), (1, 0), strict=True):
        error = (one.double() - sign * terms.sum(over)).abs()
        assert (error <= bound * terms.abs().sum(over) + least).all(), error.max()


def check_gradients(
    kind: str,
    p: float,
    scale: float,
    kernel: bool,
    device: str = "cpu",
    sizes: tuple = (),
    bound: float = BOUND,
) -> None:
    """Of distances, or of a Laplace kernel whose bandwidth is of their size."""
    a, b = (t.requires_grad_() for t in points(kind, scale, device, *sizes))
    g = torch.randn(len(a), len(b), generator=torch.Generator().manual_seed(5)).to(device)
    weights = g.double()
    with torch.no_grad():
        n = norms(a, b, p)
        bandwidth = float(n.median().float())
    if kernel:
        out = kl.run_kernel(kl.laplace_pq(), a, b, p=p, q=1.0, bandwidth=bandwidth)
        weights = -weights * torch.exp(-n / bandwidth) / bandwidth
    else:
        out = kl.cdist(a, b, p=p)
    grads = torch.autograd.grad(out, (a, b), g)
    check_slopes(a.detach(), b.detach(), p, weights, grads, bound)


def check_sums(p: float, scale: float, device: str = "cpu", bound: float = BOUND) -> None:
    """Gradients of sums of rows."""
    a, b = (t.requires_grad_() for t in points("equal", scale, device))
    g = torch.randn(len(a), generator=torch.Generator().manual_seed(5)).to(device)
    grads = torch.autograd.grad(kl.kernel_sum(kl.p_distance(), a, b, p=p), (a, b), g)
    weights = g[:, None].expand(len(a), len(b))
    check_slopes(a.detach(), b.detach(), p, weights, grads, bound)

"""Kernels of points and bandwidths of any magnitude, beside those of the same points and bandwidth
near 1: a power of two changes no digit."""

from __future__ import annotations

import torch

import kernlib as kl

KERNELS = {
    "gaussian": (kl.gaussian, {}),
    "cauchy": (kl.cauchy, {}),
    "rational_quadratic": (kl.rational_quadratic, {"alpha": 1.5}),
    "matern32": (kl.matern32, {}),
    "matern52": (kl.matern52, {}),
    "laplace_l1": (kl.laplace_l1, {}),
    "laplace_l2": (kl.laplace_l2, {}),
    "laplace_pq": (kl.laplace_pq, {"p": 3.0, "q": 0.8}),
}
EXPONENTS = (-120, -99, -83, -60, -31, 30, 60, 83, 99, 120)  # of two: 1e-36 to 1e36
BANDWIDTH = 1.5


def check(name: str, how: str, exponent: int, device="cpu", bound=3e-6, second=False) -> None:
    """Values, a reduction and gradients; of a bandwidth that is a ``"number"``, a ``"tensor"``, or
    ``"several"``, of host memory."""
    make, others = KERNELS[name]
    generator = torch.Generator().manual_seed(7)
    a, b, g, along = (torch.randn(*s, generator=generator) for s in
                      ((20, 5), (17, 5), (20, 17), (20, 5)))  # fmt: skip
    b[:4] = a[:4]

    def results(unit: float) -> list:
        """In the unit of the points near 1, but for rounding."""
        x, z = ((t * unit).to(device).requires_grad_() for t in (a, b))
        bandwidth = BANDWIDTH * unit
        if how != "number":
            bandwidth = torch.tensor([bandwidth, 2 * bandwidth] if how == "several" else bandwidth)
            bandwidth.requires_grad_()
        out = kl.run_kernel(make(), x, z, bandwidth=bandwidth, **others)
        with torch.no_grad():
            values = kl.run_kernel(make(), x, z, bandwidth=bandwidth, **others)
            total = kl.kernel_sum(make(), x, z, bandwidth=bandwidth, **others)
        if how == "several":
            out = out[1]
        leaves = (x, z) if how == "number" else (x, z, bandwidth)
        first = torch.autograd.grad(out, leaves, g.to(device), create_graph=second)
        found = [out, values, total / 10, *(t * unit for t in first)]
        if second:
            y = (first[0] * unit * along.to(device)).sum()
            found += [t * unit for t in torch.autograd.grad(y, (x, z))]
        return found

    for far, near in zip(results(2.0**exponent), results(1.0), strict=True):
        error, size = (far - near).abs().max(), near.abs().max().clamp(min=1)
        assert error <= bound * size, (error, size)

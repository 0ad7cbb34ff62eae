"""Kernel matrices in five calls, each compared with the plain torch expression in float64.

    python examples/quickstart.py

Runs on the first CUDA GPU, or on the CPU when there is none.
"""

from __future__ import annotations

import torch

import kernlib as kl

BOUND = 1e-5  # relative error, for float32


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    x = torch.randn(500, 32, device=device)
    y = torch.randn(400, 32, device=device)

    laplace = kl.laplace_l1()
    k = kl.run_kernel(laplace, x, y, bandwidth=30.0)
    check("Laplace kernel", k, torch.exp(-distances(x, y, 1) / 30))

    covariance = kl.run_kernel(kl.gaussian(symmetric=True), x, bandwidth=6.0, regularization=1e-3)
    ridge = 1e-3 * torch.eye(500, device=device)
    check("Gaussian K(x, x) + 1e-3 I", covariance, gauss(x, x, 6.0) + ridge)
    torch.linalg.cholesky(covariance)

    bandwidths = torch.tensor([4.0, 6.0, 8.0], device=device)
    batch = kl.run_kernel(kl.gaussian(), x, y, bandwidth=bandwidths)
    wanted = torch.stack([gauss(x, y, width) for width in (4.0, 6.0, 8.0)])
    check("three bandwidths, one call", batch, wanted)

    total = torch.zeros(500, 400, device=device)
    kl.run_kernel(laplace, x, y, bandwidth=30.0, out=total)
    kl.run_kernel(kl.gaussian(), x, y, bandwidth=6.0, out=total, accumulate=True)
    wanted = torch.exp(-distances(x, y, 1) / 30) + gauss(x, y, 6.0)
    check("sum of two kernels in one out", total, wanted)

    check("cdist, p = 1.5", kl.cdist(x, y, p=1.5), distances(x, y, 1.5))


def distances(x: torch.Tensor, y: torch.Tensor, p: float) -> torch.Tensor:
    return ((x.double()[:, None] - y.double()[None]).abs() ** p).sum(-1) ** (1 / p)


def gauss(x: torch.Tensor, y: torch.Tensor, bandwidth: float) -> torch.Tensor:
    return torch.exp(-(distances(x, y, 2) ** 2) / (2 * bandwidth**2))


def check(what: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    error = ((got.double() - wanted).norm() / wanted.norm()).item()
    shape = " x ".join(str(size) for size in got.shape)
    print(f"{what:32s} {shape:16s} {got.device.type:5s} relative error {error:.1e}")
    if not error <= BOUND:
        raise SystemExit(f"{what}: the error is above {BOUND:g}")


if __name__ == "__main__":
    main()

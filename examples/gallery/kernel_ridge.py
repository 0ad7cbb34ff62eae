"""Kernel ridge regression: a function of many features from noisy values.

The prediction at z is `K(z, x) w` with `w = (K(x, x) + ridge I)^-1 y` and a Matérn 5/2 kernel.
`kl.linalg.solve_kernel` solves by preconditioned conjugate gradients over products that never store
K, so that memory grows with n (on a CPU and up to 5000 points it stores K after all, and factors
it). `kl.kernel_matmul` predicts. The plain way stores K and takes its Cholesky factor.

**Your own data.** Put features (n, features), scaled to a spread of about one, in the place of `x`
and values (n,) or (n, outputs) in the place of `y`. The right-hand picture is how to choose the
bandwidth: by the error at points that were left out. `RIDGE` is about the variance of the noise
over that of the function.
"""

import torch
from harness import BLUE, GREY, figure, finish, milliseconds, parse, relative_error

import kernlib as kl

KERNEL, FEATURES, BANDWIDTH, RIDGE, NOISE = kl.matern52(), 8, 4.0, 0.05, 0.2
TOLERANCE = 1e-4  # of the conjugate gradients' residual, far below the noise
BANDWIDTHS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)


def data(n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Points, and a smooth function of them: waves, by each feature less."""
    x = torch.randn(n, FEATURES, device=device)
    weights = 0.6 * torch.randn(FEATURES, 3, device=device)
    return x, torch.sin(x @ (weights * 0.7 ** torch.arange(FEATURES).to(x)[:, None])).sum(1)


def by_kernlib(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, bandwidth: float = BANDWIDTH):
    w = kl.linalg.solve_kernel(
        KERNEL, x, y, regularization=RIDGE, tol=TOLERANCE, bandwidth=bandwidth
    ).x
    return kl.kernel_matmul(KERNEL, z, x, w, bandwidth=bandwidth)


def matern(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    d = 5**0.5 / BANDWIDTH * torch.cdist(a, b)
    return (1 + d + d.square() / 3) * torch.exp(-d)


def by_torch(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    k = matern(x, x)
    k.diagonal().add_(RIDGE)
    w = torch.cholesky_solve(y[:, None], torch.linalg.cholesky(k))
    return (matern(z, x) @ w)[:, 0]


def main() -> None:
    args = parse(__doc__, {"n": (2000, 40000), "tests": (500, 10000)})
    points, values = data(args.n + args.tests, args.device)
    (x, z), (y, truth) = points.split((args.n, args.tests)), values.split((args.n, args.tests))
    y = y + NOISE * torch.randn_like(y)
    prediction = by_kernlib(x, y, z)
    times = {
        "kernlib": milliseconds(lambda: by_kernlib(x, y, z), args.device, repeats=3),
        "torch, K stored": milliseconds(lambda: by_torch(x, y, z), args.device, repeats=1),
    }

    def draw():
        page, (scatter, curve) = figure(2)
        scatter.scatter(truth.cpu(), prediction.cpu(), s=3, color=BLUE, rasterized=True)
        ends = [truth.min().item(), truth.max().item()]
        scatter.plot(ends, ends, color=GREY, linewidth=1)
        scatter.set(title="points that were left out", xlabel="function", ylabel="prediction")
        few = x[:5000], y[:5000], z
        errors = [(by_kernlib(*few, b) - truth).square().mean().sqrt().item() for b in BANDWIDTHS]
        curve.plot(BANDWIDTHS, errors, "o-", color=BLUE)
        curve.axvline(BANDWIDTH, color=GREY, linewidth=1, linestyle=":")
        curve.set(title="the error by the bandwidth", xlabel="bandwidth")
        curve.set(ylabel="root mean square error", xscale="log")
        curve.set_ylim(0, 1.1 * max(errors))
        return page

    finish(args, times, relative_error(prediction, by_torch(x, y, z)), 1e-2, draw)


if __name__ == "__main__":
    main()

"""Sparse Gaussian process: a long series by a few inducing points.

With m inducing points z for n of data, a prediction is `K(t, z) w`, where
`w = (K_zx K_xz + noise K_zz)^-1 K_zx y`. Neither `K_xz` nor `K_zx K_xz` is stored: conjugate
gradients need products, two of `kl.kernel_matmul` each. With `K_zz = L L^T` the unknowns are
`u = L^T w`, and the same system of some of the data, 10 m of them, is the preconditioner, so that
some ten products are enough. The plain way stores `K_xz`, n m numbers, and makes the system of
order m from it.

**Your own data.** Put points (n, features) in the place of `x`, values less their mean in the place
of `y`, and as inducing points `z` a grid, centres of k-means or a random choice of the data. Take
more until predictions no longer change. `NOISE` is the variance of the noise over that of the
function. If conjugate gradients warn, inducing points are too close to each other for float32.
"""

import torch
from harness import BLUE, GREY, ORANGE, figure, finish, milliseconds, parse, relative_error

import kernlib as kl

KERNEL, BANDWIDTH, NOISE, TOLERANCE, JITTER = kl.matern32(), 0.6, 0.1, 1e-4, 1e-6
ROUGH = 1e-3  # the tolerance of variances
SPACING, SAMPLE = 0.2, 10  # of inducing points; how many data for each are in the preconditioner


def data(n: int, end: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A series over the times 0 to ``end`` with a gap, of noisy values."""
    x = end * torch.rand(2 * n, 1, device=device)
    x = x[((x - 6.5).abs() > 0.7)[:, 0]][:n]
    y = torch.sin(2 * x[:, 0]) * torch.cos(0.3 * x[:, 0]) + 0.5 * torch.cos(5 * x[:, 0])
    return x, y + NOISE**0.5 * torch.randn_like(y)


def product(a: torch.Tensor, b: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return kl.kernel_matmul(KERNEL, a, b, v, bandwidth=BANDWIDTH)


def by_kernlib(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, t: torch.Tensor, spread=False):
    """The mean at t, and with ``spread`` the variance."""
    k = kl.run_kernel(KERNEL, z.double(), z.double(), bandwidth=BANDWIDTH)
    k.diagonal().add_(JITTER)
    factor = torch.linalg.cholesky(k)
    some = x[torch.randperm(len(x), device=x.device)[: SAMPLE * len(z)]]

    def forward(v):  # L^-1 v
        return torch.linalg.solve_triangular(factor, v.double(), upper=False)

    def backward(u):  # L^-T u
        return torch.linalg.solve_triangular(factor.T, u.double(), upper=True).to(x.dtype)

    def system(u):
        return forward(product(z, x, product(x, z, backward(u)))) + NOISE * u

    half = forward(kl.run_kernel(KERNEL, z, some, bandwidth=BANDWIDTH))
    sampled = len(x) / len(some) * half @ half.T
    sampled.diagonal().add_(NOISE)
    sampled = torch.linalg.cholesky(sampled)

    def solve(b, tol):
        options = {"preconditioner": lambda r: torch.cholesky_solve(r, sampled), "tol": tol}
        return kl.linalg.conjugate_gradient(system, b, check_every=5, **options).x

    cross = kl.run_kernel(KERNEL, t, z, bandwidth=BANDWIDTH)
    mean = cross @ backward(solve(forward(product(z, x, y[:, None])), TOLERANCE))[:, 0]
    if not spread:
        return mean
    half = forward(cross.T)
    return mean, 1 - half.square().sum(0) + NOISE * (half * solve(half, ROUGH)).sum(0)


def matern(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    d = 3**0.5 / BANDWIDTH * torch.cdist(a, b)
    return (1 + d) * torch.exp(-d)


def by_torch(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    k = matern(z, z)
    k.diagonal().add_(JITTER)
    factor = torch.linalg.cholesky(k)
    half = torch.linalg.solve_triangular(factor, matern(z, x), upper=False)
    system = half @ half.T
    system.diagonal().add_(NOISE)
    u = torch.cholesky_solve(half @ y[:, None], torch.linalg.cholesky(system))
    return (matern(t, z) @ torch.linalg.solve_triangular(factor.T, u, upper=True))[:, 0]


def main() -> None:
    args = parse(__doc__, {"n": (10000, 1000000), "inducing": (50, 1000)})
    end = SPACING * args.inducing
    x, y = data(args.n, end, args.device)
    z = SPACING * (torch.arange(args.inducing, device=args.device)[:, None] + 0.5)
    t = torch.linspace(0, 10, 400, device=args.device)[:, None]
    mean = by_kernlib(x, y, z, t)
    times = {
        "kernlib": milliseconds(lambda: by_kernlib(x, y, z, t), args.device, repeats=3),
        "torch, K_xz stored": milliseconds(lambda: by_torch(x, y, z, t), args.device, repeats=1),
    }

    def draw():
        page, (axis,) = figure(width=7.5)
        _, variance = by_kernlib(x, y, z, t, spread=True)
        place, middle = t[:, 0].cpu(), mean.cpu()
        width = 2 * variance.clamp_min(0).sqrt().cpu().to(middle)
        near = (x[:, 0] < 10).nonzero()[:2000, 0]
        points = x[near, 0].cpu(), y[near].cpu()
        axis.scatter(*points, s=3, color=GREY, label="data", rasterized=True)
        axis.fill_between(place, middle - width, middle + width, color=BLUE, alpha=0.25, lw=0)
        axis.plot(place, middle, color=BLUE, label="mean, and two standard deviations")
        marks = z[z < 10].cpu()
        axis.plot(marks, torch.full_like(marks, -2.2), "|", color=ORANGE, label="inducing points")
        axis.set(title="the beginning of a series with a gap", xlabel="time", ylim=(-2.4, 3.2))
        axis.legend(loc="upper right", ncols=3, frameon=False, fontsize="small", markerscale=2)
        return page

    finish(args, times, relative_error(mean, by_torch(x, y, z, t)), 1e-2, draw)


if __name__ == "__main__":
    main()

"""Exact Gaussian process: a map with its uncertainty from scattered measurements.

The prediction at z is `K(z, x) A^-1 y`, its variance `1 - K(z, x) A^-1 K(x, z)`, with
`A = K(x, x) + noise I` and a Gaussian kernel. `kl.linalg.solve_kernel` solves for y and for all
columns of `K(x, z)` at once by conjugate gradients, with products that never store K (on a CPU and
up to 5000 points it stores K after all). The plain way is the Cholesky factor of A.

**Your own data.** Put places (n, features) in the place of `x`, measurements less their mean in the
place of `y`, and the places to predict in the place of `z`. The bandwidth is how far measurements
resemble each other, and `NOISE` the variance of one over that of the map. To learn both by the
marginal likelihood, see `examples/gaussian_process.py`.
"""

import torch
from harness import GREY, figure, finish, milliseconds, parse, relative_error

import kernlib as kl

KERNEL, BANDWIDTH, NOISE, TOLERANCE = kl.gaussian(), 0.12, 0.05, 1e-4


def data(n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Places in the unit square, none in a disk, and measurements of a smooth map."""
    x = torch.rand(2 * n, 2, device=device)
    x = x[(x - 0.5).norm(dim=1) > 0.22][:n]
    frequencies = torch.randn(2, 200, device=device) / BANDWIDTH
    phases = 2 * torch.pi * torch.rand(200, device=device)
    y = 0.1 * torch.cos(x @ frequencies + phases).sum(1)
    return x, y + NOISE**0.5 * torch.randn_like(y)


def grid(side: int, device: torch.device) -> torch.Tensor:
    ticks = (torch.arange(side, device=device) + 0.5) / side
    return torch.cartesian_prod(ticks, ticks)


def by_kernlib(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor):
    """Mean and variance at z."""
    cross = kl.run_kernel(KERNEL, x, z, bandwidth=BANDWIDTH)
    columns = torch.cat((y[:, None], cross), 1)
    solved = kl.linalg.solve_kernel(
        KERNEL, x, columns, regularization=NOISE, tol=TOLERANCE, bandwidth=BANDWIDTH
    ).x
    return cross.T @ solved[:, 0], 1 - (cross * solved[:, 1:]).sum(0)


def gaussian(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.exp(-torch.cdist(a, b).square() / (2 * BANDWIDTH**2))


def by_torch(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor):
    k, cross = gaussian(x, x), gaussian(x, z)
    k.diagonal().add_(NOISE)
    solved = torch.cholesky_solve(torch.cat((y[:, None], cross), 1), torch.linalg.cholesky(k))
    return cross.T @ solved[:, 0], 1 - (cross * solved[:, 1:]).sum(0)


def main() -> None:
    args = parse(__doc__, {"n": (1500, 30000), "side": (32, 32)})
    x, y = data(args.n, args.device)
    z = grid(args.side, args.device)
    mean, variance = by_kernlib(x, y, z)
    times = {
        "kernlib": milliseconds(lambda: by_kernlib(x, y, z), args.device, repeats=3),
        "torch, K stored": milliseconds(lambda: by_torch(x, y, z), args.device, repeats=1),
    }

    def draw():
        page, axes = figure(3, width=3.4, height=3.2)
        data_axis, mean_axis, spread_axis = axes
        scale = {"vmin": -2.5, "vmax": 2.5, "cmap": "RdBu_r"}
        few = slice(0, 1000)
        data_axis.scatter(*x[few].cpu().T, s=3, c=y[few].cpu(), **scale, rasterized=True)
        square = {"extent": (0, 1, 0, 1), "origin": "lower", "interpolation": "none"}
        images = (mean, scale), (variance.clamp_min(0).sqrt(), {"cmap": "viridis", "vmin": 0})
        for axis, (values, colours) in zip((mean_axis, spread_axis), images, strict=True):
            shown = axis.imshow(values.view(args.side, -1).T.cpu(), **square, **colours)
            page.colorbar(shown, ax=axis, shrink=0.8)
        for axis, title in zip(axes, ("measurements", "mean", "standard deviation"), strict=True):
            axis.set(title=title, aspect="equal", xlim=(0, 1), ylim=(0, 1))
            axis.set(xticks=[0, 1], yticks=[0, 1])
            axis.tick_params(colors=GREY)
        return page

    error = max(map(relative_error, (mean, variance), by_torch(x, y, z)))
    finish(args, times, error, 2e-2, draw)


if __name__ == "__main__":
    main()

"""Sinkhorn's algorithm: optimal transport between two clouds of points.

The plan that moves uniform weights at x to uniform weights at y at the least cost
`c = |x - y|^2 / 2`, with an entropy of weight eps, is `P_ij = exp((f_i + g_j - c_ij) / eps) / n m`.
Each round sets `f_i = -eps log mean_j exp((g_j - c_ij) / eps)`, and g likewise:
`kl.kernel_logsumexp` of `-c_ij / eps` with `g / eps` as its `col_potential`, without a matrix.
`kl.kernel_matmul` then moves each point to the mean of where its weight goes, where f and g are
coordinates of the points.

**Your own data.** Put clouds (n, features) and (m, features) in the places of `x` and `y`, scaled
to a spread of about one. A smaller eps blurs less and takes more rounds. Weights of points are
added to `g / eps` and `f / eps` as logarithms in place of `-log m` and `-log n`.
"""

import math

import torch
from harness import BLUE, GREY, ORANGE, figure, finish, milliseconds, parse, relative_error

import kernlib as kl

EPS, ROUNDS = 0.01, 50
COSTS = kl.squared_distance(epilogue=kl.Custom("-v / (2 * eps)", ("eps",)))
PLAN = kl.dot_product(epilogue=kl.Custom("exp(v)"))


def disk_and_moons(n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A disk, and two half rings beside each other."""
    t = 2 * torch.pi * torch.rand(n, device=device)
    radius = 0.5 * torch.rand(n, device=device).sqrt()
    x = radius[:, None] * torch.stack((t.cos(), t.sin()), 1)
    upper = torch.arange(n, device=device) % 2
    angle = torch.pi * torch.rand(n, device=device)
    sign = 1 - 2 * upper
    y = 0.6 * torch.stack((angle.cos() + upper - 0.5, sign * angle.sin() - 0.35 * sign), 1)
    clouds = x, y + torch.tensor([1.9, 0.0], device=device)
    return tuple(cloud + 0.03 * torch.randn_like(cloud) for cloud in clouds)


def half(points: torch.Tensor) -> torch.Tensor:
    return points.square().sum(1) / 2


def with_term(points: torch.Tensor, potential: torch.Tensor) -> torch.Tensor:
    """Points whose dot product with (x / eps, 1) is the exponent of a row, less its own term."""
    term = (potential - half(points)) / EPS - math.log(len(points))
    return torch.cat((points, term[:, None]), 1)


def with_one(points: torch.Tensor) -> torch.Tensor:
    return torch.cat((points / EPS, torch.ones_like(points[:, :1])), 1)


def by_kernlib(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The potentials f and g."""

    def other(x, y, g):
        logs = kl.kernel_logsumexp(COSTS, x, y, eps=EPS, col_potential=g / EPS)
        return EPS * (math.log(len(y)) - logs)

    f, g = torch.zeros_like(x[:, 0]), torch.zeros_like(y[:, 0])
    for _ in range(ROUNDS):
        f = other(x, y, g)
        g = other(y, x, f)
    return f, g


def by_torch(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    f, g = torch.zeros_like(x[:, 0]), torch.zeros_like(y[:, 0])
    cost = torch.cdist(x, y).square() / 2
    for _ in range(ROUNDS):
        f = EPS * (math.log(len(y)) - torch.logsumexp((g - cost) / EPS, 1))
        g = EPS * (math.log(len(x)) - torch.logsumexp((f[:, None] - cost) / EPS, 0))
    return f, g


def moved(x: torch.Tensor, y: torch.Tensor, f: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Where the plan sends each point in the mean: f is a coordinate as well."""
    ones = torch.ones_like(f)[:, None]
    rows = torch.cat((with_one(x), ((f - half(x)) / EPS)[:, None]), 1)
    columns = torch.cat((with_term(y, g), ones), 1)
    sums = kl.kernel_matmul(PLAN, rows, columns, torch.cat((y, ones), 1))
    return sums[:, :2] / sums[:, 2:]


def main() -> None:
    args = parse(__doc__, {"n": (600, 30000)})
    x, y = disk_and_moons(args.n, args.device)
    f, g = by_kernlib(x, y)
    times = {
        "kernlib": milliseconds(lambda: by_kernlib(x, y), args.device, repeats=1),
        "torch, costs stored": milliseconds(lambda: by_torch(x, y), args.device, repeats=1),
    }

    def draw():
        page, (axis,) = figure(width=7.5, height=3.4)
        some = slice(0, 1000)
        a, b, c = x[some].cpu(), y[some].cpu(), moved(x, y, f, g)[some].cpu()
        lines = torch.stack((a, c), 1)[:120]
        axis.plot(lines[..., 0].T, lines[..., 1].T, color=GREY, lw=0.5, alpha=0.6, rasterized=True)
        clouds = ("x", a, BLUE), ("y", b, GREY), ("x moved by the plan", c, ORANGE)
        for label, cloud, colour in clouds:
            axis.scatter(*cloud.T, s=4, color=colour, label=label, rasterized=True)
        axis.set(title="optimal transport", aspect="equal", xticks=[], yticks=[])
        axis.legend(loc="lower center", ncols=3, frameon=False, markerscale=3)
        axis.set_ylim(-0.85, 0.6)
        axis.spines[["left", "bottom"]].set_visible(False)
        return page

    error = max(map(relative_error, (f, g), by_torch(x, y)))
    finish(args, times, error, 1e-3, draw)


if __name__ == "__main__":
    main()

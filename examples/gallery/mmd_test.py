"""Two-sample test: whether two samples come from one distribution.

The squared maximum mean discrepancy of samples x and y is `s^T K s`, with K the kernel matrix of
both samples together and s = 1/n for points of x, -1/m for points of y. Its distribution where both
are alike is that under permutations of s. With the permutations as columns of S,
`kl.kernel_matmul(kernel, points, points, S)` multiplies all of them by K in one call, without K:
the statistics are `(S * K S).sum(0)`. The plain way stores K.

**Your own data.** Put your samples (n, features) and (m, features) in the places of `x` and `y`.
Half the median distance of some points is the bandwidth; a smaller one looks for finer differences.
The p-value is the part of permutations whose statistic is at least the observed one.
"""

import torch
from harness import BLUE, GREY, ORANGE, figure, finish, milliseconds, parse, relative_error

import kernlib as kl

KERNEL = kl.gaussian()


def samples(n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A normal distribution, and one of the same mean and covariance with a hollow middle."""
    x, y = torch.randn(n, 2, device=device), torch.randn(n, 2, device=device)
    angle = 2 * torch.pi * torch.rand(n, device=device)
    ring = 2**0.5 * torch.stack((angle.cos(), angle.sin()), 1)
    part = 0.6
    return x, part**0.5 * ring + (1 - part) ** 0.5 * y


def signs(n: int, m: int, permutations: int, device: torch.device) -> torch.Tensor:
    """S: the observed assignment, and random ones behind it."""
    s = torch.cat((torch.full((n,), 1 / n), torch.full((m,), -1 / m)))
    columns = [s, *(s[torch.randperm(n + m)] for _ in range(permutations))]
    return torch.stack(columns, 1).to(device)


def by_kernlib(points: torch.Tensor, s: torch.Tensor, bandwidth: float) -> torch.Tensor:
    return (s * kl.kernel_matmul(KERNEL, points, points, s, bandwidth=bandwidth)).sum(0)


def by_torch(points: torch.Tensor, s: torch.Tensor, bandwidth: float) -> torch.Tensor:
    k = torch.exp(-torch.cdist(points, points).square() / (2 * bandwidth**2))
    return (s * (k @ s)).sum(0)


def main() -> None:
    args = parse(__doc__, {"n": (1000, 20000), "permutations": (300, 1000)})
    x, y = samples(args.n, args.device)
    points = torch.cat((x, y))
    some = points[torch.randperm(len(points), device=args.device)[:1000]]
    bandwidth = 0.5 * torch.pdist(some).median().item()
    s = signs(len(x), len(y), args.permutations, args.device)
    statistics = by_kernlib(points, s, bandwidth)
    p = (1 + (statistics[1:] >= statistics[0]).sum().item()) / (1 + args.permutations)
    print(f"p = {p:.4f}")
    calls = by_kernlib, by_torch
    ours, plain = (
        milliseconds(lambda c=c: c(points, s, bandwidth), args.device, repeats=3) for c in calls
    )

    def draw():
        page, (cloud, histogram) = figure(2)
        for sample, colour, name in ((x, BLUE, "x"), (y, ORANGE, "y")):
            part = sample[:800].cpu()
            cloud.scatter(*part.T, s=3, color=colour, label=name, rasterized=True)
        cloud.set(title="two samples", aspect="equal", xlim=(-3.5, 3.5), ylim=(-3.5, 3.5))
        cloud.legend(frameon=False, markerscale=3)
        histogram.hist(statistics[1:].cpu().numpy(), bins=30, color=GREY, label="permutations")
        observed = f"observed, p = {p:.3f}"
        histogram.axvline(statistics[0].item(), color=ORANGE, linewidth=2, label=observed)
        histogram.set(title="test", xlabel="squared discrepancy", ylabel="count")
        histogram.ticklabel_format(style="sci", scilimits=(0, 0), axis="x")
        histogram.legend(frameon=False)
        return page

    error = relative_error(statistics, by_torch(points, s, bandwidth))
    finish(args, {"kernlib": ours, "torch, K stored": plain}, error, 1e-2, draw)


if __name__ == "__main__":
    main()

"""K-means: the colours of an image reduced to a few.

Each round assigns every point to the nearest centre, `a_i = argmin_c |x_i - m_c|^2`, and moves each
centre to the mean of its points. `kl.kernel_argmin` assigns without storing the n x k distances;
the means are sums by index. Here the points are the colours of pixels, and the centres become a
palette. The plain way is `torch.cdist` and `argmin`.

**Your own data.** Put your points (n, features) in the place of `x`; float16 and bfloat16 are read
as they are and computed in float32. `kl.l1_distance()` in the place of `kl.squared_distance()`
assigns by absolute differences, as for medians, and a `lengthscale` weighs the features. An image
of yours is `x = image.reshape(-1, 3)`, with values from 0 to 1.
"""

import torch
from harness import BLUE, figure, finish, milliseconds, parse

import kernlib as kl

ROUNDS = 20


def image(side: int, device: torch.device) -> torch.Tensor:
    """Hills of changing hues with some noise, (side, side, 3) from 0 to 1."""
    ticks = torch.linspace(0, 1, side, device=device)
    u, v = torch.meshgrid(ticks, ticks, indexing="ij")
    bent = torch.sin(7 * u + 3 * torch.cos(4 * v)) + torch.cos(6 * v - 2 * torch.sin(5 * u))
    channels = [0.5 + 0.45 * torch.sin(1.7 * bent + phase + 2 * u * v) for phase in (0, 1.6, 3.9)]
    pixels = torch.stack(channels, -1) * (1 - 0.4 * ((u - 0.5) ** 2 + (v - 0.5) ** 2))[..., None]
    return (pixels + 0.01 * torch.randn_like(pixels)).clamp(0, 1)


def rounds(x: torch.Tensor, centres: torch.Tensor, assign) -> tuple[torch.Tensor, list[float]]:
    """The centres after ROUNDS rounds, and the mean squared distance before each."""
    errors = []
    for _ in range(ROUNDS):
        nearest = assign(x, centres)
        errors.append((x - centres[nearest]).square().sum(1).mean())
        sums = torch.zeros_like(centres).index_add_(0, nearest, x)
        counts = torch.bincount(nearest, minlength=len(centres))[:, None]
        centres = torch.where(counts > 0, sums / counts.clamp_min(1), centres)
    return centres, torch.stack(errors).tolist()


def by_kernlib(x: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    return kl.kernel_argmin(kl.squared_distance(), x, centres)


def by_torch(x: torch.Tensor, centres: torch.Tensor) -> torch.Tensor:
    return torch.cdist(x, centres).argmin(1)


def main() -> None:
    args = parse(__doc__, {"side": (160, 2000), "centres": (12, 256)})
    pixels = image(args.side, args.device)
    x = pixels.reshape(-1, 3)
    start = x[torch.randperm(len(x), device=args.device)[: args.centres]]
    centres, errors = rounds(x, start, by_kernlib)
    _, plain = rounds(x, start, by_torch)
    times = {
        "kernlib": milliseconds(lambda: rounds(x, start, by_kernlib), args.device, repeats=3),
        "torch": milliseconds(lambda: rounds(x, start, by_torch), args.device, repeats=3),
    }

    def draw():
        page, (left, right, curve) = figure(3, width=3.2, height=3.0)
        few = max(1, args.side // 160)  # pixels of a large image for one that is drawn
        reduced = centres[by_kernlib(x, centres)].view_as(pixels)
        for axis, shown in ((left, pixels), (right, reduced)):
            axis.imshow(shown[::few, ::few].cpu(), interpolation="none")
            axis.set_axis_off()
        left.set_title("image")
        right.set_title(f"{args.centres} colours")
        curve.plot(range(1, ROUNDS + 1), errors, "o-", markersize=3, color=BLUE)
        curve.set(title="error", xlabel="round", ylabel="mean squared distance")
        curve.set(ylim=(0, 1.1 * errors[0]), xticks=range(0, ROUNDS + 1, 5))
        return page

    error = abs(errors[-1] - plain[-1]) / plain[-1]
    finish(args, times, error, 1e-3, draw)


if __name__ == "__main__":
    main()

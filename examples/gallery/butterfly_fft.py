"""A butterfly chain that learns the fast Fourier transform.

A Fourier matrix of n points is dense, but it is a product of few sparse matrices. With complex
numbers as pairs of reals and n = r^m, these are m Kronecker-sparse factors of the patterns
`(r^s, 2r, 2r, n / r^(s+1))`, s = 0 to m - 1: 4 m r n numbers in place of 4 n². For r = 2 that is
the butterfly of the textbooks. Here `kernlib.nn.KSLinear` has this pattern and random values, and
learns from pairs of x and its transform: Adam ends at the transform itself, up to rounding. The
factors leave frequencies in the order of their reversed digits.

**Your own data.** Put your pairs in the place of those of `pairs`, and choose patterns whose
product may hold your transform: `layer.patterns` shows them, and a chain of fewer, larger blocks
(`--radix`) is easier to learn and takes fewer launches. For a Fourier transform as such take
`torch.fft`; a learnt chain is for a transform that nobody has written down.
"""

import math

import torch
from harness import BLUE, figure, finish, milliseconds, parse, relative_error
from torch import nn

from kernlib.nn import KSLinear

RATE, BATCH = 0.02, 512


def patterns(n: int, radix: int) -> list[tuple[int, int, int, int]]:
    """Of the factors, in the order in which they meet the input."""
    stages = round(math.log(n, radix))
    if radix**stages != n:
        raise SystemExit(f"--points must be a power of --radix, got {n} and {radix}")
    return [(radix**s, 2 * radix, 2 * radix, n // radix ** (s + 1)) for s in range(stages)]


def transform(x: torch.Tensor, radix: int) -> torch.Tensor:
    """Real parts and then imaginary parts (rows, 2 n), to pairs of them in reversed digits."""
    y = torch.fft.fft(torch.complex(*x.chunk(2, -1)), norm="ortho")
    stages = round(math.log(y.shape[1], radix))
    y = y.view(-1, *stages * [radix]).permute(0, *range(stages, 0, -1))
    return torch.view_as_real(y).flatten(1)


def real_part(matrix: torch.Tensor, radix: int) -> torch.Tensor:
    """Of the complex matrix (n, n), its rows by frequency."""
    n = len(matrix) // 2
    stages = round(math.log(n, radix))
    rows = matrix[::2, :n].reshape(*stages * [radix], n)
    return rows.permute(*range(stages - 1, -1, -1), stages).reshape(n, n)


def learn(layer: nn.Module, steps: int, n: int, radix: int, device: torch.device) -> list[float]:
    """The loss of each step."""
    optimizer = torch.optim.Adam(layer.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, RATE / 1000)
    losses = []
    for _ in range(steps):
        x = torch.randn(min(BATCH, 2 * n), 2 * n, device=device)
        loss = (layer(x) - transform(x, radix)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def main() -> None:
    sizes = {"points": (64, 4096), "radix": (2, 64), "steps": (450, 300), "rows": (256, 8192)}
    args = parse(__doc__, sizes)
    n, radix = args.points, args.radix
    layer = KSLinear(patterns(n, radix), bias=False, device=args.device)
    losses = learn(layer, args.steps, n, radix, args.device)
    layer.requires_grad_(False)
    product = layer.to_dense()
    exact = transform(torch.eye(2 * n, device=args.device), radix).T
    print(f"{sum(f.numel() for f in layer.factors):,} parameters, dense {product.numel():,}")

    x = torch.randn(args.rows, 2 * n, device=args.device)
    dense = nn.functional.linear
    times = {
        "kernlib, learnt factors": milliseconds(lambda: layer(x), args.device),
        "torch, dense matrix": milliseconds(lambda: dense(x, exact), args.device),
        "torch.fft": milliseconds(lambda: transform(x, radix), args.device),
    }

    def draw():
        page, (curve, left, right) = figure(3, width=3.6)
        curve.semilogy(losses, color=BLUE)
        curve.set(title="learning", xlabel="step", ylabel="mean squared error")
        for axis, matrix, title in ((left, product, "learnt"), (right, exact, "exact")):
            part = real_part(matrix, radix)[:64, :64].cpu()
            axis.imshow(part, cmap="RdBu", vmin=-1 / n**0.5, vmax=1 / n**0.5, rasterized=True)
            axis.set(title=f"{title}, real part", xlabel="point", ylabel="frequency")
        return page

    finish(args, times, relative_error(product, exact), 1e-3, draw)


if __name__ == "__main__":
    main()

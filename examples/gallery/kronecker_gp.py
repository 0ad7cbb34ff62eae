"""Gaussian process on a grid: an image denoised by Kronecker products.

On a grid the covariance of a product kernel is `K_1 ⊗ K_2`, a small matrix for each axis.
`kl.linalg.kron_solve` gives `w = (K_1 ⊗ K_2 + noise I)^-1 y` and `kl.linalg.kron_logdet` the
determinant in the marginal likelihood `-(y^T w + log det(K + noise I) + n log 2 pi) / 2`, both by
the eigenvalues of the factors. `kl.kron_matmul` predicts `(C_1 ⊗ C_2) w` on a finer grid. The plain
way makes the whole matrix and its Cholesky factor.

**Your own data.** Put the coordinates of your axes, any number of them, in the place of `axes` and
the values less their mean, flattened (the last axis runs fastest), in the place of `y`. Each axis
may have a kernel and a length of its own: take those with the largest likelihood, whose gradients
are recorded too. Grids with missing values have `kl.linalg.masked_kron_solve`: see
`examples/kronecker_gp.py`.
"""

import math

import torch
from harness import figure, finish, milliseconds, parse, relative_error

import kernlib as kl

LENGTHS, NOISE, FINER = (0.12, 0.08), 0.3, 3

Axes = list[torch.Tensor]


def factors(a: Axes, b: Axes) -> Axes:
    """A Gaussian kernel for each axis."""
    pairs = zip(a, b, LENGTHS, strict=True)
    return [torch.exp(-((u[:, None] - v) ** 2) / (2 * h**2)) for u, v, h in pairs]


def smooth(axes: Axes, random: torch.Generator) -> torch.Tensor:
    """A function on a grid with the spectrum of the kernel, (n_1, n_2)."""
    count = 300
    frequencies = torch.randn(2, count, generator=random, dtype=torch.float64)
    phases = 2 * math.pi * torch.rand(count, generator=random, dtype=torch.float64)
    u, v = (a[:, None] * f.to(a) / h for a, f, h in zip(axes, frequencies, LENGTHS, strict=True))
    waves = torch.cos(u[:, None] + v[None] + phases.to(u))
    return math.sqrt(2 / count) * waves.sum(-1)


def by_kernlib(axes: Axes, y: torch.Tensor, finer: Axes) -> tuple[torch.Tensor, torch.Tensor]:
    """The prediction on the finer grid, and the logarithm of the marginal likelihood."""
    k = factors(axes, axes)
    w = kl.linalg.kron_solve(k, y, noise=NOISE)
    likelihood = -(y @ w + kl.linalg.kron_logdet(k, noise=NOISE) + len(y) * math.log(2 * math.pi))
    return kl.kron_matmul(w, factors(finer, axes), side="left"), likelihood / 2


def by_torch(axes: Axes, y: torch.Tensor, finer: Axes) -> tuple[torch.Tensor, torch.Tensor]:
    k = torch.kron(*factors(axes, axes))
    k.diagonal().add_(NOISE)
    factor = torch.linalg.cholesky(k)
    w = torch.cholesky_solve(y[:, None], factor)[:, 0]
    logdet = 2 * factor.diagonal().log().sum()
    likelihood = -(y @ w + logdet + len(y) * math.log(2 * math.pi)) / 2
    first, second = factors(finer, axes)
    return (first @ w.view(len(axes[0]), -1) @ second.T).flatten(), likelihood


def main() -> None:
    args = parse(__doc__, {"rows": (40, 128), "columns": (60, 192)})
    wide = {"dtype": torch.float64, "device": args.device}
    axes = [torch.linspace(0, 1, size, **wide) for size in (args.rows, args.columns)]
    finer = [torch.linspace(0, 1, FINER * size, **wide) for size in (args.rows, args.columns)]
    random = torch.Generator().manual_seed(args.seed)
    truth = smooth(finer, random)
    clean = smooth(axes, torch.Generator().manual_seed(args.seed))
    y = (clean + math.sqrt(NOISE) * torch.randn_like(clean)).flatten()
    mean, likelihood = by_kernlib(axes, y, finer)
    times = {
        "kernlib": milliseconds(lambda: by_kernlib(axes, y, finer), args.device),
        "torch, K stored": milliseconds(lambda: by_torch(axes, y, finer), args.device, repeats=1),
    }

    def draw():
        page, panels = figure(3, width=3.4, height=2.9)
        images = y.view(clean.shape), mean.view(truth.shape), truth
        titles = "values with noise", "prediction, a finer grid", "function"
        for axis, image, title in zip(panels, images, titles, strict=True):
            scale = {"vmin": -2.5, "vmax": 2.5, "cmap": "RdBu_r", "origin": "lower"}
            shown = axis.imshow(image.cpu(), extent=(0, 1, 0, 1), interpolation="none", **scale)
            axis.set(title=title, xlabel="second axis", xticks=[0, 1], yticks=[0, 1])
        panels[0].set_ylabel("first axis")
        page.colorbar(shown, ax=panels, shrink=0.7)
        return page

    plain, plain_likelihood = by_torch(axes, y, finer)
    error = max(relative_error(mean, plain), relative_error(likelihood, plain_likelihood))
    finish(args, times, error, 1e-6, draw)


if __name__ == "__main__":
    main()

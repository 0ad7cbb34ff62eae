"""Kernel PCA: the leading components of points in the feature space of a kernel.

Three rings that no line separates become three layers of the first component of a Gaussian kernel.
The components are the leading eigenvectors of the centred kernel matrix `H K H`, `H = I - 1/n`.
They are computed by subspace iteration: `kl.kernel_matmul` multiplies K with a few vectors without
storing K, so the memory grows with n, not with its square. The plain way stores K, and computes all
eigenvectors.

**Your own data.** Put your points (n, features) in the place of `x`, and choose the bandwidth: the
median distance of a sample is a good first value. Any kernel of kernlib stands in the place of
`kl.gaussian()`. New points are projected, up to a constant for each component, by
`kl.kernel_matmul(kernel, new, x, vectors / values.sqrt())`.
"""

import torch
from harness import BLUE, GREY, ORANGE, figure, finish, milliseconds, parse, relative_error

import kernlib as kl

KERNEL, BANDWIDTH, COMPONENTS, STEPS = kl.gaussian(), 1.0, 3, 40


def rings(n: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Points in the plane, and the ring of each."""
    ring = torch.arange(n, device=device) % 3
    angle = 2 * torch.pi * torch.rand(n, device=device)
    radius = 0.4 + ring + 0.07 * torch.randn(n, device=device)
    return torch.stack((radius * angle.cos(), radius * angle.sin()), 1), ring


def by_kernlib(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues and eigenvectors by subspace iteration, K never stored."""
    generator = torch.Generator(x.device).manual_seed(0)
    v = torch.randn(len(x), 2 * COMPONENTS, device=x.device, generator=generator)
    for _ in range(STEPS):
        v, _ = torch.linalg.qr(v - v.mean(0))
        v = kl.kernel_matmul(KERNEL, x, x, v, bandwidth=BANDWIDTH)
    v, _ = torch.linalg.qr(v - v.mean(0))
    small = v.T @ kl.kernel_matmul(KERNEL, x, x, v, bandwidth=BANDWIDTH)
    values, turn = torch.linalg.eigh((small + small.T) / 2)
    return values.flip(0)[:COMPONENTS], (v @ turn).flip(1)[:, :COMPONENTS]


def by_torch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with the matrix stored, by a full eigendecomposition."""
    k = torch.exp(-torch.cdist(x, x).square() / (2 * BANDWIDTH**2))
    k = k - k.mean(0) - k.mean(1, keepdim=True) + k.mean()
    values, vectors = torch.linalg.eigh(k)
    return values.flip(0)[:COMPONENTS], vectors.flip(1)[:, :COMPONENTS]


def main() -> None:
    args = parse(__doc__, {"n": (900, 12000)})
    x, ring = rings(args.n, args.device)
    values, vectors = by_kernlib(x)
    times = {
        "kernlib": milliseconds(lambda: by_kernlib(x), args.device),
        "torch, K stored": milliseconds(lambda: by_torch(x), args.device, repeats=1),
    }

    def draw():
        page, (plane, components) = figure(2)
        projected = (vectors * values.sqrt()).cpu()
        for index, colour in enumerate((BLUE, ORANGE, GREY)):
            rows = (ring == index).cpu()
            style = {"s": 4, "color": colour, "rasterized": True}
            plane.scatter(*x.cpu()[rows].T, **style, label=f"ring {index + 1}")
            components.scatter(*projected[rows][:, [1, 0]].T, **style)
        plane.set(title="points", xlabel="x", ylabel="y", aspect="equal")
        components.set(title="kernel PCA", xlabel="component 2", ylabel="component 1")
        page.legend(loc="outside lower center", ncols=3, frameon=False, markerscale=3)
        return page

    finish(args, times, relative_error(values, by_torch(x)[0]), 1e-3, draw)


if __name__ == "__main__":
    main()

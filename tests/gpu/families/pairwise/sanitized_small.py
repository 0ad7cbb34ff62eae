"""Small odd calls of reductions of few features, and of their gradients, to be run under
compute-sanitizer."""

from __future__ import annotations

import torch

import kernlib as kl
from tests.gpu.families.pairwise.cases import whole_blocks

SHAPES = ((1, 1, 1), (67, 133, 3), (300, 75, 10))


def main() -> None:
    torch.manual_seed(0)
    calls()
    with whole_blocks():
        calls()
    torch.cuda.synchronize()
    print("done")


def calls() -> None:
    for dtype in (torch.float32, torch.float16, torch.float64):
        for m, n, k in SHAPES:
            a, b = (torch.randn(rows, k, device="cuda").to(dtype) for rows in (m, n))
            v = torch.randn(n, 4, device="cuda").to(dtype)
            kl.kernel_matmul(kl.matern32(), a, b, v, bandwidth=2.0, regularization=1.0)
            kl.kernel_sum(kl.laplace_l1(), a.expand(3, -1, -1), b.repeat(3, 1, 1), bandwidth=2.0)
            kl.kernel_logsumexp(kl.laplace_l1(), a, b, bandwidth=2.0, regularization=1.0)
            kl.kernel_min(kl.l1_distance(), a.expand(3, -1, -1), b)
    for m, n, k in SHAPES:
        a, b = (torch.randn(rows, k, device="cuda") for rows in (m, n))
        kl.kernel_min(kl.p_distance(), a, b, p=1.3)
        a, v = a.requires_grad_(), torch.randn(n, 3, device="cuda", requires_grad=True)
        bandwidth = torch.tensor(2.0, device="cuda", requires_grad=True)
        kl.kernel_matmul(kl.gaussian(), a, b, v, bandwidth=bandwidth).sum().backward()
        kl.kernel_sum(kl.laplace_l1(), a, a, bandwidth=bandwidth).sum().backward()


if __name__ == "__main__":
    main()

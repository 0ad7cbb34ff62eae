"""Small odd products of many columns, and gradients of products and sums by one kernel, to be run
under compute-sanitizer."""

from __future__ import annotations

from unittest import mock

import torch

import kernlib as kl
from kernlib.families.pairwise.lowering import reduce
from tests.gpu.families.pairwise.sanitized_products import SHAPES, points


def many_columns(a: torch.Tensor, b: torch.Tensor) -> None:
    """By folded exponents, by what is behind them, and behind the gate."""
    v = torch.randn(b.shape[0], 33, device="cuda").to(a.dtype)
    for bandwidth in (10.0, 0.5):
        kl.kernel_matmul(kl.gaussian(), a, b, v, bandwidth=bandwidth, regularization=1.0)
    kl.kernel_matmul(kl.matern32(), a, b, v, bandwidth=2.0)
    kl.kernel_matmul(kl.gaussian(precision="tf32"), a, b, v[:, :20] * float("nan"), bandwidth=2.0)


def gradients(a: torch.Tensor, b: torch.Tensor) -> None:
    """Of products and sums, of two sets of points and of one."""
    a, b = (t.detach().requires_grad_() for t in (a, b))
    bandwidth = torch.tensor(2.0, device="cuda", requires_grad=True)
    for columns in (1, 3, 6):
        v = torch.randn(b.shape[0], columns, device="cuda").to(a.dtype).requires_grad_()
        for descriptor in (kl.gaussian(), kl.laplace_l1(), kl.laplace_l2()):
            for x in (a, b):
                out = kl.kernel_matmul(descriptor, x, b, v, bandwidth=bandwidth)
                out.sum().backward()
    kl.kernel_sum(kl.gaussian(), a, b, bandwidth=bandwidth).sum().backward()
    kl.kernel_matmul(kl.power_sum(), a, b, v, p=1.3).sum().backward()


def main() -> None:
    torch.manual_seed(0)
    with mock.patch.object(reduce, "product_pays", lambda _, problem: problem.columns > 8):
        for shape in SHAPES:
            for dtype in (torch.float32, torch.bfloat16):
                a, b = points(*shape, dtype)
                many_columns(a, b)
                many_columns(a[:, :3], b[:, :3])
                gradients(a[:, :16], b[:, :16])
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()

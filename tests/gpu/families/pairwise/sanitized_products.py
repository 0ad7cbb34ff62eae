"""Small odd calls of the kernels of tensor cores and of reductions, to be run under
compute-sanitizer.

Racecheck takes no mbarrier for what orders the stores of threads before another warp's reads, and
threads store the columns of v for the kernel of tensor cores: with "racecheck" as an argument those
calls are left out, and its sums without v stay."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from unittest import mock

import torch

import kernlib as kl
from kernlib.families.pairwise.lowering import product, split, split_reduce
from kernlib.runtime.plan import forget_plans

SHAPES = ((1, 1, 1), (67, 33, 7), (68, 196, 36), (130, 193, 140))


def points(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = (torch.randn(rows, k, device="cuda").to(dtype) for rows in (m, n))
    b[: min(m, n) // 2] = a[: min(m, n) // 2]  # pairs that are computed from differences
    return a, b


def matrices(a: torch.Tensor, b: torch.Tensor) -> None:
    for precision in ("fp32", "tf32"):
        kl.run_kernel(kl.l2_distance(precision=precision), a, b)
        kl.run_kernel(kl.dot_product(precision=precision), a, b.mT.contiguous().mT)
    out = torch.zeros(b.shape[0], a.shape[0], device="cuda", dtype=a.dtype).T
    arguments = {"bandwidth": 2.0, "regularization": 1.0}
    kl.run_kernel(kl.gaussian(), a, b, out=out, accumulate=True, **arguments)
    kl.run_kernel(kl.gaussian(symmetric=True), b, **arguments)


def reductions(a: torch.Tensor, b: torch.Tensor, widths: tuple[int, ...]) -> None:
    for columns in widths:
        v = torch.randn(b.shape[0], columns, device="cuda").to(a.dtype)
        for precision in ("fp32", "tf32"):
            descriptor = kl.gaussian(precision=precision)
            kl.kernel_matmul(descriptor, a, b, v, bandwidth=2.0, regularization=1.0)
    kl.kernel_min(kl.squared_distance(), a, b)
    kl.kernel_logsumexp(kl.l2_distance(), a, b)


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
    racecheck = "racecheck" in sys.argv
    for everywhere in (True, False):
        with ExitStack() as stack:
            for module in (split, split_reduce):
                stack.enter_context(mock.patch.object(module, "pays", lambda _, e=everywhere: e))
            many = mock.patch.object(product, "pays", lambda _, problem: problem.columns > 8)
            stack.enter_context(many)
            for shape in SHAPES:
                for dtype in (torch.float32, torch.bfloat16):
                    a, b = points(*shape, dtype)
                    reductions(a, b, () if racecheck and everywhere else (1, 3, 8))
                    if everywhere:
                        matrices(a, b)
                        many_columns(a, b)
                        many_columns(a[:, :3], b[:, :3])
                    else:
                        gradients(a[:, :16], b[:, :16])
        forget_plans()  # which know how a call was computed
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()

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
from kernlib.families.pairwise.lowering import problem, reduce
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


def main() -> None:
    torch.manual_seed(0)
    racecheck = "racecheck" in sys.argv
    for everywhere in (True, False):
        with ExitStack() as stack:
            for module in (problem, reduce):
                pays = mock.patch.object(module, "split_pays", lambda _, e=everywhere: e)
                stack.enter_context(pays)
            for shape in SHAPES:
                for dtype in (torch.float32, torch.bfloat16):
                    a, b = points(*shape, dtype)
                    reductions(a, b, () if racecheck and everywhere else (1, 3, 8))
                    if everywhere:
                        matrices(a, b)
        forget_plans()  # which know how a call was computed
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()

"""Small odd calls of every way of loading and storing, to be run under compute-sanitizer."""

from __future__ import annotations

import torch

import kernlib as kl
from tests.gpu.families.pairwise.cases import by


def inputs(m: int, n: int, k: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    a, b = (torch.randn(rows, k, device="cuda").to(dtype) for rows in (m, n))
    columns = b.T.contiguous().T
    shifted = torch.empty(m, k + 1, device="cuda", dtype=dtype)[:, 1:].copy_(a)
    return [(a, b), (a, columns), (shifted, b), (columns.contiguous(), columns)]


def main() -> None:
    torch.manual_seed(0)
    with by("direct"):
        calls()
    torch.cuda.synchronize()
    print("done")


def calls() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for m, n, k in ((1, 1, 1), (67, 33, 7), (68, 36, 20), (130, 131, 140)):
            for a, b in inputs(m, n, k, dtype):
                kl.cdist(a, b, p=1)
                out = torch.zeros(b.shape[0], a.shape[0], device="cuda", dtype=dtype).T
                kl.run_kernel(
                    kl.gaussian(), a, b, out=out, accumulate=True, bandwidth=2.0, regularization=1.0
                )
        a = torch.randn(2, 70, 9, device="cuda").to(dtype)
        kl.run_kernel(kl.laplace_l1(symmetric=True), a, bandwidth=torch.ones(2, device="cuda"))
    a, b = torch.randn(2100, 20, device="cuda"), torch.randn(1500, 20, device="cuda")
    for p in (1.3, 0.5, float("inf"), torch.tensor(1.5, device="cuda")):
        kl.cdist(a, b, p=p)
    a, b = torch.randn(1500, 150, device="cuda"), torch.randn(1601, 150, device="cuda")
    kl.cdist(a, b, p=1)
    kl.run_kernel(kl.l1_distance(symmetric=True), b)


if __name__ == "__main__":
    main()

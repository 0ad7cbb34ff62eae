"""Small odd calls of the kernel of few pairs, to be run under compute-sanitizer."""

from __future__ import annotations

import torch

import kernlib as kl
from tests.gpu.families.pairwise.cases import by
from tests.gpu.families.pairwise.sanitized_direct import inputs

SIZES = ((1, 1, 1), (3, 5, 0), (33, 18, 7), (5, 9, 40), (6, 7, 100), (9, 10, 300), (5, 6, 2100))


def main() -> None:
    torch.manual_seed(0)
    with by("few"):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for size in SIZES:
                calls(*size, dtype)
        numbers()
    torch.cuda.synchronize()
    print("done")


def calls(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    for a, b in inputs(m, n, k, dtype):
        kl.cdist(a, b, p=1)
        kl.cdist(a, b, p=1.3)  # each patch in a unit of its own
        out = torch.zeros(b.shape[0], a.shape[0], device="cuda", dtype=dtype).T
        kl.run_kernel(
            kl.gaussian(), a, b, out=out, accumulate=True, bandwidth=2.0, regularization=1.0
        )
    kl.run_kernel(kl.exp_power_sum(), a, b, p=1.5, inner_scale=-0.3)
    kl.run_kernel(kl.laplace_l1(symmetric=True), a, bandwidth=2.0)


def numbers() -> None:
    """Norms computed anew, numbers on the device, batches, sums of more than one chain."""
    a, b = torch.randn(3, 13, 70, device="cuda"), torch.randn(3, 6, 70, device="cuda")
    for p in (0.5, 3.0, torch.tensor(1.5, device="cuda")):
        kl.cdist(a, b, p=p)
        kl.cdist(a * 1e20, b, p=p)
    kl.run_kernel(kl.laplace_l1(), a, b, bandwidth=torch.ones(3, device="cuda"))
    kl.cdist(torch.randn(5, 33_000, device="cuda"), torch.randn(3, 33_000, device="cuda"), p=1)


if __name__ == "__main__":
    main()

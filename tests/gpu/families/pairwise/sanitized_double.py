"""Small odd calls of the kernels of float64 that store no matrix, to be run under
compute-sanitizer."""

from __future__ import annotations

import torch

import kernlib as kl

SHAPES = ((1, 1, 1), (67, 133, 3), (67, 133, 8), (130, 333, 36), (64, 640, 17))


def main() -> None:
    torch.manual_seed(0)
    for m, n, k in SHAPES:
        a, b = (torch.randn(rows, k, device="cuda", dtype=torch.float64) for rows in (m, n))
        for near in (False, True):
            if near:  # tiles that are summed once more
                b[: min(m, n) // 2] = a[: min(m, n) // 2]
            for columns in (1, 9):
                v = torch.randn(n, columns, device="cuda", dtype=torch.float64)
                kl.kernel_matmul(kl.gaussian(), a, b, v, bandwidth=2.0, regularization=1.0)
            kl.kernel_sum(kl.laplace_l1(), a, b, bandwidth=2.0)
            kl.kernel_sum(kl.dot_product(), a.expand(3, -1, -1), b.repeat(3, 1, 1))
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()

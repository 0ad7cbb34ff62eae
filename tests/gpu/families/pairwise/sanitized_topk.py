"""Small odd calls of the kernels that keep lists, to be run under compute-sanitizer."""

from __future__ import annotations

from unittest import mock

import torch

import kernlib as kl
from kernlib.families.pairwise.lowering import reduce
from kernlib.runtime.plan import forget_plans


def main() -> None:
    torch.manual_seed(0)
    with mock.patch.object(reduce, "split_pays", lambda _: True):
        calls()
    forget_plans()  # which know how a call was computed
    calls()
    torch.cuda.synchronize()
    print("done")


def calls() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for m, n, features in ((1, 1, 1), (67, 333, 7), (68, 196, 36), (130, 1293, 140)):
            a, b = (torch.randn(rows, features, device="cuda").to(dtype) for rows in (m, n))
            for k in {1, min(n, 10), min(n, 64), min(n, 128)}:
                kl.kernel_topk(kl.squared_distance(), a, b, k)
            b[::3] = float("nan")
            kl.kernel_topk(kl.l1_distance(), a, b, min(n, 10), True)
            kl.kernel_topk(kl.gaussian(), a, b, 1, True, bandwidth=2.0, regularization=1.0)
    a, b = torch.randn(3, 70, 5, device="cuda"), torch.randn(5000, 5, device="cuda")
    kl.kernel_topk(kl.p_distance(), a * 1e20, b * 1e20, 5, p=1.3)


if __name__ == "__main__":
    main()

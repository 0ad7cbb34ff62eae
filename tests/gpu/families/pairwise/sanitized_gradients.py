"""Small odd calls of every way to a pair gradient, to be run under compute-sanitizer."""

from __future__ import annotations

import torch

import kernlib as kl
from tests.gpu.families.pairwise.gradient_cases import by, operands


def main() -> None:
    torch.manual_seed(0)
    for way in ("direct", "mma", "wgmma"):
        with by(way):
            for k, m, n in ((1, 1, 1), (67, 70, 33), (600, 36, 130)):
                for sets in (1, 3, 16, 40):
                    given = operands(k, m, n, sets)
                    kl.cdist_grad(*given, p=1)
                    kl.cdist_grad(*(t.mT.contiguous().mT for t in given), p=1)
                    if sets > 1 or way == "direct":
                        kl.cdist_grad(*given, p=1.5)
    for dtype in (torch.float64, torch.bfloat16):
        with by("direct"):
            for sets in (1, 3):
                given = operands(67, 70, 33, sets, dtype)
                given[1][3, 4] = float("nan")
                kl.cdist_grad(*given, p=1)
                kl.cdist_grad(*given, p=torch.tensor(0.7, device="cuda", dtype=torch.float64))
    with by("products"):
        kl.cdist_grad(*operands(67, 70, 33, 3), p=2)
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()

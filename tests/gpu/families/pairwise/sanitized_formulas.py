"""Small odd calls of formulas, to be run under compute-sanitizer."""

from __future__ import annotations

import torch

import kernlib as kl
from tests.gpu.families.pairwise.formula_cases import drawn, formula, placed, reductions

SIZES = ((67, 5, 3), (3, 301, 65))


def main() -> None:
    torch.manual_seed(0)
    for name in ("row+col", "matrix", "whole", "bools"):
        for m, n, k in SIZES:
            calls(name, m, n, k, torch.float32, derived=name in ("row+col", "matrix"))
    calls("row+col", 65, 67, 5, torch.float64, derived=False)
    calls("two sums", 65, 67, 70, torch.bfloat16, derived=False)
    pairs = kl.Pairs.from_splits([0, 3, 3, 65], [0, 1, 40, 67], device="cuda")
    for k in (3, 70):
        values = placed(drawn("row+col", 65, 67, k, torch.float32), "cuda")
        reductions(formula("row+col"), values, torch.randn(67, 3, device="cuda"), pairs)
    torch.cuda.synchronize()
    print("done")


def calls(name: str, m: int, n: int, k: int, dtype: torch.dtype, derived: bool) -> None:
    values = placed(drawn(name, m, n, k, dtype), "cuda")
    v = torch.randn(n, 20, device="cuda").to(dtype).requires_grad_()
    results = reductions(formula(name), values, v)
    if derived:
        leaves = [*(t for t in values.values() if t.requires_grad), v]
        total = results["matmul"].sum() + results["logsumexp"].sum()
        torch.autograd.grad(total, leaves, allow_unused=True)


if __name__ == "__main__":
    main()

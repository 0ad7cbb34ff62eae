"""Small odd calls of the portable kernels, with each of their tiles, or of Hopper's: one each for
the shapes of their tiles. To be run under compute-sanitizer; prints the kinds of kernels."""

from __future__ import annotations

import sys
from functools import partial

import kronecker_sparse_cases as ks
import torch

import kernlib as kl
from kernlib.ops import kronecker_sparse as op

# Patterns, numbers, batch_last and batches. The last ones pack a weight, and split a batch.
PORTABLE = (
    *(
        (pattern, numbers, last, batch)
        for pattern in ((1, 1, 1, 1), (2, 3, 5, 3), (1, 70, 67, 1), (1, 130, 34, 2))
        for numbers in ("fp32", "fp16")
        for last in ks.LAYOUTS
        for batch in (67, 136)
    ),
    ((2, 3, 5, 3), "fp32", False, 1100),
    ((2, 9, 5, 3), "fp16", True, 1100),
)
HOPPER = (
    # Lanes of whole words: 16, 8, 4 and 2 to a tile, and some of more.
    ((2, 20, 8, 16), "fp16", False, 67), ((3, 26, 24, 8), "fp16", False, 130),
    ((1, 70, 20, 4), "bf16", False, 67), ((1, 72, 20, 2), "fp16", False, 130),
    ((1, 26, 17, 4), "fp32", False, 67), ((1, 50, 20, 2), "tf32", False, 130),
    # Blocks: one tile of columns or several, weights as they are or packed, resident or not.
    ((2, 24, 40, 1), "fp16", False, 67), ((2, 24, 40, 1), "fp32", False, 130),
    ((1, 264, 72, 1), "fp16", False, 130), ((1, 136, 264, 1), "fp32", False, 67),
    # Batch last, with a tail of rows.
    ((1, 10, 24, 3), "fp16", True, 136), ((2, 40, 24, 5), "fp32", True, 136),
    ((1, 300, 20, 2), "bf16", True, 8),
    # Gradients of weights, of batches that are long.
    ((2, 24, 40, 1), "fp16", False, 4360), ((1, 10, 24, 4), "bf16", False, 4360),
    ((1, 10, 24, 3), "fp16", True, 4360),
)  # fmt: skip
# Rows of 32 bytes, which threads copy and announce by an mbarrier.
BY_THREADS = (
    ((2, 9, 17, 24), "bf16", False, 67), ((2, 9, 17, 12), "fp32", False, 67),
    ((1, 26, 24, 64), "fp16", False, 130),
)  # fmt: skip
CALLS = {"portable": PORTABLE, "hopper": (*HOPPER, *BY_THREADS), "engine": HOPPER}


def run(pattern, numbers: str, batch_last: bool, batch: int, every: bool) -> None:
    """A product, one with costly epilogues, and the gradient of its weight."""
    x, weight = ks.operands(pattern, batch, numbers, batch_last)
    plain = ks.product(pattern, numbers, batch_last)
    calls = [partial(kl.run_kernel, plain, x, weight)]
    y = calls[0]()
    calls.append(partial(op.weight_gradient, y, x, pattern, batch_last, plain.precision))
    if numbers == "fp16":
        fused = ks.product(pattern, numbers, batch_last, (kl.Bias(), kl.Scale(), kl.Gelu()))
        scale = torch.ones((), device=ks.DEVICE)
        bias = x.new_ones(fused.out_features)
        calls.append(partial(kl.run_kernel, fused, x, weight, bias=bias, scale=scale))
    for call in calls:
        for _ in ks.each(call, every=True) if every else (call(),):
            pass


def main(kernels: str) -> None:
    torch.manual_seed(0)
    names = ("portable",) if kernels == "portable" else ()
    with ks.only(*names), ks.launches() as launched:
        for call in CALLS[kernels]:
            run(*call, every=kernels == "portable")
    torch.cuda.synchronize()
    print("done", *sorted({description.split()[1] for description in launched}))


if __name__ == "__main__":
    main(sys.argv[1])

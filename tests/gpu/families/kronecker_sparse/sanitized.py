"""Small odd calls of the portable kernels, with each of their tiles, or of Hopper's: one each for
the shapes of their tiles. To be run under compute-sanitizer; prints the kinds of kernels."""

from __future__ import annotations

import sys
from functools import partial
from unittest import mock

import torch

import kernlib as kl
from kernlib.families.kronecker_sparse import operation as primitives
from kernlib.families.kronecker_sparse.chain import fused
from kernlib.families.kronecker_sparse.kernels.chain import fused_chain
from kernlib.families.kronecker_sparse.lowering import by_torch
from kernlib.families.kronecker_sparse.lowering.problem import DEEP
from kernlib.lowering import kernel
from kernlib.runtime.plan import forget_plans
from tests.gpu.families.kronecker_sparse import cases as ks
from tests.gpu.watched import launches

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
# By way of batch last, which goes before none but the kind that takes the same products.
TRANSPOSED = (((2, 24, 40, 16), "fp16", False, 67), ((1, 26, 17, 4), "fp32", False, 130))
# Two factors in one launch: each order of features between, one to three row tiles a pair of
# warpgroups, l that go to memory as they are or through shared memory.
CHAINS = (
    ((6, 32, 24, 1), (1, 40, 96, 2)), ((4, 24, 40, 1), (1, 24, 32, 3)),
    ((8, 32, 24, 1), (1, 40, 16, 16)), ((2, 96, 72, 1), (1, 104, 96, 2)),
)  # fmt: skip
# Their gradients: h with each l by itself or with the batch last, of one tile or of several.
GRADIENTS = (
    ((6, 32, 24, 1), (1, 136, 96, 2)), ((4, 24, 40, 1), (1, 40, 32, 3)),
    ((8, 32, 24, 1), (1, 40, 16, 16)), ((4, 16, 24, 1), (2, 40, 8, 8)),
)  # fmt: skip
CALLS = {"portable": PORTABLE, "hopper": (*HOPPER, *BY_THREADS), "engine": HOPPER}


def gradient_by_threads(pattern, numbers: str, batch_last: bool, batch: int) -> bool:
    """Whether threads copy for the gradient of a weight: its k are rows of a batch too short to be
    turned, which do not lie side by side, and the l of each fill 16 bytes."""
    lane_bytes = pattern[3] * ks.DTYPES[numbers].itemsize
    return not batch_last and batch <= DEEP and lane_bytes >= 16


def run(kernels: str, pattern, numbers: str, batch_last: bool, batch: int) -> None:
    """A product, one with costly epilogues, and the gradient of its weight."""
    x, weight = ks.operands(pattern, batch, numbers, batch_last)
    plain = ks.product(pattern, numbers, batch_last)
    calls = [partial(kl.run_kernel, plain, x, weight)]
    y = calls[0]()
    # Racecheck does not follow the mbarriers of copies by threads; memcheck has these gradients
    # in "hopper".
    if kernels != "engine" or not gradient_by_threads(pattern, numbers, batch_last, batch):
        calls.append(
            partial(primitives.weight_gradient, y, x, pattern, batch_last, plain.precision)
        )
    if numbers == "fp16":
        fused = ks.product(pattern, numbers, batch_last, (kl.Bias(), kl.Scale(), kl.Gelu()))
        scale = torch.ones((), device=ks.DEVICE)
        bias = x.new_ones(fused.out_features)
        calls.append(partial(kl.run_kernel, fused, x, weight, bias=bias, scale=scale))
    for call in calls:
        for _ in ks.each(call, every=True) if kernels == "portable" else (call(),):
            pass


def run_chain(chain: tuple, rows: int = 131) -> None:
    """Every way of a chain's kernel, with a cheap and with a costly epilogue."""
    kind = torch.float16
    x = ks.random(rows, chain[0][0] * chain[0][2], dtype=kind)
    weights = [ks.random(*pattern, dtype=kind) for pattern in chain]
    for epilogue in ((kl.Bias(),), (kl.Bias(), kl.Gelu())):
        last = kl.KroneckerSparse(*chain[1], epilogue=epilogue)
        descriptor = kl.KroneckerSparseChain((kl.KroneckerSparse(*chain[0]), last))
        bias = x.new_ones(last.out_features)
        with mock.patch.object(fused_chain, "lower", return_value=None) as lower:
            fused.takes(descriptor, (x, *weights), {"bias": bias})
        for knobs in _ways(lower.call_args.args[0]):
            # So few rows would go to the kernels of one factor.
            with mock.patch.object(fused_chain, "lower", partial(_lowered, knobs)):
                forget_plans()
                kl.run_kernel(descriptor, x, *weights, bias=bias)


def run_gradient(chain: tuple, rows: int = 1104) -> None:
    """All gradients of a chain with a bias."""
    kind = torch.float16
    last = kl.KroneckerSparse(*chain[1], epilogue=(kl.Bias(),))
    descriptor = kl.KroneckerSparseChain((kl.KroneckerSparse(*chain[0]), last))
    x = ks.random(rows, chain[0][0] * chain[0][2], dtype=kind)
    leaves = [x, *(ks.random(*pattern, dtype=kind) for pattern in chain)]
    leaves = [t.requires_grad_() for t in (*leaves, x.new_ones(last.out_features))]
    y = kl.run_kernel(descriptor, *leaves[:3], bias=leaves[3])
    y.backward(torch.ones_like(y))


def _ways(chain) -> list[dict]:
    """Choices of a chain's kernel, one for each of its variants."""
    choices = fused_chain.FusedChain().choices(chain, "sm_90a")
    return [choice for choice in choices if choice["splits"] == 1]


def _lowered(knobs, chain, gpu):
    one = gpu._replace(multiprocessors=1)
    return fused_chain.FusedChain().launch(chain.epilogue, chain, one, knobs)


def _by_rank(among, problem, gpu, tuned=None):
    """The tuned option, else the first one."""
    every = kernel.options(among, problem, gpu.arch)
    return next((option for option in every if option.choice == tuned), every[0])


def main(kernels: str) -> None:
    torch.manual_seed(0)
    names = ("portable",) if kernels == "portable" else ()
    # Hopper's kernels, small as these batches are, and kernels wherever torch is faster.
    with (
        mock.patch.object(by_torch, "gains", lambda *_: False),
        mock.patch.object(kernel, "choose", _by_rank),
    ):
        with ks.only(*names), launches() as launched:
            for call in CALLS[kernels]:
                run(kernels, *call)
            for chain in CHAINS if kernels != "portable" else ():
                run_chain(chain)
            for chain in GRADIENTS if kernels != "portable" else ():
                run_gradient(chain)
        assert kernels == "portable" or any(" chain " in name for name in launched), launched
        if kernels != "portable":
            with ks.only("transposed", "portable"), launches() as by_batch_last:
                for call in TRANSPOSED:
                    run(kernels, *call)
            assert any("hopper" in name for name in by_batch_last), by_batch_last
            launched += by_batch_last
    torch.cuda.synchronize()
    by_threads = [name for name in launched if " interleaved " in name and "merged" not in name]
    assert kernels != "engine" or not by_threads, by_threads
    print("done", *sorted({description.split()[1] for description in launched}))


if __name__ == "__main__":
    main(sys.argv[1])

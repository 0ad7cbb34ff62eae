"""Operations that torch's FlopCounterMode counts: two for each product that is added up, and those
of plain torch where all of a matrix is stored."""

import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import kernlib as kl
from kernlib import blocksparse, sparse
from tests.support.limits import LIMIT_S

A, B, V = torch.randn(2, 9, 5), torch.randn(7, 5), torch.randn(7, 4)
X, W = torch.randn(3, 64, 64), torch.randn(64, 64)
KERNEL, WIDTH, PAIRS = kl.gaussian(), {"bandwidth": 1.0}, 2 * 9 * 7
PRUNED = sparse.magnitude(W, 0.3)
CAUSAL, HEADS = blocksparse.causal(64, 16), blocksparse.dense(64, 64, (16, 32), heads=3)
BLOCKS, OF_HEADS = torch.randn(2, 10, 16, 16), torch.randn(24, 16, 32)  # 10 of 16 are causal
Q, VALUES = torch.randn(2, 3, 64, 32), torch.randn(2, 3, 64, 8)
WIDE = blocksparse.dense(64, 16 * 40, 16, heads=3)  # whose lines have more blocks than a word bits
FLOAT8, ONE = torch.float8_e4m3fn, torch.ones(())
SQUARE = 2 * 3 * 64**3  # of X times a matrix


def chain(side):
    return lambda x, *factors: kl.kron_matmul(x, factors, side=side)


# A call, its tensors, and the operations of the call and of its backward pass.
CASES = {
    "pairwise": (lambda a, b: kl.run_kernel(KERNEL, a, b, **WIDTH), (A, B), 10 * PAIRS, None),
    "out": (lambda a, b: kl.cdist(a, b, out=torch.empty(2, 9, 7)), (A, B), 10 * PAIRS, None),
    "kernel_sum": (
        lambda a, b: kl.kernel_sum(KERNEL, a, b, **WIDTH), (A, B), 10 * PAIRS, 30 * PAIRS
    ),
    "kernel_topk": (
        lambda a, b: kl.kernel_topk(KERNEL, a, b, 2, **WIDTH)[0], (A, B), 10 * PAIRS, None
    ),
    "kernel_matmul": (
        lambda a, b, v: kl.kernel_matmul(KERNEL, a, b, v, **WIDTH), (A, B, V),
        2 * PAIRS * (5 + 4), 2 * PAIRS * (3 * 5 + 2 * 4),
    ),
    "Kronecker-sparse": (
        lambda x, w: kl.run_kernel(kl.KroneckerSparse(2, 4, 8, 4), x, w),
        (X, torch.randn(2, 4, 8, 4)), 2 * 192 * 256, 2 * 2 * 192 * 256,
    ),
    "Kronecker product": (
        chain("right"), (X, torch.randn(2, 32), torch.randn(32, 4)),
        2 * 192 * (64 * 4 + 8 * 32), None,
    ),
    "on the left": (
        chain("left"), (X, torch.randn(32, 2), torch.randn(4, 32)),
        2 * 192 * (64 * 4 + 8 * 32), None,
    ),
    "bitmap": (lambda x: sparse.matmul(sparse.compress(PRUNED, "bitmap"), x), (X,),
               2 * 192 * int(PRUNED.count_nonzero()), 2 * 192 * int(PRUNED.count_nonzero())),
    "dense": (lambda x: sparse.matmul(sparse.compress(W, "dense"), x), (X,), SQUARE, SQUARE),
    "sdd": (lambda a, b: blocksparse.sdd(a, b, CAUSAL), (X, W),
            SQUARE * 10 // 16, SQUARE * 20 // 16),
    "dsd": (lambda s, b: blocksparse.dsd(s, b, CAUSAL), (BLOCKS, W),
            SQUARE * 2 // 3 * 10 // 16, SQUARE * 4 // 3 * 10 // 16),
    "dsd, wide": (
        lambda s, b: blocksparse.dsd(s, b, WIDE),
        (torch.randn(480, 16, 16), torch.randn(3, 640, 7)), 2 * 3 * 64 * 640 * 7, None,
    ),
    "attention, wide": (
        lambda q, k, v: blocksparse.attention(q, k, v, WIDE),
        (Q, torch.randn(2, 3, 640, 32), torch.randn(2, 3, 640, 8)), 2 * 6 * 64 * 640 * 40, None,
    ),
    "of a matrix on meta": (
        lambda x: sparse.matmul(sparse.compress(W, "bitmap").to("meta"), x.to("meta")), (X,),
        SQUARE, None,
    ),
    "dds turned": (lambda a, s: blocksparse.dds(a, s, HEADS, transpose_b=True), (X, OF_HEADS),
                   SQUARE, 2 * SQUARE),
    "scaled": (
        lambda s, b: blocksparse.scaled_dsd(s.to(FLOAT8), b.to(FLOAT8), HEADS, torch.ones(24), ONE),
        (OF_HEADS, X), SQUARE, None,
    ),
    "attention": (
        lambda q, k, v: blocksparse.attention(q, k, v, CAUSAL, causal=True), (Q, Q + 1, VALUES),
        2 * 6 * 2560 * 40, 2 * 6 * 2560 * (3 * 32 + 2 * 8),
    ),
    "attention of heads": (
        lambda q, k, v: blocksparse.attention(q, k, v, HEADS), (Q, Q + 1, VALUES),
        2 * 6 * 4096 * 40, 2 * 6 * 4096 * (3 * 32 + 2 * 8),
    ),
    "softmax": (lambda x: blocksparse.softmax(x, CAUSAL), (BLOCKS,), 0, 0),
}  # fmt: skip


def counted(call, tensors) -> int:
    with FlopCounterMode(display=False) as counter:
        result = call(*tensors)
        if result.requires_grad:
            result.sum().backward()
    return counter.get_total_flops()


@pytest.mark.few(99)
@pytest.mark.parametrize("case", CASES)
def test_operations_are_counted_as_those_of_plain_products(case):
    call, tensors, forward, backward = CASES[case]
    assert counted(call, tensors) == forward
    if backward is not None:
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        assert counted(call, leaves) == forward + backward


def test_a_counter_that_is_older_than_the_operators_counts_them():
    code = (
        "import torch\n"
        "from torch.utils.flop_counter import FlopCounterMode\n"
        "with FlopCounterMode(display=False) as counter:\n"
        "    import kernlib\n"
        "    kernlib.run_kernel(kernlib.l1_distance(), torch.ones(4, 3), torch.ones(5, 3))\n"
        "assert counter.get_total_flops() == 2 * 4 * 5 * 3, counter.get_total_flops()\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert child.returncode == 0, child.stderr

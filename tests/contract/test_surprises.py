"""What GPUs and other libraries do otherwise than a CPU or than their names say, where a call of
kernlib would show it: here on the CPU, by the calls that are made; tests/gpu has the values."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

import kernlib as kl
from kernlib import blocksparse, sparse

NEGATIVE_NAN = torch.tensor([0xFFC00000 - 2**32], dtype=torch.int32).view(torch.float32)


class Watched(TorchDispatchMode):
    """Has ``look(operator, arguments)`` see each operator of torch."""

    def __init__(self, look):
        super().__init__()
        self.look = look

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.look(function.overloadpacket, args)
        return function(*args, **(kwargs or {}))


@contextmanager
def watched(*operators):
    """The arguments of each call of one of the operators."""
    calls = []
    with Watched(lambda operator, args: operator in operators and calls.append(args)):
        yield calls


WEIGHT = torch.linspace(-3, 5, 16 * 256).view(16, 256)


def compressed(values, as_csr):
    return sparse.compress(WEIGHT.to_sparse_csr() if as_csr else WEIGHT, "bitmap", values=values)


QUANTISERS = {
    "quantize": partial(blocksparse.quantize, WEIGHT, -1),
    **{
        f"{values} of {'CSR' if as_csr else 'a tensor'}": partial(compressed, values, as_csr)
        for values in ("int8", "fp8", "int4")
        for as_csr in (False, True)
    },
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("name", QUANTISERS)
def test_scales_are_quotients_by_tensors(name):
    """By a number torch multiplies with its reciprocal on GPUs: scales would have other bits."""
    div = torch.ops.aten.div
    with watched(div, torch.ops.aten.div_) as calls:
        QUANTISERS[name]()
    divisors = [args[1] for args in calls if args[0].is_floating_point()]
    assert len(divisors) >= 2  # of scales, and of codes
    assert all(isinstance(divisor, torch.Tensor) for divisor in divisors)


def nearest():
    points = torch.linspace(0, 9, 24).view(12, 2)
    points[3] = torch.nan
    return kl.kernel_topk(kl.Pairwise(epilogue=kl.Custom("-v")), points, points, 8, True)[0]


SORTED = {
    "kernel_topk": nearest,
    "top_k": lambda: blocksparse.top_k(torch.cat((torch.ones(3), NEGATIVE_NAN))[None], 16, 2),
}


@pytest.mark.parametrize("name", SORTED)
def test_a_nan_that_torch_sorts_has_no_sign(name, monkeypatch):
    """On GPUs one with a sign comes first in a long row, and last where it is descending."""
    numbers, sort = [], torch.Tensor.sort

    def watched_sort(t, *args, **kwargs):
        numbers.extend([t.clone()] if t.is_floating_point() else [])
        return sort(t, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "sort", watched_sort)
    found = SORTED[name]()
    assert any(t.isnan().any() for t in numbers)
    assert not any((t.isnan() & t.signbit()).any() for t in numbers)
    if name == "top_k":
        assert found.mask().tolist() == [[True, False, False, True]]
    else:
        assert found[:, 0].isnan().all()


HALF = (torch.float16, torch.bfloat16)
FLOATS = (*HALF, torch.float32, torch.float64)
LONG = torch.ones(1, 320, dtype=torch.bool)


def times_values(dtype):
    layout, values = blocksparse.Layout(LONG, (16, 16)), torch.ones(320, 16, 16, dtype=dtype)
    return blocksparse.dsd(values, torch.ones(5120, 3, dtype=dtype), layout)


def gradient_of_dense(dtype):
    layout, values = blocksparse.Layout(LONG.mT, (16, 16)), torch.ones(320, 16, 16, dtype=dtype)
    dense = torch.ones(16, 3, dtype=dtype, requires_grad=True)
    y = blocksparse.dsd(values, dense, layout)
    return torch.autograd.grad(y, dense, torch.ones_like(y))[0]


SUMS = {
    "block-sparse": times_values,
    "its gradient": gradient_of_dense,
    "sparse": lambda dtype: sparse.matmul(
        sparse.compress(torch.ones(4, 5120, dtype=dtype), "bitmap"),
        torch.ones(2, 5120, dtype=dtype),
    ),
    "pairwise": lambda dtype: kl.kernel_sum(
        kl.dot_product(), torch.ones(3, 1, dtype=dtype), torch.ones(5120, 1, dtype=dtype)
    ),
}


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", SUMS)
def test_sums_of_half_types_go_on_where_one_more_is_lost(name, dtype):
    """Added up in bfloat16 ones stop at 256, in float16 at 2048; 5120 is a number of both."""
    assert SUMS[name](dtype).eq(5120).all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_an_alpha_of_0_multiplies_and_a_beta_of_0_does_not(dtype):
    """In every dtype: torch's addmm lets NaN through by dtype and device."""
    x, factor = torch.ones(3, 4, dtype=dtype), torch.eye(2, dtype=dtype)
    bad = torch.full_like(x, torch.nan)
    found = kl.kron_matmul(bad, [factor, factor], alpha=0.0, beta=1.0, y=x)
    assert found.isnan().all()
    found = kl.kron_matmul(x, [factor, factor], alpha=1.0, beta=0.0, y=bad)
    assert found.equal(x)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_logsumexp_of_nothing_is_minus_infinity(dtype):
    """Of a row whose entries all are, as of no points: a log of 0, and no NaN."""
    descriptor = kl.Pairwise(inner=kl.Square(), epilogue=kl.Custom("-v"))
    a, b = torch.ones(3, 2, dtype=dtype), torch.zeros(5, 2, dtype=dtype)
    a[1] = torch.inf
    found = kl.kernel_logsumexp(descriptor, a, b)
    assert found.isfinite().tolist() == [True, False, True] and found[1] == -torch.inf
    assert kl.kernel_logsumexp(descriptor, a, b[:0]).eq(-torch.inf).all()


@pytest.mark.parametrize("text", ["v ** -0.5", "1 / sqrt(v)", "1 / v"])
def test_an_inverse_root_of_0_is_infinite(text):
    points = torch.linspace(0, 5, 12).view(6, 2)
    descriptor = kl.Pairwise(inner=kl.Square(), epilogue=kl.Custom(text))
    assert kl.run_kernel(descriptor, points, points).diagonal().eq(torch.inf).all()
    assert kl.kernel_sum(descriptor, points, points).eq(torch.inf).all()


@pytest.mark.parametrize("count", [999, 1000])  # times 128 features on both sides of 128,000
def test_points_far_from_0_are_at_no_distance_from_themselves(count, seed):
    """By norms and products they are, in float32 by 1 at 100 of 128 features."""
    points = torch.randn(count, 128) + 100
    assert not kl.cdist(points, points).diagonal().any()
    nearest = kl.kernel_argmin(kl.squared_distance(), points, points)
    assert nearest.equal(torch.arange(count))


def test_a_slice_of_a_block_mask_is_not_taken_for_whole_blocks():
    """Whose rule torch takes away, or replaces by one that permits everything."""
    mask = create_block_mask(
        lambda batch, head, row, col: row >= col, 2, 1, 128, 128, "cpu", BLOCK_SIZE=64
    )
    for part in (mask[0:1], mask[:, :, 0:1]):
        layout = blocksparse.Layout.from_block_mask(part)
        assert layout.mask().equal(torch.ones(2, 2).tril()[: layout.grid[0]].bool())
        q, k = torch.randn(1, 1, layout.shape[0], 16), torch.randn(1, 1, 128, 16)
        with pytest.warns(kl.KernlibWarning, match="rows see columns that its rule leaves out"):
            blocksparse.attention(q, k, k, layout)

"""What kernels on a GPU must not do as others do there: cut the operands of products, lose what is
small in sums of one sign, make numbers of infinities."""

from __future__ import annotations

import pytest
import torch

import kernlib as kl
from kernlib import blocksparse, sparse
from kernlib.blocksparse import Layout, quantize, scaled_dds
from kernlib.families.sparse.lowering.quantised import QUANTISED
from kernlib.nn import KSLinear

TERMS, ROWS = 4096, 128


def positive(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, device="cuda")


def bias(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The mean relative error, in which errors of both signs cancel."""
    return float((found.double() / wanted - 1).mean())


def pairwise(x, w):
    return kl.run_kernel(kl.dot_product(precision="tf32"), x, w)


def kronecker_product(x, w):
    return kl.kron_matmul(x, [w.mT], precision="tf32")


def kronecker_sparse(x, w):
    descriptor = kl.KroneckerSparse(1, ROWS, TERMS, 1, precision="tf32")
    return kl.run_kernel(descriptor, x, w[None, :, :, None].contiguous())


def block_sparse(x, w):
    layout = Layout(torch.ones(ROWS // 64, TERMS // 64, dtype=torch.bool), 64, device=x.device)
    return blocksparse.dds(x, layout.to_blocks(w), layout, transpose_b=True, precision="tf32")


@pytest.mark.parametrize(
    "product",
    [pairwise, kronecker_product, kronecker_sparse, block_sparse],
    ids=lambda f: f.__name__,
)
def test_operands_in_tf32_are_rounded(product, seed):
    """Cut ones are too small each: sums of numbers of one sign lose 7e-4."""
    x, w = positive(200, TERMS), positive(ROWS, TERMS)
    found = product(x, w)
    assert abs(bias(found, x.double() @ w.double().mT)) <= 2e-4


def test_sums_of_float8_lose_little_of_numbers_of_one_sign(seed):
    """By one accumulator of 14 bits they lose 7 % of 4096 numbers."""
    layout = Layout(torch.ones(1, TERMS // 128, dtype=torch.bool), 128, device="cuda")
    values, scale = quantize(layout.to_blocks(positive(ROWS, TERMS)))
    x, own = quantize(positive(200, TERMS), -1)
    found = scaled_dds(x, values, layout, own, scale, transpose_b=True, out_dtype=torch.float16)
    weight = layout.to_dense(values.double() * scale.double()[:, None, None])
    assert abs(bias(found, (x.double() * own.double()[:, None]) @ weight.mT)) <= 6e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_kernel_of_an_inverse_root_is_infinite_at_0(dtype, seed):
    """In sums too, as in torch."""
    points = torch.randn(100, 3, dtype=dtype, device="cuda")
    for text in ("v ** -0.5", "1 / sqrt(v)", "1 / v"):
        descriptor = kl.Pairwise(inner=kl.Square(), epilogue=kl.Custom(text))
        assert kl.run_kernel(descriptor, points, points).diagonal().eq(torch.inf).all()
        assert kl.kernel_sum(descriptor, points, points).eq(torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_logsumexp_of_nothing_is_minus_infinity(dtype, seed):
    """Of rows whose entries all are: a log of 0, and no NaN."""
    a, b = (torch.randn(n, 3, dtype=dtype, device="cuda") for n in (70, 300))
    a[::2] = torch.inf
    descriptor = kl.Pairwise(inner=kl.Square(), epilogue=kl.Custom("-v"))
    found = kl.kernel_logsumexp(descriptor, a, b)
    assert found[::2].eq(-torch.inf).all() and found[1::2].isfinite().all()


@pytest.mark.parametrize("algo", ("auto", "sparse", "bsr"))
def test_long_sums_of_half_types_lose_nothing(algo):
    """5000 ones, of which the nearest bfloat16 is 4992."""
    for dtype, wanted in ((torch.bfloat16, 4992), (torch.float16, 5000)):
        weight = torch.ones(1, 8, 5000, 1, dtype=dtype, device="cuda")
        layer = KSLinear([(1, 8, 5000, 1)], weights=[weight], bias=False, algo=algo)
        for rows in (1, 40):
            x = torch.ones(rows, 5000, dtype=dtype, device="cuda", requires_grad=True)
            y = layer(x)
            assert y.eq(wanted).all()
            grads = torch.autograd.grad(y, (x, layer.factors[0]), torch.ones_like(y))
            assert grads[0].eq(8).all() and grads[1].eq(rows).all()


@pytest.mark.parametrize("name", QUANTISED)
def test_scales_half_way_between_two_are_those_of_a_cpu(name):
    """Quotients that a reciprocal would move."""
    largest = QUANTISED[name].largest
    most = largest * (1 + (2 * torch.arange(64.0) + 1) / 256)
    dense = torch.zeros(64, 256).index_fill(1, torch.tensor([0]), 1.0) * most[:, None]
    for weight in (dense, dense.to_sparse_csr()):
        given, wanted = sparse.compress(weight.cuda(), name), sparse.compress(weight, name)
        assert torch.equal(given.tensors["data"].cpu(), wanted.tensors["data"])

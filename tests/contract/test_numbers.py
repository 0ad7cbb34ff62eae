"""Numbers of other libraries are taken wherever one of Python is."""

from __future__ import annotations

import operator
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

import kernlib as kl
from kernlib import blocksparse, linalg, sparse
from kernlib.nn import (
    BlockSparseConv2d,
    BlockSparseLinear,
    BlockSparseMultiheadAttention,
    KroneckerLinear,
    KSLinear,
    SparseLinear,
    block_sparsify,
    sparsify,
)
from kernlib.runtime.plan import forget_plans

A = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
B = torch.linspace(0, 1, 15, dtype=torch.float64).reshape(5, 3)
SQUARE = torch.eye(32)
LAYOUT = blocksparse.Layout([[1, 0], [1, 1]], 16)
Q = torch.linspace(-1, 1, 512).reshape(1, 1, 32, 16)
gaussian, distance = kl.gaussian(), kl.l2_distance()


def net():
    return torch.nn.Sequential(torch.nn.Linear(32, 32))


def attention(**options):
    return blocksparse.attention(Q, Q, Q, LAYOUT, **options)


# What a call gives, with a number n that is 2 or 1 where an int stands.
INTS = {
    "topk": lambda n: kl.kernel_topk(distance, A, B, k=n),
    "polynomial": lambda n: kl.polynomial(n),
    "Polynomial": lambda n: kl.Polynomial(n),
    "categories": lambda n: kl.Pairwise(categories=n),
    "row_offset": lambda n: kl.run_kernel(
        gaussian, A, B, bandwidth=1.0, regularization=2.0, row_offset=n, col_offset=n
    ),
    "row_offset of a gradient": lambda n: kl.run_kernel(
        gaussian, A.clone().requires_grad_(), B, bandwidth=1.0, regularization=2.0, row_offset=n
    ),
    "row_offset of a sum": lambda n: kl.kernel_sum(
        gaussian, A, B, bandwidth=1.0, regularization=2.0, row_offset=n
    ),
    "KroneckerSparse": lambda n: kl.KroneckerSparse(n, n, n, n),
    "KroneckerProduct": lambda n: kl.KroneckerProduct(((n, n), n)),
    "columns": lambda n: sparse.compress(SQUARE, "u4", n).convert("u8", n).to_dense(),
    "columns of a layer": lambda n: sparsify(net(), density=0.5, columns=n)["0"].in_features,
    "from_csr": lambda n: sparse.from_csr(
        torch.tensor([0, 1, 1]), torch.tensor([0]), torch.ones(1), (n, n)
    ).to_dense(),
    "rank": lambda n: (
        linalg.solve_kernel(gaussian, A, A[:, 0], rank=n, regularization=0.1, bandwidth=1.0).x.shape
    ),
    "max_iter": lambda n: linalg.conjugate_gradient(
        lambda v: v, A[:, 0], max_iter=n, check_every=n
    ),
    "KSLinear": lambda n: KSLinear([(n, n, n, n)]).patterns,
    "KroneckerLinear": lambda n: KroneckerLinear([n, n], [n, n]).in_sizes,
    "SparseLinear": lambda n: (SparseLinear(n, n).in_features, SparseLinear(n, n).out_features),
    "Layout": lambda n: blocksparse.Layout.from_indices([0], [0], (n, n), 16, capacity=n).text,
    "random": lambda n: blocksparse.random(32, 32, 16, 0.5, heads=n, seed=n).mask(),
    "sliding_window": lambda n: blocksparse.sliding_window(64, 16, n).mask(),
    "top_k": lambda n: blocksparse.top_k(SQUARE[:4, :4], 16, n).mask(),
    "quantize": lambda n: blocksparse.quantize(A[None], dim=n)[1],
    "window": lambda n: attention(window=n),
    "window of two": lambda n: attention(window=(n, None)),
    "seed": lambda n: attention(dropout_p=0.5, seed=n),
    "heads": lambda n: BlockSparseMultiheadAttention(32, n, LAYOUT).num_heads,
    "drop_": lambda n: BlockSparseLinear(32, 32, LAYOUT).drop_(count=n).layout.nnz,
    "stride": lambda n: (
        BlockSparseConv2d(16, 16, 1, n, layout=blocksparse.Layout([[1]], 16), bias=False)(
            torch.ones(1, 16, 4, 4)
        ).shape
    ),
    "ceil_div": lambda n: kl.compat.kermac.ceil_div(n, n),
}
NUMBERS = {
    "bandwidth": lambda x: kl.run_kernel(gaussian, A, B, bandwidth=x),
    "epsilon": lambda x: kl.run_kernel(gaussian, A, B, bandwidth=x, epsilon=x, regularization=x),
    "p": lambda x: kl.cdist(A, B, x),
    "p of a gradient": lambda x: kl.cdist(A.clone().requires_grad_(), B, x),
    "p of a matrix": lambda x: kl.run_kernel(kl.p_distance(), A, B, p=x),
    "of a sum": lambda x: kl.kernel_sum(gaussian, A, B, bandwidth=x),
    "of a product": lambda x: kl.kernel_matmul(kl.laplace_pq(), A, B, B, p=x, bandwidth=x, q=x),
    "expadd": lambda x: kl.cdist_expadd(A, B, lengthscale=x, p=x),
    "slope": lambda x: kl.LeakyRelu(x),
    "noise": lambda x: linalg.kron_solve([A[:3] @ A[:3].mT], A[:3, 0], noise=x),
    "tol": lambda x: linalg.conjugate_gradient(lambda v: v, A[:, 0], tol=x),
    "regularization": lambda x: linalg.solve_kernel(
        gaussian, A, A[:, 0], regularization=x, bandwidth=x
    ).x,
    "scale of a softmax": lambda x: blocksparse.softmax(Q.new_ones(3, 16, 16), LAYOUT, scale=x),
    "scale of attention": lambda x: attention(scale=x),
    "scale of a product": lambda x: sparse.matmul(
        sparse.compress(SQUARE, "u8"), SQUARE, epilogue=kl.Scale(), scale=x
    ),
    "scale of factors": lambda x: kl.run_kernel(
        kl.KroneckerSparse(1, 2, 3, 1, epilogue=kl.Scale()), A, torch.ones(1, 2, 3, 1).double(),
        scale=x,
    ),
    "kron_matmul": lambda x: kl.kron_matmul(A, [torch.eye(3).double()], alpha=x),
}  # fmt: skip
PARTS = {  # from 0 to 1
    "magnitude": lambda x: sparse.magnitude(SQUARE, x),
    "from_linear": lambda x: SparseLinear.from_linear(net()[0], density=x).matrix.density,
    "block_sparsify": lambda x: block_sparsify(net(), 16, density=x)["0"].layout.nnz,
    "drawn": lambda x: BlockSparseLinear(32, 32, 16, density=x).layout.nnz,
    "drop_": lambda x: BlockSparseLinear(32, 32, LAYOUT).drop_(density=x).layout.nnz,
    "random": lambda x: blocksparse.random(64, 64, 16, x).mask(),
    "dropout": lambda x: BlockSparseMultiheadAttention(32, 2, LAYOUT, dropout=x).dropout,
    "dropout_p": lambda x: attention(dropout_p=x, seed=0),
}


def flat(value) -> list:
    """The numbers of a result, in order."""
    if isinstance(value, torch.Tensor):
        return value.detach().reshape(-1).tolist()
    if isinstance(value, (tuple, list)):
        return [number for each in value for number in flat(each)]
    return [value]


@pytest.mark.few(1000)
@pytest.mark.parametrize("name", INTS)
def test_a_whole_number_of_numpy_is_an_int(name):
    for given in (np.int64(2), np.array(2), np.uint8(2)):
        assert flat(INTS[name](given)) == flat(INTS[name](2)), repr(given)


@pytest.mark.few(1000)
@pytest.mark.parametrize("name", INTS)
def test_what_is_no_whole_number_is_refused(name):
    values = [np.float64(2), np.array([2]), np.bool_(True), torch.tensor(2), True, "2"]
    with suppress(TypeError):  # NumPy before 2 says that its bool is an index, and warns
        operator.index(values[2])
        del values[2]
    for value in values:
        forget_plans()  # True finds that of 1
        if isinstance(value, torch.Tensor) and name in ("seed", "KSLinear", "KroneckerLinear"):
            continue  # which take tensors
        with pytest.raises((TypeError, ValueError), match="int"):
            INTS[name](value)


@pytest.mark.few(1000)
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_of_another_library_is_one(name):
    for given in (np.float32(1.5), np.array(1.5), Decimal("1.5"), Fraction(3, 2)):
        assert flat(NUMBERS[name](given)) == flat(NUMBERS[name](1.5)), repr(given)
    assert flat(NUMBERS[name](np.array(2))) == flat(NUMBERS[name](2.0))


@pytest.mark.few(1000)
@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_another_library_is_one(name):
    for given in (np.float32(0.5), np.array(0.5), Decimal("0.5"), Fraction(1, 2)):
        assert flat(PARTS[name](given)) == flat(PARTS[name](0.5)), repr(given)


@pytest.mark.parametrize("value", [np.array([1.5]), np.array("1.5"), np.bool_(True), 1j], ids=repr)
def test_what_is_no_number_is_refused(value):
    with pytest.raises(TypeError, match="bandwidth must be a real number or a tensor of shape"):
        kl.run_kernel(gaussian, A, B, bandwidth=value)

"""Gradients of compiled calls whose backward pass is one operator: batches of them, and what such a
call keeps between its passes."""

import pytest
import torch

import kernlib as kl
from kernlib.families.kronecker_product import operation
from tests.contract.library.calls import compiled

FACTORS = kl.KroneckerSparse(2, 3, 4, 5), kl.KroneckerSparse(1, 4, 6, 5)
CHAIN = kl.KroneckerSparseChain(FACTORS)
LAYOUT = kl.blocksparse.Layout([[1, 0, 1], [0, 1, 1]], 16)


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64)


# A call, what it takes of x and weights, and the operator of all their gradients.
CALLS = {
    "factor": (
        lambda x, weight: kl.run_kernel(FACTORS[0], x, weight), ((7, 40), (2, 3, 4, 5)),
        "kronecker_sparse_chain_gradients",
    ),
    "chain": (
        lambda x, *weights: kl.run_kernel(CHAIN, x, *weights),
        ((7, 40), (2, 3, 4, 5), (1, 4, 6, 5)),
        "kronecker_sparse_chain_gradients",
    ),
    "Kronecker product": (
        lambda x, *factors: kl.kron_matmul(x, factors), ((7, 40), (8, 4), (5, 5)),
        "kronecker_product_gradients",
    ),
    "blocks": (
        lambda x, values: kl.blocksparse.dsd(values, x, LAYOUT), ((48, 20), (4, 16, 16)),
        "blocksparse_matmul_gradients",
    ),
}  # fmt: skip
EACH = pytest.mark.parametrize("name", CALLS)


@pytest.fixture(autouse=True)
def compiled_as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(operation, "has_kernels", lambda *call: True)
    yield
    torch._dynamo.reset()


@EACH
def test_batches_of_gradients(name, seed):
    call, shapes, _ = CALLS[name]
    leaves = [randn(*shape).requires_grad_() for shape in shapes]
    y = compiled(call)(*leaves)
    grads = randn(3, *y.shape)
    found = torch.autograd.grad(y, leaves, grads, is_grads_batched=True)
    wanted = [torch.autograd.grad(call(*leaves), leaves, grad) for grad in grads]
    torch.testing.assert_close(found, tuple(map(torch.stack, zip(*wanted, strict=True))))


@pytest.mark.filterwarnings("ignore")  # that it is deprecated
def test_a_chain_with_a_gradient_is_traced(seed):
    call, shapes, _ = CALLS["chain"]
    leaves = [randn(*shape).requires_grad_() for shape in shapes]
    traced = torch.jit.trace(call, tuple(leaves))
    found, wanted = (torch.autograd.grad(run(*leaves).sum(), leaves) for run in (traced, call))
    torch.testing.assert_close(found, wanted)

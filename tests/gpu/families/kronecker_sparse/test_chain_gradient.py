"""Gradients of chains of two factors in half precision on the GPU: against float64, of every order
of what lies between, compiled and captured."""

from __future__ import annotations

import pytest
import torch

import kernlib as kl
from tests.gpu.families.kronecker_sparse import cases as ks
from tests.gpu.watched import launches

CHAINS = {
    "384 to 384": ((2, 48, 192, 1), (1, 192, 48, 2)),
    "384 to 1536": ((6, 64, 64, 1), (1, 768, 192, 2)),
    "1536 to 384": ((6, 64, 256, 1), (1, 128, 128, 3)),
    "768 to 3072": ((12, 64, 64, 1), (1, 1536, 384, 2)),
    "two groups, d = 4": ((4, 32, 24, 1), (2, 40, 16, 4)),
    "d = 5": ((4, 40, 24, 1), (1, 64, 32, 5)),
    "d = 8": ((8, 32, 24, 1), (1, 40, 32, 8)),
    "more features between": ((2, 80, 24, 1), (1, 40, 80, 2)),
    "1024 to 4096": ((16, 64, 64, 1), (1, 256, 64, 16)),
    "d = 24": ((12, 16, 16, 1), (1, 20, 8, 24)),
    "of no kernel's sizes": ((3, 7, 9, 1), (1, 5, 7, 3)),
}
HALVES = ("fp16", "bf16")
TOLERANCE = {"fp16": 5e-4, "bf16": 4e-3}


def descriptor(chain) -> kl.KroneckerSparseChain:
    first, last = chain
    return kl.KroneckerSparseChain(
        (kl.KroneckerSparse(*first), kl.KroneckerSparse(*last, epilogue=(kl.Bias(),)))
    )


def operands(chain, rows: int, numbers: str) -> list[torch.Tensor]:
    """x, both weights, the bias and the gradient of the result."""
    dtype, (a, _, c, _), (g, j, _, d) = ks.DTYPES[numbers], *chain
    x, grad = ks.random(rows, a * c, dtype=dtype), ks.random(rows, g * j * d, dtype=dtype)
    weights = [ks.random(*each, dtype=dtype, scale=each[2] ** -0.5) for each in chain]
    return [x, *weights, ks.random(g * j * d, dtype=dtype), grad]


def exact(x, first, last, bias, grad) -> list[torch.Tensor]:
    """In float64, but that h and its gradient are rounded."""
    (a, b, c, _), (g, j, k, d), n = first.shape, last.shape, len(x)
    blocks, of_y = x.double().view(n, a, c), grad.double().view(n, g, j, d)
    first, last = first.double()[..., 0], last.double()
    h = torch.einsum("aji,nai->naj", first, blocks).to(x.dtype).double()
    to_last = torch.einsum("ngjl,ngkl->gjkl", of_y, h.reshape(n, g, k, d))
    to_h = torch.einsum("gjkl,ngjl->ngkl", last, of_y).to(x.dtype).double().reshape(n, a, b)
    to_first = torch.einsum("naj,nai->aji", to_h, blocks)[..., None]
    to_x = torch.einsum("aji,naj->nai", first, to_h).reshape(n, a * c)
    return [to_x, to_first, to_last, grad.double().sum(0)]


def gradients(call, *tensors, grad) -> list[torch.Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    call(*leaves).backward(grad)
    return [leaf.grad for leaf in leaves]


def check(chain, rows: int, numbers: str, call) -> None:
    *tensors, grad = operands(chain, rows, numbers)
    expected = exact(*tensors, grad)
    for _ in range(2):  # the second by the plans of the first
        grads = gradients(call, *tensors, grad=grad)
        errors = list(map(ks.relative_error, grads, expected))
        assert max(errors) < TOLERANCE[numbers], errors


def called(chain):
    descriptor_ = descriptor(chain)
    return lambda x, first, last, bias: kl.run_kernel(descriptor_, x, first, last, bias=bias)


@pytest.mark.few(8)
@pytest.mark.parametrize("numbers", HALVES)
@pytest.mark.parametrize("name", CHAINS)
def test_values(name, numbers, seed):
    for rows in (8200, 4097, 130):
        check(CHAINS[name], rows, numbers, called(CHAINS[name]))


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["384 to 1536", "1536 to 384", "768 to 3072", "1024 to 4096"])
def test_compiled(name, seed):
    torch.compiler.reset()
    check(CHAINS[name], 8200, "bf16", torch.compile(called(CHAINS[name]), fullgraph=True))


@pytest.mark.parametrize("name", ["384 to 1536", "1024 to 4096"])
def test_no_h_is_kept_and_the_backward_pass_is_one_plan(name, seed):
    *tensors, grad = operands(CHAINS[name], 8192, "bf16")
    leaves = [t.requires_grad_() for t in tensors]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = called(CHAINS[name])(*leaves)
    places = {t.untyped_storage().data_ptr() for t in leaves}
    assert {t.untyped_storage().data_ptr() for t in kept} <= places
    with launches() as launched:
        y.backward(grad, retain_graph=True)
    first = [t.grad for t in leaves]
    for t in leaves:
        t.grad = None
    y.backward(grad)
    assert all(torch.equal(t.grad, before) for t, before in zip(leaves, first, strict=True))
    assert not any("portable" in description for description in launched)


@pytest.mark.parametrize("name", ["384 to 384", "1024 to 4096"])
def test_a_captured_step(name, seed):
    *tensors, grad = operands(CHAINS[name], 8200, "fp16")
    leaves, call = [t.requires_grad_() for t in tensors], called(CHAINS[name])

    def step() -> None:
        for t in leaves:
            t.grad = None
        call(*leaves).backward(grad)

    kl.prepare(descriptor(CHAINS[name]), *leaves[:3], bias=leaves[3])
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    with torch.no_grad():
        for t in (*leaves, grad):
            t.copy_(torch.randn_like(t) * 0.25)
    graph.replay()
    expected = exact(*(t.detach() for t in leaves), grad)
    for t, reference in zip(leaves, expected, strict=True):
        assert ks.relative_error(t.grad, reference) < TOLERANCE["fp16"]


def test_infinities_stay_in_their_features(seed):
    """A gradient that has one leaves those of weights of other features as they are."""
    chain = CHAINS["384 to 1536"]
    *tensors, grad = operands(chain, 8192, "fp16")
    clean = gradients(called(chain), *tensors, grad=grad)
    grad[5, 7] = float("inf")  # j = 3, l = 1
    y = gradients(called(chain), *tensors, grad=grad)
    others = torch.ones_like(y[2], dtype=torch.bool)
    others[0, 3, :, 1] = False
    assert torch.equal(y[2][others], clean[2][others]) and not y[2][~others].isfinite().any()
    rows = torch.arange(8192, device=ks.DEVICE) != 5
    assert torch.equal(y[0][rows], clean[0][rows])

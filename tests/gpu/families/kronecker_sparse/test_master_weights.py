"""Chains under autocast whose weights are float32, on the GPU: the numbers of casts before the
call, whose gradients autograd widens."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.families.kronecker_sparse import cases as ks
from tests.gpu.families.kronecker_sparse.test_chain_gradient import CHAINS, called
from tests.gpu.watched import launches

NAMES = ["384 to 384", "384 to 1536", "1536 to 384", "768 to 3072", "1024 to 4096"]
DTYPE = torch.bfloat16


def tensors(name: str, rows: int) -> tuple:
    """x in half precision, master weights and bias, and the gradient of the result."""
    (a, _, c, _), (g, j, _, d) = chain = CHAINS[name]
    x, grad = ks.random(rows, a * c, dtype=DTYPE), ks.random(rows, g * j * d, dtype=DTYPE)
    return (
        x,
        *(ks.random(*each, scale=each[2] ** -0.5) for each in chain),
        ks.random(g * j * d),
        grad,
    )


def step(call, x, *masters, grad, is_cast: bool) -> list[torch.Tensor]:
    """The result, and the gradients of a step whose call casts, or casts before it."""
    leaves = [t.detach().requires_grad_() for t in (x, *masters)]
    with torch.autocast(ks.DEVICE, dtype=DTYPE, enabled=is_cast):
        y = call(*(leaves if is_cast else [t.to(DTYPE) for t in leaves]))
    return [y, *torch.autograd.grad(y, leaves, grad)]


def equal(results: list, expected: list) -> None:
    for y, other in zip(results, expected, strict=True):
        assert y.dtype is other.dtype and torch.equal(y, other)


@pytest.mark.parametrize("rows", [8200, 130])
@pytest.mark.parametrize("name", NAMES)
def test_a_step(name, rows, seed):
    *leaves, grad = tensors(name, rows)
    expected = step(called(CHAINS[name]), *leaves, grad=grad, is_cast=False)
    for _ in range(2):  # the second by the plans of the first
        with launches() as launched:
            results = step(called(CHAINS[name]), *leaves, grad=grad, is_cast=True)
        equal(results, expected)
        casts = [description for description in launched if " cast " in description]
        is_fused = any(" chain " in description for description in launched)
        assert len(casts) == 2 + is_fused
    assert all(t.dtype is torch.float32 for t in results[2:])


@pytest.mark.few(2)
@pytest.mark.parametrize("name", NAMES)
def test_compiled(name, seed):
    torch.compiler.reset()
    *leaves, grad = tensors(name, 8200)
    expected = step(called(CHAINS[name]), *leaves, grad=grad, is_cast=False)
    compiled = torch.compile(called(CHAINS[name]), fullgraph=True)
    for _ in range(2):
        with launches() as launched:
            results = step(compiled, *leaves, grad=grad, is_cast=True)
        equal(results, expected)
        assert sum(" cast " in description for description in launched) >= 2
    with torch.no_grad(), torch.autocast(ks.DEVICE, dtype=DTYPE):
        equal([compiled(*leaves)], expected[:1])


@pytest.mark.parametrize("name", NAMES)
def test_without_a_gradient(name, seed):
    *leaves, _ = tensors(name, 8200)
    expected = called(CHAINS[name])(*(t.to(DTYPE) for t in leaves))
    for _ in range(2):
        with torch.autocast(ks.DEVICE, dtype=DTYPE):
            equal([called(CHAINS[name])(*leaves)], [expected])


def test_a_captured_step(seed):
    name = "384 to 1536"
    *leaves, grad = tensors(name, 8200)
    leaves = [t.requires_grad_() for t in leaves]

    def captured() -> list[torch.Tensor]:
        with torch.autocast(ks.DEVICE, dtype=DTYPE):
            y = called(CHAINS[name])(*leaves)
        return [y, *torch.autograd.grad(y, leaves, grad)]

    captured()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = captured()
    with torch.no_grad():
        for t in leaves:
            t.mul_(0.5)
    graph.replay()
    plain = [t.detach() for t in leaves]
    equal(results, step(called(CHAINS[name]), *plain, grad=grad, is_cast=False))


def test_second_derivatives(seed):
    """Of half of the batch's features, by the chain computed again."""
    name = "384 to 384"
    *leaves, grad = tensors(name, 8200)
    leaves = [t.requires_grad_() for t in leaves]

    def second(is_cast: bool) -> list[torch.Tensor]:
        with torch.autocast(ks.DEVICE, dtype=DTYPE, enabled=is_cast):
            y = called(CHAINS[name])(*(leaves if is_cast else [t.to(DTYPE) for t in leaves]))
        to_x, to_first = torch.autograd.grad(y, leaves[:2], grad, create_graph=True)
        return list(
            torch.autograd.grad(to_x.float().square().sum() + to_first.square().sum(), leaves[:3])
        )

    for t, other in zip(second(True), second(False), strict=True):
        assert (
            t.dtype is other.dtype and ks.relative_error(t, other.double()) < ks.TOLERANCE["bf16"]
        )


def test_without_autocast_dtypes_must_be_one(seed):
    *leaves, grad = tensors("384 to 1536", 8200)
    step(called(CHAINS["384 to 1536"]), *leaves, grad=grad, is_cast=True)
    with pytest.raises(TypeError, match="x and weight must have one dtype"):
        called(CHAINS["384 to 1536"])(*leaves)

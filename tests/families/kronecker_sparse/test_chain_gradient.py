"""Gradients of chains of two factors as one plan: on GPUs that exist only by name, whose kernels
the host runs by their text."""

import pytest
import torch

import kernlib as kl
from kernlib.families.kronecker_sparse import operation, plans
from kernlib.families.kronecker_sparse.chain import fused, gradient
from kernlib.families.kronecker_sparse.chain.operation import variants
from kernlib.runtime import products
from tests.support import fakes
from tests.support.emulation import gpus
from tests.support.emulation.emulator import kernels_of

pytestmark = pytest.mark.emulated

OPTIONS = False, None, False
ALL = True, True, True, True
ROWS = 1100
BARS = {torch.float16: 4e-4, torch.bfloat16: 3.2e-3}


@pytest.fixture(autouse=True)
def on_host(tmp_path_factory, monkeypatch):
    """The GPUs; ``specs`` are those that were launched."""
    fakes.forget()
    modules = products, operation, plans, fused, gradient
    yield gpus.install(monkeypatch, kernels_of(tmp_path_factory), *modules)
    fakes.forget()


# By name: both patterns, rows, and the kernel that tells how h lies.
CHAINS = {
    "two l": ((6, 16, 16, 1), (1, 136, 48, 2), ROWS, "hidden"),
    "three l": ((6, 16, 32, 1), (1, 64, 32, 3), ROWS, "hidden"),
    "four l, two groups": ((4, 16, 24, 1), (2, 40, 8, 4), ROWS, "deinterleave"),
    "eight l": ((8, 32, 24, 1), (1, 40, 32, 8), ROWS, "hidden"),
    "more features between": ((2, 80, 24, 1), (1, 40, 80, 2), ROWS, "deinterleave"),
    "sixteen l": ((16, 16, 8, 1), (1, 24, 16, 16), 1104, "turn"),
    "24 l": ((12, 16, 8, 1), (1, 16, 8, 24), 1104, "turn"),
    "l in both": ((2, 8, 4, 4), (1, 8, 8, 8), 64, ""),
    "l in both, many": ((6, 8, 4, 2), (1, 4, 8, 12), 1032, ""),
    "sixteen l of an odd batch": ((16, 16, 8, 1), (1, 24, 16, 16), 1101, "turn"),
}


def tensors(first, last, rows, dtype):
    torch.manual_seed(rows)
    x = torch.randn(rows, first[0] * first[2] * first[3]).to(dtype)
    weights = tuple((torch.randn(each) / each[2] ** 0.5).to(dtype) for each in (first, last))
    grad = torch.randn(rows, last[0] * last[1] * last[3]).to(dtype)
    return grad, x, weights


def exact(grad, x, weights):
    """In float64, but that h and its gradient are rounded."""
    (a, b, c, e), (g, j, k, d) = (weight.shape for weight in weights)
    n, dtype, (first, second) = len(x), x.dtype, (weight.double() for weight in weights)
    of_x, of_y = x.double().view(n, a, c, e), grad.double().view(n, g, j, d)
    h = torch.einsum("ajil,nail->najl", first, of_x).to(dtype).double()
    to_second = torch.einsum("ngjl,ngkl->gjkl", of_y, h.reshape(n, g, k, d))
    to_h = torch.einsum("gjkl,ngjl->ngkl", second, of_y).to(dtype).double().reshape(n, a, b, e)
    to_first = torch.einsum("najl,nail->ajil", to_h, of_x)
    to_x = torch.einsum("ajil,najl->nail", first, to_h).reshape(n, -1)
    return to_x, to_first, to_second, grad.double().sum(0)


def computed(grad, x, weights, needs=ALL):
    placed = gpus.gpu(grad), gpus.gpu(x), tuple(map(gpus.gpu, weights))
    grads = gradient.calls.execute(*placed, needs, OPTIONS)
    return [None if t is None else gpus.host(t) for t in grads]


def kinds(on_host) -> list[str]:
    """Of the kernels that were launched since the last time."""
    kinds = [spec.description.split()[1] for spec in on_host.specs]
    on_host.specs.clear()
    return kinds


def check(grads, references, dtype) -> None:
    for y, reference in zip(grads, references, strict=True):
        error = (y.double() - reference).norm() / reference.norm()
        assert y.dtype is dtype and error.item() < BARS[dtype]


@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("name", CHAINS)
def test_gradients_of_all(on_host, name, dtype):
    *sizes, kind = CHAINS[name]
    request = tensors(*sizes, dtype)
    for _ in range(2):  # the second by the plan of the first
        check(computed(*request), exact(*request), dtype)
        assert not kind or kind in kinds(on_host)


@pytest.mark.parametrize("needs", [(0, 0, 1, 1), (1, 1, 0, 0), (0, 1, 0, 1), (1, 0, 1, 0)])
@pytest.mark.parametrize("name", ["two l", "sixteen l"])
def test_gradients_of_some(on_host, name, needs):
    *sizes, _ = CHAINS[name]
    request = tensors(*sizes, torch.float16)
    grads = computed(*request, tuple(map(bool, needs)))
    assert [t is not None for t in grads] == [bool(need) for need in needs]
    pairs = [pair for pair in zip(grads, exact(*request), strict=True) if pair[0] is not None]
    check(*zip(*pairs, strict=True), torch.float16)


@pytest.mark.parametrize("name", ["two l", "sixteen l"])
def test_operands_that_lie_apart(on_host, name):
    *sizes, _ = CHAINS[name]
    grad, x, weights = tensors(*sizes, torch.float16)
    references = exact(grad, x, weights)
    wide = torch.full((len(x), x.shape[1] + 8), float("nan"), dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    apart = [weight.transpose(1, 2).contiguous().transpose(1, 2) for weight in weights]
    twice = torch.stack((grad, grad), 1)[:, 0]
    check(computed(twice, wide[:, : x.shape[1]], tuple(apart)), references, torch.float16)
    last = x.t().contiguous().t()  # a layout that takes a copy
    check(computed(grad, last.view(len(x), -1), weights), references, torch.float16)


@pytest.mark.parametrize("name", CHAINS)
def test_kernels_are_among_those_that_are_compiled_ahead(on_host, name):
    first, last, rows, _ = CHAINS[name]
    computed(*tensors(first, last, rows, torch.float16))
    end = kl.KroneckerSparse(*last, epilogue=(kl.Bias(),))
    chain = kl.KroneckerSparseChain((kl.KroneckerSparse(*first), end))
    assert {*on_host.specs} <= {*variants(chain, "sm_90a", (torch.float16,))}

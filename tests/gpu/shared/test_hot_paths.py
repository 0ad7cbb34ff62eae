"""A call of each operation, forward and backward, with the plans that a first call makes and those
that later ones find: what the host code that all families share has to get right.

The right values are those of the same call on CPU tensors in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

import kernlib as kl
from kernlib import blocksparse, linalg, nn, sparse
from kernlib.runtime.plan import forget_plans
from tests.support import repeats, torch_settings

LAYOUT = blocksparse.Layout([[(i + 2 * j) % 3 != 1 for j in range(5)] for i in range(6)], 16)
SQUARE = blocksparse.Layout([[j <= i for j in range(6)] for i in range(6)], 16)
VALUES = (LAYOUT.capacity, 16, 16)
FACTOR = kl.KroneckerSparse(2, 12, 10, 3, epilogue=(kl.Bias(), kl.Gelu()))
LAST = kl.KroneckerSparse(2, 12, 10, 3, batch_last=True)


def layout(like: torch.Tensor, of: blocksparse.Layout = LAYOUT) -> blocksparse.Layout:
    """Where the operand is, copied there once: not while a graph is captured."""
    return _layout(of, like.device)


@cache
def _layout(of: blocksparse.Layout, device: torch.device) -> blocksparse.Layout:
    return of.to(device)


def sparse_product(format: str) -> Callable:
    """Of a matrix with zeros in it, which takes no gradient."""

    def run(dense, x):
        weight = sparse.compress(dense.detach() * (dense.detach() > 0), format)
        return sparse.matmul(weight, x)

    return run


def layer(make: Callable, *arguments, **options) -> Callable:
    """A layer's call, with the weights that one seed draws on the host."""

    def run(x):
        torch.manual_seed(3)
        return make(*arguments, **options).to(x.device, x.dtype)(x)

    return run


A, B, V = (71, 19), (53, 19), (53, 2)
HEADS = (1, 2, 96, 32)
# Name to a function of tensors and their shapes: results are compared, and all gradients.
CALLS: dict[str, tuple[Callable, tuple[tuple[int, ...], ...]]] = {
    "cdist": (lambda a, b: kl.cdist(a, b, p=1.5), (A, B)),
    "cdist by tensor cores": (kl.cdist, ((300, 130), (280, 130))),
    "run_kernel": (lambda a, b: kl.run_kernel(kl.gaussian(), a, b, bandwidth=4.0), (A, B)),
    "epilogue": (lambda a, b: kl.run_kernel(kl.matern32(), a, b, bandwidth=4.0), (A, B)),
    "kernel_matmul": (
        lambda a, b, v: kl.kernel_matmul(kl.gaussian(), a, b, v, bandwidth=4.0),
        (A, B, V),
    ),
    "kernel_matmul by tensor cores": (
        lambda a, b, v: kl.kernel_matmul(kl.dot_product(), a, b, v),
        ((300, 130), (280, 130), (280, 3)),
    ),
    "kernel_sum": (lambda a, b: kl.kernel_sum(kl.laplace_l1(), a, b, bandwidth=9.0), (A, B)),
    "kernel_logsumexp": (lambda a, b: kl.kernel_logsumexp(kl.dot_product(), a, b), (A, B)),
    "kernel_min": (lambda a, b: kl.kernel_min(kl.l1_distance(), a, b)[0], (A, B)),
    "kernel_topk": (lambda a, b: kl.kernel_topk(kl.l1_distance(), a, b, 3)[0], (A, B)),
    "factor": (lambda x, w, bias: kl.run_kernel(FACTOR, x, w, bias=bias),
               ((33, 60), FACTOR.weight_shape, (72,))),
    "factor, batch last": (lambda x, w: kl.run_kernel(LAST, x, w), ((60, 33), LAST.weight_shape)),
    "kron_matmul": (lambda x, *factors: kl.kron_matmul(x, factors),
                    ((9, 105), (3, 4), (5, 2), (7, 6))),
    "sdd": (lambda a, b: blocksparse.sdd(a, b, layout(a)), ((96, 40), (40, 80))),
    "dsd": (lambda v, b: blocksparse.dsd(v, b, layout(v)), (VALUES, (80, 24))),
    "dds": (lambda a, v: blocksparse.dds(a, v, layout(v)), ((24, 96), VALUES)),
    "softmax": (lambda v: blocksparse.softmax(v, layout(v)), (VALUES,)),
    "attention": (
        lambda q, k, v: blocksparse.attention(q, k, v, layout(q, SQUARE)),
        (HEADS, HEADS, HEADS),
    ),
    "KSLinear": (layer(nn.KSLinear, [(2, 4, 4, 3), (1, 8, 8, 3)]), ((7, 24),)),
    "BlockSparseLinear": (layer(nn.BlockSparseLinear, 80, 96, LAYOUT), ((7, 80),)),
    "KroneckerLinear": (layer(nn.KroneckerLinear, (4, 6), (3, 5)), ((7, 24),)),
    "solve_kernel": (
        lambda x, y: linalg.solve_kernel(
            kl.gaussian(), x.detach(), y.detach(), regularization=0.5, bandwidth=2.0, tol=1e-6
        ).x,
        ((90, 3), (90,)),
    ),
}  # fmt: skip


def compared(run: Callable, tensors: list[torch.Tensor], kind: torch.dtype, device: str) -> list:
    """Result and gradients along a direction, as float64 on the host."""
    operands = [t.to(device, kind).requires_grad_() for t in tensors]
    result = run(*operands)
    along = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view(result.shape)
    slopes = ()
    if result.requires_grad:
        slopes = torch.autograd.grad(
            result, operands, along.to(device, result.dtype), allow_unused=True
        )
    every = [result, *(slope for slope in slopes if slope is not None)]
    return [t.detach().cpu().double() for t in every]


def assert_near(ours: list, wanted: list, bar: float) -> None:
    for mine, right in zip(ours, wanted, strict=True):
        assert torch.isfinite(mine).all()
        assert (mine - right).norm() <= bar * right.norm().clamp(min=1e-3)


@pytest.mark.few(100)
@pytest.mark.parametrize("name", CALLS)
def test_first_and_later_calls_are_those_of_the_host(name, device, seed):
    run, shapes = CALLS[name]
    for _ in range(3):  # other values in the same places of a plan, and a size of its own
        tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
        wanted = compared(run, tensors, torch.float64, "cpu")
        assert_near(compared(run, tensors, torch.float32, device), wanted, 2e-5)


@pytest.mark.few(100)
@pytest.mark.parametrize("format", ["bitmap", "u4", "u8", "macko"])
def test_compressed_products_are_those_of_the_host(format, device, seed):
    run = sparse_product(format)
    for columns in ((), (3,)):
        dense, x = torch.randn(96, 512).half(), torch.randn(*columns, 512).half()
        wanted = x.double() @ dense.double().clamp(min=0).T
        assert_near([run(dense.to(device), x.to(device)).cpu().double()], [wanted], 2e-3)


@pytest.mark.few(100)
@pytest.mark.parametrize("name", ["run_kernel", "factor", "dsd", "attention"])
def test_a_replayed_graph_is_the_call(name, device, seed):
    run, shapes = CALLS[name]
    tensors = [torch.randn(shape, device=device) for shape in shapes]
    run(*tensors)  # compiled and planned before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(*tensors)
    for tensor in tensors:
        tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result, run(*tensors))


@pytest.mark.few(100)
@pytest.mark.parametrize("name", CALLS)
def test_a_permission_of_tf32_ends_when_it_is_withdrawn(name, device, seed):
    """Plans of a permitted call are no plans of a later one, forward and backward."""
    run, shapes = CALLS[name]
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    wanted = compared(run, tensors, torch.float64, "cpu")
    forget_plans()
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert_near(compared(run, tensors, torch.float32, device), wanted, 3e-3)
    finally:
        torch.set_float32_matmul_precision(before)
    assert_near(compared(run, tensors, torch.float32, device), wanted, 2e-5)


# Products that tensor cores of every kind take.
PRODUCTS: dict[str, tuple[Callable, tuple[tuple[int, ...], ...]]] = {
    "torch": (torch.mm, ((256, 256), (256, 256))),
    "factor": (lambda x, w: kl.run_kernel(kl.KroneckerSparse(1, 256, 256, 1), x, w),
               ((256, 256), (1, 256, 256, 1))),
    "factor, steps": (lambda x, w: kl.run_kernel(kl.KroneckerSparse(2, 64, 64, 4), x, w),
                      ((256, 512), (2, 64, 64, 4))),
    "kron_matmul": (lambda x, *factors: kl.kron_matmul(x, factors),
                    ((256, 1024), (32, 32), (32, 32))),
    "dsd": CALLS["dsd"],
    "dot_product": (lambda a, b: kl.run_kernel(kl.dot_product(), a, b), ((256, 256), (256, 256))),
}  # fmt: skip


@pytest.mark.few(100)
@pytest.mark.parametrize("case", torch_settings.CASES)
def test_products_are_as_exact_as_torch_s_own_are_set_to_be(case, device, seed):
    """By each of torch's settings, the older, the newer and both."""
    forget_plans()
    for name, (run, shapes) in PRODUCTS.items():
        tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
        wanted = compared(run, tensors, torch.float64, "cpu")
        with torch_settings.torch_permits(case) as rounded:
            ours = compared(run, tensors, torch.float32, device)
        assert_near(ours, wanted, 3e-3 if rounded else 2e-5)
        if name in ("torch", "factor"):
            error = (ours[0] - wanted[0]).norm() / wanted[0].norm()
            assert bool(error > 2e-5) == rounded, name


@pytest.mark.few(100)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_torch_may_do_in_calls_of_its_own_changes_no_kernel(dtype, device, seed):
    calls = {name: call for name, call in PRODUCTS.items() if name != "torch"}
    for name, (run, shapes) in (calls | {"attention": CALLS["attention"]}).items():
        tensors = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
        wanted = run(*tensors)
        for setting, entered in torch_settings.OF_TORCH_ALONE.items():
            with entered():
                assert torch.equal(run(*tensors), wanted), (name, setting)


def test_second_derivatives_are_of_a_descriptor_s_precision(device, seed):
    """Whatever torch permits to its own products."""
    made = kl.squared_distance(precision="fp32")
    pairs = [torch.randn(shape, dtype=torch.float64) for shape in ((300, 130), (280, 130))]

    def derived(kind, where):
        sides = tuple(t.to(where, kind).requires_grad_() for t in pairs)
        return repeats.slopes(lambda a, b: kl.run_kernel(made, a, b), sides, True)

    with torch_settings.torch_permits("high"):
        ours = derived(torch.float32, device)
    for one, other in zip(ours, derived(torch.float64, "cpu"), strict=True):
        assert (one.cpu().double() - other).norm() <= 1e-5 * other.norm()

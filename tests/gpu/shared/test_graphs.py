"""CUDA graphs over forward and backward: of each function by a capture, of each layer by
``torch.cuda.make_graphed_callables`` and by ``torch.compile`` with graphs. Replays are compared
with eager calls of other values in the same places.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import NamedTuple

import pytest
import torch
from torch import nn

import kernlib as kl
from kernlib import blocksparse
from kernlib.nn import (
    BlockSparseConv2d,
    BlockSparseLinear,
    BlockSparseMultiheadAttention,
    KroneckerLinear,
    KSLinear,
    SparseLinear,
)
from tests.gpu.shared.test_hot_paths import CALLS, layout
from tests.gpu.watched import capture

F16, F32, BF16 = torch.float16, torch.float32, torch.bfloat16
BOUNDS = {F32: 1e-5, F16: 4e-3, BF16: 1.6e-2}  # of relative Frobenius norms
WARM_UPS, REPLAYS = 3, 2
STEPS = 5  # compiled, the first run eagerly, the second record, the others replay


def assert_near(ours: Iterable[torch.Tensor], eager: Iterable[torch.Tensor]) -> None:
    for index, (one, other) in enumerate(zip(ours, eager, strict=True)):
        assert one.shape == other.shape and one.dtype is other.dtype, index
        assert torch.isfinite(one).all(), index
        error = (one.double() - other.double()).norm()
        assert error <= BOUNDS[one.dtype] * other.double().norm(), index


@torch.no_grad()
def renew(*tensors: torch.Tensor) -> None:
    """Write other values in the same places."""
    for t in tensors:
        t.copy_(torch.randn_like(t))


# Functions.


class Function(NamedTuple):
    """Of tensors of these shapes, all of which have a gradient."""

    call: Callable[..., torch.Tensor]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = F32


POINTS, OTHERS, COLUMNS = (300, 8), (200, 8), (200, 2)
HEADS = (1, 2, 256, 64)
CAUSAL = blocksparse.causal(256, 64)
WIDE = blocksparse.random(256, 192, block=64, density=0.5)
BLOCKS = (WIDE.capacity, 64, 64)
HALF_FACTOR = kl.KroneckerSparse(2, 64, 64, 1, epilogue=(kl.Bias(), kl.Gelu()))


def width(value: torch.Tensor) -> torch.Tensor:
    """A bandwidth made of any number, as programs that learn one make it."""
    return value.square() + 2


# Calls of test_hot_paths; then hyperparameters that are learned, and half types, which have kernels
# of their own.
FUNCTIONS = {
    **{
        name: Function(*CALLS[name])
        for name in (
            "cdist", "cdist by tensor cores", "run_kernel", "epilogue", "kernel_matmul",
            "kernel_matmul by tensor cores", "kernel_sum", "kernel_logsumexp", "kernel_min",
            "kernel_topk", "factor", "factor, batch last", "kron_matmul", "sdd", "dsd", "dds",
            "softmax", "attention",
        )
    },
    "run_kernel, learned": Function(
        lambda a, w: kl.run_kernel(kl.gaussian(symmetric=True), a, bandwidth=width(w)),
        (POINTS, ()),
    ),
    "kernel_matmul, learned": Function(
        lambda a, b, v, w: kl.kernel_matmul(kl.gaussian(), a, b, v, bandwidth=width(w)),
        (POINTS, OTHERS, COLUMNS, ()),
    ),
    "kernel_matmul of itself, learned": Function(
        lambda a, v, w: kl.kernel_matmul(kl.matern52(), a, a, v, bandwidth=width(w)),
        (OTHERS, COLUMNS, ()),
    ),
    "kernel_sum, learned": Function(
        lambda a, b, w: kl.kernel_sum(kl.laplace_l1(), a, b, bandwidth=width(w)),
        (POINTS, OTHERS, ()),
    ),
    "kernel_logsumexp, learned": Function(
        lambda a, b, w: kl.kernel_logsumexp(kl.gaussian(), a, b, bandwidth=width(w)),
        (POINTS, OTHERS, ()),
    ),
    "factor, float16": Function(
        lambda x, w, bias: kl.run_kernel(HALF_FACTOR, x, w, bias=bias),
        ((96, 128), HALF_FACTOR.weight_shape, (128,)),
        F16,
    ),
    "kron_matmul, bfloat16": Function(
        lambda x, *factors: kl.kron_matmul(x, factors), ((64, 512), (8, 8), (8, 8), (8, 8)), BF16
    ),
    "sdd, bfloat16": Function(
        lambda a, b: blocksparse.sdd(a, b, layout(a, WIDE)), ((256, 64), (64, 192)), BF16
    ),
    "dsd, bfloat16": Function(
        lambda v, b: blocksparse.dsd(v, b, layout(v, WIDE)), (BLOCKS, (192, 128)), BF16
    ),
    "dds, bfloat16": Function(
        lambda a, v: blocksparse.dds(a, v, layout(v, WIDE)), ((128, 256), BLOCKS), BF16
    ),
    "softmax, bfloat16": Function(
        lambda v: blocksparse.softmax(v, layout(v, WIDE)), (BLOCKS,), BF16
    ),
    "attention, bfloat16": Function(
        lambda q, k, v: blocksparse.attention(q, k, v, layout(q, CAUSAL), causal=True),
        (HEADS, HEADS, HEADS),
        BF16,
    ),
}  # fmt: skip


def captured(step: Callable[[], tuple]) -> tuple[torch.cuda.CUDAGraph, tuple]:
    """A graph of a step, which has run before on a stream beside, and the tensors that it fills."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    with capture() as graph:
        results = step()
    return graph, results


@pytest.mark.few(100)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_replay_of_a_function_and_its_gradients_is_the_eager_step(name, device, seed):
    function = FUNCTIONS[name]
    options = {"device": device, "dtype": function.dtype}
    leaves = [torch.randn(shape, **options, requires_grad=True) for shape in function.shapes]
    with torch.no_grad():
        grad = torch.randn_like(function.call(*leaves))

    def step() -> tuple[torch.Tensor, ...]:
        y = function.call(*leaves)
        return y.detach(), *torch.autograd.grad(y, leaves, grad)

    graph, results = captured(step)
    for _ in range(REPLAYS):
        renew(*leaves, grad)
        graph.replay()
        assert_near(results, step())


# Layers.


class SelfAttention(nn.Module):
    """The one result that a layer of attention has, of one input."""

    def __init__(self, *arguments, **options):
        super().__init__()
        self.inner = BlockSparseMultiheadAttention(*arguments, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x, x, is_causal=True)[0]


def sparse_linear(**options) -> SparseLinear:
    """With the transpose that a backward pass multiplies by."""
    plain = nn.Linear(256, 192, **options)
    with torch.no_grad():
        plain.weight.mul_(torch.rand_like(plain.weight) < 0.3)
    layer = SparseLinear.from_linear(plain, format="bitmap")
    layer.matrix.transpose()
    return layer


class Layer(NamedTuple):
    """A layer by keyword arguments, and the shape of its input."""

    make: Callable[..., nn.Module]
    shape: tuple[int, ...]
    dtype: torch.dtype = F32


PATTERNS = [(8, 16, 16, 1), (1, 16, 16, 8)]
# The first, the last and the one in the middle are compiled in every run: of one family each.
LAYERS = {
    "KSLinear": Layer(lambda **options: KSLinear(PATTERNS, **options), (48, 128)),
    "KSLinear, gelu": Layer(
        lambda **options: KSLinear(PATTERNS, activation="gelu", **options), (48, 128), F16
    ),
    "SparseLinear": Layer(sparse_linear, (5, 256), F16),
    "BlockSparseLinear": Layer(
        lambda **options: BlockSparseLinear(
            256, 192, 64, density=0.5, activation="gelu", **options
        ),
        (40, 256),
        BF16,
    ),
    "BlockSparseConv2d": Layer(
        lambda **options: BlockSparseConv2d(
            32, 48, 3, padding=1, layout=16, density=0.5, **options
        ),
        (2, 32, 10, 10),
    ),
    "BlockSparseMultiheadAttention": Layer(
        lambda **options: SelfAttention(128, 2, CAUSAL, batch_first=True, **options),
        (2, 256, 128),
        F16,
    ),
    "KroneckerLinear": Layer(
        lambda **options: KroneckerLinear((8, 8), (4, 8), **options), (48, 64)
    ),
}


def layer_and_twin(name: str, device: str) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    """A layer, its copy and an input that has a gradient."""
    make, shape, dtype = LAYERS[name]
    layer = make(device=device, dtype=dtype)
    x = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    return layer, copy.deepcopy(layer), x


@torch.no_grad()
def write(layer: nn.Module, twin: nn.Module) -> None:
    """Move the parameters of both alike, in place, as an optimizer does."""
    for one, other in zip(layer.parameters(), twin.parameters(), strict=True):
        one.add_(0.1 * torch.randn_like(one))
        other.copy_(one)


def step(layer: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = layer(x)
    return y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], grad)


@pytest.mark.few(100)
@pytest.mark.parametrize("name", LAYERS)
def test_a_graphed_layer_is_the_eager_one(name, device, seed):
    layer, twin, sample = layer_and_twin(name, device)
    grad = torch.randn_like(twin(sample))
    graphed = torch.cuda.make_graphed_callables(layer, (sample,))
    for _ in range(REPLAYS):
        write(layer, twin)
        x = torch.randn_like(sample).requires_grad_()
        renew(grad)
        assert_near(step(graphed, x, grad), step(twin, x, grad))


@pytest.fixture
def counters():
    """Those of a torch.compile that has compiled nothing."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()


@pytest.mark.few(3)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_compiled_with_graphs_is_the_eager_one(name, device, seed, counters):
    layer, twin, sample = layer_and_twin(name, device)
    grad = torch.randn_like(twin(sample))
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for _ in range(STEPS):
        write(layer, twin)
        x = torch.randn_like(sample).requires_grad_()
        renew(grad)
        torch.compiler.cudagraph_mark_step_begin()
        assert_near(step(compiled, x, grad), step(twin, x, grad))
    assert not counters["inductor"]["cudagraph_skips"]  # which would leave eager launches

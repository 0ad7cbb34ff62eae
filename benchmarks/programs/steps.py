"""Small steps and calls, in which the host takes the time.

Layers take 512 features to 512 at 64 rows: KSLinear by two factors, KroneckerLinear by three of
8 x 8, BlockSparseLinear in blocks of 64 at density 0.25. Kernels are Gaussian, of 256 points in 8
dimensions. Attention is causal, 4 heads of 512 x 64 in bf16; dsd 1024 x 1024 in blocks of 64 at
density 0.3 times 1024 x 4096, in bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import kernlib as kl
from benchmarks.programs.problems import Call, Calls, Program, step
from kernlib import blocksparse

FEATURES, ROWS = 512, 64
POINTS, DIMENSIONS, BANDWIDTH = 256, 8, 2.0
HEADS, LENGTH, HEAD_DIM, BLOCK = 4, 512, 64, 64
SIDE, COLUMNS, DENSITY = 1024, 4096, 0.3

# How many times the rival's time a step may take.
LAYER_MUSTS = {"KSLinear": 1.2, "KroneckerLinear": 1.35, "BlockSparseLinear": 1.3}
COMPILED_MUST, KERNEL_MUST, ATTENTION_MUST, HOT_MUST = 1.3, 0.45, 1.15, 0.8


def leaf(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)


# Layers.


def ks_linear(device: str) -> nn.Module:
    return kl.nn.KSLinear([(8, 64, 64, 1), (1, 64, 64, 8)], device=device)


def kronecker_linear(device: str) -> nn.Module:
    return kl.nn.KroneckerLinear((8, 8, 8), (8, 8, 8), device=device)


def block_sparse_linear(device: str) -> nn.Module:
    layout = blocksparse.random(FEATURES, FEATURES, block=BLOCK, density=0.25, device=device)
    return kl.nn.BlockSparseLinear(FEATURES, FEATURES, layout=layout, device=device)


LAYERS: dict[str, Callable[[str], nn.Module]] = {
    "KSLinear": ks_linear,
    "KroneckerLinear": kronecker_linear,
    "BlockSparseLinear": block_sparse_linear,
}


def layer_calls(make: Callable, is_compiled: bool, device: str) -> Calls:
    """Steps of a layer, and of a dense one on the same rows."""
    x, grad = leaf(ROWS, FEATURES, device=device), torch.ones(ROWS, FEATURES, device=device)
    if is_compiled:
        torch.compiler.reset()

    def of(layer: nn.Module) -> Call:
        forward = torch.compile(layer) if is_compiled else layer
        return step(lambda: forward(x), [x, *layer.parameters()], grad)

    linear = partial(nn.Linear, FEATURES, FEATURES, device=device)
    return Calls(of(make(device)), {"linear": lambda: of(linear())})


# Kernels.


def kernel_leaves(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Points, a vector and a bandwidth."""
    x, v = leaf(POINTS, DIMENSIONS, device=device), leaf(POINTS, 1, device=device)
    return x, v, torch.tensor(BANDWIDTH, device=device, requires_grad=True)


def kernel_by_torch(x: torch.Tensor, bandwidth: torch.Tensor) -> torch.Tensor:
    return torch.exp(-torch.cdist(x, x).square() / (2 * bandwidth * bandwidth))


def product_functions(device: str) -> tuple[tuple, Callable, Callable]:
    """Leaves, and products of them with a kernel matrix by kernlib and by torch. The descriptor is
    made anew in each call, as programs do."""
    x, v, bandwidth = leaves = kernel_leaves(device)

    def ours() -> torch.Tensor:
        return kl.kernel_matmul(kl.gaussian(), x, x, v, bandwidth=bandwidth)

    return leaves, ours, lambda: kernel_by_torch(x, bandwidth) @ v


def matrix_functions(device: str) -> tuple[tuple, Callable, Callable]:
    """The same without the product."""
    x, _, bandwidth = kernel_leaves(device)

    def ours() -> torch.Tensor:
        return kl.run_kernel(kl.gaussian(), x, x, bandwidth=bandwidth)

    return (x, bandwidth), ours, lambda: kernel_by_torch(x, bandwidth)


# Attention and products.


def attention_functions(device: str) -> tuple[tuple, Callable, Callable]:
    shape = 1, HEADS, LENGTH, HEAD_DIM
    q, k, v = leaves = tuple(leaf(*shape, device=device, dtype=torch.bfloat16) for _ in range(3))
    layout = blocksparse.causal(LENGTH, BLOCK, device=device)
    ours = partial(blocksparse.attention, q, k, v, layout, causal=True)
    return leaves, ours, partial(scaled_dot_product_attention, q, k, v, is_causal=True)


def function_calls(make: Callable, rival: str, device: str) -> Calls:
    """Steps of a function with a gradient of ones."""
    leaves, ours, theirs = make(device)
    with torch.no_grad():
        grad = torch.ones_like(ours())
    return Calls(step(ours, leaves, grad), {rival: lambda: step(theirs, leaves, grad)})


def kron_matmul(device: str) -> Call:
    x, factors = leaf(ROWS, FEATURES, device=device), [leaf(8, 8, device=device) for _ in range(3)]
    return partial(kl.kron_matmul, x, factors)


def dsd(device: str) -> Call:
    layout = blocksparse.random(SIDE, SIDE, block=BLOCK, density=DENSITY, device=device)
    values = leaf(layout.capacity, BLOCK, BLOCK, device=device, dtype=torch.bfloat16)
    columns = leaf(SIDE, COLUMNS, device=device, dtype=torch.bfloat16)
    return partial(blocksparse.dsd, values, columns, layout)


HOT: dict[str, Callable[[str], Call]] = {
    "kernel_matmul 256": lambda device: product_functions(device)[1],
    "kron_matmul 512": kron_matmul,
    "attention 512": lambda device: attention_functions(device)[1],
    "dsd 1024": dsd,
}


def hot_calls(make: Callable, device: str) -> Calls:
    """A call, a small product by torch, and torch's least operation, which tells how fast the host
    is."""
    square, counter = torch.randn(256, 256, device=device), torch.zeros(1, device=device)
    rivals = {
        "mm": lambda: partial(torch.mm, square, square),
        "add_": lambda: partial(counter.add_, 1),
    }
    return Calls(make(device), rivals)


# The cases.


def programs() -> list[Program]:
    layers = [
        Program(f"step {name} 512{' compiled' * is_compiled}",
                partial(layer_calls, make, is_compiled), "us", "linear",
                COMPILED_MUST if is_compiled else LAYER_MUSTS[name])
        for is_compiled in (False, True)
        for name, make in LAYERS.items()
    ]  # fmt: skip
    functions = [
        Program(f"step {name}", partial(function_calls, make, rival), "us", rival, must)
        for name, make, rival, must in (
            ("kernel_matmul 256", product_functions, "torch", KERNEL_MUST),
            ("run_kernel 256", matrix_functions, "torch", KERNEL_MUST),
            ("attention 512", attention_functions, "sdpa", ATTENTION_MUST),
        )
    ]
    musts = {"kernel_matmul 256": HOT_MUST}
    hot = [
        Program(f"hot {name}", partial(hot_calls, make), "us", "mm", musts.get(name), False)
        for name, make in HOT.items()
    ]
    return [*layers, *functions, *hot]

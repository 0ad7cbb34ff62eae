"""Ways through kernlib: the frames of Python that a call enters, their files, and how often these
change from one frame to the next, on a GPU that exists only by name. No clock runs.

    python -m tests.architecture.walks

prints them for first calls, each in a process of its own, and for second ones, whose plans are
there; and where the backward pass of a product with a kernel matrix goes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import kernlib as kl
from tests.architecture import golden_blocks, golden_gradients, golden_launches
from tests.architecture.golden_gradients import HALF, tensor
from tests.support import fakes

PACKAGE = str(Path(kl.__file__).resolve().parent)


class Walk(NamedTuple):
    """Of a call: how many frames, distinct files, and frames in another file than the one
    before."""

    frames: int
    files: int
    switches: int


def frames_of(call: Callable) -> list[tuple[str, str]]:
    """Files and functions of kernlib that a call enters, in order; comprehensions of Python 3.11
    are frames too."""
    frames = []

    def note(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            frames.append((code.co_filename.removeprefix(PACKAGE), code.co_name))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return frames


def measured(frames: list[tuple[str, str]]) -> Walk:
    files = [file for file, _ in frames]
    return Walk(len(files), len({*files}), len([*groupby(files)]) - 1)


# Each way makes its tensors, and returns what is called.


def forward(call: Callable, *tensors: torch.Tensor) -> Callable:
    return lambda: call(*tensors)


def backward(call: Callable, *tensors: torch.Tensor, count: int | None = None) -> Callable:
    """The backward pass of a function of tensors, of which so many require a gradient, None for
    all. Of a call whose route is there already."""
    leaves = [t.requires_grad_(i < (count or len(tensors))) for i, t in enumerate(tensors)]
    call(*leaves)
    y = call(*leaves)
    y = y.as_subclass(torch.Tensor)
    grad = torch.zeros(y.shape, dtype=y.dtype)
    return lambda: y.backward(grad, retain_graph=True)


def recorded(call: Callable, *tensors: torch.Tensor) -> Callable:
    """A forward pass whose gradient is recorded."""
    leaves = [t.requires_grad_() for t in tensors]
    return lambda: call(*leaves)


def distances(way: Callable, descriptor: kl.Pairwise, **options) -> Callable:
    values = {name: options.pop(name) for name in ("bandwidth", "p") if name in options}
    call = partial(kl.run_kernel, descriptor, **values)
    return way(call, tensor(100, 64), tensor(80, 64), **options)


def factor(way: Callable) -> Callable:
    pattern = kl.KroneckerSparse(2, 48, 192, 1)
    x, weight = tensor(100, pattern.in_features), tensor(*pattern.weight_shape)
    return way(partial(kl.run_kernel, pattern), x, weight)


def chain(way: Callable) -> Callable:
    factors = kl.KroneckerSparse(8, 64, 64, 1), kl.KroneckerSparse(1, 64, 64, 8)
    weights = (tensor(*factor.weight_shape) for factor in factors)
    descriptor = kl.KroneckerSparseChain(factors)
    return way(partial(kl.run_kernel, descriptor), tensor(100, 512), *weights)


def sparse(way: Callable) -> Callable:
    matrix = golden_launches.compressed(torch.eye(512, 1024).half(), "u8")
    return way(partial(kl.sparse.matmul, matrix), tensor(1, 1024, dtype=HALF))


def pair_gradient() -> Callable:
    shapes = (50, 40), (20, 50), (3, 50), (20, 40)
    return forward(partial(kl.cdist_grad, p=1), *(tensor(*shape) for shape in shapes))


def dsd(way: Callable) -> Callable:
    layout = golden_blocks.layout(64, (4, 6))
    operands = tensor(layout.capacity, 64, 64, dtype=HALF), tensor(384, 128, dtype=HALF)
    return way(lambda values, b: kl.blocksparse.dsd(values, b, layout), *operands)


def attention(way: Callable) -> Callable:
    layout = golden_blocks.layout(128, (2, 2))
    operands = (tensor(1, 2, 256, 64, dtype=torch.bfloat16) for _ in range(3))
    return way(lambda q, k, v: kl.blocksparse.attention(q, k, v, layout), *operands)


def kron_matmul(way: Callable) -> Callable:
    x, factors = tensor(100, 4096), (tensor(16, 16) for _ in range(3))
    return way(lambda x, *factors: kl.kron_matmul(x, factors), x, *factors)


def kernel_matmul(way: Callable, descriptor: Callable) -> Callable:
    """Of a descriptor that each call makes, as users write it."""
    return way(
        lambda a, b, v: kl.kernel_matmul(descriptor(), a, b, v, bandwidth=2.0),
        tensor(100, 64), tensor(80, 64), tensor(80, 3),
    )  # fmt: skip


# Of operators as compiled programs call them, each way of a step.


def compiled(family: str, call: Callable) -> Callable:
    """``call(module, ...)`` of the module of a family's operators, without a record."""
    module = import_module(f"kernlib.families.{family}.operators")
    return torch.no_grad()(partial(call, module))


def compiled_chain(way: Callable) -> Callable:
    weights = tensor(8, 64, 64, 1), tensor(1, 64, 64, 8)
    x, bias = tensor(100, 512), tensor(512)
    return compiled("kronecker_sparse", partial(way, x=x, weights=[*weights], bias=bias))


def compiled_kron(way: Callable) -> Callable:
    x, factors, product = tensor(100, 512), [tensor(8, 8)] * 3, kl.KroneckerProduct(((8, 8),) * 3)
    return compiled("kronecker_product", partial(way, x=x, factors=factors, text=product.text))


def compiled_dsd(way: Callable) -> Callable:
    layout, product = golden_blocks.layout(64, (4, 6)), kl.BlockSparseMatmul("dsd")
    values, b, grad = tensor(layout.capacity, 64, 64), tensor(384, 128), tensor(256, 128)
    given = {"values": values, "b": b, "grad": grad, "layout": layout, "product": product}
    return compiled("blocksparse", partial(way, **given))


def chain_product(operators, x, weights, bias):
    return operators.chain_product(x, weights, bias, False, None, False)


def chain_gradients(operators, x, weights, bias):
    needs = [True, True, True, False]
    return operators.chain_gradients(x, [x, x], weights, needs, False, None, False)


def kron_product(operators, x, factors, text):
    return operators.product_of(x, factors, text, None, False)


def kron_gradients(operators, x, factors, text):
    return operators.gradients(x, x, factors, text, [True] * 4, False)


def dsd_product(operators, values, b, grad, layout, product):
    return operators.product(values, b, layout, product, None, False)


def dsd_gradients(operators, values, b, grad, layout, product):
    return operators.product_gradients(grad, values, b, layout, product, [True] * 2, False)


WIDE = {"bandwidth": 2.0}
WAYS: dict[str, Callable[[], Callable]] = {
    "l1": partial(distances, forward, kl.l1_distance()),
    "gaussian": partial(distances, forward, kl.gaussian(), **WIDE),
    "Kronecker-sparse": partial(factor, forward),
    "Kronecker-sparse, recorded": partial(factor, recorded),
    "Kronecker-sparse, backward": partial(factor, backward),
    "chain": partial(chain, forward),
    "chain, recorded": partial(chain, recorded),
    "chain, backward": partial(chain, backward),
    "sparse": partial(sparse, forward),
    "sparse, recorded": partial(sparse, recorded),
    "pair gradient": pair_gradient,
    "dsd": partial(dsd, forward),
    "dsd, recorded": partial(dsd, recorded),
    "dsd, backward": partial(dsd, backward),
    "attention": partial(attention, forward),
    "attention, recorded": partial(attention, recorded),
    "attention, backward": partial(attention, backward),
    "kron_matmul": partial(kron_matmul, forward),
    "kron_matmul, recorded": partial(kron_matmul, recorded),
    "kron_matmul, backward": partial(kron_matmul, backward),
    "gaussian, recorded": partial(distances, recorded, kl.gaussian(), **WIDE),
    "l1, backward": partial(distances, backward, kl.l1_distance()),
    "gaussian, backward": partial(distances, backward, kl.gaussian(), **WIDE),
    "gaussian, backward by a": partial(distances, backward, kl.gaussian(), count=1, **WIDE),
    "p, backward": partial(distances, backward, kl.p_distance(), p=1.7),
    "kernel_matmul": partial(kernel_matmul, forward, kl.gaussian),
    "kernel_matmul, recorded": partial(kernel_matmul, recorded, kl.gaussian),
    "kernel_matmul, backward": partial(kernel_matmul, backward, kl.gaussian),
    "kernel_matmul, backward by blocks": partial(kernel_matmul, backward, kl.laplace_l1),
    "chain, compiled": partial(compiled_chain, chain_product),
    "chain, compiled backward": partial(compiled_chain, chain_gradients),
    "kron_matmul, compiled": partial(compiled_kron, kron_product),
    "kron_matmul, compiled backward": partial(compiled_kron, kron_gradients),
    "dsd, compiled": partial(compiled_dsd, dsd_product),
    "dsd, compiled backward": partial(compiled_dsd, dsd_gradients),
}


def install(monkeypatch) -> None:
    """Put the GPU in place."""
    fakes.forget()
    golden_launches.install(monkeypatch)
    golden_gradients.everywhere(monkeypatch)


def hot_frames(name: str) -> list[tuple[str, str]]:
    """Of a way's second time."""
    call = WAYS[name]()
    call()
    frames = frames_of(call)
    fakes.forget()
    return frames


def both(name: str) -> tuple[Walk, Walk]:
    """A way's first time in this process, and its second."""
    install(pytest.MonkeyPatch())
    call = WAYS[name]()
    return measured(frames_of(call)), measured(frames_of(call))


def main() -> None:
    with get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        walks = pool.map(both, WAYS, chunksize=1)
    print(f"{'way':34}{'first: frames files switches':>30}{'second: frames files switches':>32}")
    for name, (first, second) in zip(WAYS, walks, strict=True):
        print(f"{name:34}" + "".join(f"{number:>10}" for number in (*first, *second)))
    install(pytest.MonkeyPatch())
    for name in ("kernel_matmul, backward", "kernel_matmul, backward by blocks"):
        print(f"\n{name}, second time, file by file:")
        for file, group in groupby(hot_frames(name), key=lambda frame: frame[0]):
            print(f"  {file}: {', '.join(function for _, function in group)}")


if __name__ == "__main__":
    main()

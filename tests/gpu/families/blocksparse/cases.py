"""Operands of block-sparse products on the GPU, and these products in float64."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import torch

import kernlib as kl
from kernlib import BlockSparseMatmul, ahead
from kernlib.blocksparse import Layout
from kernlib.families.blocksparse.lowering import hopper
from kernlib.jit import service
from kernlib.lowering.kernel import Gpu, Option, options
from kernlib.runtime.devices import arch_of

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TYPES = {"fp32": F32, "fp16": F16, "bf16": BF16}
GATES = {F32: 1e-6, F16: 1e-3, BF16: 8e-3}
BLOCKS = ((16, 16), (32, 32), (64, 64), (128, 128), (16, 64), (128, 32))
MODES = ("sdd", "dsd", "dds")
FLAGS = tuple((of_a, of_b) for of_a in (False, True) for of_b in (False, True))
SHAPES_OF_LAYOUTS = {
    "few blocks": [[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]],
    "one long line": [[1] * 40] + [[0] * 39 + [1]] * 9,
    "lines that take turns": [[1, 0] * 20, [0, 1] * 20, [1] * 20 + [0] * 20, [0] * 20 + [1] * 20],
    "one column": [[1, 0, 0]] * 20,
    "band": [[int(abs(row - col) < 2) for col in range(12)] for row in range(12)],
}


def layout_of(block, grid=(5, 7), heads=None, density=0.4, room=2) -> Layout:
    """A random layout with a line without blocks and room for more than it holds."""
    lead = () if heads is None else (heads,)
    mask = torch.rand(*lead, *grid) < density
    mask[..., 1, :] = False
    mask[..., 0, 0] = True
    return Layout(mask, block, capacity=int(mask.sum()) + room, device="cuda")


def values_of(layout: Layout, dtype, batch=()) -> torch.Tensor:
    """Values, NaN in slots that hold no block."""
    made = torch.randn(*batch, layout.capacity, *layout.block, device="cuda").to(dtype)
    made[..., layout.nnz :, :, :] = float("nan")
    return made


def operands(mode: str, layout: Layout, size: int, dtype, batch=(), of_a=False, of_b=False):
    """a and b of a mode, contiguous as they are given."""
    rows, cols = layout.shape
    lead = (*batch, *(() if layout.heads is None else (layout.heads,)))
    if mode == "sdd":
        shapes = {"a": (rows, size), "b": (size, cols)}
    elif mode == "dsd":
        shapes = {"b": (rows if of_a else cols, size)}
    else:
        shapes = {"a": (size, cols if of_b else rows)}
    made = []
    for name, turned in (("a", of_a), ("b", of_b)):
        if name not in shapes:
            made.append(values_of(layout, dtype, batch))
            continue
        ends = shapes[name][::-1] if turned else shapes[name]
        made.append(torch.randn(*lead, *ends, device="cuda").to(dtype))
    return made


def exact(mode: str, layout: Layout, a, b, of_a=False, of_b=False) -> torch.Tensor:
    """The product in float64."""
    wide = {"a": a.double(), "b": b.double()}
    for name, letter in zip("ab", mode[1:], strict=True):
        if letter == "s":
            wide[name] = layout.to_dense(wide[name])
    left, right = (wide[n].mT if turned else wide[n] for n, turned in (("a", of_a), ("b", of_b)))
    y = left @ right
    return layout.to_blocks(y) if mode == "sdd" else y


def check(found: torch.Tensor, wanted: torch.Tensor, gate: float) -> None:
    """As a whole, and each of the last dimension's lines beside what such a line mostly is."""
    found = found.double()
    assert (found - wanted).norm() <= gate * wanted.norm()
    usual = wanted.norm() / max(wanted.numel() / max(wanted.shape[-1], 1), 1) ** 0.5
    lines = torch.maximum(wanted.norm(dim=-1), usual)
    assert ((found - wanted).norm(dim=-1) <= 3 * gate * lines + 1e-300).all()


def build(calls) -> None:
    """Have the kernels of calls, (descriptor, operands), compiled side by side."""
    arch, found = arch_of(torch.cuda.current_device()), []
    for descriptor, tensors in calls:
        found += ahead.specs(descriptor, arch, tuple(tensors), {}, tensors[1].get_device())
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda spec: service.build(spec, arch), dict.fromkeys(found)))


def pays_as_ever(*call) -> bool:
    """In the place of what kernels of Hopper's say of dsd and dds, whose last arguments are a
    problem and the GPU: however few their tiles are."""
    problem, _ = call[-2:]
    return problem.columns > hopper.FEW_COLUMNS


def in_parts(count: int, among: tuple, problem, gpu: Gpu, tuned=None) -> Option:
    """Of a problem's options one with so many parts of sums, of the smallest tile, if there is
    one: for the place of :func:`kernlib.lowering.kernel.choose`."""
    every = options(among, problem, gpu.arch)
    return next((one for one in every[::-1] if one.knobs.get("parts") == count), every[0])


def product(mode: str, of_a=False, of_b=False, **options) -> BlockSparseMatmul:
    return BlockSparseMatmul(mode, transpose_a=of_a, transpose_b=of_b, **options)


def check_products(mode: str, layout: Layout, sizes, dtype, flags=FLAGS) -> None:
    """Of batches of two, with these transposes, into results that hold NaN: the values, and that
    they have the same bits each time."""
    made = [
        (pair, operands(mode, layout, size, dtype, (2,), *pair)) for pair in flags for size in sizes
    ]
    build([(product(mode, *pair), (layout, a, b)) for pair, (a, b) in made])
    for pair, (a, b) in made:
        descriptor = product(mode, *pair)
        first = kl.run_kernel(descriptor, layout, a, b)
        out = torch.full_like(first, math.nan)
        kl.run_kernel(descriptor, layout, a, b, out=out)
        check(out, exact(mode, layout, a, b, *pair), GATES[dtype])
        assert torch.equal(out, first)

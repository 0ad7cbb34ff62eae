"""Small odd calls, to be run under compute-sanitizer; prints the kinds of kernels that ran."""

from __future__ import annotations

import sys

import torch

import kernlib as kl
from kernlib import events
from kernlib.families.kronecker_product import plans
from kernlib.families.kronecker_product.kernels import halves
from kernlib.families.kronecker_product.lowering import by_torch, grouping, passes, slabs
from kernlib.runtime.devices import Model
from tests.gpu.families.kronecker_product.cases import TYPES, operands, product

SHAPES = (
    ((3, 4),),
    ((2, 2),) * 5,
    ((8, 8), (8, 8)),
    ((5, 3), (2, 7), (4, 4)),
    ((40, 24), (5, 33)),
    ((64, 64), (8, 8)),
    ((16, 16),) * 3,
)
WGMMA = ((8, 8),) * 4, ((16, 16),) * 3, ((128, 128), (64, 64), (8, 8))
# Of each kind of numbers: shapes of several runs.
ODD, CHUNKS = ((8, 8), (4, 6), (8, 7), (8, 8)), ((8, 8), (16, 8), (8, 8))
LONG = {"fp32": (ODD, CHUNKS), "fp64": (ODD,), "fp16": (CHUNKS,), "bf16": (CHUNKS,)}
LONG_ROWS = 90


def call(shapes, numbers: str, side: str, rows: int, batch: tuple) -> None:
    descriptor = product(shapes, side, epilogue=kl.Bias())
    x, *factors = operands(shapes, rows, side, TYPES[numbers], batch)
    bias = x.new_ones(descriptor.out_features)
    kl.run_kernel(descriptor, x.mT.contiguous().mT, *factors, bias=bias)
    kl.run_kernel(descriptor, x, *factors, bias=bias)
    leaves = [t.requires_grad_() for t in (x, *factors)]
    kl.kron_matmul(x, factors, side=side).sum().backward(inputs=leaves)


def cut_into_slabs() -> None:
    """As rows of any length are that are longer than these: each run has one or two factors, a slab
    one row or eight columns, and a GPU four multiprocessors."""
    grouping.room = lambda dtype, arch: 1200 if dtype != "float64" else 600
    grouping.most_features = lambda dtype: 512 if dtype != "float64" else 256
    slabs.SLAB_BYTES = slabs.RESTAGED_BYTES = 1
    slabs.COLUMNS_INSIDE = 8
    plans.model = lambda device: Model("", 4)
    by_time = grouping.groups

    def halved(kernel, whole, arch):
        groups, count = by_time(kernel, whole, arch), len(whole.sizes)
        if kernel is not halves.HALVES or groups is None:
            return groups
        return (count // 2, count), (0, count // 2)

    grouping.groups = halved


def main(side: str, numbers: str) -> None:
    kinds = set()
    by_torch.gains = lambda *_: False  # kernels are looked at, wherever torch is faster
    events.subscribe(lambda e: e.name == "launch" and kinds.add(e.description.split()[1]))
    for shapes in SHAPES:
        for rows, batch in ((1, ()), (9, ()), (33, ()), (5, (2,))):
            call(shapes, numbers, side, rows, batch)
    passes.is_faster = lambda *_: True  # also where others are faster
    for shapes in WGMMA:
        for rows in (2, 19):  # of which nobody has a plan
            call(shapes, numbers, side, rows, ())
    cut_into_slabs()
    for batch in ((), (2,)):
        for shapes in LONG[numbers]:
            call(shapes, numbers, side, LONG_ROWS, batch)
    torch.cuda.synchronize()
    print("done", *sorted(kinds))


if __name__ == "__main__":
    main(*sys.argv[1].split("-"))

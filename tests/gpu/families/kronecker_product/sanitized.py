"""Small odd calls, to be run under compute-sanitizer; prints the kinds of kernels that ran."""

from __future__ import annotations

import sys

import torch

import kernlib as kl
from kernlib import events
from tests.gpu.families.kronecker_product.cases import TYPES, operands, product

SHAPES = (
    ((3, 4),),
    ((2, 2),) * 5,
    ((8, 8), (8, 8)),
    ((5, 3), (2, 7), (4, 4)),
    ((40, 24), (5, 33)),
    ((64, 64), (8, 8)),
)


def main(sides: tuple[str, ...]) -> None:
    kinds = set()
    events.subscribe(lambda e: e.name == "launch" and kinds.add(e.description.split()[1]))
    for shapes in SHAPES:
        for numbers in TYPES.values():
            for side in sides:
                for rows, batch in ((1, ()), (9, ()), (33, ()), (5, (2,))):
                    descriptor = product(shapes, side, epilogue=kl.Bias())
                    x, *factors = operands(shapes, rows, side, numbers, batch)
                    bias = x.new_ones(descriptor.out_features)
                    kl.run_kernel(descriptor, x.mT.contiguous().mT, *factors, bias=bias)
                    kl.run_kernel(descriptor, x, *factors, bias=bias)
                    leaves = [t.requires_grad_() for t in (x, *factors)]
                    kl.kron_matmul(x, factors, side=side).sum().backward(inputs=leaves)
    torch.cuda.synchronize()
    print("done", *sorted(kinds))


if __name__ == "__main__":
    main((sys.argv[1],))

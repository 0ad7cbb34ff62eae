"""Small odd calls, to be run under compute-sanitizer; prints the kinds of kernels that ran."""

from __future__ import annotations

import sys

import torch

import kernlib as kl
from kernlib import events
from kernlib.blocksparse import Layout, softmax
from kernlib.families.blocksparse.lowering import hopper_words
from tests.gpu.families.blocksparse.cases import BLOCKS, MODES, TYPES, layout_of, operands, product


def products(dtype) -> None:
    for block in BLOCKS:
        layout = layout_of(block, (3, 4), heads=2)
        for mode in MODES:
            for of_a, of_b in ((False, False), (True, True)):
                for size in (7, 72):
                    a, b = operands(mode, layout, size, dtype, (2,), of_a, of_b)
                    kl.run_kernel(product(mode, of_a, of_b), layout, a, b)


def layouts() -> None:
    for shape in ((1, 1), (5, 33), (2, 40, 31)):
        mask = torch.rand(shape, device="cuda") < 0.5
        made = Layout(mask, 16, capacity=40)
        made.update_(~mask)
        rows, cols = (torch.randint(-2, 45, (50,), device="cuda") for _ in range(2))
        Layout.from_indices(rows, cols, (40, 31), 16)


def softmaxes(dtype) -> None:
    for block in BLOCKS[:4]:
        layout = layout_of(block, (3, 4), heads=2)
        x = torch.randn(2, layout.capacity, *block, device="cuda").to(dtype).requires_grad_()
        rpe = torch.randn(2, *layout.shape, device="cuda").to(dtype).requires_grad_()
        softmax(x, layout, scale=0.5, rpe=rpe, causal=True).sum().backward()


def main(numbers: str) -> None:
    kinds = set()
    hopper_words.pays = lambda *_: True  # for products as small as these too
    events.subscribe(lambda e: e.name == "launch" and kinds.add(e.description.split()[1]))
    layouts()
    products(TYPES[numbers])
    softmaxes(TYPES[numbers])
    torch.cuda.synchronize()
    print("done", *sorted(kinds))


if __name__ == "__main__":
    main(sys.argv[1])

"""Block-sparse products and attention that promise the same bits each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from kernlib.families.blocksparse.attention.functions import attention
from kernlib.families.blocksparse.descriptor import BlockSparseMatmul
from kernlib.families.blocksparse.functions import dds, dsd, sdd
from kernlib.families.blocksparse.layout import Layout
from kernlib.run import run_kernel
from tests.support.repeats import Maker, slopes

# Rows of 3, 2, 0 and 1 blocks, and a slot without one.
MASK = [[1, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]]


def calls(make: Maker) -> Iterator[tuple[str, Callable]]:
    n = make.rows
    for block, mask in ((16, MASK), ((32, 64), MASK), (128, [MASK, MASK[::-1]])):
        layout = Layout(torch.tensor(mask), block, 13, make.device)
        (rows, cols), heads = layout.shape, (layout.heads,) if layout.heads else ()
        values = make(13, *layout.block, recorded=True)
        sides = {
            "sdd": (make(*heads, rows, n, recorded=True), make(*heads, n, cols, recorded=True)),
            "dsd": (values, make(2, *heads, cols, n, recorded=True)),
            "dds": (make(2, *heads, n, rows, recorded=True), values),
        }
        for mode, operands in sides.items():
            call = partial(run_kernel, BlockSparseMatmul(mode), layout)
            yield f"{mode} {layout.text}", partial(slopes, call, operands, True)
            wide = tuple(t.detach().double().requires_grad_() for t in operands)
            yield f"{mode} {layout.text} float64", partial(slopes, call, wide, True)
    for dtype in (torch.float16, torch.bfloat16):
        layout = Layout(torch.tensor(MASK), 32, None, make.device)
        x, y = (make(128, n).mul(0.1).to(dtype).requires_grad_() for _ in range(2))

        def scores(x, y, layout=layout):
            """Through all modes."""
            values = sdd(x, y, layout, transpose_b=True)
            return dds(dsd(values, y, layout), values, layout, transpose_a=True)

        yield f"all modes {dtype}", partial(slopes, scores, (x, y), False)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        layout = Layout(torch.tensor(MASK), 32, None, make.device)
        shapes = ((2, 4, 128, 16), (2, 2, 128, 16), (2, 2, 128, 24), (4, 128, 128))
        given = tuple(make(*shape).to(dtype).requires_grad_() for shape in shapes)

        def attended(q, k, v, bias, layout=layout):
            rest = {"dropout_p": 0.2, "seed": 7, "causal": True}
            return attention(q, k, v, layout, score="v + bias", bias=bias, **rest)

        yield f"attention {dtype}", partial(slopes, attended, given, False)

"""Products with Kronecker products that promise the same bits each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

import kernlib as kl
from tests.support.repeats import Maker, slopes


def calls(make: Maker) -> Iterator[tuple[str, Callable]]:
    shapes = ((3, 5), (4, 2), (5, 7))
    factors = [make(*shape, recorded=True) for shape in shapes]
    for side, wide in (("right", 60), ("left", 70)):
        x = make(make.rows, wide)
        x = (x.mT.contiguous() if side == "left" else x).requires_grad_()
        made = kl.KroneckerProduct(shapes, side=side)
        yield side, partial(slopes, partial(kl.run_kernel, made), (x, *factors), True)

    def scaled(alpha: torch.Tensor, beta: torch.Tensor, y: torch.Tensor, x, *factors):
        return kl.kron_matmul(x, factors, alpha=alpha, beta=beta, y=y)

    numbers = make(recorded=True), make(recorded=True)
    x, y = make(make.rows, 60, recorded=True), make(make.rows, 70, recorded=True)
    yield "scaled", partial(slopes, scaled, (*numbers, y, x, *factors), True)
    batches = make(3, 1, 3, 5, recorded=True), make(2, 4, 2, recorded=True)
    x = make(make.rows, 12, recorded=True)
    made = kl.KroneckerProduct(shapes[:2])
    yield "batches", partial(slopes, partial(kl.run_kernel, made), (x, *batches), False)

"""Kronecker-sparse products that promise the same bits each time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import kernlib as kl
from kernlib.nn import KSLinear
from tests.support.repeats import Maker, slopes


def calls(make: Maker) -> Iterator[tuple[str, Callable]]:
    pattern = (2, 24, 16, 4)
    w = make(*pattern, recorded=True)
    for last in (False, True):
        x = make(make.rows, 128)
        x = (x.mT.contiguous() if last else x).requires_grad_()
        factor = kl.KroneckerSparse(*pattern, batch_last=last)
        yield f"batch_last={last}", partial(slopes, partial(kl.run_kernel, factor), (x, w), True)
    chain = kl.KroneckerSparseChain((kl.KroneckerSparse(2, 16, 16, 4),) * 2)
    again, first = make(2, 16, 16, 4, recorded=True), make(2, 16, 16, 4, recorded=True)
    x = make(make.rows, 128, recorded=True)
    yield "chain", partial(slopes, partial(kl.run_kernel, chain), (x, first, again), False)
    weight = make(*pattern)
    for algo in ("auto", "einsum", "bmm", "dense"):
        layer = KSLinear([pattern], weights=[weight], algo=algo, bias=False, activation="gelu")
        yield algo, partial(slopes, layer, (x,), False)

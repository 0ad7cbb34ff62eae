"""Products with compressed matrices that promise the same bits each time, and these matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from kernlib import sparse
from tests.families.sparse.cases import FORMATS
from tests.support.repeats import Maker, slopes


def calls(make: Maker) -> Iterator[tuple[str, Callable]]:
    dense = sparse.magnitude(make(200, 333), 0.3)
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    for dtype in dtypes if make.device != "cpu" else dtypes[1:2]:
        for form in FORMATS:
            w = sparse.compress(dense.to(dtype), form)
            for vectors in (1, 7, 33):
                x = make(vectors, 333).to(dtype).requires_grad_()
                call = partial(slopes, partial(sparse.matmul, w), (x,), False)
                yield f"{form} {dtype} {vectors}", call
            yield (
                f"{form} {dtype}",
                lambda form=form, dtype=dtype: tuple(
                    sparse.compress(dense.to(dtype), form).tensors.values()
                ),
            )

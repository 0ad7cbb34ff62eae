"""Shapes of several tensors together, and of one seen as a matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.compiler import is_dynamo_compiling


def broadcast_shapes(*shapes: Sequence[int]) -> torch.Size:
    """As ``torch.broadcast_shapes``. The first call of that in a process imports sympy, which takes
    0.3 s, so it is called only where sizes are symbols, and under Dynamo, which has loaded sympy
    anyway. Raises RuntimeError for shapes that do not broadcast."""
    if is_dynamo_compiling() or any(type(size) is not int for shape in shapes for size in shape):
        return torch.broadcast_shapes(*shapes)
    rank = max(map(len, shapes), default=0)
    found = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, rank - len(shape)):
            if found[axis] == 1:
                found[axis] = size
            elif size not in (1, found[axis]):
                shown = ", ".join(str(tuple(each)) for each in shapes)
                raise RuntimeError(f"shapes do not broadcast: {shown}")
    return torch.Size(found)


def as_rows(t: torch.Tensor) -> torch.Tensor:
    """All dimensions but the last as one: by reshape, as is_grads_batched knows no flatten."""
    return t.reshape(math.prod(t.shape[:-1]), t.shape[-1])

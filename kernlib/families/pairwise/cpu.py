"""The pairwise op on CPU tensors, by the reference."""

from __future__ import annotations

import torch

from kernlib.families.pairwise import checks
from kernlib.families.pairwise.reference import pairwise
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.numbers import plain
from kernlib.runtime.precision import without_autocast
from kernlib.runtime.tensors import refuse_overlap, span


def run(
    call: checks.Call, descriptor, a, b, out, accumulate, row_offset, col_offset, hyperparameters
) -> torch.Tensor:
    """A checked request of :mod:`kernlib.families.pairwise.matrix`, computed in PyTorch."""
    hyperparameters = {name: plain(name, value) for name, value in hyperparameters.items()}
    fresh = out is None
    out = torch.empty(call.out_shape, dtype=call.out_dtype, device=a.device) if fresh else out
    second = a if b is None else b
    tensors = (a, second, out)
    spans = tuple(span(t) for t in tensors)
    if not fresh and checks.ranges_meet(tuple(t.data_ptr() for t in tensors), spans):
        refuse_overlap(out, a=a, b=second)
    if not fresh:
        tensors = {k: v for k, v in hyperparameters.items() if isinstance(v, torch.Tensor)}
        refuse_overlap(out, **tensors)
    with without_autocast(a.device):
        result = compute(descriptor, a, second, call, row_offset - col_offset, hyperparameters)
    if descriptor.symmetric:  # BLAS does not sum (m, n) and (n, m) in one order
        below = torch.ones(call.m, call.n, dtype=torch.bool, device=a.device).tril(-1)
        result = torch.where(below, result.mT, result)
    result = result.view(out.shape)
    out.copy_(out.to(result.dtype) + result if accumulate else result)
    return out


def compute(descriptor, a, b, call, diagonal: int, hyperparameters: dict) -> torch.Tensor:
    """The (L, M, N) result in the arithmetic's dtype, for checked arguments."""
    wide = accumulator(a.dtype)
    first, second = (
        (x if x.dim() == 3 else x[None]).expand(call.batch, -1, -1).to(wide) for x in (a, b)
    )
    values = dict(hyperparameters)
    inner = values.pop("p", values.pop("inner_p", None))
    arguments = {name: values.pop(name) for name in ("epsilon", "regularization") if name in values}
    return pairwise(
        descriptor,
        first,
        second,
        inner_p=inner,
        inner_scale=values.pop("inner_scale", None),
        outer_p=values.pop("outer_p", None),
        root=checks.follows_inner(descriptor, hyperparameters),
        diagonal=diagonal,
        parameters=values,
        **arguments,
    )

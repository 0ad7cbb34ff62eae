"""Calls of pairwise descriptors with categories, and their gradients.

A call is ``finish(S + T)``, with the sums S of the numerical features and what the tables add, T.
Forward is one kernel, of which the inputs are kept. Backward makes blocks of rows of the matrix
again out of operators that are differentiable themselves
(:mod:`kernlib.families.pairwise.categories.formula`), so that it takes memory for a block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch._C import _are_functorch_transforms_active

from kernlib.families.pairwise import checks
from kernlib.families.pairwise.categories import arguments, formula, matrix
from kernlib.families.pairwise.categories.arguments import Tables
from kernlib.families.pairwise.descriptor import CODES, Pairwise
from kernlib.families.pairwise.gradients.eager import refuse_out
from kernlib.families.pairwise.request import Request
from kernlib.runtime import rehearsal
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.numbers import plain
from kernlib.runtime.tensors import (
    is_mapped,
    refuse_any_overlap,
    refuse_transforms,
    stand_ins,
)

BLOCK_ENTRIES = 1 << 24  # of the matrix at once in a backward pass, which stores about eight


def run(
    descriptor: Pairwise, a, b, out, accumulate, row_offset: int, col_offset: int, values: dict
) -> torch.Tensor:
    """``epilogue(outer(sum_k ... + sum_c tables[c][a_codes[m,c], b_codes[n,c]]))``, with what
    :func:`kernlib.families.pairwise.operation.run` takes and, among ``values``,

    - ``a_codes`` (M, C) and ``b_codes`` (N, C), or (L, M, C) and (L, N, C), with C the descriptor's
      ``categories``: integers from 0 on, of any strides. int32 and int64 are read as they are;
      others are converted, as are two of different dtypes.
    - ``tables``: (C, S, S) or (L, C, S, S), or a list of C tables (S_c, S_c), of the inputs' dtype
      or that of the arithmetic. A list is packed at each call.

    A code that is below 0, or not below the size of its table, makes NaN of every pair that it is
    part of: nothing outside a table is read, and nothing waits for a device to look at codes.
    Tables need not be symmetric, their entries not positive; the sum may be negative then, of which
    roots are NaN. Sums are summed as those of ``power_sum`` are: no norm is computed anew that
    leaves the range of float32 on the way.

    Gradients of points, tables and hyperparameters are recorded, those of gradients too.

    Raises TypeError and ValueError that name the argument, also for a number inf for p, which has
    no sum; RuntimeError for an ``out`` while gradients are recorded.
    """
    codes, values = arguments.separate(descriptor, values)
    checks.check_tensors(a, b, out)
    refuse_any_overlap(out, **dict(zip(CODES, codes, strict=True)))
    a, tables = arguments.placed(descriptor, a, b, codes)
    values = {name: plain(name, value) for name, value in values.items()}
    request = Request(descriptor, a, b, out, accumulate, row_offset, col_offset, values)
    given = (a, b, *tables[:3], *(v for v in values.values() if isinstance(v, torch.Tensor)))
    if stand_ins(out, *given) or a.is_meta:
        return _by_operator(request, codes)
    if out is None and is_mapped(*given):
        return formula.matrix(request, tables).to(a.dtype)
    refuse_transforms(checks.MAPPED_ALONE, out=out, a=a, b=b, **tables.tensors())
    arguments.check_exponents(descriptor, values)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*given, *_some(out))):
        refuse_out(a, b, out, {"tables": tables.flat, **values})
        matrix.check(request)
        if _are_functorch_transforms_active():  # of which a Function knows none
            return formula.matrix(request, tables).to(a.dtype)
        names = tuple(name for name, v in values.items() if isinstance(v, torch.Tensor))
        call = Call(request._replace(a=None, b=None), tables._replace(flat=None), names)
        return _Recorded.apply(call, a, b, tables.flat, *(values[name] for name in names))
    return matrix.execute(request, tables)


def _by_operator(request: Request, codes: tuple) -> torch.Tensor:
    """Of tensors without memory, of which the operator knows as much."""
    if rehearsal.current() is not None:
        checks.refuse_categories(request.descriptor)
    from kernlib import run

    descriptor, a, b, out, accumulate, row_offset, col_offset, values = request
    options = {"row_offset": row_offset, "col_offset": col_offset, "accumulate": accumulate}
    named = dict(zip(CODES, codes, strict=True))
    return run.pairwise_operators.run(descriptor, a, b, out=out, **options, **named, **values)


def _some(t: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return () if t is None else (t,)


class Call(NamedTuple):
    """What of a call is not given to autograd: ``names`` are those of hyperparameters that are."""

    request: Request
    tables: Tables
    names: tuple[str, ...]

    def computed(self, *sides) -> torch.Tensor:
        """The matrix, by operators that are differentiable."""
        return formula.matrix(*self.of(*sides))

    def of(self, a, b, flat, *tensors) -> tuple[Request, Tables]:
        """The call of these."""
        values = self.request.hyperparameters | dict(zip(self.names, tensors, strict=True))
        request = self.request._replace(a=a, b=b, hyperparameters=values)
        return request, self.tables._replace(flat=flat)

    def of_rows(self, rows: slice) -> Call:
        """For some points of a."""
        offset = self.request.row_offset + rows.start
        request = self.request._replace(row_offset=offset)
        return self._replace(request=request, tables=self.tables.of_rows(rows))


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, a, b, flat, *tensors):
        ctx.call = call
        ctx.save_for_backward(a, b, flat, *tensors)
        return matrix.execute(*call.of(a, b, flat, *tensors))

    @staticmethod
    def backward(ctx, grad):
        needs = ctx.needs_input_grad[1:]
        return None, *gradients(ctx.call, needs, ctx.saved_tensors, grad)


def gradients(call, needs: tuple, saved: tuple, grad: torch.Tensor) -> list:
    """Those of ``saved``, None for what needs none: of a call, or of something else that has its
    ``of_rows`` and ``computed``, whose result has as many rows as a."""
    made = _made_again if torch.is_grad_enabled() else _by_blocks
    return made(call, needs, saved, grad)


def _made_again(call, needs: tuple, saved: tuple, grad) -> list:
    """The gradients, recorded."""
    # Aliases, lest two of the arguments be one tensor.
    sides = [t.view_as(t) if need else t for t, need in zip(saved, needs, strict=True)]
    return _gradients(call, needs, sides, grad, create_graph=True)


def _by_blocks(call, needs: tuple, saved: tuple, grad: torch.Tensor) -> list:
    """The gradients, a block of rows of the matrix at a time, in the arithmetic's dtype."""
    rows = saved[0].shape[-2]
    found = [
        torch.zeros(t.shape, dtype=_wide(t), device=t.device) if need else None
        for t, need in zip(saved, needs, strict=True)
    ]
    batch = max(t.shape[0] if t.dim() == 3 else 1 for t in (*saved[:2], grad))
    step = max(1, BLOCK_ENTRIES // max(1, saved[1].shape[-2] * batch))
    for start in range(0, rows if grad.numel() else 0, step):
        part = slice(start, start + step)
        a, *others = (t.detach() for t in saved)
        sides = [t.to(_wide(t)) for t in (a[..., part, :], *others)]
        with torch.enable_grad():
            sides = [t.detach().requires_grad_(need) for t, need in zip(sides, needs, strict=True)]
            made = _gradients(call.of_rows(part), needs, sides, grad[..., part, :])
        for place, each in enumerate(made):
            if each is not None:
                whole = found[place]
                (whole[..., part, :] if place == 0 else whole).add_(each)
    return [
        None if total is None else total.to(t.dtype) for total, t in zip(found, saved, strict=True)
    ]


def _wide(t: torch.Tensor) -> torch.dtype:
    return accumulator(t.dtype) if t.dtype.is_floating_point else t.dtype


def _gradients(call, needs, sides, grad, create_graph: bool = False) -> list:
    """Those of ``sides`` which are needed; None for others."""
    out = call.computed(*sides)
    wanted = [side for side, need in zip(sides, needs, strict=True) if need]
    options = {"create_graph": create_graph, "allow_unused": True}
    found = iter(torch.autograd.grad(out, wanted, grad.to(out.dtype), **options))
    return [next(found) if need else None for need in needs]

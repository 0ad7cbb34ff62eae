"""Matrices with categories as an operator of ``torch.library``, for whoever records calls and runs
them later. With a gradient to record it is what
:func:`kernlib.families.pairwise.categories.operation.matrix` makes of it."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from kernlib import events
from kernlib.descriptors.text import from_text
from kernlib.families.pairwise import checks
from kernlib.families.pairwise.categories import arguments, operation
from kernlib.families.pairwise.categories.arguments import Tables
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.request import Request
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.operators import register

# Behind the tables what the operators of the family take; ``wide`` asks for the arithmetic's dtype.
_ARGUMENTS = (
    "SymInt[] sizes, bool wide, str descriptor, str names, float[] numbers, Tensor[] tensors, "
    "SymInt row_offset, SymInt col_offset, bool debug"
)


def run(descriptor: Pairwise, a, b, codes: tuple, out, accumulate: bool, given: tuple):
    """:func:`kernlib.families.pairwise.categories.operation.run` by way of the operator, ``given``
    being its arguments from ``descriptor`` on.

    What is wrong with shapes, dtypes and devices is raised here; what is wrong with values, when
    the operator runs.
    """
    a, tables = arguments.placed(descriptor, a, b, codes)
    wide = out is not None and out.dtype == accumulator(a.dtype)
    placed = tables.a_codes, tables.b_codes, tables.flat, list(tables.sizes)
    if out is None:
        return _matrix(a, b, *placed, wide, *given)
    names, numbers, tensors = given[1:4]
    named = dict(zip(names.split()[len(numbers) :], tensors, strict=True))
    if torch.is_grad_enabled():
        checks.refuse_out(out, a=a, b=b, out=out, tables=tables.flat, **named)
    shape = checks.check_shapes(a, b, out, named)
    made = _matrix(a, b, *placed, wide, *given).view(shape)
    out.copy_(out + made if accumulate else made)
    return out


def _read(a, b, a_codes, b_codes, flat, sizes, descriptor, names, numbers, tensors, rows, columns):
    values = dict(zip(names.split(), (*(numbers or ()), *(tensors or ())), strict=True))
    request = Request(from_text(descriptor), a, b, None, False, rows, columns, values)
    return request, Tables(a_codes, b_codes, flat, tuple(sizes))


def _compute(*given) -> torch.Tensor:
    *first, wide, descriptor, names, numbers, tensors, rows, columns, debug = given
    request, tables = _read(*first, descriptor, names, numbers, tensors, rows, columns)
    arguments.check_exponents(request.descriptor, request.hyperparameters)
    if wide:
        shape, dtype = _shape(request), accumulator(request.a.dtype)
        request = request._replace(out=request.a.new_empty(shape, dtype=dtype))
    with torch.no_grad(), events.on_stderr() if debug else nullcontext():
        return operation.execute(request, tables)


def _shape(request: Request) -> tuple[int, ...]:
    values = request.hyperparameters
    tensors = {name: v for name, v in values.items() if isinstance(v, torch.Tensor)}
    return checks.check_shapes(request.a, request.b, None, tensors)


def _fake(*given) -> torch.Tensor:
    *first, wide, descriptor, names, numbers, tensors, rows, columns, _ = given
    request, _ = _read(*first, descriptor, names, numbers, tensors, rows, columns)
    a = request.a
    return a.new_empty(_shape(request), dtype=accumulator(a.dtype) if wide else a.dtype)


def _recorded(*given) -> torch.Tensor | None:
    *first, _, descriptor, names, numbers, tensors, rows, columns, _ = given
    if not any(t.requires_grad for t in (*first[:5], *(tensors or ()))):
        return None
    request, tables = _read(*first, descriptor, names, numbers, tensors, rows, columns)
    made = operation.matrix(request, tables)
    return made.to(request.a.dtype).contiguous()


_matrix = register(
    "pairwise_categories",
    f"(Tensor a, Tensor b, Tensor a_codes, Tensor b_codes, Tensor flat, {_ARGUMENTS}) -> Tensor",
    _compute,
    _fake,
    recorded=_recorded,
)

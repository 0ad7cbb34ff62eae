"""Matrices with categories as an operator of ``torch.library``, for whoever records calls and runs
them later. With a gradient to record it is what
:func:`kernlib.families.pairwise.categories.operation.matrix` makes of it."""

from __future__ import annotations

import torch

from kernlib.families.pairwise import checks
from kernlib.families.pairwise.categories import arguments, operation
from kernlib.families.pairwise.categories.arguments import Tables
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.request import Request
from kernlib.runtime.arguments import tensors_of
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.operators import register
from kernlib.runtime.schema import DESCRIPTOR, HYPERPARAMETERS, Kind, Schema


def run(descriptor: Pairwise, a, b, codes: tuple, out, accumulate: bool, options: tuple):
    """:func:`kernlib.families.pairwise.categories.operation.run` by way of the operator, whose
    fields from ``descriptor`` on are ``options``.

    What is wrong with shapes, dtypes and devices is raised here; what is wrong with values, when
    the operator runs.
    """
    a, tables = arguments.placed(descriptor, a, b, codes)
    wide = out is not None and out.dtype == accumulator(a.dtype)
    fields = a, b, *_TABLES.flatten(tables), wide, *options
    if out is None:
        return _matrix.overload(*fields)
    names, numbers, tensors = options[1:4]
    named = dict(zip(names.split()[len(numbers) :], tensors, strict=True))
    if torch.is_grad_enabled():
        checks.refuse_out(out, a=a, b=b, out=out, tables=tables.flat, **named)
    shape = checks.check_shapes(a, b, out, named)
    k = _matrix.overload(*fields).view(shape)
    out.copy_(out + k if accumulate else k)
    return out


def _request(a, b, descriptor, values: dict, rows: int, columns: int) -> Request:
    return Request(descriptor, a, b, None, False, rows, columns, values)


def _compute(a, b, tables, wide, descriptor, values, rows, columns, debug) -> torch.Tensor:
    request = _request(a, b, descriptor, values, rows, columns)
    arguments.check_exponents(descriptor, values)
    if wide:
        request = request._replace(
            out=a.new_empty(_shape(a, b, values), dtype=accumulator(a.dtype))
        )
    with torch.no_grad():
        return operation.execute(request, tables)


def _shape(a, b, values: dict) -> tuple[int, ...]:
    return checks.check_shapes(a, b, None, tensors_of(values))


def _fake(a, b, tables, wide, descriptor, values, *options) -> torch.Tensor:
    return a.new_empty(_shape(a, b, values), dtype=accumulator(a.dtype) if wide else a.dtype)


def _recorded(a, b, tables, wide, descriptor, values, rows, columns, debug) -> torch.Tensor:
    k = operation.matrix(_request(a, b, descriptor, values, rows, columns), tables)
    return k.to(a.dtype).contiguous()


_TABLES = Kind(
    "tables",
    ("Tensor a_codes", "Tensor b_codes", "Tensor flat", "SymInt[] sizes"),
    lambda tables: (tables.a_codes, tables.b_codes, tables.flat, [*tables.sizes]),
    lambda a_codes, b_codes, flat, sizes: Tables(a_codes, b_codes, flat, tuple(sizes)),
)
# ``wide`` asks for the arithmetic's dtype.
_MATRIX = Schema(
    "Tensor a", "Tensor b", _TABLES, "bool wide", DESCRIPTOR, HYPERPARAMETERS, "SymInt row_offset",
    "SymInt col_offset", "bool debug",
)  # fmt: skip
_matrix = register("pairwise_categories", _MATRIX, "Tensor", _compute, _fake, recorded=_recorded)

"""The pairwise op as two operators of ``torch.library``, for whoever records calls and runs them
later: torch.compile, torch.export, make_fx, fake tensors. With a gradient to record the first is
the two of :mod:`kernlib.families.pairwise.gradients.operators` and torch's own.

Eager calls pass them by (the dispatcher costs 6 to 11 us a call), so this module is imported, and
the operators registered, when a call is first recorded. A process that only loads an exported
program imports it before ``torch.export.load``.
"""

from __future__ import annotations

from functools import partial

import torch

from kernlib.descriptors.base import check_flag
from kernlib.families.pairwise import checks, mapped, operation, per_point
from kernlib.families.pairwise import feature_map as pairwise_features
from kernlib.families.pairwise.categories import arguments as category_arguments
from kernlib.families.pairwise.categories import operators as categories
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.formula import operation as formulas
from kernlib.families.pairwise.gradients.operators import recorded
from kernlib.runtime.arguments import tensors_of
from kernlib.runtime.operators import register
from kernlib.runtime.schema import DESCRIPTOR, HYPERPARAMETERS, Schema, flattened, placed

_OPTIONS = DESCRIPTOR, HYPERPARAMETERS, "SymInt row_offset", "SymInt col_offset", "bool debug"
# After an error of a traced call Dynamo would trace what the operators run: 5 s, for nothing.
_run = torch.compiler.disable(operation.run)


def run(
    descriptor: Pairwise,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    *more: torch.Tensor,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    row_offset: int = 0,
    col_offset: int = 0,
    debug: bool = False,
    feature_map: torch.Tensor | None = None,
    lengthscale: torch.Tensor | None = None,
    **hyperparameters,
) -> torch.Tensor:
    """:func:`kernlib.families.pairwise.operation.run` by way of the operators.

    What is wrong with shapes, dtypes and devices is raised here; what is wrong with values, or
    does not fit the descriptor, when the operator runs.
    """
    if descriptor.package:
        points = [t for t in (a, b) if t is not None]
        options = {"feature_map": feature_map, "lengthscale": lengthscale}
        return formulas.run(
            descriptor, *points, *more, out=out, debug=debug, **options, **hyperparameters
        )
    if more:
        checks.refuse_more(descriptor, more)
    if a is None:
        checks.refuse_missing(descriptor)
    checks.check_tensors(a, b, out)
    if lengthscale is not None:
        a, b, hyperparameters = pairwise_features.scaled(
            descriptor, lengthscale, feature_map, a, b, out, hyperparameters
        )
    elif feature_map is not None:
        a, b = pairwise_features.apply(feature_map, a, b, out)
    check_flag("accumulate", accumulate)
    if accumulate and out is None:
        raise ValueError("accumulate=True adds to out, and no out is given")
    offsets = row_offset, col_offset
    checks.check_recorded_offsets(*offsets)
    again = partial(run, debug=debug)
    result = per_point.computed(again, descriptor, a, b, out, accumulate, *offsets, hyperparameters)
    if result is not None:
        return result
    codes = None
    if descriptor.categories:
        codes, hyperparameters = category_arguments.separate(descriptor, hyperparameters)
    arguments = descriptor.text, *separate(hyperparameters, a.device), *offsets, debug
    if codes is not None:
        return categories.run(descriptor, a, b, codes, out, accumulate, arguments)
    if out is None:
        return _new.overload(a, b, *arguments)
    _into.overload(a, b, out, accumulate, *arguments)
    return out


def separate(values: dict, device: torch.device) -> tuple[str, list, list]:
    """Names, numbers and tensors of hyperparameters, tensors of the host on the device. Raises
    TypeError for what is neither number nor tensor."""
    names, numbers, tensors = flattened(values, 1)
    return names, numbers, [placed(t, device) if t.device.type == "cpu" else t for t in tensors]


def _compute(a, b, descriptor, values: dict, rows: int, columns: int, debug: bool) -> torch.Tensor:
    with torch.no_grad():  # one to record has not come here
        return _run(descriptor, a, b, row_offset=rows, col_offset=columns, **values)


def _compute_into(a, b, out, accumulate, descriptor, values, rows, columns, debug) -> None:
    options = {"out": out, "accumulate": accumulate, "row_offset": rows, "col_offset": columns}
    _run(descriptor, a, b, **options, **values)


def _recorded(a, b, descriptor, values: dict, rows, columns, debug) -> torch.Tensor:
    """With a gradient to record the operator is what
    :func:`kernlib.families.pairwise.gradients.operators.recorded` does."""
    _check_recorded(descriptor, a, b, rows, columns, values)
    return recorded(descriptor, a, b, values, rows - columns)


def _check_recorded(descriptor, a, b, rows, columns, values: dict) -> None:
    """The checks of the operator's run, without those of values, whose tensors may have no
    memory."""
    offsets = (rows, columns) if type(rows) is type(columns) is int else (0, 0)
    numbers = {name: value if type(value) is float else 1.0 for name, value in values.items()}
    checks.check_call(descriptor, a, b, None, False, *offsets, numbers)
    checks.check_shapes(a, b, None, tensors_of(values))


def _shape(descriptor, a, b, out, values: dict) -> tuple:
    """The output's shape. Raises what eager calls raise for names, shapes, dtypes and devices, and
    for an ``out`` while gradients are recorded."""
    tensors = tensors_of(values)
    checks.check_names(descriptor, [*tensors])
    if torch.is_grad_enabled():
        checks.refuse_out(out, a=a, b=b, out=out, **tensors)
    return checks.check_shapes(a, b, out, tensors)


def _fake(a, b, descriptor, values: dict, *options) -> torch.Tensor:
    return a.new_empty(_shape(descriptor, a, b, None, values))


def _fake_into(a, b, out, accumulate, descriptor, values: dict, *options) -> None:
    _shape(descriptor, a, b, out, values)


def _mapped(info, dims, a, b, descriptor, values: dict, *options) -> tuple[torch.Tensor, int]:
    points = [(a, dims.a), (b, dims.b)]
    batch, (a, b), values = mapped.spread(info.batch_size, points, values, dims.tensors)
    return batch.restored(_new(a, b, descriptor, values, *options), 2), 0


def _call_request(
    descriptor, a, b, out, accumulate, row_offset, col_offset, values: dict
) -> torch.Tensor:
    offsets = {"row_offset": row_offset, "col_offset": col_offset}
    return run(descriptor, a, b, out=out, accumulate=accumulate, **offsets, **values)


BY_NAME = {"pairwise": _call_request}
_new = register(
    "pairwise",
    Schema("Tensor a", "Tensor? b", *_OPTIONS),
    "Tensor",
    _compute,
    _fake,
    recorded=_recorded,
    vmap=_mapped,
)
_into = register(
    "pairwise_out",
    Schema("Tensor a", "Tensor? b", "Tensor(a!) out", "bool accumulate", *_OPTIONS),
    "()",
    _compute_into,
    _fake_into,
)

"""The pairwise op as two operators of ``torch.library``, for whoever records calls and runs them
later: torch.compile, torch.export, make_fx, fake tensors. With a gradient to record the first is
the two of :mod:`kernlib.families.pairwise.gradients.operators` and torch's own.

Eager calls pass them by (the dispatcher costs 6 to 11 us a call), so this module is imported, and
the operators registered, when a call is first recorded. A process that only loads an exported
program imports it before ``torch.export.load``.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch

from kernlib import events
from kernlib.descriptors.base import check_flag
from kernlib.descriptors.text import from_text
from kernlib.families.pairwise import checks, mapped, operation, per_point
from kernlib.families.pairwise import feature_map as pairwise_features
from kernlib.families.pairwise.categories import arguments as category_arguments
from kernlib.families.pairwise.categories import operators as categories
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.gradients.operators import recorded
from kernlib.runtime.numbers import host_value
from kernlib.runtime.operators import register

# ``names`` are those of ``numbers``, then those of ``tensors``, which stay where they are; one text
# with spaces, for torch.jit.trace takes no list of str.
_ARGUMENTS = (
    "str descriptor, str names, float[] numbers, Tensor[] tensors, "
    "SymInt row_offset, SymInt col_offset, bool debug"
)
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
    made = per_point.computed(again, descriptor, a, b, out, accumulate, *offsets, hyperparameters)
    if made is not None:
        return made
    codes = None
    if descriptor.categories:
        codes, hyperparameters = category_arguments.separate(descriptor, hyperparameters)
    given = separate(hyperparameters, a.device)
    arguments = (descriptor.text, *given, row_offset, col_offset, debug)
    if codes is not None:
        return categories.run(descriptor, a, b, codes, out, accumulate, arguments)
    if out is None:
        return _new(a, b, *arguments)
    _into(a, b, out, accumulate, *arguments)
    return out


def separate(hyperparameters: dict, device: torch.device) -> tuple[str, list, list]:
    """Names, numbers and tensors. Raises TypeError for what is neither number nor tensor."""
    tensors = {k: v for k, v in hyperparameters.items() if isinstance(v, torch.Tensor)}
    numbers = {k: _number(k, v) for k, v in hyperparameters.items() if k not in tensors}
    # The copy of a host tensor is recorded too: a CUDA graph can leave it out, where the operator
    # itself would have to refuse a host tensor while it is captured.
    placed = [v.to(device) if v.device.type == "cpu" else v for v in tensors.values()]
    return " ".join([*numbers, *tensors]), [*numbers.values()], placed


def _number(name: str, value) -> float:
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return torch.sym_float(value)
    return host_value(name, value)


def _call(a, b, out, accumulate, descriptor, names, numbers, tensors, rows, columns, debug):
    """The eager call that an operator's arguments stand for. AOTInductor hands over None for an
    empty list."""
    values = dict(zip(names.split(), (*(numbers or ()), *(tensors or ())), strict=True))
    with events.on_stderr() if debug else nullcontext():
        return _run(
            from_text(descriptor), a, b, out=out, accumulate=accumulate,
            row_offset=rows, col_offset=columns, **values,
        )  # fmt: skip


def _call_new(a, b, *arguments):
    with torch.no_grad():  # one to record has not come here
        return _call(a, b, None, False, *arguments)


def _call_into(a, b, out, accumulate, *arguments):
    _call(a, b, out, accumulate, *arguments)


def _new_recorded(a, b, descriptor, names, numbers, tensors, rows, columns, debug):
    """With a gradient to record the operator is what
    :func:`kernlib.families.pairwise.gradients.operators.recorded` does."""
    needed = (a, b, *(tensors or ()))
    if not any(t is not None and t.requires_grad for t in needed):
        return None
    values = dict(zip(names.split(), (*(numbers or ()), *needed[2:]), strict=True))
    made = from_text(descriptor)
    _check_recorded(made, a, b, rows, columns, values)
    return recorded(made, a, b, values, rows - columns)


def _check_recorded(descriptor, a, b, rows, columns, values: dict) -> None:
    """What the operator checks when it runs, but for values that may be of no tensor in memory."""
    offsets = (rows, columns) if type(rows) is type(columns) is int else (0, 0)
    numbers = {name: value if type(value) is float else 1.0 for name, value in values.items()}
    checks.check_call(descriptor, a, b, None, False, *offsets, numbers)
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    checks.check_shapes(a, b, None, tensors)


def _shape(a, b, out, names, tensors) -> tuple:
    """The output's shape. Raises what eager calls raise for shapes, dtypes and devices, and for an
    ``out`` while gradients are recorded."""
    given, tensors = names.split(), tensors or ()
    values = dict(zip(given[len(given) - len(tensors) :], tensors, strict=True))
    if torch.is_grad_enabled():
        checks.refuse_out(out, a=a, b=b, out=out, **values)
    return checks.check_shapes(a, b, out, values)


def _fake_new(a, b, descriptor, names, numbers, tensors, row_offset, col_offset, debug):
    checks.check_names(from_text(descriptor), names.split()[len(numbers) :])
    return a.new_empty(_shape(a, b, None, names, tensors))


def _vmap_new(
    info, dims, a, b, descriptor, names, numbers, tensors, rows, columns, debug
) -> tuple[torch.Tensor, int]:
    points = [(a, dims[0]), (b, dims[1])]
    batch, (a, b), tensors = mapped.spread(info.batch_size, points, tensors, dims[5])
    found = _new(a, b, descriptor, names, numbers, tensors, rows, columns, debug)
    return batch.restored(found, 2), 0


def _fake_into(a, b, out, accumulate, descriptor, names, numbers, tensors, *rest):
    checks.check_names(from_text(descriptor), names.split()[len(numbers) :])
    _shape(a, b, out, names, tensors)


def _call_request(
    descriptor, a, b, out, accumulate, row_offset, col_offset, values: dict
) -> torch.Tensor:
    offsets = {"row_offset": row_offset, "col_offset": col_offset}
    return run(descriptor, a, b, out=out, accumulate=accumulate, **offsets, **values)


BY_NAME = {"pairwise": _call_request}
_new = register(
    "pairwise",
    f"(Tensor a, Tensor? b, {_ARGUMENTS}) -> Tensor",
    _call_new,
    _fake_new,
    recorded=_new_recorded,
    vmap=_vmap_new,
)
_into = register(
    "pairwise_out",
    f"(Tensor a, Tensor? b, Tensor(a!) out, bool accumulate, {_ARGUMENTS}) -> ()",
    _call_into,
    _fake_into,
)

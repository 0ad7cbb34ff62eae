"""Reductions of kernel matrices as operators of ``torch.library``, for whoever records calls and
runs them later: torch.compile, torch.export, make_fx, fake tensors. Eager calls pass by.

``pairwise_reduce`` is a product, a sum or a log-sum-exp in the arithmetic's dtype,
``pairwise_reduce_gradient`` gives the gradients that its text ``wanted`` names, and
``pairwise_choose`` the values and places of the k smallest or largest entries of each row.
"""

from __future__ import annotations

import torch
from torch._C import _are_functorch_transforms_active

from kernlib.families.pairwise import mapped
from kernlib.families.pairwise.checks import check_names, check_recorded_offsets
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.operators import separate
from kernlib.families.pairwise.reductions import arguments as checks
from kernlib.families.pairwise.reductions import gradients, operation
from kernlib.families.pairwise.reductions.arguments import Request
from kernlib.runtime.arguments import tensors_of
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.operators import register
from kernlib.runtime.schema import DESCRIPTOR, HYPERPARAMETERS, Schema
from kernlib.runtime.tensors import refuse_any_overlap

_OPTIONS = "str reduction", DESCRIPTOR, HYPERPARAMETERS, "SymInt row_offset", "SymInt col_offset"
# After an error of a traced call Dynamo would trace what the operators run.
_run = torch.compiler.disable(operation.run)
_chosen = torch.compiler.disable(operation.chosen)


def run(
    reduction: str, descriptor: Pairwise, a, b, v, out, row_offset, col_offset, values, wide=False
) -> torch.Tensor:
    """:func:`kernlib.families.pairwise.reductions.operation.run`, but for ``min``, by way of the
    operators, its gradient recorded.

    What is wrong with shapes, dtypes and devices is raised here; what is wrong with values, or
    does not fit the descriptor, when the operator runs.
    """
    checks.check_tensors(descriptor, a, b, v)
    check_recorded_offsets(row_offset, col_offset)
    descriptor, b = checks.sides(descriptor, a, b, row_offset, col_offset)
    fields = separate(values, a.device)
    if out is not None and torch.is_grad_enabled() and _any_requires(a, b, v, out, *fields[2]):
        gradients.refuse_out(out)
    result = _reduce.overload(a, b, v, reduction, descriptor.text, *fields, row_offset, col_offset)
    if out is None:
        return result if wide else result.to(a.dtype)
    checks.check_result(out, tuple(result.shape), a)
    refuse_any_overlap(out, a=a, b=b, v=v, **values)
    return out.copy_(result)


def choose(
    reduction: str, descriptor: Pairwise, a, b, k: int, largest: bool, rows, columns, values: dict
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`kernlib.families.pairwise.reductions.operation.choose` by way of the operators."""
    checks.check_tensors(descriptor, a, b, None)
    check_recorded_offsets(rows, columns)
    descriptor, b = checks.sides(descriptor, a, b, rows, columns)
    names, numbers, tensors = separate(values, a.device)
    # A compiled call that raises within torch.no_grad() leaves gradients off (torch 2.13).
    x, y, *constants = (t.detach() for t in (a, b, *tensors))
    options = reduction, descriptor.text, names, numbers, constants, rows, columns
    entries, places = _choose.overload(x, y, k, largest, *options)
    # Within vmap, and a compiled torch.func.grad, tensors do not say what is differentiated.
    recorded = _any_requires(a, b, *tensors) or _are_functorch_transforms_active()
    if torch.is_grad_enabled() and recorded:
        named = dict(zip(names.split(), (*numbers, *tensors), strict=True))
        request = Request(descriptor, a, b, None, rows, columns, named)
        batched = places if places.dim() == 3 else places[None]
        entries = operation.pair_values(request, batched).view(places.shape)
    entries = entries.to(a.dtype)
    return (entries, places) if reduction == "topk" else (entries.squeeze(-1), places.squeeze(-1))


def _call_request(
    reduction, descriptor, a, b, v, out, row_offset, col_offset, values: dict, wide: bool
):
    offsets = row_offset, col_offset
    if reduction == "min":
        return choose(reduction, descriptor, a, b, 1, False, *offsets, values)
    return run(reduction, descriptor, a, b, v, out, *offsets, values, wide)


BY_NAME = {"pairwise_reduce": _call_request}


def _any_requires(*tensors) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


# What the operators compute.


def _compute(a, b, v, reduction, descriptor, values: dict, rows, columns) -> torch.Tensor:
    with torch.no_grad():  # one to record has not come here
        return _run(reduction, descriptor, a, b, v, None, rows, columns, values, wide=True)


def _compute_gradient(
    grad, result, a, b, v, wanted, reduction, descriptor, values: dict, rows, columns
) -> list[torch.Tensor]:
    request = checks.request_of(descriptor, a, b, v, rows, columns, values)
    shape, names = checks.shape_of(request, reduction), wanted.split()
    size = (shape.batch, shape.m, *((shape.columns,) if v is not None else ()))
    grads = gradients.gradients(
        reduction, request, shape, names, grad.reshape(size), result.reshape(size)
    )
    tensors = {"a": a, "b": b, "v": v, **values}
    return [grads[name].reshape(tensors[name].shape).contiguous() for name in names]


def _compute_gradient_alone(*arguments):
    """Without a record. Within, gradients of blocks are, so the dispatcher must not pass autograd
    by, as it does inside of an operator."""
    keys, guard = torch._C.DispatchKey, torch._C._SetExcludeDispatchKeyGuard
    with (
        torch.no_grad(),
        guard(keys.AutogradFunctionality, False),
        guard(keys.ADInplaceOrView, False),
    ):
        return _compute_gradient(*arguments)


def _compute_choice(a, b, k, largest, reduction, descriptor, values: dict, rows, columns) -> tuple:
    request = checks.request_of(descriptor, a, b, None, rows, columns, values)
    return tuple(t.contiguous() for t in _chosen(reduction, request, k, largest))


# Their shapes.


def _fake(a, b, v, reduction, descriptor, values: dict, *offsets) -> torch.Tensor:
    tensors = tensors_of(values)
    check_names(descriptor, [*tensors])
    size = checks.result_shape(a, b, v, tensors, reduction)
    return a.new_empty(size, dtype=accumulator(a.dtype))


def _fake_gradient(
    grad, result, a, b, v, wanted, reduction, descriptor, values: dict, *offsets
) -> list[torch.Tensor]:
    tensors = {"a": a, "b": b, "v": v, **values}
    return [tensors[name].new_empty(tensors[name].shape) for name in wanted.split()]


def _fake_choice(a, b, k, largest, reduction, descriptor, values: dict, *offsets) -> tuple:
    tensors = tensors_of(values)
    check_names(descriptor, [*tensors])
    shape = (*checks.result_shape(a, b, None, tensors), k)
    places = a.new_empty(shape, dtype=torch.int64)
    return a.new_empty(shape, dtype=accumulator(a.dtype)), places


# Mapped calls.


def _mapped(info, dims, a, b, v, reduction, descriptor, values: dict, *offsets):
    single = v is not None and v.dim() - (dims.v is not None) == 1
    v = v.unsqueeze(-1) if single else v  # an axis counts from the front
    points = [(a, dims.a), (b, dims.b), (v, dims.v)]
    batch, (a, b, v), values = mapped.spread(info.batch_size, points, values, dims.tensors)
    result = _reduce(a, b, v, reduction, descriptor, values, *offsets)
    result = batch.restored(result, 1 if v is None else 2)
    return (result.squeeze(-1) if single else result), 0


def _mapped_choice(
    info, dims, a, b, k, largest, reduction, descriptor, values: dict, *offsets
) -> tuple:
    points = [(a, dims.a), (b, dims.b)]
    batch, (a, b), values = mapped.spread(info.batch_size, points, values, dims.tensors)
    pair = _choose(a, b, k, largest, reduction, descriptor, values, *offsets)
    return tuple(batch.restored(t, 2) for t in pair), (0, 0)


# Their gradients.


def _backward(saved, grad) -> dict:
    named = tensors_of(saved.parameters)
    needs = dict(zip(named, saved.needs.tensors or (), strict=True))
    needs = {"a": saved.needs.a, "b": saved.needs.b, "v": saved.needs.v, **needs}
    names = [name for name, need in needs.items() if need]
    answers = _gradient(
        grad, *saved.outputs, saved.a, saved.b, saved.v, " ".join(names), saved.reduction,
        saved.descriptor, saved.parameters, saved.row_offset, saved.col_offset,
    )  # fmt: skip
    grads = dict(zip(names, answers, strict=True))
    points = {name: grads.get(name) for name in ("a", "b", "v")}
    return {**points, "tensors": [grads.get(name) for name in named]}


_reduce = register(
    "pairwise_reduce",
    Schema("Tensor a", "Tensor b", "Tensor? v", *_OPTIONS),
    "Tensor",
    _compute,
    _fake,
    saves=("a", "b", "v", "descriptor", "parameters"),
    outputs=1,
    backward=_backward,
    vmap=_mapped,
)
_GRADIENT = "Tensor gradient", "Tensor result", "Tensor a", "Tensor b", "Tensor? v", "str wanted"
_gradient = register(
    "pairwise_reduce_gradient",
    Schema(*_GRADIENT, *_OPTIONS),
    "Tensor[]",
    _compute_gradient_alone,
    _fake_gradient,
    # Gradients of gradients are those of the sums and products that they consist of.
    recorded=_compute_gradient,
)
_choose = register(
    "pairwise_choose",
    Schema("Tensor a", "Tensor b", "SymInt k", "bool largest", *_OPTIONS),
    "(Tensor, Tensor)",
    _compute_choice,
    _fake_choice,
    vmap=_mapped_choice,
)

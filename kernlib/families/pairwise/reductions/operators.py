"""Reductions of kernel matrices as operators of ``torch.library``, for whoever records calls and
runs them later: torch.compile, torch.export, make_fx, fake tensors. Eager calls pass by.

``pairwise_reduce`` is a product, a sum or a log-sum-exp in the arithmetic's dtype,
``pairwise_reduce_gradient`` gives the gradients that its text ``wanted`` names, and
``pairwise_choose`` the values and places of the k smallest or largest entries of each row.
"""

from __future__ import annotations

import torch
from torch._C import _are_functorch_transforms_active

from kernlib.descriptors.text import from_text
from kernlib.families.pairwise import mapped
from kernlib.families.pairwise.checks import check_names, check_recorded_offsets
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.operators import separate
from kernlib.families.pairwise.reductions import arguments as checks
from kernlib.families.pairwise.reductions import gradients, operation
from kernlib.families.pairwise.reductions.arguments import Request
from kernlib.runtime import rehearsal
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.operators import register
from kernlib.runtime.tensors import refuse_any_overlap

# ``names`` are those of ``numbers``, then those of ``tensors``, as of kernlib::pairwise.
_ARGUMENTS = (
    "str descriptor, str names, float[] numbers, Tensor[] tensors, "
    "SymInt row_offset, SymInt col_offset"
)
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
    made, b = checks.sides(descriptor, a, b, row_offset, col_offset)
    given = separate(values, a.device)
    if out is not None and torch.is_grad_enabled() and _any_requires(a, b, v, out, *given[2]):
        gradients.refuse_out(out)
    found = _reduce(a, b, v, reduction, made.text, *given, row_offset, col_offset)
    if out is None:
        return found if wide else found.to(a.dtype)
    checks.check_result(out, tuple(found.shape), a)
    refuse_any_overlap(out, a=a, b=b, v=v, **values)
    return out.copy_(found)


def choose(
    reduction: str, descriptor: Pairwise, a, b, k: int, largest: bool, rows, columns, values: dict
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`kernlib.families.pairwise.reductions.operation.choose` by way of the operators."""
    checks.check_tensors(descriptor, a, b, None)
    check_recorded_offsets(rows, columns)
    made, b = checks.sides(descriptor, a, b, rows, columns)
    names, numbers, tensors = separate(values, a.device)
    # A compiled call that raises within torch.no_grad() leaves gradients off (torch 2.13).
    x, y, *constants = (t.detach() for t in (a, b, *tensors))
    options = reduction, made.text, names, numbers, constants, rows, columns
    found, places = _choose(x, y, k, largest, *options)
    # Within vmap, and a compiled torch.func.grad, tensors do not say what is differentiated.
    recorded = _any_requires(a, b, *tensors) or _are_functorch_transforms_active()
    if torch.is_grad_enabled() and recorded:
        request = Request(made, a, b, None, rows, columns, _named(names, numbers, tensors))
        batched = places if places.dim() == 3 else places[None]
        found = operation.pair_values(request, batched).view(places.shape)
    found = found.to(a.dtype)
    return (found, places) if reduction == "topk" else (found.squeeze(-1), places.squeeze(-1))


def _call_request(
    reduction, descriptor, a, b, v, out, row_offset, col_offset, values: dict, wide: bool
):
    offsets = row_offset, col_offset
    if a.is_meta and rehearsal.current() is not None:
        return operation.rehearsed(reduction, descriptor, a, b, v, out, *offsets, values, wide)
    if reduction == "min":
        return choose(reduction, descriptor, a, b, 1, False, *offsets, values)
    return run(reduction, descriptor, a, b, v, out, *offsets, values, wide)


BY_NAME = {"pairwise_reduce": _call_request}


def _any_requires(*tensors) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


def _named(names: str, numbers, tensors) -> dict:
    """The hyperparameters by name. AOTInductor hands over None for an empty list."""
    return dict(zip(names.split(), (*(numbers or ()), *(tensors or ())), strict=True))


def _tensors(names: str, tensors) -> dict[str, torch.Tensor]:
    """Those that are tensors by name."""
    listed = names.split()
    return dict(zip(listed[len(listed) - len(tensors or ()) :], tensors or (), strict=True))


# What the operators compute.


def _compute(a, b, v, reduction, descriptor, names, numbers, tensors, rows, columns):
    values = _named(names, numbers, tensors)
    with torch.no_grad():  # one to record has not come here
        return _run(
            reduction, from_text(descriptor), a, b, v, None, rows, columns, values, wide=True
        )


def _compute_gradient(
    gradient, result, a, b, v, wanted, reduction, descriptor, names, numbers, tensors, rows, columns
):
    values = _named(names, numbers, tensors)
    request = checks.request_of(from_text(descriptor), a, b, v, rows, columns, values)
    shape = checks.shape_of(request)
    size = (shape.batch, shape.m, *((shape.columns,) if v is not None else ()))
    made = gradients.gradients(
        reduction, request, shape, wanted.split(), gradient.reshape(size), result.reshape(size)
    )
    given = {"a": a, "b": b, "v": v, **values}
    return [made[name].reshape(given[name].shape).contiguous() for name in wanted.split()]


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


def _compute_choice(
    a, b, k, largest, reduction, descriptor, names, numbers, tensors, rows, columns
):
    values = _named(names, numbers, tensors)
    request = checks.request_of(from_text(descriptor), a, b, None, rows, columns, values)
    return tuple(t.contiguous() for t in _chosen(reduction, request, k, largest))


# Their shapes.


def _fake(a, b, v, reduction, descriptor, names, numbers, tensors, *offsets):
    check_names(from_text(descriptor), names.split()[len(numbers) :])
    shape = checks.result_shape(a, b, v, _tensors(names, tensors))
    return a.new_empty(shape, dtype=accumulator(a.dtype))


def _fake_gradient(
    gradient, result, a, b, v, wanted, reduction, descriptor, names, numbers, tensors, *offsets
):
    given = {"a": a, "b": b, "v": v, **_tensors(names, tensors)}
    return [given[name].new_empty(given[name].shape) for name in wanted.split()]


def _fake_choice(a, b, k, largest, reduction, descriptor, names, numbers, tensors, *offsets):
    check_names(from_text(descriptor), names.split()[len(numbers) :])
    shape = (*checks.result_shape(a, b, None, _tensors(names, tensors)), k)
    places = a.new_empty(shape, dtype=torch.int64)
    return a.new_empty(shape, dtype=accumulator(a.dtype)), places


# Mapped calls.


def _vmap(info, dims, a, b, v, reduction, descriptor, names, numbers, tensors, rows, columns):
    single = v is not None and v.dim() - (dims[2] is not None) == 1
    v = v.unsqueeze(-1) if single else v  # an axis counts from the front
    points = [(a, dims[0]), (b, dims[1]), (v, dims[2])]
    batch, (a, b, v), tensors = mapped.spread(info.batch_size, points, tensors, dims[7])
    found = _reduce(a, b, v, reduction, descriptor, names, numbers, tensors, rows, columns)
    found = batch.restored(found, 1 if v is None else 2)
    return (found.squeeze(-1) if single else found), 0


def _vmap_choice(
    info, dims, a, b, k, largest, reduction, descriptor, names, numbers, tensors, rows, columns
):
    points = [(a, dims[0]), (b, dims[1])]
    batch, (a, b), tensors = mapped.spread(info.batch_size, points, tensors, dims[8])
    options = reduction, descriptor, names, numbers, tensors, rows, columns
    return tuple(batch.restored(t, 2) for t in _choose(a, b, k, largest, *options)), (0, 0)


# Their gradients.


def _save(ctx, inputs, output) -> None:
    a, b, v, ctx.reduction, ctx.descriptor, ctx.names, ctx.numbers, tensors, *ctx.offsets = inputs
    ctx.save_for_backward(a, b, v, output, *tensors)


def _backward(ctx, gradient):
    a, b, v, result, *tensors = ctx.saved_tensors
    needs = [*ctx.needs_input_grad[:3], *ctx.needs_input_grad[7]]
    names = ["a", "b", "v", *_tensors(ctx.names, tensors)]
    wanted = [name for name, need in zip(names, needs, strict=True) if need]
    found = _gradient(
        gradient, result, a, b, v, " ".join(wanted), ctx.reduction, ctx.descriptor, ctx.names,
        ctx.numbers, tensors, *ctx.offsets,
    )  # fmt: skip
    made = dict(zip(wanted, found, strict=True))
    sides = (made.get(name) for name in names[:3])
    numbers = None if ctx.numbers else []
    return *sides, None, None, None, numbers, [made.get(name) for name in names[3:]], None, None


def _gradient_recorded(*arguments):
    """The gradients as autograd sees them: with one of their own to record they are the sums and
    products that they consist of."""
    if not _any_requires(*arguments[:5], *(arguments[10] or ())):
        return None
    return _compute_gradient(*arguments)


_reduce = register(
    "pairwise_reduce",
    f"(Tensor a, Tensor b, Tensor? v, str reduction, {_ARGUMENTS}) -> Tensor",
    _compute,
    _fake,
    save=_save,
    backward=_backward,
    vmap=_vmap,
)
_gradient = register(
    "pairwise_reduce_gradient",
    "(Tensor gradient, Tensor result, Tensor a, Tensor b, Tensor? v, str wanted, str reduction, "
    f"{_ARGUMENTS}) -> Tensor[]",
    _compute_gradient_alone,
    _fake_gradient,
    recorded=_gradient_recorded,
)
_choose = register(
    "pairwise_choose",
    f"(Tensor a, Tensor b, SymInt k, bool largest, str reduction, {_ARGUMENTS}) "
    "-> (Tensor, Tensor)",
    _compute_choice,
    _fake_choice,
    vmap=_vmap_choice,
)

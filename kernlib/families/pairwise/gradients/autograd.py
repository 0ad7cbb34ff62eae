"""How eager calls record gradients.

The forward pass is the ordinary fused kernel and keeps the inputs alone.
:mod:`kernlib.families.pairwise.gradients.backward` computes the gradients from those. With
``create_graph`` the call is made again out of operators that are recorded themselves
(:mod:`kernlib.families.pairwise.gradients.operators`), as it is under torch.compile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._C import _are_functorch_transforms_active
from torch._C._functorch import is_legacy_batchedtensor

from kernlib.descriptors.base import check_flag
from kernlib.families.pairwise import checks
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.matrix import MATRIX, calls, key_of
from kernlib.runtime import early, rehearsal
from kernlib.runtime.numbers import host_value
from kernlib.runtime.operation import by_operator
from kernlib.runtime.rehearsal import is_traced
from kernlib.runtime.tensors import is_mapped, normal, refuse_transforms, stand_ins

if TYPE_CHECKING:
    from kernlib.families.pairwise.gradients.backward import Call

NOT_BATCHED = (
    "is_grads_batched=True, which jacobian(vectorize=True) sets, is not supported by this kernel "
    "matrix; ask for one gradient after the other"
)


def kernel_matrix(
    descriptor: Pairwise, a, b, out=None, row_offset: int = 0, col_offset: int = 0, **values
) -> torch.Tensor:
    """The matrix for another call, of points and hyperparameters as kernels take them: recorded
    where one of them requires a gradient, by the operator where calls are traced."""
    if is_traced():
        from kernlib import run  # whose attributes Dynamo can trace

        options = {"out": out, "row_offset": row_offset, "col_offset": col_offset}
        return run.pairwise_operators.run(descriptor, a, b, **options, **values)
    request = descriptor, a, b, out, False, row_offset, col_offset, values
    if torch.is_grad_enabled() and True in [
        getattr(value, "requires_grad", False) for value in (a, b, out, *values.values())
    ]:
        return record(*request)
    return calls.execute(*request)


def record(
    descriptor: Pairwise, a, b, out, accumulate, row_offset: int, col_offset: int, values: dict
) -> torch.Tensor:
    """A call whose gradient is recorded. Raises RuntimeError for an ``out``, and inside transforms
    of torch.func."""
    if out is not None:
        checks.check_tensors(a, b, out)
        checks.refuse_out(out, a=a, b=b, out=out, **values)
    if accumulate is not False:
        check_flag("accumulate", accumulate)
        raise ValueError("accumulate=True adds to out, and no out is given")
    tensors, numbers = {}, {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        else:
            numbers[name] = host_value(name, value)
    watched = stand_ins(a, b)
    if _are_functorch_transforms_active():
        if not is_mapped(a, b, *tensors.values()):
            refuse_transforms(checks.MAPPED_ALONE, a=a, b=b, **tensors)
        watched = True  # where nothing is mapped too: a Function knows no transform
    if watched or (getattr(a, "is_meta", False) and rehearsal.current() is None):
        request = descriptor, a, b, None, False, row_offset, col_offset, values
        if not watched:  # for meta tensors operators would say less
            checks.check_call(*request)
        return by_operator(MATRIX, request)
    from kernlib.families.pairwise.gradients.backward import Call  # 13 ms, for these calls alone

    call = Call(descriptor, row_offset, col_offset, numbers, tuple(tensors))
    try:
        return _Pairwise.apply(call, *map(normal, (a, b, *tensors.values())))
    except Exception:
        checks.check_tensors(a, b, out)  # of others than dense ones torch says less, if it is first
        raise


class _Pairwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, a, b, *tensors):
        ctx.call = call
        ctx.save_for_backward(a, b, *tensors)
        offsets = call.row_offset, call.col_offset
        values = call.values(tensors) if tensors else call.numbers
        request = call.descriptor, a, b, None, False, *offsets, values
        key = key_of(*request)
        try:
            plan = calls.plans.plans.get(key)
        except TypeError:  # an argument cannot be hashed, which is said there
            return calls.execute(*request)
        if plan is None:
            again = _Pairwise.apply, call, a, b, *tensors
            return early.first(calls.first, key, *request, again=again)
        return calls.launch(plan, *request)

    @staticmethod
    def backward(ctx, grad):
        needs = ctx.needs_input_grad[1:]
        if is_legacy_batchedtensor(grad):
            return None, *_of_several(ctx.call, needs, ctx.saved_tensors, grad)
        if torch.is_grad_enabled():
            return None, *_recorded(ctx.call, needs, ctx.saved_tensors, grad)
        from kernlib.families.pairwise.gradients import backward  # record has loaded it

        return None, *backward.gradients(ctx.call, needs, ctx.saved_tensors, grad)


def _recorded(call: Call, needs: tuple, saved: tuple, grad) -> list:
    """The gradients, recorded."""
    from kernlib.families.pairwise.gradients import operators  # most passes need none

    # Aliases, lest two of the arguments be one tensor.
    sides = [t.view_as(t) if need else t for t, need in zip(saved, needs, strict=True)]
    out = operators.recorded(call.descriptor, *sides[:2], call.values(sides[2:]), call.diagonal)
    leaves = [side for side, need in zip(sides, needs, strict=True) if need]
    grads = iter(torch.autograd.grad(out, leaves, grad, create_graph=True, allow_unused=True))
    return [next(grads) if need else None for need in needs]


def _of_several(call: Call, needs: tuple, saved: tuple, grad) -> list:
    """The gradients from several output gradients at once (``is_grads_batched``), by torch's
    operators: kernels cannot read such tensors. Raises RuntimeError for a gradient that is no
    kernel's: torch's own operators for a maximum refuse it too, or return 0, as in torch 2.8."""
    from kernlib.families.pairwise.gradients import backward, formula

    if backward.by_formula(formula.sums_of(call.descriptor, call.values(saved[2:]))):
        raise RuntimeError(NOT_BATCHED)
    with torch.enable_grad():
        return _recorded(call, needs, saved, grad)

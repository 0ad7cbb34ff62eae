"""Gradients of block-sparse attention: how eager calls record them.

Of a call q, k, v, out and lse are kept, of a score also what floats leave of lse, and no logits:
with ``D = sum(grad * out) - grad_lse`` of each row the gradient by a logit is ``p * (<grad, v> -
D)``, for p computed again. Gradients of gradients are torch's own, of the reference computed again.
"""

from __future__ import annotations

import torch
from torch._C import _are_functorch_transforms_active
from torch.autograd import forward_ad

from kernlib.families.blocksparse.attention.arguments import Options, check_kinds, dtypes_of
from kernlib.families.blocksparse.attention.primitive import (
    ATTENTION,
    by_reference,
    calls,
    gradient_calls,
)
from kernlib.runtime.arguments import no_autocast, refuse_out_of_recorded
from kernlib.runtime.autograd import ORDINARY, is_watched
from kernlib.runtime.operation import by_operator, operators_of
from kernlib.runtime.products import requires_gradient
from kernlib.runtime.tensors import is_wrapped, stand_ins

KEPT = 2  # tensors of a layout that are kept for backward


def differentiable(descriptor, captured: dict) -> tuple[str, ...]:
    """The captured tensors that have gradients."""
    return descriptor.expression.differentiable(dtypes_of(descriptor, captured))


def eager(descriptor, operands, saved, options, captured: dict, grads: tuple, needs: tuple) -> list:
    """Those of q, k, v and captured tensors: by torch's operators where a gradient of them may be
    asked for or a transform is active, by the operator where somebody must see it, else by
    kernels."""
    request = descriptor, operands, saved, options, captured, grads, needs
    # Operands are not wrapped where no transform is active: the call went to the reference then.
    given = (*operands[1:], *grads) if _are_functorch_transforms_active() else grads
    if torch.is_grad_enabled() or any(map(is_wrapped, given)):
        return by_torch(descriptor, operands, options, captured, grads, needs)
    if is_watched(grads[0]):
        return operators_of(ATTENTION).gradients_of(*request)
    return gradient_calls.execute(*request)


def by_torch(descriptor, operands, options, captured: dict, grads: tuple, needs: tuple) -> list:
    """The gradients that are needed of the reference computed again, differentiable where gradients
    are recorded."""
    from kernlib.families.blocksparse.attention import reference  # which kernels do without

    layout, *tensors = operands
    again = torch.is_grad_enabled()
    given = dict(zip(("q", "k", "v"), tensors, strict=True)) | captured
    with torch.enable_grad():
        leaves = {  # aliases, lest two of the arguments be one tensor, or one be made of another
            name: t.view_as(t) if t.requires_grad and again else t.detach().requires_grad_()
            for (name, t), need in zip(given.items(), needs, strict=True)
            if need
        }
    own = {name: leaves.get(name, t) for name, t in given.items()}
    with torch.enable_grad(), no_autocast(tensors[0]):
        operands = layout, *(own.pop(name) for name in ("q", "k", "v"))
        found = reference.attention(descriptor, operands, options, own)
    pairs = [
        (y, grad)
        for y, grad in zip(found, grads, strict=True)
        if grad is not None and y.requires_grad
    ]
    if not pairs:
        return [torch.zeros_like(t) if need else None for t, need in _pairs(given, needs)]
    results, arrived = zip(*pairs, strict=True)
    made = torch.autograd.grad(
        results, [*leaves.values()], arrived, create_graph=again, allow_unused=True
    )
    by_name = dict(zip(leaves, made, strict=True))
    answered = []
    for name, need in zip(given, needs, strict=True):
        t = by_name.get(name)
        answered.append(torch.zeros_like(given[name]) if need and t is None else t)
    return answered


def _pairs(given: dict, needs: tuple) -> zip:
    return zip(given.values(), needs, strict=True)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, descriptor, layout, options, plan, q, k, v, *captured):
        named = dict(zip(descriptor.names, captured, strict=True))
        request = descriptor, (layout, q, k, v), None, options, named
        out, lse, rest = calls.execute(*request) if plan is None else calls.launch(plan, *request)
        ctx.descriptor, ctx.layout = descriptor, layout
        places = [at for at, n in enumerate(options) if isinstance(n, torch.Tensor)]
        tensors = [options[at] for at in places]
        if tensors:
            options = Options(*(None if at in places else n for at, n in enumerate(options)))
        ctx.options, ctx.places = options, places
        ctx.set_materialize_grads(False)
        # Of the layout what backward reads too, for torch to see what was written since: each
        # tensor costs a step 0.7 us, and who writes one writes all.
        ctx.save_for_backward(out, lse, rest, q, k, v, *captured, *tensors, *layout.tensors[:3:2])
        return out, lse

    @staticmethod
    def backward(ctx, grad, grad_lse):
        needs = ctx.needs_input_grad[4:]
        if grad is None and grad_lse is None:
            return None, None, None, None, *[None] * len(needs)
        out, lse, below, q, k, v, *rest = ctx.saved_tensors
        descriptor, options, captured = ctx.descriptor, ctx.options, {}
        if len(rest) > KEPT:
            names = descriptor.names
            captured = dict(zip(names, rest[: len(names)], strict=True))
            given = dict(zip(ctx.places, rest[len(names) : -KEPT], strict=True))
            options = Options(*(given.get(at, n) for at, n in enumerate(options)))
        grad = torch.zeros_like(out) if grad is None else grad
        operands = ctx.layout, q, k, v
        saved, grads = (out, lse, below), (grad, grad_lse)
        made = eager(descriptor, operands, saved, options, captured, grads, needs)
        return None, None, None, None, *made


def recorded(descriptor, operands: tuple, out, options: Options, captured: dict) -> tuple:
    """A call whose derivatives torch wants to know. Raises RuntimeError for an ``out``, and what
    checks raise."""
    transformed = forward_ad._current_level >= 0 or _are_functorch_transforms_active()
    wanted = options if options.lse else Options(*options[:-1], True)
    plan = None
    if out is None and not transformed:
        plan = _kept(descriptor, operands, wanted, captured)
    if plan is None:
        check_kinds(descriptor, operands)
        refuse_out_of_recorded(out)
        request = descriptor, operands, None, options, captured
        if stand_ins(*ATTENTION.tensors(*request)):
            return by_operator(ATTENTION, request)[:2]
        ATTENTION.check(*request)
        if transformed:
            return by_reference(*request)[:2]
    layout, *tensors = operands
    named: list = []
    if captured:
        known = differentiable(descriptor, captured)
        named = [captured[n] if n in known else captured[n].detach() for n in descriptor.names]
    out, lse = _Attention.apply(descriptor, layout, wanted, plan, *tensors, *named)
    return out, lse if options.lse else None


def _kept(descriptor, operands: tuple, options: Options, captured: dict):
    """The plan of a call that needs no check since it is kept, else None."""
    tensors = *operands[1:], *captured.values()
    if any([type(t) not in ORDINARY for t in tensors]) and stand_ins(*tensors):
        return None
    if requires_gradient((), *options.tensors):  # which checks refuse
        return None
    return calls.find(descriptor, operands, None, options, captured)

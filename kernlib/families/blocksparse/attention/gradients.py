"""Gradients of block-sparse attention: how eager calls record them.

Of a call q, k, v, out and lse are kept, and no logits: with ``D = sum(grad * out) - grad_lse`` of
each row the gradient by a logit is ``p * (<grad, v> - D)``, for p computed again. Gradients of
gradients are torch's own, of the reference computed again.
"""

from __future__ import annotations

import torch
from torch._C import _are_functorch_transforms_active
from torch.autograd import forward_ad

from kernlib.families.blocksparse.attention import reference
from kernlib.families.blocksparse.attention.arguments import Options, dtypes_of
from kernlib.families.blocksparse.attention.primitive import (
    ATTENTION,
    by_reference,
    calls,
    gradient_calls,
)
from kernlib.runtime.arguments import no_autocast, refuse_out_of_recorded
from kernlib.runtime.autograd import is_watched
from kernlib.runtime.operation import by_operator, operators_of
from kernlib.runtime.tensors import is_wrapped, stand_ins


def differentiable(descriptor, captured: dict) -> tuple[str, ...]:
    """The captured tensors that have gradients."""
    return descriptor.expression.differentiable(dtypes_of(descriptor, captured))


def eager(descriptor, operands, saved, options, captured: dict, grads: tuple, needs: tuple) -> list:
    """Those of q, k, v and captured tensors: by torch's operators where a gradient of them may be
    asked for or a transform is active, by the operator where somebody must see it, else by
    kernels."""
    request = descriptor, operands, saved, options, captured, grads, needs
    if torch.is_grad_enabled() or any(map(is_wrapped, (*operands[1:], *grads))):
        return by_torch(descriptor, operands, options, captured, grads, needs)
    if is_watched(grads[0]):
        return operators_of(ATTENTION).gradients_of(*request)
    return gradient_calls.execute(*request)


def by_torch(descriptor, operands, options, captured: dict, grads: tuple, needs: tuple) -> list:
    """The gradients that are needed of the reference computed again, differentiable where gradients
    are recorded."""
    layout, *tensors = operands
    again = torch.is_grad_enabled()
    given = dict(zip(("q", "k", "v"), tensors, strict=True)) | captured
    leaves = {
        name: t if t.requires_grad and again else t.detach().requires_grad_()
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
    def forward(ctx, descriptor, layout, options, q, k, v, *captured):
        named = dict(zip(descriptor.names, captured, strict=True))
        wanted = options._replace(lse=True)
        out, lse = calls.execute(descriptor, (layout, q, k, v), None, wanted, named)
        ctx.descriptor, ctx.layout = descriptor, layout
        ctx.numbers = [None if isinstance(n, torch.Tensor) else n for n in wanted]
        tensors = [n if isinstance(n, torch.Tensor) else None for n in wanted]
        ctx.set_materialize_grads(False)
        # Of the layout too, for torch to see what was written since.
        ctx.save_for_backward(out, lse, q, k, v, *tensors, *captured, *layout.tensors)
        return out, lse

    @staticmethod
    def backward(ctx, grad, grad_lse):
        if grad is None and grad_lse is None:
            return None, None, None, *[None] * len(ctx.needs_input_grad[3:])
        out, lse, q, k, v, *rest = ctx.saved_tensors
        count = len(ctx.numbers)
        options = Options(
            *(n if t is None else t for n, t in zip(ctx.numbers, rest[:count], strict=True))
        )
        names = ctx.descriptor.names
        captured = dict(zip(names, rest[count : count + len(names)], strict=True))
        grad = torch.zeros_like(out) if grad is None else grad
        operands = ctx.layout, q, k, v
        grads, needs = (grad, grad_lse), tuple(ctx.needs_input_grad[3:])
        made = eager(ctx.descriptor, operands, (out, lse), options, captured, grads, needs)
        return None, None, None, *made


def recorded(descriptor, operands: tuple, out, options: Options, captured: dict) -> tuple:
    """A call whose derivatives torch wants to know. Raises RuntimeError for an ``out``."""
    refuse_out_of_recorded(out)
    request = descriptor, operands, None, options, captured
    if stand_ins(*ATTENTION.tensors(*request)):
        return by_operator(ATTENTION, request)
    ATTENTION.check(*request)
    if forward_ad._current_level >= 0 or _are_functorch_transforms_active():
        return by_reference(*request)
    layout, *tensors = operands
    known = differentiable(descriptor, captured)
    named = [captured[n] if n in known else captured[n].detach() for n in descriptor.names]
    out, lse = _Attention.apply(descriptor, layout, options, *tensors, *named)
    return out, lse if options.lse else None

"""Formulas whose gradients are recorded by eager calls, and inside of ``torch.func``, whose
transforms take no operator of lists: each call is a function of autograd. That takes half the time
of an operator of torch.library, which traced calls are.

``vmap`` makes a mapped dimension a part of the batch.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch._C import _are_functorch_transforms_active
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from kernlib.families.pairwise.formula import operators
from kernlib.runtime import rehearsal


def are_active() -> bool:
    """Whether a call is inside of transforms that kernlib sees."""
    return _are_functorch_transforms_active() and not is_dynamo_compiling()


def call(name: str, tensors, numbers, text: str, sizes, debug: bool):
    """A call of the operator ``name``, recorded where a gradient may be asked for."""
    request = list(tensors), list(numbers), text, list(sizes), debug
    if debug or rehearsal.is_traced():
        return operators.BY_NAME[name](*request)
    if are_active() or forward_ad._current_level >= 0:
        return _Call.apply(name, tuple(numbers), text, tuple(sizes), debug, *tensors)
    if _is_recorded(tensors):
        return _Eager.apply(name, tuple(numbers), text, tuple(sizes), debug, *tensors)
    return operators.COMPUTED[name](*request)


def _is_recorded(tensors) -> bool:
    return torch.is_grad_enabled() and any([t.requires_grad for t in tensors])


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(name, numbers, text, sizes, debug, *tensors):
        if are_active():  # further ones
            return call(name, tensors, numbers, text, sizes, debug)
        return operators.COMPUTED[name](list(tensors), list(numbers), text, list(sizes), debug)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.name, ctx.numbers, ctx.text, ctx.sizes, ctx.debug, *tensors = inputs
        if isinstance(output, tuple):  # the smallest and their places
            ctx.mark_non_differentiable(*output)
        outputs = [output] if ctx.name == "formula_logsumexp" else []
        ctx.count = len(tensors)
        ctx.save_for_backward(*tensors, *outputs)

    @staticmethod
    def backward(ctx, *grads):
        if len(grads) > 1:
            return (None,) * (5 + ctx.count)
        saved = SimpleNamespace(
            text=ctx.text,
            tensors=ctx.saved_tensors[: ctx.count],
            outputs=ctx.saved_tensors[ctx.count :],
            numbers=ctx.numbers,
            sizes=ctx.sizes,
            debug=ctx.debug,
            needs=SimpleNamespace(tensors=ctx.needs_input_grad[5:]),
        )
        return (*(None,) * 5, *operators.gradients(saved, grads[0], call)["tensors"])

    @staticmethod
    def jvp(ctx, *tangents):
        raise RuntimeError(
            f"forward mode (torch.func.jvp, jacfwd) is not known of kernlib::{ctx.name}, which "
            "formulas are; use vjp or jacrev"
        )

    @staticmethod
    def vmap(info, in_dims, name, numbers, text, sizes, debug, *tensors):
        if "\nranged\n" in text or text.endswith("True)"):
            raise RuntimeError("torch.vmap knows no calls with pairs, which are batches already")
        dims, (batch, *rest) = in_dims[5:], sizes
        count, values = info.batch_size, []
        for t, dim in zip(tensors, dims, strict=True):
            t = t[None] if dim is None else t.movedim(dim, 0)
            if t.dim() > 1 and (dim is not None or t.shape[1] > 1):
                t = t.expand(count, batch, *t.shape[2:])
            values.append(t.reshape(-1, *t.shape[2:]))
        result = call(name, values, numbers, text, [count * batch, *rest], debug)
        if isinstance(result, tuple):
            return tuple(x.unflatten(0, (count, batch)) for x in result), (0, 0)
        return result.unflatten(0, (count, batch)), 0


class _Eager(torch.autograd.Function):
    """The same outside of transforms, for which torch looks at no signature in each call."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _Call.forward(*inputs)
        _Call.setup_context(ctx, inputs, output)
        return output

    backward = staticmethod(_Call.backward)

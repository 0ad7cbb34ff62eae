"""Gradients of block-sparse softmax: their formulas, stated here alone, and eager calls that record
them.

That by the logits is ``y * (grad - sum(y * grad))`` over the stored blocks of each row. x has it
times the scale; rpe and masks that are added have it laid out as a matrix and summed over what they
broadcast along; the scale has the sum of its product with x. Of a call only y is kept, and x for a
scale that asks for its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch._C import _are_functorch_transforms_active
from torch.autograd import forward_ad

from kernlib.families.blocksparse.layout import Layout
from kernlib.families.blocksparse.softmax.arguments import NAMES
from kernlib.families.blocksparse.softmax.descriptor import BlockSparseSoftmax
from kernlib.families.blocksparse.softmax.primitive import (
    SOFTMAX,
    by_reference,
    calls,
    gradient_by_torch,
    gradient_calls,
)
from kernlib.runtime.arguments import refuse_out_of_recorded
from kernlib.runtime.autograd import is_watched
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.operation import REFERENCE, by_operator, operators_of
from kernlib.runtime.tensors import is_wrapped, stand_ins


class Needs(NamedTuple):
    """Which gradients are asked for."""

    x: bool
    scale: bool
    rpe: bool
    key_padding_mask: bool
    attn_mask: bool

    @property
    def pair(self) -> tuple[bool, bool]:
        """Whether those by x and by the logits are."""
        return self.x, any(self[1:])


class Kept(NamedTuple):
    """What a call leaves for its gradients: ``x`` only for that of the scale, and the shapes of rpe
    and masks, None for those that are not given."""

    layout: Layout
    y: torch.Tensor
    x: torch.Tensor | None
    scale: float | torch.Tensor
    shapes: tuple


def differentiable(descriptor: BlockSparseSoftmax) -> tuple[bool, bool, bool]:
    """Of rpe and the masks whether they are added."""
    return descriptor.rpe, descriptor.key_padding_mask == "add", descriptor.attn_mask == "add"


def gradients(kept: Kept, grad: torch.Tensor, needs: Needs, pair: Callable) -> list:
    """Those that are needed, in their order, by ``pair(layout, grad, y, scale, needs)``, which
    answers those by x and by the logits."""
    if not any(needs):
        return [None] * len(needs)
    to_x, to_logits = pair(kept.layout, grad, kept.y, kept.scale, needs.pair)
    to_scale = of_scale(kept, to_logits) if needs.scale else None
    return [to_x, to_scale, *_of_dense(kept, to_logits, needs[2:])]


def of_scale(kept: Kept, to_logits: torch.Tensor) -> torch.Tensor:
    """The gradient by the scale. An element that takes no part has none, whatever x holds there:
    told by y, as what takes part may have a gradient of 0 whose own derivatives are none."""
    wide = accumulator(to_logits.dtype)
    products = to_logits.to(wide) * torch.where(kept.y == 0.0, 0.0, kept.x).to(wide)
    found = products.sum().to(kept.scale.dtype)
    return found if found.device == kept.scale.device else found.to(kept.scale.device)


def _of_dense(kept: Kept, to_logits, needs: tuple) -> list:
    """The gradients by rpe, key_padding_mask and attn_mask."""
    if not any(needs):
        return [None] * len(needs)
    whole, heads = kept.layout.to_dense(to_logits), kept.layout.heads
    found = []
    for name, need, shape in zip(NAMES, needs, kept.shapes, strict=True):
        summed = whole
        if need and name == "key_padding_mask":
            summed = whole.sum(-2 if heads is None else (-3, -2))
        found.append(summed.sum_to_size(shape) if need else None)
    return found


def eager_pair(layout: Layout, grad, y, scale, needs: tuple) -> list:
    """Those by x and by the logits: by torch's operators where a gradient of them may be asked for
    or a transform is active, by the operator where somebody must see it, else by the kernel."""
    tensors = grad, y, scale
    if torch.is_grad_enabled() or any(map(is_wrapped, tensors)):
        return gradient_by_torch(layout, grad, y, scale, needs)
    if is_watched(grad):
        return operators_of(SOFTMAX).gradient_pair(layout, grad, y, scale, needs)
    return gradient_calls.execute(layout, grad, y, scale, needs)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, descriptor, layout, x, scale, *parameters):
        given = {n: t for n, t in zip(NAMES, parameters, strict=True) if t is not None}
        y = calls.execute(descriptor, (layout, x), None, scale, given)
        ctx.layout, ctx.number = layout, None if isinstance(scale, torch.Tensor) else scale
        ctx.shapes = tuple(None if t is None else t.shape for t in parameters)
        of_scale = ctx.needs_input_grad[3]
        ctx.save_for_backward(
            y, x if of_scale else None, scale if ctx.number is None else None, *layout.tensors
        )
        return y

    @staticmethod
    def backward(ctx, grad):
        # Of the layout too, for torch to see what was written since.
        y, x, scale, *_ = ctx.saved_tensors
        kept = Kept(ctx.layout, y, x, ctx.number if scale is None else scale, ctx.shapes)
        needs = Needs(*ctx.needs_input_grad[2:])
        return None, None, *gradients(kept, grad, needs, eager_pair)


def recorded(descriptor, operands: tuple, out, scale, parameters: dict) -> torch.Tensor:
    """A call whose derivatives torch wants to know. Raises RuntimeError for an ``out``."""
    refuse_out_of_recorded(out)
    request = descriptor, operands, None, scale, parameters
    if stand_ins(*SOFTMAX.tensors(*request)):
        return by_operator(SOFTMAX, request)
    call = SOFTMAX.check(*request)
    transformed = _are_functorch_transforms_active()
    if forward_ad._current_level >= 0:
        return by_reference(*request)
    if transformed and SOFTMAX.way(call, *request) == REFERENCE:
        return by_reference(*request)
    if transformed:
        return by_operator(SOFTMAX, request)
    layout, x = operands
    given = [parameters.get(name) for name in NAMES]
    for index, may in enumerate(differentiable(descriptor)):
        if given[index] is not None and not may:
            given[index] = given[index].detach()
    return _Softmax.apply(descriptor, layout, x, scale, *given)

"""Block-sparse softmax and its gradient as operators of ``torch.library``, for whoever records
calls and runs them later and inside of torch.vmap. Eager calls pass by.
"""

from __future__ import annotations

import torch

from kernlib.descriptors.text import from_text
from kernlib.families.blocksparse.checks import check_scale
from kernlib.families.blocksparse.kinds import LAYOUT, SCALE
from kernlib.families.blocksparse.layout import Layout, count_of
from kernlib.families.blocksparse.softmax import arguments, operation, reference
from kernlib.families.blocksparse.softmax.descriptor import BlockSparseSoftmax
from kernlib.families.blocksparse.softmax.operation import (
    GRADIENT,
    SOFTMAX,
    Kept,
    Needs,
    by_reference,
    calls,
    gradient_by_torch,
    gradient_calls,
)
from kernlib.runtime.arguments import refuse_recorded_out, written
from kernlib.runtime.operators import in_front, one_by_one, register
from kernlib.runtime.schema import DESCRIPTOR, Schema, placed
from kernlib.runtime.tensors import takes_derivatives


def _compute(x, layout, scale, descriptor, rpe, key_padding_mask, attn_mask, debug):
    parameters = arguments.given(rpe, key_padding_mask, attn_mask)
    return calls.execute(descriptor, (layout, x), None, scale, parameters)


def _fake(x, layout, scale, descriptor, rpe, key_padding_mask, attn_mask, debug):
    parameters = arguments.given(rpe, key_padding_mask, attn_mask)
    arguments.check_operands(descriptor, (layout, x), parameters)
    return x.new_empty(x.shape)


def _by_torch(x, layout, scale, descriptor, rpe, key_padding_mask, attn_mask, debug):
    parameters = arguments.given(rpe, key_padding_mask, attn_mask)
    return reference.softmax(descriptor, layout, x, scale, parameters)


def _backward(saved, grad) -> dict:
    needs = saved.needs
    dense = zip(arguments.NAMES, operation.differentiable(saved.descriptor), strict=True)
    needed = Needs(needs.x, needs.scale, *(getattr(needs, name) and may for name, may in dense))
    shapes = tuple(getattr(saved.shapes, name) for name in arguments.NAMES)
    (y,) = saved.outputs
    record = Kept(saved.layout, y, saved.x, saved.scale, shapes)

    def pair(*request) -> list:
        return gradient_pair(*request, saved.debug)

    grads = operation.gradients(record, grad, needed, pair)
    return dict(zip(("x", "scale", *arguments.NAMES), grads, strict=True))


# vmap: the mapped axis is one more leading dimension. A call has one scale and one mask of the
# whole matrix, so that mapping over these makes as many calls.


def _mapped(info, dims, *request):
    if dims.scale is not None or dims.attn_mask is not None:
        return one_by_one(whole, info, dims, request)
    x, layout, scale, descriptor, rpe, key, attn, debug = request
    lead = x.dim() - 3 - (dims.x is not None)
    x = in_front(x, dims.x, lead + 3)
    if dims.x is None:
        x = x.expand(info.batch_size, *x.shape)
    rpe = in_front(rpe, dims.rpe, lead + 2 + (layout.heads is not None))
    key = in_front(key, dims.key_padding_mask, lead + 1)
    return whole(x, layout, scale, descriptor, rpe, key, attn, debug), 0


def _mapped_gradient(info, dims, *request):
    if dims.scale is not None:
        return one_by_one(gradient, info, dims, request)
    grad, y, *rest, to_x, to_logits, debug = request
    tensors = []
    for t, dim in ((grad, dims.grad), (y, dims.y)):
        t = t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
        tensors.append(t)
    pair = zip(gradient(*tensors, *rest, to_x, to_logits, debug), (to_x, to_logits), strict=True)
    return tuple(t if need else t.new_empty(info.batch_size, 0) for t, need in pair), (0, 0)


# The gradient.


def _gradient(grad, y, layout, scale, to_x, to_logits, debug):
    pair = gradient_calls.execute(layout, grad, y, scale, (to_x, to_logits))
    return tuple(y.new_empty(0) if t is None else t for t in pair)


def _fake_gradient(grad, y, layout, scale, to_x, to_logits, debug):
    return tuple(y.new_empty(y.shape if need else (0,)) for need in (to_x, to_logits))


def _gradient_recorded(grad, y, layout, scale, to_x, to_logits, debug):
    pair = gradient_by_torch(layout, grad, y, scale, (to_x, to_logits))
    return tuple(y.new_empty(0) if t is None else t for t in pair)


def gradient_pair(layout: Layout, grad, y, scale, needs: tuple, debug: bool = False) -> list:
    """The gradients by x and by the logits by their operator, None where there is no need."""
    pair = gradient(grad, y, layout, placed(scale, y.device), *needs, debug)
    return [t if need else None for t, need in zip(pair, needs, strict=True)]


whole = register(
    SOFTMAX.name,
    Schema(
        "Tensor x", LAYOUT, SCALE, DESCRIPTOR, "Tensor? rpe", "Tensor? key_padding_mask",
        "Tensor? attn_mask", "bool debug",
    ),
    "Tensor",
    _compute,
    _fake,
    saves={"x": ("scale",), "layout": (), "scale": (), "descriptor": ()},
    outputs=1,
    backward=_backward,
    vmap=_mapped,
    exported=_by_torch,
)  # fmt: skip
gradient = register(
    GRADIENT.name,
    Schema(
        "Tensor grad", "Tensor y", LAYOUT, SCALE, "bool to_x", "bool to_logits", "bool debug"
    ),
    "(Tensor, Tensor)",
    _gradient,
    _fake_gradient,
    recorded=_gradient_recorded,
    vmap=_mapped_gradient,
)  # fmt: skip


# What Dynamo traces.


def run(
    descriptor: BlockSparseSoftmax,
    *operands,
    out: torch.Tensor | None = None,
    scale: float | torch.Tensor = 1.0,
    rpe: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    debug: bool = False,
) -> torch.Tensor:
    """:func:`kernlib.run_kernel` by way of the operators.

    What is wrong with shapes, dtypes and devices is raised here; what is wrong with values when the
    operator runs.
    """
    arguments.check_kinds(descriptor, operands)
    layout, x = operands
    parameters = arguments.given(rpe, key_padding_mask, attn_mask)
    refuse_recorded_out(out, x, scale, *parameters.values())
    inputs = (x, scale, *layout.flat, *parameters.values())
    y = _traced(descriptor.text, " ".join(parameters), layout.form, debug, *inputs)
    return written(out, y, x)


# Dynamo puts the call into its graph as it is, for AOTAutograd to trace what it does.
@torch.compiler.allow_in_graph
def _traced(text: str, names: str, layout_text: str, debug: bool, x, scale, *tensors):
    descriptor, count = from_text(text), count_of(layout_text)
    operands = Layout.from_layout(layout_text, tensors[:count]), x
    arguments.check_kinds(descriptor, operands)
    parameters = dict(zip(names.split(), tensors[count:], strict=True))
    parameters = arguments.autocast(operands, parameters)
    arguments.check_operands(descriptor, operands, parameters)
    check_scale(scale, "x", x, False)
    if takes_derivatives():  # where operators that take lists of tensors have no gradients
        return by_reference(descriptor, operands, None, scale, parameters)
    dense = [parameters.get(name) for name in arguments.NAMES]
    layout, scale = operands[0], placed(scale, x.device)
    return whole(x, layout, scale, descriptor, *dense, debug)


def _call(descriptor, operands: tuple, out, scale, parameters: dict) -> torch.Tensor:
    return run(descriptor, *operands, out=out, scale=scale, **parameters)


# Requests of tensors that stand for others.
BY_NAME = {SOFTMAX.name: _call, GRADIENT.name: gradient_pair}

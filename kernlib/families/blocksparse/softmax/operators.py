"""Block-sparse softmax and its gradient as operators of ``torch.library``, for whoever records
calls and runs them later and inside of torch.vmap. Eager calls pass by.

A layout goes in as its flat tensors and its form, the scale as a tensor or, where that is None, as
a number.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from kernlib import events
from kernlib.descriptors.text import from_text
from kernlib.families.blocksparse.checks import check_scale
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
from kernlib.runtime.numbers import host_value
from kernlib.runtime.operators import exported_by, in_front, register
from kernlib.runtime.tensors import takes_derivatives

_LAYOUT = "Tensor[] layout, str layout_text, Tensor? scale, float factor"


def _compute(
    x, layout, layout_text, scale, factor, descriptor, rpe, key_padding_mask, attn_mask, debug
):
    operands = Layout.from_layout(layout_text, layout), x
    parameters = arguments.given(rpe, key_padding_mask, attn_mask)
    scale = factor if scale is None else scale
    with events.on_stderr() if debug else nullcontext():
        return calls.execute(from_text(descriptor), operands, None, scale, parameters)


def _fake(
    x, layout, layout_text, scale, factor, descriptor, rpe, key_padding_mask, attn_mask, debug
):
    operands = Layout.from_layout(layout_text, layout), x
    parameters = arguments.given(rpe, key_padding_mask, attn_mask)
    arguments.check_operands(from_text(descriptor), operands, parameters)
    return x.new_empty(x.shape)


def _by_torch(
    x, layout, layout_text, scale, factor, descriptor, rpe, key_padding_mask, attn_mask, debug
):
    softmax, parameters = from_text(descriptor), arguments.given(rpe, key_padding_mask, attn_mask)
    scale = factor if scale is None else scale
    return reference.softmax(softmax, Layout.from_layout(layout_text, layout), x, scale, parameters)


def _save(ctx, inputs, output) -> None:
    x, layout, ctx.layout_text, scale, ctx.factor, ctx.descriptor, *dense, ctx.debug = inputs
    ctx.shapes = tuple(None if t is None else t.shape for t in dense)
    ctx.save_for_backward(output, None if scale is None else x, scale, *layout)


def _backward(ctx, grad):
    y, x, scale, *tensors = ctx.saved_tensors
    needs = ctx.needs_input_grad
    asked = zip(needs[6:9], operation.differentiable(from_text(ctx.descriptor)), strict=True)
    wanted = Needs(needs[0], needs[3], *(need and may for need, may in asked))
    layout = Layout.from_layout(ctx.layout_text, tensors)
    kept = Kept(layout, y, x, ctx.factor if scale is None else scale, ctx.shapes)

    def pair(*given) -> list:
        return gradient_pair(*given, ctx.debug)

    to_x, to_scale, *to_dense = operation.gradients(kept, grad, wanted, pair)
    return to_x, [None] * len(tensors), None, to_scale, None, None, *to_dense, None


# vmap: what is mapped over is one more of the dimensions in front; over scales and masks of the
# whole matrix, of which a call has one, it is as many calls.


def _mapped(info, dims, x, layout, layout_text, scale, factor, descriptor, rpe, key, attn, debug):
    of_x, of_layout, _, of_scale, _, _, of_rpe, of_key, of_attn, _ = dims
    _refuse_mapped_layout(of_layout)
    made = Layout.from_layout(layout_text, layout)
    if of_scale is not None or of_attn is not None:
        given = zip(
            (x, scale, rpe, key, attn), (of_x, of_scale, of_rpe, of_key, of_attn), strict=True
        )
        found = []
        for x, scale, *dense in zip(*(_one_by_one(info, *each) for each in given), strict=True):
            parts = layout, layout_text, scale, factor, descriptor
            found.append(whole(x, *parts, *dense, debug))
        return torch.stack(found), 0
    lead = x.dim() - 3 - (of_x is not None)
    x = in_front(x, of_x, lead + 3)
    if of_x is None:
        x = x.expand(info.batch_size, *x.shape)
    rpe = in_front(rpe, of_rpe, lead + 2 + (made.heads is not None))
    key = in_front(key, of_key, lead + 1)
    y = whole(x, layout, layout_text, scale, factor, descriptor, rpe, key, attn, debug)
    return y, 0


def _mapped_gradient(
    info, dims, grad, y, layout, layout_text, scale, factor, to_x, to_logits, debug
):
    of_grad, of_y, of_layout, _, of_scale, *_ = dims
    _refuse_mapped_layout(of_layout)
    rest = factor, to_x, to_logits, debug
    if of_scale is not None:
        given = zip((grad, y, scale), (of_grad, of_y, of_scale), strict=True)
        found = []
        for grad, y, scale in zip(*(_one_by_one(info, *each) for each in given), strict=True):
            found.append(gradient(grad, y, layout, layout_text, scale, *rest))
        return tuple(map(torch.stack, zip(*found, strict=True))), (0, 0)
    tensors = []
    for t, dim in ((grad, of_grad), (y, of_y)):
        t = t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
        tensors.append(t)
    found = gradient(*tensors, layout, layout_text, scale, *rest)
    wanted = zip(found, (to_x, to_logits), strict=True)
    return tuple(t if want else t.new_empty(info.batch_size, 0) for t, want in wanted), (0, 0)


def _one_by_one(info, t: torch.Tensor | None, dim: int | None) -> list:
    """What each of the mapped calls is given."""
    return [t] * info.batch_size if dim is None else [*t.unbind(dim)]


def _refuse_mapped_layout(dims) -> None:
    if any(dim is not None for dim in dims or ()):
        raise NotImplementedError("torch.vmap over a layout is not known: it is one for all")


# The gradient.


def _gradient(grad, y, layout, layout_text, scale, factor, to_x, to_logits, debug):
    made = Layout.from_layout(layout_text, layout)
    number = factor if scale is None else scale
    with events.on_stderr() if debug else nullcontext():
        found = gradient_calls.execute(made, grad, y, number, (to_x, to_logits))
    return tuple(y.new_empty(0) if t is None else t for t in found)


def _fake_gradient(grad, y, layout, layout_text, scale, factor, to_x, to_logits, debug):
    return tuple(y.new_empty(y.shape if want else (0,)) for want in (to_x, to_logits))


def _gradient_recorded(grad, y, layout, layout_text, scale, factor, to_x, to_logits, debug):
    if not any(t is not None and t.requires_grad for t in (grad, y, scale)):
        return None
    made = Layout.from_layout(layout_text, layout)
    number = factor if scale is None else scale
    found = gradient_by_torch(made, grad, y, number, (to_x, to_logits))
    return tuple(y.new_empty(0) if t is None else t for t in found)


def gradient_pair(layout: Layout, grad, y, scale, needs: tuple, debug: bool = False) -> list:
    """The gradients by x and by the logits by their operator, None where there is no need."""
    shared = [*layout.flat], layout.form, *_scale(scale, y.device)
    gradients = gradient(grad, y, *shared, *needs, debug)
    return [t if need else None for t, need in zip(gradients, needs, strict=True)]


def _scale(scale, device: torch.device) -> tuple[torch.Tensor | None, float]:
    """The scale as a tensor on the device or None, and as a number."""
    if isinstance(scale, torch.Tensor):
        # The copy of a host tensor is recorded too: a CUDA graph can leave it out.
        return scale if scale.device == device else scale.to(device), 1.0
    if isinstance(scale, (torch.SymInt, torch.SymFloat)):
        return None, torch.sym_float(scale)
    return None, host_value("scale", scale, 0)


whole = register(
    SOFTMAX.name,
    f"(Tensor x, {_LAYOUT}, str descriptor, Tensor? rpe, Tensor? key_padding_mask, "
    "Tensor? attn_mask, bool debug) -> Tensor",
    _compute,
    _fake,
    save=_save,
    backward=_backward,
    vmap=_mapped,
)
gradient = register(
    GRADIENT.name,
    f"(Tensor grad, Tensor y, {_LAYOUT}, bool to_x, bool to_logits, bool debug) "
    "-> (Tensor, Tensor)",
    _gradient,
    _fake_gradient,
    recorded=_gradient_recorded,
    vmap=_mapped_gradient,
)
exported_by(whole, _by_torch)


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
    given = [*tensors[:count]], layout_text, *_scale(scale, x.device)
    return whole(x, *given, descriptor.text, *dense, debug)


def _call(descriptor, operands: tuple, out, scale, parameters: dict) -> torch.Tensor:
    return run(descriptor, *operands, out=out, scale=scale, **parameters)


# Requests of tensors that stand for others.
BY_NAME = {SOFTMAX.name: _call, GRADIENT.name: gradient_pair}

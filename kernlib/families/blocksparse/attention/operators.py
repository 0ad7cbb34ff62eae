"""Block-sparse attention and its gradient as operators of ``torch.library``, for whoever records
calls and runs them later. Eager calls pass by.

A layout goes in as its flat tensors and its form, scale and seed each as a tensor or, where that is
None, as a number.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch

from kernlib import events
from kernlib.descriptors.text import from_text
from kernlib.families.blocksparse.attention import arguments, reference
from kernlib.families.blocksparse.attention.arguments import Options
from kernlib.families.blocksparse.attention.descriptor import BlockSparseAttention
from kernlib.families.blocksparse.attention.operation import (
    ATTENTION,
    GRADIENT,
    by_reference,
    calls,
    gradient_calls,
)
from kernlib.families.blocksparse.layout import Layout, count_of
from kernlib.runtime.arguments import refuse_recorded_out, written
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.numbers import host_value
from kernlib.runtime.operators import register
from kernlib.runtime.tensors import takes_derivatives

_REQUEST = (
    "Tensor q, Tensor k, Tensor v, Tensor[] layout, str layout_text, str descriptor, "
    "Tensor? scale, float factor, SymInt left, SymInt right, Tensor? q_lengths, "
    "Tensor? kv_lengths, float dropout_p, Tensor? seed, SymInt seed_number, Tensor[] captured"
)
COUNT = _REQUEST.count(",") + 1
CAPTURED = COUNT - 1  # the place of the captured tensors


def _request(q, k, v, layout, layout_text, descriptor, *rest) -> tuple:
    """Descriptor, operands, options and captured tensors."""
    made = from_text(descriptor)
    *numbers, captured = rest
    scale, factor, left, right, q_lengths, kv_lengths, dropout_p, seed, seed_number = numbers
    options = Options(
        factor if scale is None else scale, (left, right), q_lengths, kv_lengths, dropout_p,
        seed_number if seed is None else seed, True,
    )  # fmt: skip
    named = dict(zip(made.names, captured or (), strict=True))  # None of AOTInductor's empty lists
    return made, (Layout.from_layout(layout_text, layout), q, k, v), options, named


def _given(descriptor_text: str, operands: tuple, options: Options, captured: dict) -> tuple:
    """What an operator takes of a request."""
    layout, q, k, v = operands
    device = q.device
    scale, factor = options.scale, 1.0
    if isinstance(scale, (torch.SymInt, torch.SymFloat)):
        scale, factor = None, torch.sym_float(scale)
    elif not isinstance(scale, torch.Tensor):
        scale, factor = None, host_value("scale", scale, 0)
    elif scale.device != device:
        # The copy of a host tensor is recorded too: a CUDA graph can leave it out.
        scale = scale.to(device)
    is_tensor = isinstance(options.seed, torch.Tensor)
    seed = (options.seed, 0) if is_tensor else (None, options.seed)
    return (
        q, k, v, [*layout.flat], layout.form, descriptor_text, scale, factor, *options.window,
        options.q_lengths, options.kv_lengths, options.dropout_p, *seed, [*captured.values()],
    )  # fmt: skip


def _compute(*given):
    *request, debug = given
    descriptor, operands, options, captured = _request(*request)
    with events.on_stderr() if debug else nullcontext():
        out, lse, rest = calls.execute(descriptor, operands, None, options, captured)
    # Gradients by torch read no rest.
    return out, lse, torch.zeros_like(lse) if rest is None else rest


def _fake(*given):
    descriptor, operands, options, captured = _request(*given[:-1])
    sizes = arguments.check_operands(descriptor, operands, options, captured)
    q = operands[1]
    lse, rest = (q.new_empty(sizes.out[:3], dtype=accumulator(q.dtype)) for _ in range(2))
    return q.new_empty(sizes.out), lse, rest


def _save(ctx, inputs, output) -> None:
    *request, ctx.debug = inputs
    ctx.constants = [None if isinstance(n, (torch.Tensor, list, tuple)) else n for n in request]
    ctx.set_materialize_grads(False)
    tensors = [n if isinstance(n, torch.Tensor) else None for n in request]
    captured = request[CAPTURED] or []
    rest = output[2] if len(output) > 2 else None
    ctx.save_for_backward(*output[:2], rest, *tensors, *request[3], *captured)


def _backward(ctx, grad, grad_lse, _=None):
    out, lse, rest, *saved = ctx.saved_tensors
    tensors, lists = saved[:COUNT], saved[COUNT:]
    request = [n if t is None else t for n, t in zip(ctx.constants, tensors, strict=True)]
    stored = count_of(request[4])
    request[3], request[CAPTURED] = lists[:stored], lists[stored:]
    count = len(request[CAPTURED])
    none = [None] * COUNT
    none[3], none[CAPTURED] = [None] * stored, [None] * count
    if grad is None and grad_lse is None:
        return *none, None
    grad = torch.zeros_like(out) if grad is None else grad
    descriptor, _, _, captured = _request(*request)
    known = arguments.differentiable(descriptor, captured)
    asked = zip(ctx.needs_input_grad[CAPTURED] or [], descriptor.names, strict=True)
    needs = *ctx.needs_input_grad[:3], *(need and name in known for need, name in asked)
    found = _gradients(request, (out, lse, rest), (grad, grad_lse), needs, ctx.debug)
    return *found[:3], *none[3:CAPTURED], found[3:], None


def _gradients(request: list, saved, grads, needs: tuple, debug: bool) -> list:
    """By q, k, v and captured tensors, by their operator, None where there is no need."""
    out, lse, rest = saved
    given = *grads, out, lse, *request, [*needs], debug, rest
    found = iter(gradient(*given) if any(needs) else ())
    return [next(found) if need else None for need in needs]


# The gradient.


def _split(given: tuple) -> tuple:
    """Of what a gradient is given behind its tensors: the request, needs, debug, and the rest,
    which torch leaves out where it is None."""
    needs, debug, *rest = given[COUNT:]
    return given[:COUNT], needs, debug, rest[0] if rest else None


def _compute_gradient(grad, grad_lse, out, lse, *given):
    request, needs, debug, rest = _split(given)
    descriptor, operands, options, captured = _request(*request)
    # The reference records its pieces, by which the dispatcher passes inside of an operator.
    keys, guard = torch._C.DispatchKey, torch._C._SetExcludeDispatchKeyGuard
    with (
        torch.no_grad(),
        guard(keys.AutogradFunctionality, False),
        guard(keys.ADInplaceOrView, False),
        events.on_stderr() if debug else nullcontext(),
    ):
        found = gradient_calls.execute(
            descriptor, operands, (out, lse, rest), options, captured, (grad, grad_lse),
            tuple(needs),
        )  # fmt: skip
    return [t for t in found if t is not None]


def _fake_gradient(grad, grad_lse, out, lse, *given):
    request, needs, *_ = _split(given)
    tensors = (*request[:3], *(request[CAPTURED] or ()))
    return [t.new_empty(t.shape) for t, need in zip(tensors, needs, strict=True) if need]


def _gradient_recorded(grad, grad_lse, out, lse, *given):
    request, needs, *_ = _split(given)
    descriptor, operands, options, captured = _request(*request)
    tensors = (grad, grad_lse, *operands[1:], *captured.values())
    if not any(t is not None and t.requires_grad for t in tensors):
        return None
    grads = grad, grad_lse
    found = reference.recorded_gradient(
        descriptor, operands, options, captured, grads, tuple(needs)
    )
    return [t for t in found if t is not None]


def gradients_of(descriptor, operands, saved, options, captured: dict, grads, needs) -> list:
    """A request of the gradient by its operator."""
    given = _given(descriptor.text, operands, options, captured)
    return _gradients([*given], saved, grads, needs, False)


# vmap: as many calls, stacked.


def _mapped(run, info, dims, given: tuple, layout: int):
    """``layout`` is the place of that among the arguments."""
    if any(dim is not None for dim in dims[layout] or ()):
        raise NotImplementedError("torch.vmap over a layout is not known: it is one for all")
    found = []
    for index in range(info.batch_size):
        found.append(run(*(_one(t, dim, index) for t, dim in zip(given, dims, strict=True))))
    stacked = [torch.stack(each) for each in zip(*found, strict=True)]
    if isinstance(found[0], list):
        return stacked, [0] * len(stacked)
    return tuple(stacked), (0,) * len(stacked)


def _one(value, dim, index: int):
    """What one of the mapped calls is given."""
    if isinstance(value, (list, tuple)) and isinstance(dim, (list, tuple)):
        return [_one(t, d, index) for t, d in zip(value, dim, strict=True)]
    return value if dim is None else value.select(dim, index)


whole = register(
    ATTENTION.name,
    f"({_REQUEST}, bool debug) -> (Tensor, Tensor)",
    lambda *given: _compute(*given)[:2],
    lambda *given: _fake(*given)[:2],
    save=_save,
    backward=_backward,
    vmap=lambda info, dims, *given: _mapped(whole, info, dims, given, 3),
)
# With what floats leave of the log-sum-exps of a score's logits, which gradients want.
scored = register(
    f"{ATTENTION.name}_scored",
    f"({_REQUEST}, bool debug) -> (Tensor, Tensor, Tensor)",
    _compute,
    _fake,
    save=_save,
    backward=_backward,
    vmap=lambda info, dims, *given: _mapped(scored, info, dims, given, 3),
)
gradient = register(
    GRADIENT.name,
    f"(Tensor grad, Tensor? grad_lse, Tensor out, Tensor lse, {_REQUEST}, bool[] needs, "
    "bool debug, Tensor? rest=None) -> Tensor[]",
    _compute_gradient,
    _fake_gradient,
    recorded=_gradient_recorded,
    vmap=lambda info, dims, *given: _mapped(gradient, info, dims, given, 7),
)


# What Dynamo traces.


def run(descriptor: BlockSparseAttention, *operands, **given):
    """:func:`kernlib.run_kernel` by way of the operators.

    What is wrong with shapes, dtypes and devices is raised here; what is wrong with values when the
    operator runs.
    """
    arguments.check_kinds(descriptor, operands)
    return attend(descriptor.text, operands, **given)


def attend(
    text: str,
    operands: tuple,
    out: torch.Tensor | None = None,
    scale: float | torch.Tensor | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    q_lengths: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    dropout_p: float | None = None,
    seed: int | torch.Tensor | None = None,
    return_lse: bool = False,
    debug: bool = False,
    **captured: torch.Tensor,
):
    """:func:`run` by the text of a descriptor, which Dynamo need not make."""
    layout, q, k, v = operands
    refuse_recorded_out(out, q, k, v, scale, *captured.values())
    numbers = scale, window, q_lengths, kv_lengths, dropout_p, seed, return_lse
    tensors = q, k, v, *layout.flat, *captured.values()
    y, lse, *_ = _traced(text, " ".join(captured), layout.form, debug, *numbers, *tensors)
    y = written(out, y, q if out is None or q.dtype == y.dtype else y)
    return (y, lse) if return_lse else y


# Dynamo puts the call into its graph as it is, for AOTAutograd to trace what it does.
@torch.compiler.allow_in_graph
def _traced(text: str, names: str, layout_text: str, debug: bool, *given):
    descriptor, count, stored = from_text(text), len(arguments.NUMBERS), count_of(layout_text)
    numbers, (q, k, v, *tensors) = given[:count], given[count:]
    operands = Layout.from_layout(layout_text, tensors[:stored]), q, k, v
    options = arguments.options_of(descriptor, operands, *numbers)
    operands = arguments.autocast(operands)
    captured = dict(zip(names.split(), tensors[stored:], strict=True))
    arguments.check_operands(descriptor, operands, options, captured)
    arguments.check_scale(options.scale, q, False)
    captured = {name: captured[name] for name in descriptor.names}
    if takes_derivatives():
        return by_reference(descriptor, operands, None, options, captured)
    return _run(descriptor, operands, options, captured, debug)


def _run(descriptor, operands: tuple, options: Options, captured: dict, debug: bool) -> tuple:
    """A request by the operator that it is for."""
    call = whole if descriptor.score is None else scored
    return call(*_given(descriptor.text, operands, options, captured), debug)


def _call(descriptor, operands: tuple, out, options: Options, captured: dict) -> tuple:
    """A request of tensors that stand for others, whose operands autocast has seen."""
    arguments.check_call(descriptor, operands, out, options, captured)
    y, lse, *rest = _run(descriptor, operands, options, captured, False)
    return written(out, y, operands[1]), lse if options.lse else None, *(rest or [None])


BY_NAME = {ATTENTION.name: _call, GRADIENT.name: gradients_of}

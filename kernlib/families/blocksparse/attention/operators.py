"""Block-sparse attention and its gradient as operators of ``torch.library``, for whoever records
calls and runs them later. Eager calls pass by.
"""

from __future__ import annotations

import torch

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
from kernlib.families.blocksparse.kinds import LAYOUT, SCALE
from kernlib.families.blocksparse.layout import Layout, count_of
from kernlib.runtime.arguments import refuse_recorded_out, written
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.operators import one_by_one, register
from kernlib.runtime.products import requires_gradient
from kernlib.runtime.schema import DESCRIPTOR, Kind, Schema, placed
from kernlib.runtime.tensors import takes_derivatives


def _option_fields(options: Options) -> tuple:
    seed = (options.seed, 0) if isinstance(options.seed, torch.Tensor) else (None, options.seed)
    return (
        *SCALE.flatten(options.scale), *options.window, options.q_lengths, options.kv_lengths,
        options.dropout_p, *seed,
    )  # fmt: skip


def _options(scale, factor, left, right, q_lengths, kv_lengths, dropout_p, seed, number) -> Options:
    scale, seed = SCALE.restore(scale, factor), number if seed is None else seed
    return Options(scale, (left, right), q_lengths, kv_lengths, dropout_p, seed, True)


_OPTIONS = Kind(
    "options",
    (
        *SCALE.fields, "SymInt left", "SymInt right", "Tensor? q_lengths", "Tensor? kv_lengths",
        "float dropout_p", "Tensor? seed", "SymInt seed_number",
    ),
    _option_fields,
    _options,
)  # fmt: skip
_TENSORS = "Tensor q", "Tensor k", "Tensor v"
_REQUEST = *_TENSORS, LAYOUT, DESCRIPTOR, _OPTIONS, "Tensor[] captured"


def _named(descriptor: BlockSparseAttention, captured: list) -> dict:
    return dict(zip(descriptor.names, captured, strict=True))


def _compute(q, k, v, layout, descriptor, options, captured, debug):
    operands, captured = (layout, q, k, v), _named(descriptor, captured)
    out, lse, rest = calls.execute(descriptor, operands, None, options, captured)
    # Gradients by torch read no rest.
    return out, lse, torch.zeros_like(lse) if rest is None else rest


def _fake(q, k, v, layout, descriptor, options, captured, debug):
    operands, captured = (layout, q, k, v), _named(descriptor, captured)
    sizes = arguments.check_operands(descriptor, operands, options, captured)
    lse, rest = (q.new_empty(sizes.out[:3], dtype=accumulator(q.dtype)) for _ in range(2))
    return q.new_empty(sizes.out), lse, rest


def _backward(saved, grad, grad_lse, *_) -> dict:
    if grad is None and grad_lse is None:
        return {}
    out, lse, *rest = saved.outputs
    grad = torch.zeros_like(out) if grad is None else grad
    descriptor, captured, needs = saved.descriptor, saved.captured, saved.needs
    differentiable = arguments.differentiable(descriptor, _named(descriptor, captured))
    needed = zip(needs.captured or (), descriptor.names, strict=True)
    needed = needs.q, needs.k, needs.v, *(need and name in differentiable for need, name in needed)
    request = saved.q, saved.k, saved.v, saved.layout, descriptor, saved.options, captured
    results = out, lse, rest[0] if rest else None
    to_q, to_k, to_v, *rest = _gradients(request, results, (grad, grad_lse), needed, saved.debug)
    return {"q": to_q, "k": to_k, "v": to_v, "captured": rest}


def _gradients(request: tuple, results, grads, needs: tuple, debug: bool) -> list:
    """By q, k, v and captured tensors, by their operator, None where there is no need."""
    if not any(needs):
        return [None] * len(needs)
    out, lse, rest = results
    answers = iter(gradient(*grads, out, lse, *request, [*needs], debug, rest))
    return [next(answers) if need else None for need in needs]


# The gradient.


def _compute_gradient(
    grad, grad_lse, out, lse, q, k, v, layout, descriptor, options, captured, needs, debug, rest
):
    operands, captured = (layout, q, k, v), _named(descriptor, captured)
    # The reference records its pieces, by which the dispatcher passes inside of an operator.
    keys, guard = torch._C.DispatchKey, torch._C._SetExcludeDispatchKeyGuard
    with (
        torch.no_grad(),
        guard(keys.AutogradFunctionality, False),
        guard(keys.ADInplaceOrView, False),
    ):
        grads = gradient_calls.execute(
            descriptor, operands, (out, lse, rest), options, captured, (grad, grad_lse),
            tuple(needs),
        )  # fmt: skip
    return [t for t in grads if t is not None]


def _fake_gradient(
    grad, grad_lse, out, lse, q, k, v, layout, descriptor, options, captured, needs, debug, rest
):
    tensors = zip((q, k, v, *captured), needs, strict=True)
    return [t.new_empty(t.shape) for t, need in tensors if need]


def _gradient_recorded(
    grad, grad_lse, out, lse, q, k, v, layout, descriptor, options, captured, needs, debug, rest
):
    if not requires_gradient((grad, grad_lse, q, k, v), *captured):
        return None
    operands, captured = (layout, q, k, v), _named(descriptor, captured)
    grads = grad, grad_lse
    answers = reference.recorded_gradient(
        descriptor, operands, options, captured, grads, tuple(needs)
    )
    return [t for t in answers if t is not None]


def gradients_of(descriptor, operands, saved, options, captured: dict, grads, needs) -> list:
    """A request of the gradient by its operator."""
    request = _request(descriptor, operands, options, captured)
    return _gradients(request, saved, grads, needs, False)


def _request(descriptor, operands: tuple, options: Options, captured: dict) -> tuple:
    """The operator's arguments of a request."""
    layout, q, k, v = operands
    options = options._replace(scale=placed(options.scale, q.device))
    return q, k, v, layout, descriptor, options, [*captured.values()]


_GRADS = "Tensor grad", "Tensor? grad_lse", "Tensor out", "Tensor lse"
_SAVES = "q", "k", "v", "layout", "descriptor", "options", "captured"
whole = register(
    ATTENTION.name,
    Schema(*_REQUEST, "bool debug"),
    "(Tensor, Tensor)",
    lambda *call: _compute(*call)[:2],
    lambda *call: _fake(*call)[:2],
    saves=_SAVES,
    outputs=2,
    backward=_backward,
    materialize=False,
    vmap=lambda info, dims, *call: one_by_one(whole, info, dims, call),
)
# With what floats leave of the log-sum-exps of a score's logits, which gradients read.
scored = register(
    f"{ATTENTION.name}_scored",
    Schema(*_REQUEST, "bool debug"),
    "(Tensor, Tensor, Tensor)",
    _compute,
    _fake,
    saves=_SAVES,
    outputs=3,
    backward=_backward,
    materialize=False,
    vmap=lambda info, dims, *call: one_by_one(scored, info, dims, call),
)
gradient = register(
    GRADIENT.name,
    Schema(*_GRADS, *_REQUEST, "bool[] needs", "bool debug", "Tensor? rest=None"),
    "Tensor[]",
    _compute_gradient,
    _fake_gradient,
    recorded=_gradient_recorded,
    vmap=lambda info, dims, *call: one_by_one(gradient, info, dims, call),
)


# What Dynamo traces.


def run(descriptor: BlockSparseAttention, *operands, **options):
    """:func:`kernlib.run_kernel` by way of the operators.

    What is wrong with shapes, dtypes and devices is raised here; what is wrong with values when the
    operator runs.
    """
    arguments.check_kinds(descriptor, operands)
    return attend(descriptor.text, operands, **options)


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
def _traced(text: str, names: str, layout_text: str, debug: bool, *values):
    descriptor, count, stored = from_text(text), len(arguments.NUMBERS), count_of(layout_text)
    numbers, (q, k, v, *tensors) = values[:count], values[count:]
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
    operator = whole if descriptor.score is None else scored
    return operator(*_request(descriptor, operands, options, captured), debug)


def _call(descriptor, operands: tuple, out, options: Options, captured: dict) -> tuple:
    """A request of tensors that stand for others, whose operands autocast has seen."""
    arguments.check_call(descriptor, operands, out, options, captured)
    y, lse, *rest = _run(descriptor, operands, options, captured, False)
    return written(out, y, operands[1]), lse if options.lse else None, *(rest or [None])


BY_NAME = {ATTENTION.name: _call, GRADIENT.name: gradients_of}

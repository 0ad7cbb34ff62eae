"""Block-sparse attention as it is called, and its gradient.

Requests are ``(descriptor, (layout, q, k, v), out, options, captured)``, answered by ``out``,
``lse`` or None, and ``rest``, what floats leave of the log-sum-exps of a score's logits, or None;
and for a gradient ``(descriptor, operands, (out, lse, rest), options, captured, (grad, grad_lse),
needs)``, answered by those of q, k, v and the captured tensors, None where there is no need.
Kernels compute the CUDA calls that they take. The reference computes all others, and calls inside
of transforms of torch.func.

A call whose gradient is recorded keeps q, k, v, out and lse, with a score also what floats leave of
lse, and no logits: with ``D = sum(grad * out) - grad_lse`` of each row the gradient by a logit is
``p * (<grad, v> - D)``, for p computed again. Gradients of gradients are torch's own, of the
reference computed again."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import torch
from torch._C import _are_functorch_transforms_active
from torch.autograd import forward_ad

from kernlib.families.blocksparse.attention import arguments, plans
from kernlib.families.blocksparse.attention.arguments import Options, check_kinds
from kernlib.families.blocksparse.attention.descriptor import BlockSparseAttention
from kernlib.families.blocksparse.attention.plans import AttentionPlan
from kernlib.families.blocksparse.checks import Call
from kernlib.families.blocksparse.lowering.attention import choose
from kernlib.families.blocksparse.lowering.attention.score_source import CAPTURED
from kernlib.runtime import early, operation, rehearsal
from kernlib.runtime.arguments import no_autocast, parameter_key, refuse_out_of_recorded
from kernlib.runtime.autograd import ORDINARY, is_watched
from kernlib.runtime.dtypes import KERNEL_TYPES
from kernlib.runtime.operation import KERNELS, REFERENCE, Operation, by_operator, operators_of
from kernlib.runtime.products import is_on_gpu, requires_gradient
from kernlib.runtime.tensors import (
    UNREADABLE,
    check_dense,
    is_lazy,
    is_wrapped,
    materialised,
    signature,
    stand_ins,
)

if TYPE_CHECKING:
    from kernlib.jit.spec import KernelSpec
    from kernlib.runtime.ahead import Planned

OPERATORS = "kernlib.families.blocksparse.attention.operators"
SAVED = 2  # tensors of a layout that are saved for backward


# Calls without autocast and without a record of gradients.


def _key(descriptor, operands: tuple, out, options: Options, captured: dict) -> tuple | None:
    """All that a plan depends on: the descriptor, the layout's sizes and device, but nothing of its
    contents, then shapes, strides, dtypes, device, alignment and kinds of numbers. None where there
    can be no plan."""
    try:
        layout, q, k, v = operands
        key = (
            descriptor.text, layout.key, signature(q), signature(k), signature(v), options.lse,
            None if out is None else signature(out),
        )  # fmt: skip
        if options.has_tensors:  # 0.4 us, which most calls save
            key += tuple(map(parameter_key, options.tensors))
        for name, value in captured.items():
            key += (name, signature(value))
    except UNREADABLE:
        check_kinds(descriptor, operands)
        check_dense((), out=out, **captured)
        return None
    return key


def _way(call: Call, descriptor, operands: tuple, out, options: Options, captured: dict) -> str:
    """Raises UnsupportedError for devices that have no backend."""
    if not is_on_gpu(call.device) or _are_functorch_transforms_active():
        return REFERENCE
    if any(map(is_wrapped, (*operands[1:], out, *options.tensors, *captured.values()))):
        return REFERENCE
    return KERNELS if plans.takes(descriptor, operands, options, captured) else REFERENCE


def _reference(call, descriptor, operands: tuple, out, options: Options, captured: dict) -> tuple:
    arguments.refuse_overlap(operands, out, options, captured)
    return by_reference(descriptor, operands, out, options, captured)


def by_reference(descriptor, operands: tuple, out, options: Options, captured: dict) -> tuple:
    """A checked call by torch's own operators, which are differentiable as they are."""
    from kernlib.families.blocksparse.attention import reference  # only torch's way needs it

    with no_autocast(operands[1]):
        y, lse = reference.attention(descriptor, operands, options, captured)
    return y if out is None else out.copy_(y), lse if options.lse else None, None


def _tensors(descriptor, operands: tuple, out, options: Options, captured: dict) -> tuple:
    layout, *tensors = operands
    return *tensors, *layout.tensors, out, *options.tensors, *captured.values()


def _materialised(descriptor, operands: tuple, out, options: Options, captured: dict):
    layout, *tensors = operands
    numbers = [t for t in options.tensors if isinstance(t, torch.Tensor)]
    if not is_lazy(*tensors, *captured.values(), *numbers):
        return None
    arguments.refuse_overlap(operands, out, options, captured)
    real = {name: materialised(value) for name, value in captured.items()}
    return descriptor, (layout, *map(materialised, tensors)), out, options.materialised(), real


def _rehearsed(plan: AttentionPlan, descriptor, operands, out, options: Options, captured) -> tuple:
    y = operands[1].new_empty(plan.sizes.out) if out is None else out
    lse = plan.lse() if options.lse else None
    return y, lse, plan.lse() if options.lse and plan.has_rest else None


ATTENTION = Operation(
    name="blocksparse_attention",
    operators=OPERATORS,
    key=_key,
    check=arguments.check_call,
    way=_way,
    reference=_reference,
    plan=plans.plan,
    launch=plans.launch,
    tensors=_tensors,
    materialised=_materialised,
    rehearsed=_rehearsed,
)
calls = operation.bind(ATTENTION)


# The gradient.


def _gradient_key(descriptor, operands, saved: tuple, options, captured, grads, needs):
    try:
        out = saved[0]
        grad, grad_lse = grads
        key = _key(descriptor, operands, out, options, captured)
        return key and (*key, signature(grad), grad_lse is not None, needs)
    except (AttributeError, RuntimeError, NotImplementedError):  # tensors without memory
        return None


def _gradient_check(descriptor, operands, saved: tuple, options, captured, grads, needs) -> Call:
    out, q = saved[0], operands[1]
    return Call(out.numel(), tuple(out.shape), q.dtype, q.device)


def _gradient_way(call: Call, descriptor, operands, saved, options, captured, grads, needs) -> str:
    if any(map(is_wrapped, grads)):
        return REFERENCE
    return _way(call, descriptor, operands, None, options, captured)


def _gradient_reference(
    call, descriptor, operands: tuple, saved, options, captured, grads, needs
) -> list:
    from kernlib.families.blocksparse.attention import reference

    with no_autocast(operands[1]):
        return reference.gradient(descriptor, operands, options, captured, grads, needs)


def _gradient_tensors(descriptor, operands, saved, options, captured, grads, needs) -> tuple:
    return *grads, *saved, *_tensors(descriptor, operands, None, options, captured)


def _gradient_materialised(descriptor, operands, saved, options, captured, grads, needs):
    request = _materialised(descriptor, operands, None, options, captured)
    if request is None and not is_lazy(*saved, *grads):
        return None
    if request is not None:
        descriptor, operands, _, options, captured = request
    saved, grads = (
        tuple(None if t is None else materialised(t) for t in tensors) for tensors in (saved, grads)
    )
    return descriptor, operands, saved, options, captured, grads, needs


def _gradient_rehearsed(plan, descriptor, operands, saved, options, captured, grads, needs) -> list:
    tensors = *operands[1:], *(captured[name] for name in descriptor.names)
    return [rehearsal.like(t) if need else None for t, need in zip(tensors, needs, strict=True)]


GRADIENT = Operation(
    name="blocksparse_attention_gradient",
    operators=OPERATORS,
    key=_gradient_key,
    check=_gradient_check,
    way=_gradient_way,
    reference=_gradient_reference,
    plan=plans.gradient_plan,
    launch=plans.launch_gradient,
    tensors=_gradient_tensors,
    materialised=_gradient_materialised,
    rehearsed=_gradient_rehearsed,
)
gradient_calls = operation.bind(GRADIENT)


# Eager calls that record it.


def _gradients(
    descriptor, operands, saved, options, captured: dict, grads: tuple, needs: tuple
) -> list:
    """The gradients of q, k, v and captured tensors: by torch's operators where they may be
    differentiated again or a transform is active, by the library's operator where a mode watches,
    else by kernels."""
    request = descriptor, operands, saved, options, captured, grads, needs
    # Operands are not wrapped where no transform is active: the call went to the reference then.
    tensors = (*operands[1:], *grads) if _are_functorch_transforms_active() else grads
    if torch.is_grad_enabled() or any(map(is_wrapped, tensors)):
        from kernlib.families.blocksparse.attention import reference

        return reference.recorded_gradient(descriptor, operands, options, captured, grads, needs)
    if is_watched(grads[0]):
        return operators_of(ATTENTION).gradients_of(*request)
    return gradient_calls.execute(*request)


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
        # The layout's tensors that backward reads, so that torch notices writes: each tensor costs
        # a step 0.7 us, and a write of one writes all.
        ctx.save_for_backward(out, lse, rest, q, k, v, *captured, *tensors, *layout.tensors[:3:2])
        return out, lse

    @staticmethod
    def backward(ctx, grad, grad_lse):
        needs = ctx.needs_input_grad[4:]
        if grad is None and grad_lse is None:
            return None, None, None, None, *[None] * len(needs)
        out, lse, below, q, k, v, *rest = ctx.saved_tensors
        descriptor, options, captured = ctx.descriptor, ctx.options, {}
        if len(rest) > SAVED:
            names = descriptor.names
            captured = dict(zip(names, rest[: len(names)], strict=True))
            tensors = dict(zip(ctx.places, rest[len(names) : -SAVED], strict=True))
            options = Options(*(tensors.get(at, n) for at, n in enumerate(options)))
        grad = torch.zeros_like(out) if grad is None else grad
        if 0 in grad.stride():  # of sum()
            grad = grad.contiguous()
        operands = ctx.layout, q, k, v
        saved, grads = (out, lse, below), (grad, grad_lse)
        results = _gradients(descriptor, operands, saved, options, captured, grads, needs)
        return None, None, None, None, *results


def _recorded(descriptor, operands: tuple, out, options: Options, captured: dict) -> tuple:
    """A call whose derivatives torch wants to know. Raises RuntimeError for an ``out``, and what
    checks raise."""
    transformed = forward_ad._current_level >= 0 or _are_functorch_transforms_active()
    with_lse = options if options.lse else options._replace(lse=True)
    plan = None
    if out is None and not transformed:
        plan = _plan_of(descriptor, operands, with_lse, captured)
    if plan is None:
        check_kinds(descriptor, operands)
        refuse_out_of_recorded(out)
        request = descriptor, operands, None, options, captured
        if stand_ins(*_tensors(*request)):
            return by_operator(ATTENTION, request)[:2]
        arguments.check_call(*request)
        if transformed:
            return by_reference(*request)[:2]
    layout, *tensors = operands
    named: list = []
    if captured:
        names = arguments.differentiable(descriptor, captured)
        named = [captured[n] if n in names else captured[n].detach() for n in descriptor.names]
    request = descriptor, layout, with_lse, plan, *tensors, *named
    apply = _Attention.apply
    out, lse = early.first(apply, *request) if plan is None else apply(*request)
    return out, lse if options.lse else None


def _plan_of(descriptor, operands: tuple, options: Options, captured: dict):
    """The plan of a call that needs no check since it is there, else None."""
    tensors = *operands[1:], *captured.values()
    if any([type(t) not in ORDINARY for t in tensors]) and stand_ins(*tensors):
        return None
    if requires_gradient((), *options.tensors):  # checks refuse it
        return None
    return calls.find(descriptor, operands, None, options, captured)


# The call.


def run(
    descriptor: BlockSparseAttention,
    *operands,
    out: torch.Tensor | None = None,
    scale: float | torch.Tensor | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    q_lengths: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    dropout_p: float | None = None,
    seed: int | torch.Tensor | None = None,
    return_lse: bool = False,
    **captured: torch.Tensor,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The result of ``descriptor`` for ``operands``, layout, q, k and v, as its class says."""
    options = arguments.options_of(
        descriptor, operands, scale, window, q_lengths, kv_lengths, dropout_p, seed, return_lse
    )
    if torch._C._is_any_autocast_enabled():
        check_kinds(descriptor, operands)
        if isinstance(out, torch.Tensor):  # before casts, which would hide it
            arguments.refuse_overlap(operands, out, options, captured)
        operands = arguments.autocast(operands)
    if forward_ad._current_level >= 0 or (
        torch.is_grad_enabled()
        and requires_gradient(captured.values(), *operands[1:], out, *options.tensors)
    ):
        y, lse = _recorded(descriptor, operands, out, options, captured)
    else:
        y, lse, _ = calls.execute(descriptor, operands, out, options, captured)
    return (y, lse) if return_lse else y


RUNS = {BlockSparseAttention: run}


# Calls before anybody makes them.


def planned(descriptor: BlockSparseAttention, tensors: tuple, keywords: dict) -> list[Planned]:
    """The parts of a call that have a plan. Raises TypeError for an argument that is not known."""
    from kernlib.runtime.ahead import is_recorded, planned_operation

    captured = dict(keywords)
    out = captured.pop("out", None)
    numbers = {name: captured.pop(name) for name in arguments.NUMBERS if name in captured}
    for name in captured:
        if name not in descriptor.names:
            arguments.refuse_name(descriptor, name)
    check_kinds(descriptor, tensors)
    options = arguments.options_of(descriptor, tensors, **numbers)
    recorded = is_recorded(out, *tensors[1:], *options.tensors, *captured.values())
    request = descriptor, arguments.autocast(tensors), out, options, captured
    return [planned_operation(ATTENTION, calls, request, recorded)]


def variants(
    descriptor: BlockSparseAttention, arch: str, dtypes: tuple[torch.dtype, ...]
) -> list[KernelSpec]:
    """Every kernel that lowering can choose for a descriptor and tensors of ``dtypes``, of the
    usual widths and captured ones of one dtype, and for gradients by q, k and v; none for float32
    and float64. Raises KeyError for other dtypes."""
    names = [KERNEL_TYPES[dtype] for dtype in dtypes if dtype != torch.float64]
    names = tuple(name for name in names if name != "float32")
    kinds = CAPTURED if descriptor.names else ("",)
    across = [name for name, axes in descriptor.captured if "col" in axes]
    specs: dict[KernelSpec, None] = {}
    for kind, by, packed in product(kinds, ((), ("v",)), [()] + [across] * bool(across)):
        try:
            score = plans.score_of(descriptor, (kind,) * len(descriptor.names), by, packed)
        except ValueError:  # of a dtype that the expressions have no use for
            continue
        specs.update(dict.fromkeys(choose.variants(score, names, arch)))
    return list(specs)

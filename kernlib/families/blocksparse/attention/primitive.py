"""The primitives of block-sparse attention and of its gradient: calls without autocast and without
a record of gradients.

Requests are ``(descriptor, (layout, q, k, v), out, options, captured)``, answered by ``out``,
``lse`` or None, and ``rest``, what floats leave of the log-sum-exps of a score's logits, or None;
and for a gradient ``(descriptor, operands, (out, lse, rest), options, captured, (grad, grad_lse),
needs)``, answered by those of q, k, v and the captured tensors, None where there is no need.
Kernels compute on CUDA what they take; all else, and calls inside of transforms of torch.func, the
reference does.
"""

from __future__ import annotations

import torch
from torch._C import _are_functorch_transforms_active

from kernlib.families.blocksparse.attention import arguments, plans
from kernlib.families.blocksparse.attention.arguments import Call, Options
from kernlib.families.blocksparse.attention.descriptor import AXES
from kernlib.families.blocksparse.attention.plans import AttentionPlan, GradientPlan
from kernlib.families.blocksparse.layout import NAMES as TENSORS
from kernlib.runtime import devices, operation
from kernlib.runtime.arguments import no_autocast, parameter_key
from kernlib.runtime.operation import KERNELS, REFERENCE, Operation
from kernlib.runtime.products import is_on_gpu
from kernlib.runtime.tensors import (
    UNREADABLE,
    check_dense,
    is_lazy,
    is_wrapped,
    materialised,
    refuse_any_overlap,
    signature,
)

OPERATORS = "kernlib.families.blocksparse.attention.operators"


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
        if options.has_tensors:  # 0.4 us that most calls do without
            key += tuple(map(parameter_key, options.tensors))
        for name, value in captured.items():
            key += (name, signature(value))
    except UNREADABLE:
        arguments.check_kinds(descriptor, operands)
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
    refuse_overlap(operands, out, options, captured)
    return by_reference(descriptor, operands, out, options, captured)


def by_reference(descriptor, operands: tuple, out, options: Options, captured: dict) -> tuple:
    """A checked call by torch's own operators, which are differentiable as they are."""
    from kernlib.families.blocksparse.attention import reference  # which kernels do without

    with no_autocast(operands[1]):
        y, lse = reference.attention(descriptor, operands, options, captured)
    return y if out is None else out.copy_(y), lse if options.lse else None, None


def refuse_overlap(operands: tuple, out, options: Options, captured: dict) -> None:
    """Raises ValueError for an ``out`` that shares memory with an argument."""
    if out is None or out.is_meta:
        return
    layout, *tensors = operands
    listed = {f"layout.{name}": t for name, t in zip(TENSORS, layout.tensors, strict=True)}
    named = dict(zip(arguments.NAMES, tensors, strict=True))
    others = dict(zip(("scale", "q_lengths", "kv_lengths", "seed"), options.tensors, strict=True))
    refuse_any_overlap(out, **named, **others, **captured, **listed)


def _launch(plan: AttentionPlan, descriptor, operands: tuple, out, options: Options, captured):
    if devices.current_device() != plan.index:
        with torch.cuda.device(plan.index):
            return _launch(plan, descriptor, operands, out, options, captured)
    layout, q, k, v = operands
    if out is not None:
        refuse_overlap(operands, out, options, captured)
        if not out.is_inference():  # those have no version to count
            torch.autograd.graph.increment_version(out)
    target = plan.result() if out is None or plan.apart else out
    lse = plan.lse() if options.lse else None
    rest = plan.lse() if options.lse and plan.has_rest else None
    if plan.launch is not None:
        numbers, kept = plans.numbers_of(plan, options)
        if plan.reads:
            q, k, v = (read.of(t) for read, t in zip(plan.reads, (q, k, v), strict=True))
        addresses = [
            layout.addresses[0], q.data_ptr(), k.data_ptr(), v.data_ptr(), target.data_ptr(),
            0 if lse is None else lse.data_ptr(), 0 if rest is None else rest.data_ptr(),
        ]  # fmt: skip
        behind = ()
        if descriptor.lengths or captured:
            behind = plans.behind(plan, descriptor, options, captured)
            for t in behind:
                addresses.append(t.data_ptr())
        plan.launch(addresses, numbers)
        del q, k, v, kept, behind  # the stream orders the reuse of their memory behind the launch
    if plan.apart:
        whole = target[..., : plan.sizes.values]
        target = whole.contiguous() if out is None else out.copy_(whole)
    return target, lse, rest


def _addresses(tensors) -> list[int]:
    return [0 if t is None else t.data_ptr() for t in tensors]


def _plan(call: Call, *request) -> AttentionPlan:
    return plans.plan(call, *request)


def _tensors(descriptor, operands: tuple, out, options: Options, captured: dict) -> tuple:
    layout, *tensors = operands
    return *tensors, *layout.tensors, out, *options.tensors, *captured.values()


def _materialised(descriptor, operands: tuple, out, options: Options, captured: dict):
    layout, *tensors = operands
    numbers = [t for t in options.tensors if isinstance(t, torch.Tensor)]
    if not is_lazy(*tensors, *captured.values(), *numbers):
        return None
    refuse_overlap(operands, out, options, captured)
    real = {name: materialised(value) for name, value in captured.items()}
    return descriptor, (layout, *map(materialised, tensors)), out, readable(options), real


def readable(options: Options) -> Options:
    """With tensors that a kernel may read."""
    names = ("scale", "q_lengths", "kv_lengths", "seed")
    found = dict(zip(names, options.tensors, strict=True))
    real = {n: materialised(t) for n, t in found.items() if isinstance(t, torch.Tensor)}
    return options._replace(**real)


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
    plan=_plan,
    launch=_launch,
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


def _gradient_plan(
    call, descriptor, operands, saved: tuple, options, captured, grads, needs
) -> GradientPlan:
    out = saved[0]
    return plans.gradient_plan(descriptor, operands, out, options, captured, grads, needs)


def _gradient_launch(
    plan: GradientPlan, descriptor, operands: tuple, saved: tuple, options, captured, grads, needs
) -> list:
    if devices.current_device() != plan.index:
        request = descriptor, operands, saved, options, captured, grads, needs
        with torch.cuda.device(plan.index):
            return _gradient_launch(plan, *request)
    layout, *tensors = operands
    (out, lse, rest), (grad, grad_lse) = saved, grads
    made = [None if make is None else make() for make in plan.made]
    collected = [make() for _, make in plan.collected]
    if plan.launch is None:  # of no queries: keys have gradients of 0
        made = [t if t is None else t.zero_() for t in made]
    else:
        numbers, kept = plans.numbers_of(plan, options)
        given = [*tensors, out, grad]
        if plan.reads:
            given = [read.of(t) for read, t in zip(plan.reads, given, strict=True)]
        behind = plans.behind(plan, descriptor, options, captured)
        slope = None if grad_lse is None else grad_lse.contiguous()
        row_bits, _, col_bits = layout.addresses[:3]
        addresses = [row_bits, col_bits, *_addresses((*given[:4], lse, rest, given[4], slope))]
        addresses += _addresses((*made, *collected, *behind))
        plan.launch(addresses, numbers)
        del given, kept, behind, slope
    found = made
    if plan.cut:
        found = [
            t if t is None or t.shape == own.shape else t[..., : own.shape[-1]].contiguous()
            for t, own in zip(made, tensors, strict=True)
        ]
    if not descriptor.captured:
        return found
    parts = {index: t for (index, _), t in zip(plan.collected, collected, strict=True)}
    axes = dict(descriptor.captured)
    for place, name in enumerate(descriptor.names):
        part = parts.get(place)
        found.append(None if part is None else _summed(part, axes[name], captured[name]))
    return found


def _summed(part: torch.Tensor, axes: tuple[str, ...], like: torch.Tensor) -> torch.Tensor:
    """The gradient by a captured tensor of what kernels left of each batch and head."""
    from kernlib.families.blocksparse.attention.pieces import restored

    sizes = [like.shape[axes.index(axis)] if axis in axes else 1 for axis in AXES]
    whole = part.sum_to_size(sizes)
    return restored(whole[:, :, None], axes).reshape(like.shape).to(like.dtype)


def _gradient_tensors(descriptor, operands, saved, options, captured, grads, needs) -> tuple:
    return *grads, *saved, *_tensors(descriptor, operands, None, options, captured)


def _gradient_materialised(descriptor, operands, saved, options, captured, grads, needs):
    request = _materialised(descriptor, operands, None, options, captured)
    if request is None and not is_lazy(*saved, *grads):
        return None
    if request is not None:
        descriptor, operands, _, options, captured = request
    saved, grads = (
        tuple(None if t is None else materialised(t) for t in each) for each in (saved, grads)
    )
    return descriptor, operands, saved, options, captured, grads, needs


def _gradient_rehearsed(
    plan: GradientPlan, descriptor, operands, saved, options, captured, grads, needs
) -> list:
    tensors = *operands[1:], *(captured[name] for name in descriptor.names)
    return [torch.empty_like(t) if need else None for t, need in zip(tensors, needs, strict=True)]


GRADIENT = Operation(
    name="blocksparse_attention_gradient",
    operators=OPERATORS,
    key=_gradient_key,
    check=_gradient_check,
    way=_gradient_way,
    reference=_gradient_reference,
    plan=_gradient_plan,
    launch=_gradient_launch,
    tensors=_gradient_tensors,
    materialised=_gradient_materialised,
    rehearsed=_gradient_rehearsed,
)
gradient_calls = operation.bind(GRADIENT)

"""The primitives of block-sparse softmax and of its gradient: calls without autocast and without a
record of gradients.

Requests are ``(descriptor, (layout, x), out, scale, parameters)``, and for a gradient ``(layout,
grad, y, scale, needs)``, by x and by the logits. Kernels compute on CUDA but for float64 and calls
inside transforms of torch.func other than vmap, which the reference does.
"""

from __future__ import annotations

import torch

from kernlib.families.blocksparse.layout import NAMES as TENSORS
from kernlib.families.blocksparse.layout import Layout
from kernlib.families.blocksparse.lowering import softmax as lowering
from kernlib.families.blocksparse.softmax import arguments, plans, reference
from kernlib.families.blocksparse.softmax.arguments import Call
from kernlib.families.blocksparse.softmax.plans import SoftmaxPlan
from kernlib.runtime import devices, operation
from kernlib.runtime.arguments import no_autocast, parameter_key
from kernlib.runtime.dtypes import KERNEL_TYPES
from kernlib.runtime.operation import KERNELS, OPERATOR, REFERENCE, Operation
from kernlib.runtime.products import is_on_gpu
from kernlib.runtime.tensors import (
    UNREADABLE,
    check_dense,
    is_differentiated,
    is_lazy,
    is_wrapped,
    materialised,
    refuse_any_overlap,
    refuse_partial_overlap,
    signature,
)

OPERATORS = "kernlib.families.blocksparse.softmax.operators"


def _key(descriptor, operands: tuple, out, scale, parameters: dict) -> tuple | None:
    """All that a plan depends on: the descriptor, the layout's sizes and device, but nothing of its
    contents, then shapes, strides, dtypes, device, alignment and kinds of numbers. None where there
    can be no plan."""
    try:
        layout, x = operands
        key = (descriptor.text, layout.key, *signature(x), parameter_key(scale))
        key += (None,) if out is None else signature(out)
        for name, value in parameters.items():
            key += (name, signature(value))
    except UNREADABLE:
        arguments.check_kinds(descriptor, operands)
        check_dense((), out=out, **parameters)
        return None
    return key


def _way(call: Call, descriptor, operands: tuple, out, scale, parameters: dict) -> str:
    """Raises UnsupportedError for devices that have no backend."""
    layout, x = operands
    if not is_on_gpu(call.device) or not _is_for_kernels(layout, x):
        return REFERENCE
    tensors = (x, out, scale, *parameters.values())
    if is_differentiated() or any(map(_is_legacy, tensors)):
        return REFERENCE
    return OPERATOR if any(map(is_wrapped, tensors)) else KERNELS


def _is_for_kernels(layout: Layout, x: torch.Tensor) -> bool:
    return x.dtype in KERNEL_TYPES and lowering.takes(layout.sizes)


def _is_legacy(value) -> bool:
    """Whether ``is_grads_batched`` made a tensor."""
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_legacy_batchedtensor(value)


def _reference(call, descriptor, operands: tuple, out, scale, parameters: dict) -> torch.Tensor:
    refuse_overlap(operands, out, scale, parameters)
    return by_reference(descriptor, operands, out, scale, parameters)


def by_reference(descriptor, operands: tuple, out, scale, parameters: dict) -> torch.Tensor:
    """A checked call by torch's own operators, which are differentiable as they are."""
    layout, x = operands
    with no_autocast(x):
        y = reference.softmax(descriptor, layout, x, scale, parameters)
    return y if out is None else out.copy_(y)


def refuse_overlap(operands: tuple, out, scale, parameters: dict) -> None:
    """Raises ValueError for an ``out`` that shares memory with an argument, but x itself."""
    if out is None or out.is_meta:
        return
    layout, x = operands
    refuse_partial_overlap(out, x=x)
    listed = {f"layout.{name}": t for name, t in zip(TENSORS, layout.tensors, strict=True)}
    refuse_any_overlap(out, scale=scale, **parameters, **listed)


def _launch(plan: SoftmaxPlan, descriptor, operands: tuple, out, scale, parameters: dict):
    if devices.current_device() != plan.index:
        with torch.cuda.device(plan.index):
            return _launch(plan, descriptor, operands, out, scale, parameters)
    layout, x = operands
    if out is not None:
        refuse_overlap(operands, out, scale, parameters)
        if not out.is_inference():  # those have no version to count
            torch.autograd.graph.increment_version(out)
    target = plan.result() if out is None or plan.apart else out
    if plan.launch is not None:
        numbers, kept = plans.numbers_of(plan, scale)
        given = plans.read(plan, (x, *parameters.values()))
        places = dict(zip(plan.names, [t.data_ptr() for t in given[1:]], strict=True))
        _, row_ranks, _, _, cols, counts = layout.addresses
        dense = [places.get(name, 0) for name in arguments.NAMES]
        addresses = row_ranks, cols, counts, given[0].data_ptr(), target.data_ptr(), *dense
        plan.launch.launch(addresses, numbers)
        del given, kept  # the stream orders the reuse of their memory behind the launch
    return out.copy_(target) if plan.apart else target


def _plan(call: Call, *request) -> SoftmaxPlan:
    return plans.plan(call, *request)


def _tensors(descriptor, operands: tuple, out, scale, parameters: dict) -> tuple:
    layout, x = operands
    return x, *layout.tensors, out, scale, *parameters.values()


def _materialised(descriptor, operands: tuple, out, scale, parameters: dict) -> tuple | None:
    layout, x = operands
    values = scale, *parameters.values()
    if not is_lazy(x, *(t for t in values if isinstance(t, torch.Tensor))):
        return None
    refuse_overlap(operands, out, scale, parameters)
    scale = materialised(scale) if isinstance(scale, torch.Tensor) else scale
    real = {name: materialised(value) for name, value in parameters.items()}
    return descriptor, (layout, materialised(x)), out, scale, real


SOFTMAX = Operation(
    name="blocksparse_softmax",
    operators=OPERATORS,
    key=_key,
    check=arguments.check_call,
    way=_way,
    reference=_reference,
    plan=_plan,
    launch=_launch,
    tensors=_tensors,
    materialised=_materialised,
    rehearsed=lambda plan, descriptor, operands, out, *rest: plan.result() if out is None else out,
)
calls = operation.bind(SOFTMAX)


# The gradient.


def _gradient_key(layout: Layout, grad, y, scale, needs: tuple) -> tuple | None:
    try:
        return layout.key, signature(grad), signature(y), parameter_key(scale), needs
    except (AttributeError, RuntimeError, NotImplementedError):  # tensors without memory
        return None


def _gradient_check(layout: Layout, grad, y, scale, needs: tuple) -> Call:
    return Call(y.numel(), tuple(y.shape), y.dtype, y.device)


def _gradient_way(call: Call, layout: Layout, grad, y, scale, needs: tuple) -> str:
    if not is_on_gpu(call.device) or not _is_for_kernels(layout, y):
        return REFERENCE
    return REFERENCE if any(map(is_wrapped, (grad, y, scale))) else KERNELS


def gradient_by_torch(layout: Layout, grad, y, scale, needs: tuple) -> list:
    """Those by x and by the logits, by torch's own operators; None where there is no need."""
    with no_autocast(y):
        found = reference.gradient(layout, grad, y)
        return [
            reference.scaled(found, scale).to(y.dtype) if needs[0] else None,
            found.to(y.dtype) if needs[1] else None,
        ]


def _gradient_plan(call: Call, layout: Layout, grad, y, scale, needs: tuple) -> SoftmaxPlan:
    return plans.gradient_plan(layout, grad, y)


def _gradient_launch(plan: SoftmaxPlan, layout: Layout, grad, y, scale, needs: tuple) -> list:
    if devices.current_device() != plan.index:
        with torch.cuda.device(plan.index):
            return _gradient_launch(plan, layout, grad, y, scale, needs)
    made = [plan.result() if need else None for need in needs]
    if plan.launch is not None:
        numbers, kept = plans.numbers_of(plan, scale)
        grads, values = given = plans.read(plan, (grad, y))
        _, row_ranks, _, _, _, counts = layout.addresses
        results = [0 if t is None else t.data_ptr() for t in made]
        addresses = row_ranks, counts, values.data_ptr(), grads.data_ptr(), *results
        plan.launch.launch(addresses, numbers)
        del given, kept, grads, values
    return made


def _gradient_materialised(layout: Layout, grad, y, scale, needs: tuple) -> tuple | None:
    is_number = not isinstance(scale, torch.Tensor)
    if not is_lazy(grad, y, None if is_number else scale):
        return None
    scale = scale if is_number else materialised(scale)
    return layout, materialised(grad), materialised(y), scale, needs


GRADIENT = Operation(
    name="blocksparse_softmax_gradient",
    operators=OPERATORS,
    key=_gradient_key,
    check=_gradient_check,
    way=_gradient_way,
    reference=lambda call, *request: gradient_by_torch(*request),
    plan=_gradient_plan,
    launch=_gradient_launch,
    tensors=lambda layout, grad, y, scale, needs: (grad, y, *layout.tensors, scale),
    materialised=_gradient_materialised,
    rehearsed=lambda plan, *request: [plan.result() if need else None for need in request[-1]],
)
gradient_calls = operation.bind(GRADIENT)

"""Block-sparse softmax as it is called, and its gradient.

Requests are ``(descriptor, (layout, x), out, scale, parameters)``, and for a gradient ``(layout,
grad, y, scale, needs)``, by x and by the logits. Kernels compute on CUDA but for float64 and calls
inside transforms of torch.func other than vmap, which the reference does.

The gradient by the logits is ``y * (grad - sum(y * grad))`` over the stored blocks of each row. The
gradient by x is that times the scale. Those by rpe and by added masks are that laid out as a matrix
and summed over the dimensions that they broadcast along. The scale's is the sum of its product with
x. A call keeps y, and x only for the gradient of a scale."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch._C import _are_functorch_transforms_active
from torch.autograd import forward_ad

from kernlib.families.blocksparse.checks import Call
from kernlib.families.blocksparse.kernels import softmax as kernels
from kernlib.families.blocksparse.layout import Layout
from kernlib.families.blocksparse.lowering import softmax as lowering
from kernlib.families.blocksparse.softmax import arguments, plans, reference
from kernlib.families.blocksparse.softmax.arguments import NAMES
from kernlib.families.blocksparse.softmax.descriptor import BlockSparseSoftmax
from kernlib.runtime import operation
from kernlib.runtime.arguments import no_autocast, parameter_key, refuse_out_of_recorded
from kernlib.runtime.autograd import is_watched
from kernlib.runtime.dtypes import KERNEL_TYPES, accumulator
from kernlib.runtime.operation import (
    KERNELS,
    OPERATOR,
    REFERENCE,
    Operation,
    by_operator,
    operators_of,
)
from kernlib.runtime.products import is_on_gpu, requires_gradient
from kernlib.runtime.tensors import (
    UNREADABLE,
    check_dense,
    is_differentiated,
    is_lazy,
    is_wrapped,
    materialised,
    signature,
    stand_ins,
)

if TYPE_CHECKING:
    from kernlib.jit.spec import KernelSpec
    from kernlib.runtime.ahead import Planned

OPERATORS = "kernlib.families.blocksparse.softmax.operators"


# Calls without autocast and without a record of gradients.


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
    arguments.refuse_overlap(operands, out, scale, parameters)
    return by_reference(descriptor, operands, out, scale, parameters)


def by_reference(descriptor, operands: tuple, out, scale, parameters: dict) -> torch.Tensor:
    """A checked call by torch's own operators, which are differentiable as they are."""
    layout, x = operands
    with no_autocast(x):
        y = reference.softmax(descriptor, layout, x, scale, parameters)
    return y if out is None else out.copy_(y)


def _tensors(descriptor, operands: tuple, out, scale, parameters: dict) -> tuple:
    layout, x = operands
    return x, *layout.tensors, out, scale, *parameters.values()


def _materialised(descriptor, operands: tuple, out, scale, parameters: dict) -> tuple | None:
    layout, x = operands
    values = scale, *parameters.values()
    if not is_lazy(x, *(t for t in values if isinstance(t, torch.Tensor))):
        return None
    arguments.refuse_overlap(operands, out, scale, parameters)
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
    plan=plans.plan,
    launch=plans.launch,
    tensors=_tensors,
    materialised=_materialised,
    rehearsed=lambda plan, descriptor, operands, out, *rest: plan.result() if out is None else out,
)
calls = operation.bind(SOFTMAX)


# The gradients by x and by the logits.


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
    """The gradients by x and by the logits, by torch's own operators; None where not needed."""
    with no_autocast(y):
        to_logits = reference.gradient(layout, grad, y)
        return [
            reference.scaled(to_logits, scale).to(y.dtype) if needs[0] else None,
            to_logits.to(y.dtype) if needs[1] else None,
        ]


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
    plan=plans.gradient_plan,
    launch=plans.launch_gradient,
    tensors=lambda layout, grad, y, scale, needs: (grad, y, *layout.tensors, scale),
    materialised=_gradient_materialised,
    rehearsed=lambda plan, *request: [plan.result() if need else None for need in request[-1]],
)
gradient_calls = operation.bind(GRADIENT)


# All gradients: their formulas, stated here alone.


class Needs(NamedTuple):
    """The gradients that are needed."""

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
    """The tensors that a call keeps for its gradients: ``x`` only for that of the scale. ``shapes``
    are those of rpe and masks, None for absent ones."""

    layout: Layout
    y: torch.Tensor
    x: torch.Tensor | None
    scale: float | torch.Tensor
    shapes: tuple


def differentiable(descriptor: BlockSparseSoftmax) -> tuple[bool, bool, bool]:
    """Whether rpe and each mask are added."""
    return descriptor.rpe, descriptor.key_padding_mask == "add", descriptor.attn_mask == "add"


def gradients(kept: Kept, grad: torch.Tensor, needs: Needs, pair: Callable) -> list:
    """The gradients that are needed, in their order, by ``pair(layout, grad, y, scale, needs)``,
    which returns those by x and by the logits."""
    if not any(needs):
        return [None] * len(needs)
    to_x, to_logits = pair(kept.layout, grad, kept.y, kept.scale, needs.pair)
    to_scale = _of_scale(kept, to_logits) if needs.scale else None
    return [to_x, to_scale, *_of_dense(kept, to_logits, needs[2:])]


def _of_scale(kept: Kept, to_logits: torch.Tensor) -> torch.Tensor:
    """The gradient by the scale. Elements that take no part add nothing, whatever x holds there. y
    tells which they are: an element that takes part may have a gradient of 0 with derivatives other
    than 0."""
    wide = accumulator(to_logits.dtype)
    products = to_logits.to(wide) * torch.where(kept.y == 0.0, 0.0, kept.x).to(wide)
    grad = products.sum().to(kept.scale.dtype)
    return grad if grad.device == kept.scale.device else grad.to(kept.scale.device)


def _of_dense(kept: Kept, to_logits, needs: tuple) -> list:
    """The gradients by rpe, key_padding_mask and attn_mask."""
    if not any(needs):
        return [None] * len(needs)
    dense, heads = kept.layout.to_dense(to_logits), kept.layout.heads
    grads = []
    for name, need, shape in zip(NAMES, needs, kept.shapes, strict=True):
        summed = dense
        if need and name == "key_padding_mask":
            summed = dense.sum(-2 if heads is None else (-3, -2))
        grads.append(summed.sum_to_size(shape) if need else None)
    return grads


# Eager calls that record them.


def eager_pair(layout: Layout, grad, y, scale, needs: tuple) -> list:
    """The gradients by x and by the logits: by torch's operators where they may be differentiated
    again or a transform is active, by the library's operator where a mode watches, else by the
    kernel."""
    tensors = grad, y, scale
    if torch.is_grad_enabled() or any(map(is_wrapped, tensors)):
        return gradient_by_torch(layout, grad, y, scale, needs)
    if is_watched(grad):
        return operators_of(SOFTMAX).gradient_pair(layout, grad, y, scale, needs)
    return gradient_calls.execute(layout, grad, y, scale, needs)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, descriptor, layout, x, scale, *dense):
        parameters = arguments.given(*dense)
        y = calls.execute(descriptor, (layout, x), None, scale, parameters)
        ctx.layout, ctx.number = layout, None if isinstance(scale, torch.Tensor) else scale
        ctx.shapes = tuple(None if t is None else t.shape for t in dense)
        needs_scale = ctx.needs_input_grad[3]
        ctx.save_for_backward(
            y, x if needs_scale else None, scale if ctx.number is None else None, *layout.tensors
        )
        return y

    @staticmethod
    def backward(ctx, grad):
        # The layout too, so that torch notices writes.
        y, x, scale, *_ = ctx.saved_tensors
        if 0 in grad.stride():  # of sum()
            grad = grad.contiguous()
        record = Kept(ctx.layout, y, x, ctx.number if scale is None else scale, ctx.shapes)
        needs = Needs(*ctx.needs_input_grad[2:])
        return None, None, *gradients(record, grad, needs, eager_pair)


def _recorded(descriptor, operands: tuple, out, scale, parameters: dict) -> torch.Tensor:
    """A call whose derivatives torch wants to know. Raises RuntimeError for an ``out``."""
    refuse_out_of_recorded(out)
    request = descriptor, operands, None, scale, parameters
    if stand_ins(*_tensors(*request)):
        return by_operator(SOFTMAX, request)
    call = arguments.check_call(*request)
    transformed = _are_functorch_transforms_active()
    if forward_ad._current_level >= 0:
        return by_reference(*request)
    if transformed and _way(call, *request) == REFERENCE:
        return by_reference(*request)
    if transformed:
        return by_operator(SOFTMAX, request)
    layout, x = operands
    dense = [parameters.get(name) for name in NAMES]
    for index, is_added in enumerate(differentiable(descriptor)):
        if dense[index] is not None and not is_added:
            dense[index] = dense[index].detach()
    return _Softmax.apply(descriptor, layout, x, scale, *dense)


# The call.


def run(
    descriptor: BlockSparseSoftmax,
    *operands,
    out: torch.Tensor | None = None,
    scale: float | torch.Tensor = 1.0,
    rpe: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The result of ``descriptor`` for ``operands``, layout and x, as its class says."""
    parameters = arguments.given(rpe, key_padding_mask, attn_mask)
    if torch._C._is_any_autocast_enabled():
        arguments.check_kinds(descriptor, operands)
        if isinstance(out, torch.Tensor):  # before casts, which would hide it
            arguments.refuse_overlap(operands, out, scale, parameters)
        parameters = arguments.autocast(operands, parameters)
    if forward_ad._current_level >= 0 or (
        torch.is_grad_enabled()
        and requires_gradient(parameters.values(), *operands[1:], out, scale)
    ):
        arguments.check_kinds(descriptor, operands)
        return _recorded(descriptor, operands, out, scale, parameters)
    return calls.execute(descriptor, operands, out, scale, parameters)


RUNS = {BlockSparseSoftmax: run}


# Calls before anybody makes them.


def planned(descriptor: BlockSparseSoftmax, tensors: tuple, keywords: dict) -> list[Planned]:
    """The parts of a call that have a plan. Raises TypeError for an argument that is not known."""
    from kernlib.runtime.ahead import is_recorded, planned_operation

    rest = dict(keywords)
    out, scale = rest.pop("out", None), rest.pop("scale", 1.0)
    for name in rest:
        if name not in NAMES:
            names = ", ".join(("out", "scale", *NAMES))
            raise TypeError(f"{name} is no argument of {descriptor.describe()}; it takes {names}")
    arguments.check_kinds(descriptor, tensors)
    parameters = arguments.autocast(tensors, arguments.given(**rest))
    recorded = is_recorded(out, scale, *tensors[1:], *parameters.values())
    request = descriptor, tensors, out, scale, parameters
    return [planned_operation(SOFTMAX, calls, request, recorded)]


def variants(
    descriptor: BlockSparseSoftmax, arch: str, dtypes: tuple[torch.dtype, ...]
) -> list[KernelSpec]:
    """Every kernel that lowering can choose for a descriptor and x of ``dtypes``, masks being bools
    or not, and for its gradients; none for float64. Raises KeyError for other dtypes."""
    names = tuple(KERNEL_TYPES[dtype] for dtype in dtypes if dtype != torch.float64)
    modes = descriptor.key_padding_mask, descriptor.attn_mask
    kinds = [(None,) if mode is None else (mode, "bool") for mode in modes]
    options = [
        lowering.Options(descriptor.causal, descriptor.rpe, *masks) for masks in product(*kinds)
    ]
    return list(kernels.variants(options, names))

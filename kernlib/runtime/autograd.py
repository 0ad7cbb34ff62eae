"""What families of products share of calls that record gradients: the parts of such a call, the
function that answers it, and whether a backward pass must be seen as operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch._C import _are_functorch_transforms_active, _is_tracing
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kernlib.descriptors.epilogues import Bias, Epilogue, Product
from kernlib.runtime import early, expressions, products, rehearsal
from kernlib.runtime.arguments import refuse_out_of_recorded
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.operation import REFERENCE, Bound, by_operator, operators_of
from kernlib.runtime.plan import PlanCache
from kernlib.runtime.tensors import stand_ins

ORDINARY = frozenset((torch.Tensor, torch.nn.Parameter))  # types that stand for no other tensor


class Parts(NamedTuple):
    """A call as it is recorded: one product, and behind it the rest of the epilogues, by torch's
    own operators on the rounded result."""

    product: Product  # with or without a bias
    bias: str | None  # the parameter of the Bias that the epilogues begin with; None if they do not
    needed: frozenset[str]  # the parameters of the product: the bias or none
    rest: tuple[Epilogue, ...]
    names: tuple[str, ...]  # of the rest's parameters
    axis: int  # of the result's features

    def operands(self, parameters: dict) -> dict:
        """The parameters of the product."""
        return {} if self.bias is None else {"bias": parameters[self.bias]}

    def finish(self, y: torch.Tensor, parameters: dict) -> torch.Tensor:
        """The result of the call, from that of the product."""
        if not self.rest:
            return y
        if y.dtype is torch.bfloat16 and len(self.rest) == 1:
            activation = expressions.BFLOAT16_ACTIVATIONS.get(type(self.rest[0]))
            if activation is not None:
                return activation(self.rest[0], y)
        values = {name: parameters[name] for name in self.names}
        v = expressions.apply(self.rest, y.to(accumulator(y.dtype)), values, axis=self.axis)
        return v.to(y.dtype)


def is_biased(descriptor: Product) -> bool:
    """Whether the epilogues begin with a Bias, which the product itself adds."""
    return bool(descriptor.epilogue) and isinstance(descriptor.epilogue[0], Bias)


def parts(descriptor: Product, product: Product, axis: int) -> Parts:
    """The parts of a call that is recorded as ``product``, which adds the bias if the call
    :func:`is_biased`."""
    biased = is_biased(descriptor)
    bias = descriptor.epilogue[0].parameter if biased else None
    rest = descriptor.epilogue[biased:]
    names = tuple(name for epilogue in rest for name in epilogue.parameters)
    return Parts(product, bias, frozenset([bias] if biased else ()), rest, names, axis)


def bias_gradient(grad: torch.Tensor, axis: int) -> torch.Tensor:
    """The gradient of a vector that was added to each line along ``axis``, counted from the
    back."""
    if grad.dim() == 2:
        return grad.sum(-3 - axis)
    features = grad.movedim(axis, -1)
    return features.reshape(-1, features.shape[-1]).sum(0)


def is_watched(grad: torch.Tensor) -> bool:
    """Whether a backward pass must consist of operators of torch, because something traces,
    transforms or intercepts it."""
    return (
        is_dynamo_compiling()
        or (is_in_torch_dispatch_mode() and rehearsal.current() is None)  # no mode sees this
        or _is_tracing()
        or _are_functorch_transforms_active()
        or is_legacy_batchedtensor(grad)  # as is_grads_batched makes them
    )


# Eager calls.


class Recording(NamedTuple):
    """How a family records a product: ``parts``, which takes a call apart; ``apply(descriptor,
    operands, bias, plan)``, a function of torch.autograd that computes the product, by a plan if
    that is not None; and ``mask(descriptor, operands, y)``, what is left of a result that other
    epilogues have finished, None for all of it."""

    parts: Callable[[Product], Parts]
    apply: Callable[..., torch.Tensor]
    mask: Callable[..., torch.Tensor] | None = None

    def result(self, request: tuple, route: Route | None = None) -> torch.Tensor:
        """The result of a checked request, outside of transforms of torch.func."""
        descriptor, operands, _, parameters = request
        parts, plan = (self.parts(descriptor), None) if route is None else route
        bias = None if parts.bias is None else parameters[parts.bias]
        if plan is None:
            y = early.first(self.apply, parts.product, operands, bias, None)
        else:
            y = self.apply(parts.product, operands, bias, plan)
        if not parts.rest:
            return y
        y = parts.finish(y, parameters)
        return y if self.mask is None else self.mask(descriptor, operands, y)


def are_here(tensors: tuple) -> bool:
    """Whether tensors have what they stand for in their own memory."""
    return ORDINARY.issuperset(map(type, tensors)) or not stand_ins(*tensors)


class Route(NamedTuple):
    """What a call of one signature is recorded by, decided at the first such call."""

    parts: Parts
    plan: object  # of their product


def recorder(product: products.Product, bound: Bound, recording: Recording) -> Callable:
    """The function that answers requests whose gradient is recorded, or that are in forward
    mode."""
    key_of, routes = product.key, PlanCache()

    def recorded(*request) -> torch.Tensor:
        descriptor, operands, out, parameters = request
        eager = forward_ad._current_level < 0 and not _are_functorch_transforms_active()
        key = None
        if eager and out is None:
            key = key_of(*request)
            route = routes.find(key)
            if route is not None and are_here(product.tensors(operands)):
                return recording.result(request, route)
        product.check_operands(descriptor, operands)
        refuse_out_of_recorded(out)
        if stand_ins(*product.tensors(operands)):
            return by_operator(product, request)
        call = product.check(*request)
        if forward_ad._current_level >= 0 or product.way(call, *request) == REFERENCE:
            return products.by_reference(product, *request)
        if not eager:
            return operators_of(product).recorded(descriptor, operands, parameters)
        y = recording.result(request)
        if key is not None:
            keep(key, descriptor, operands, parameters)
        return y

    def keep(key, descriptor, operands, parameters: dict) -> None:
        """Keep the route of a call that had no error, if nothing of the next is left to check:
        numbers in host memory are."""
        parts = recording.parts(descriptor)
        rest = [parameters[name] for name in parts.names]
        if any(not isinstance(t, torch.Tensor) or t.device.type == "cpu" for t in rest):
            return
        plan = bound.find(parts.product, operands, None, parts.operands(parameters))
        if plan is not None:
            routes.keep(key, Route(parts, plan))

    return recorded

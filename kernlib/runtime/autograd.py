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
from kernlib.runtime import expressions, products, rehearsal
from kernlib.runtime.arguments import refuse_out_of_recorded
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.operation import REFERENCE, Bound, by_operator, operators_of
from kernlib.runtime.tensors import stand_ins

ORDINARY = frozenset((torch.Tensor, torch.nn.Parameter))  # types that stand for no other tensor


class Parts(NamedTuple):
    """A call as it is recorded: one product, and behind it the rest of the epilogues, by torch's
    own operators on the rounded result."""

    product: Product  # with or without a bias
    bias: str | None  # the parameter of the Bias that the epilogues begin with; None if they do not
    needed: frozenset[str]  # the parameters of the product: that one, or none
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
        own = {name: parameters[name] for name in self.names}
        v = expressions.apply(self.rest, y.to(accumulator(y.dtype)), own, axis=self.axis)
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


def is_watched(grad: torch.Tensor) -> bool:
    """Whether a backward pass must consist of operators of torch, because something traces,
    transforms or intercepts it."""
    return (
        is_dynamo_compiling()
        or (is_in_torch_dispatch_mode() and rehearsal.current() is None)  # which no mode sees
        or _is_tracing()
        or _are_functorch_transforms_active()
        or is_legacy_batchedtensor(grad)  # as is_grads_batched makes them
    )


# Eager calls.


class Recording(NamedTuple):
    """How a family records a product: ``parts``, which takes a call apart, and ``apply(descriptor,
    operands, bias, plan)``, a function of torch.autograd that computes the product, by a plan if
    that is not None."""

    parts: Callable[[Product], Parts]
    apply: Callable[..., torch.Tensor]

    def result(self, request: tuple, plan=None) -> torch.Tensor:
        """The result of a checked request, outside of transforms of torch.func."""
        descriptor, operands, _, parameters = request
        made = self.parts(descriptor)
        bias = made.operands(parameters).get("bias")
        return made.finish(self.apply(made.product, operands, bias, plan), parameters)


def recorder(product: products.Product, bound: Bound, recording: Recording) -> Callable:
    """The function that answers requests whose gradient is recorded, or that are in forward
    mode."""

    def recorded(*request) -> torch.Tensor:
        descriptor, operands, out, parameters = request
        refuse_out_of_recorded(out)
        eager = forward_ad._current_level < 0 and not _are_functorch_transforms_active()
        plan = kept(*request) if eager else None
        if plan is not None:
            return recording.result(request, plan)
        if stand_ins(*product.tensors(operands)):
            return by_operator(product, request)
        call = product.check(*request)
        if forward_ad._current_level >= 0 or product.way(call, *request) == REFERENCE:
            return products.by_reference(product, *request)
        if eager:
            return recording.result(request)
        return operators_of(product).recorded(descriptor, operands, parameters)

    def kept(descriptor, operands, out, parameters):
        """The plan of a call's product, if it is kept and the rest of the call has no parameters:
        then nothing is left to check. Else None."""
        made = recording.parts(descriptor)
        if made.names or parameters.keys() != made.needed:
            return None
        tensors = product.tensors(operands)
        if any(type(t) not in ORDINARY for t in tensors) and stand_ins(*tensors):
            return None
        return bound.find(made.product, operands, None, made.operands(parameters))

    return recorded

"""What products share of calls that are prepared, compiled or tuned before anybody makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from kernlib.descriptors.epilogues import Product as Descriptor
from kernlib.runtime.arguments import readable, refuse_out_of_recorded
from kernlib.runtime.operation import Bound
from kernlib.runtime.products import Call, Product, requires_gradient


class Request(NamedTuple):
    """The arguments of one product, in the order that :mod:`kernlib.runtime.products` has them."""

    descriptor: Descriptor
    operands: tuple
    out: torch.Tensor | None
    parameters: dict

    def check(self, product: Product) -> Call:
        """Raises what a call raises."""
        if self.recorded():
            refuse_out_of_recorded(self.out)
        return product.check(*self)

    def recorded(self) -> bool:
        """Whether a gradient would be recorded."""
        values = self.parameters.values()
        return torch.is_grad_enabled() and requires_gradient(values, *self.operands, self.out)

    def fused(self, parts: Callable) -> Request:
        """The request that the kernel of the product itself gets. Where a gradient is recorded, it
        has no activation. Views that are lazily negated are copied, since their memory does not
        hold their values. ``parts`` is that of the family's recording."""
        descriptor, parameters = self.descriptor, self.parameters
        if self.recorded():
            made = parts(descriptor)
            descriptor, parameters = made.product, made.operands(parameters)
        operands, parameters = readable(self.operands, parameters)
        return Request(descriptor, operands, self.out, parameters)


def prepared(calls: Bound, parts: Callable, request: Request) -> bool:
    """Whether the plan of a request is there, and nothing else is needed. Where a gradient would be
    recorded the answer is False, since the kernels of gradients are looked for each time."""
    return not request.recorded() and calls.find(*request.fused(parts)) is not None


def plan_of(calls: Bound, parts: Callable, request: Request, call: Call):
    """The plan of a checked request, made if need be."""
    fused = request.fused(parts)
    known = calls.find(*fused)
    return calls.make(call, *fused) if known is None else known

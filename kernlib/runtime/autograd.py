"""What products share of calls that record gradients: the parts of such a call, and who must see
what a backward pass computes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch._C import _are_functorch_transforms_active, _is_tracing
from torch._C._functorch import is_legacy_batchedtensor
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kernlib.descriptors.epilogues import Bias, Epilogue, Product
from kernlib.runtime import expressions
from kernlib.runtime.dtypes import accumulator

ORDINARY = frozenset((torch.Tensor, torch.nn.Parameter))  # which stand for no other tensor


class Parts(NamedTuple):
    """A call as it is recorded: one product, and torch's own operators on its rounded result."""

    product: Product  # with or without a bias
    bias: str | None  # the parameter of the Bias that the epilogues begin with, if they do
    needed: frozenset[str]  # that, if there is one
    rest: tuple[Epilogue, ...]
    names: tuple[str, ...]  # of the rest's parameters
    axis: int  # of the result's features

    def operands(self, parameters: dict) -> dict:
        """The parameters of the product."""
        return {} if self.bias is None else {"bias": parameters[self.bias]}

    def finish(self, y: torch.Tensor, parameters: dict) -> torch.Tensor:
        """The result of the call for that of the product."""
        if not self.rest:
            return y
        own = {name: parameters[name] for name in self.names}
        v = expressions.apply(self.rest, y.to(accumulator(y.dtype)), own, axis=self.axis)
        return v.to(y.dtype)


def is_biased(descriptor: Product) -> bool:
    """Whether the epilogues begin with a Bias, which the product itself adds."""
    return bool(descriptor.epilogue) and isinstance(descriptor.epilogue[0], Bias)


def parts(descriptor: Product, product: Product, axis: int) -> Parts:
    """Of a call, recorded as ``product``, which adds the bias if the call :func:`is_biased`."""
    biased = is_biased(descriptor)
    bias = descriptor.epilogue[0].parameter if biased else None
    rest = descriptor.epilogue[biased:]
    names = tuple(name for epilogue in rest for name in epilogue.parameters)
    return Parts(product, bias, frozenset([bias] if biased else ()), rest, names, axis)


def is_watched(grad: torch.Tensor) -> bool:
    """Whether somebody must see what a backward pass computes as operators."""
    return (
        is_dynamo_compiling()
        or is_in_torch_dispatch_mode()
        or _is_tracing()
        or _are_functorch_transforms_active()
        or is_legacy_batchedtensor(grad)  # as is_grads_batched makes them
    )

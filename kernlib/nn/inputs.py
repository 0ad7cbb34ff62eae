"""Inputs of layers that are no plain tensors: Proxies of ``torch.fx``, and jagged tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import Proxy


def called(layer: nn.Module, input: Any) -> Any:
    """The result of a layer that maps features for such an input, None for every other.

    A symbolic trace records the layer as a call of a module, as it does torch's own layers. Of a
    jagged tensor the layer maps the values, whose offsets the result shares.
    """
    if isinstance(input, Proxy):
        return recorded(layer, input)
    if getattr(input, "layout", None) == torch.jagged:
        return torch.nested.nested_tensor_from_jagged(
            layer(input.values()), input.offsets(), input.lengths(), input._ragged_idx
        )
    return None


def recorded(layer: nn.Module, *values: Any, **named: Any) -> Any:
    """The call of a layer in the graph that the first value, a Proxy, is of. Raises TypeError for a
    layer that is traced alone, whose graph could only hold itself."""
    tracer = values[0].tracer
    path = tracer.path_of_module(layer)
    if not path:
        kind = type(layer).__name__
        raise TypeError(
            f"torch.fx traces what calls a {kind}, which is one node of a graph: trace a module "
            f"that holds it, such as nn.Sequential({kind}(...))"
        )
    return tracer.create_proxy("call_module", path, values, named)

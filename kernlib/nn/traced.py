"""Layers in other calls than eager ones of plain tensors: in symbolic traces of torch.fx, of jagged
tensors, and inside of torch.compile.

Dynamo makes constants of the sizes of every ``nn.Parameter``, whatever ``dynamic`` says, so that
each layer of other sizes would take a program of its own. The sizes of a sparse layer differ with
its entries, and should share one program."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.fx import Proxy

from kernlib.nn.indexed import MARK, IndexedModule


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


def represented(layer: nn.Module) -> str:
    """The ``__repr__`` of a layer. While Dynamo traces it is the name of the class: torch.vmap asks
    what it maps for its repr, and Dynamo does not follow what makes the rest of that."""
    return type(layer).__name__ if is_dynamo_compiling() else nn.Module.__repr__(layer)


def factors_of(layer: nn.Module, names: tuple[str, ...]) -> list[torch.Tensor]:
    """:func:`parameters_of` the layer's ``factors``."""
    return parameters_of(layer.factors, names)


def parameters_of(layer: nn.Module, names: tuple[str, ...]) -> list[torch.Tensor | None]:
    """Parameters by name, whose sizes Dynamo handles as those of other tensors. For calls that it
    traces."""
    if "parametrizations" in layer._modules:  # foreign code computes some of them
        return [getattr(layer, name) for name in names]
    from torch._dynamo.comptime import comptime  # it is there if Dynamo traces the call

    comptime(_as_tensors)
    parameters = [getattr(layer, name) for name in names]
    comptime(_as_parameters)
    return parameters


def has_own_mark(layer: IndexedModule) -> bool:
    """Whether the mark that is there is the tensor that was last compared, in a call that Dynamo
    traces, whatever their sizes."""
    from torch._dynamo.comptime import comptime

    comptime(_as_tensors)
    same = layer._buffers[MARK] is layer._seen[0]  # which Dynamo reads here and not before
    comptime(_as_parameters)
    return same


# Dynamo runs these while it traces, in the order of the calls; between them it wraps parameters.
# The second setting is for those in a container of torch's.
_SETTINGS = ("force_parameter_static_shapes", "force_nn_module_property_static_shapes")
_before: list[tuple[bool, ...]] = []


def _as_tensors(context) -> None:
    config = torch._dynamo.config
    if not _before:
        _before.append(tuple(getattr(config, name) for name in _SETTINGS))
        # A trace may end before the second call, with an error or at a break of the graph.
        translator = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
        translator.output.add_cleanup_hook(_restore)
    for name in _SETTINGS:
        setattr(config, name, False)


def _as_parameters(context) -> None:
    _restore()


def _restore() -> None:
    if _before:
        for name, value in zip(_SETTINGS, _before.pop(), strict=True):
            setattr(torch._dynamo.config, name, value)

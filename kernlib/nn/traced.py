"""Layers inside of torch.compile: their parameters, and how they are shown.

Dynamo makes constants of the sizes of every ``nn.Parameter``, whatever ``dynamic`` says, so that
each layer of other sizes would take a program of its own. Those of a sparse layer differ with
what it stores, which is no reason for that.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from kernlib.nn.indexed import MARK, IndexedModule


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
    if hasattr(layer, "parametrizations"):  # code of somebody else's computes some of them
        return [getattr(layer, name) for name in names]
    from torch._dynamo.comptime import comptime  # which is there, if Dynamo traces the call

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

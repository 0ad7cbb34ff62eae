"""Activations of a layer: epilogues of a kernel, and the same by torch for other algorithms."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernlib.descriptors import epilogues
from kernlib.descriptors.base import shown
from kernlib.descriptors.epilogues import Epilogue, advice_on, as_epilogues
from kernlib.descriptors.expression import Node
from kernlib.hints import spelling
from kernlib.runtime import expressions

NAMED: dict[str, Epilogue] = {
    "gelu": epilogues.Gelu(),
    "leaky_relu": epilogues.LeakyRelu(),
    "relu": epilogues.Relu(),
    "sigmoid": epilogues.Sigmoid(),
    "silu": epilogues.Silu(),
    "tanh": epilogues.Tanh(),
}
_FUNCTIONS = {
    **expressions.ACTIVATIONS,
    epilogues.Gelu: lambda gelu, v: F.gelu(v, approximate=gelu.approximate),
    epilogues.Tanh: lambda _, v: torch.tanh(v),
}
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def as_activation(value) -> tuple[Epilogue, ...]:
    """Epilogues from a name of :data:`NAMED`, one or several epilogues, or None.

    Raises ValueError for another name and for an epilogue that takes arguments, TypeError for what
    is neither.
    """
    if isinstance(value, str):
        if value not in NAMED:
            hint = spelling.argument(value, NAMED)
            raise ValueError(
                f"activation must be one of {', '.join(NAMED)}, got {shown(value)}{hint}"
            )
        value = NAMED[value]
    try:
        epilogues = as_epilogues(value)
    except TypeError:
        raise TypeError(
            f"activation must be a name such as 'gelu' or an epilogue such as kernlib.Gelu(), got "
            f"{shown(value)}{advice_on(value)}"
        ) from None
    for epilogue in epilogues:
        if epilogue.parameters:
            raise ValueError(
                f"activation {epilogue!r} needs the argument(s) {', '.join(epilogue.parameters)}, "
                "which a layer does not take; write the number into a kernlib.Custom()"
            )
    return epilogues


class Parsed(NamedTuple):
    """An epilogue with its parsed tree: Dynamo could not parse one in a call that it compiles."""

    node: Node
    vectors: tuple[str, ...] = ()
    summands: tuple[tuple[str, str | None], ...] = ()

    def tree(self) -> Node:
        return self.node


def as_steps(activation: tuple[Epilogue, ...]) -> tuple[Epilogue | Parsed, ...]:
    """What :func:`activate` takes: epilogues that torch has a function for, and trees."""
    return tuple(e if type(e) in _FUNCTIONS else Parsed(e.tree()) for e in activation)


def activate(steps: tuple[Epilogue | Parsed, ...], v: torch.Tensor) -> torch.Tensor:
    """The activation of ``v`` in its dtype, by torch."""
    for step in steps:
        if isinstance(step, Parsed):
            v = expressions.apply((step,), v.to(_WIDE.get(v.dtype, v.dtype)), {}).to(v.dtype)
        else:
            v = _FUNCTIONS[type(step)](step, v)
    return v

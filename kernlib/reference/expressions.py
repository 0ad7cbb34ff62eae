"""Epilogues in PyTorch."""

from __future__ import annotations

import torch

from kernlib.descriptors.epilogues import Epilogue
from kernlib.descriptors.expression import VALUE, Name, Node, Number

_FUNCTIONS = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "/": lambda x, y: x / y,
    "**": lambda x, y: x**y,
    "neg": lambda x: -x,
    "abs": torch.abs,
    "cos": torch.cos,
    "erf": torch.erf,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "max": torch.maximum,
    "min": torch.minimum,
    "pow": lambda x, y: x**y,
    "sin": torch.sin,
    "sqrt": torch.sqrt,
    "tanh": torch.tanh,
}


def apply(epilogues: tuple[Epilogue, ...], v: torch.Tensor, parameters: dict) -> torch.Tensor:
    """The chain of epilogues over ``v``; parameters are numbers or tensors that broadcast."""
    values = {
        name: torch.as_tensor(x, dtype=v.dtype, device=v.device) for name, x in parameters.items()
    }
    for epilogue in epilogues:
        v = _evaluate(epilogue.tree(), {**values, VALUE: v}).expand(v.shape)
    return v


def _evaluate(node: Node, values: dict[str, torch.Tensor]) -> torch.Tensor:
    if isinstance(node, Number):
        like = values[VALUE]
        return torch.tensor(node.value, dtype=like.dtype, device=like.device)
    if isinstance(node, Name):
        return values[node.name]
    return _FUNCTIONS[node.operator](*(_evaluate(x, values) for x in node.operands))

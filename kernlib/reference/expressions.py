"""Epilogues in PyTorch."""

from __future__ import annotations

import torch

from kernlib.descriptors.epilogues import Epilogue
from kernlib.descriptors.expression import VALUE, Name, Node, Number


def _maximum(x, y) -> torch.Tensor:
    """The larger, NaN if one is. Against a number the derivative at the tie is that of
    ``torch.relu`` and ``torch.clamp``, where ``torch.maximum`` has one half."""
    x, y = (y, x) if isinstance(y, torch.Tensor) else (x, y)
    if isinstance(y, torch.Tensor):
        return torch.maximum(x, y)
    return torch.relu(x) if y == 0 else x.clamp(min=y)


def _minimum(x, y) -> torch.Tensor:
    x, y = (y, x) if isinstance(y, torch.Tensor) else (x, y)
    return torch.minimum(x, y) if isinstance(y, torch.Tensor) else x.clamp(max=y)


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
    "max": _maximum,
    "min": _minimum,
    "ndtr": torch.special.ndtr,
    "pow": lambda x, y: x**y,
    "sin": torch.sin,
    "sqrt": torch.sqrt,
    "tanh": torch.tanh,
}


def apply(
    epilogues: tuple[Epilogue, ...],
    v: torch.Tensor,
    parameters: dict,
    axis: int = -1,
    functions: dict | None = None,
) -> torch.Tensor:
    """The chain of epilogues over ``v``, differentiable in everything.

    Parameters are numbers or tensors that broadcast; vectors lie along ``axis`` of ``v``, 0 or -1.
    ``functions`` replace torch's, by the operators and names of the language.
    """
    known = _FUNCTIONS | (functions or {})
    vectors = {name for epilogue in epilogues for name in epilogue.vectors}
    after = v.dim() - 1 if axis == 0 else 0  # dimensions of v that follow a vector's
    values = {name: _value(x, v, after if name in vectors else 0) for name, x in parameters.items()}
    for epilogue in epilogues:
        found = _evaluate(epilogue.tree(), {**values, VALUE: v}, known)
        if not isinstance(found, torch.Tensor):
            found = v.new_full((), found)
        v = found.to(v.device).expand(v.shape)
    return v


def _value(x, v: torch.Tensor, after: int):
    """A parameter as a tensor like ``v`` followed by some dimensions of size 1, or as a number."""
    if not isinstance(x, torch.Tensor):
        return torch.sym_float(x)
    x = x.to(v.device, v.dtype)
    return x.reshape(*x.shape, *([1] * after)) if after else x


def _evaluate(
    node: Node, values: dict[str, torch.Tensor | float], known: dict
) -> torch.Tensor | float:
    """A tensor, or the number of a tree that is nothing else. Numbers stay numbers: a tensor of
    each on the GPU would wait for the copy."""
    if isinstance(node, Number):
        return node.value
    if isinstance(node, Name):
        return values[node.name]
    operands = [_evaluate(x, values, known) for x in node.operands]
    if not any(isinstance(x, torch.Tensor) for x in operands):
        operands[0] = torch.tensor(operands[0], dtype=values[VALUE].dtype, device="cpu")
    return known[node.operator](*operands)

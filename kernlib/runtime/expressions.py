"""Epilogues in PyTorch: what the references of all families share."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kernlib.descriptors.epilogues import Epilogue, LeakyRelu, Relu, Sigmoid, Silu
from kernlib.descriptors.expression import VALUE, Name, Node, Number, Operation, tie_share


def absolute(x: torch.Tensor) -> torch.Tensor:
    """``|x|``, whose derivatives at 0 are 0."""
    return torch.where(x == 0, 0.0, x.abs())


# By the operator and whether the first is given a part of a tie: where the second one is taken.
_SECOND = {
    ("max", False): torch.le,
    ("max", True): torch.lt,
    ("min", False): torch.ge,
    ("min", True): torch.gt,
}


def extreme(operator: str, x, y, share: float) -> torch.Tensor:
    """The larger (``"max"``) or smaller (``"min"``) of tensors or numbers, of which one is a
    tensor: NaN if one is. Where both are equal, x receives ``share`` of the derivative, 0, 1 or
    one half, and y the rest: selected here, for torch's own ``clamp`` gave all of it to the tensor
    up to 2.13 and gives nothing in 2.15."""
    if not isinstance(x, torch.Tensor):
        x, y, share = y, x, 1 - share
    second = _SECOND[operator, share > 0](x, y)
    if isinstance(y, torch.Tensor):
        second = second | y.isnan()
    found = torch.where(second, y, x)
    # Halves first: their sum does not overflow.
    return found if share in (0, 1) else torch.where(x == y, 0.5 * x + 0.5 * y, found)


_FUNCTIONS = {
    "+": lambda x, y: x + y,
    "-": lambda x, y: x - y,
    "*": lambda x, y: x * y,
    "/": lambda x, y: x / y,
    "**": lambda x, y: x**y,
    "neg": lambda x: -x,
    "abs": absolute,
    "cos": torch.cos,
    "erf": torch.erf,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "ndtr": torch.special.ndtr,
    "pow": lambda x, y: x**y,
    "sin": torch.sin,
    "sqrt": torch.sqrt,
    "tanh": torch.tanh,
}


# Epilogues in fewer of torch's operators than their expressions take: 1 for 12 of a sigmoid. Those
# with a corner select, so that no choice of torch's is their derivative at 0.
ACTIVATIONS: dict[type[Epilogue], Callable] = {
    LeakyRelu: lambda leaky, v: torch.where(v > 0, v, leaky.negative_slope * v),
    Relu: lambda _, v: extreme("max", v, 0.0, 0.0),
    Sigmoid: lambda _, v: torch.sigmoid(v),
    Silu: lambda _, v: F.silu(v),
}


def apply(
    epilogues: tuple[Epilogue, ...],
    v: torch.Tensor,
    parameters: dict,
    axis: int = -1,
    functions: dict | None = None,
) -> torch.Tensor:
    """The chain of epilogues over ``v``, differentiable in everything.

    Parameters are numbers or tensors that broadcast; vectors lie along ``axis`` of ``v``. Summands
    are read as :func:`summand` says.
    ``functions`` replace torch's, by the operators and names of the language.
    """
    known = _FUNCTIONS | (functions or {})
    vectors = {name for epilogue in epilogues for name in epilogue.vectors}
    after = (v.dim() if axis >= 0 else 0) - 1 - axis  # dimensions of v that follow a vector's
    values = {name: _value(x, v, after if name in vectors else 0) for name, x in parameters.items()}
    for epilogue in epilogues:
        for name, scale in epilogue.summands:
            if scale is not None:
                values[name] = summand(values[name], values[scale])
        activation = ACTIVATIONS.get(type(epilogue))
        if activation is not None:
            v = activation(epilogue, v)
            continue
        found = _evaluate(epilogue.tree(), {**values, VALUE: v}, known)
        if not isinstance(found, torch.Tensor):
            found = v.new_full((), found)
        v = found.to(v.device).expand(v.shape)
    return v


def summand(y: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor | float:
    """What of y is multiplied by ``scale``: where that is 0, nothing that is not finite."""
    if not isinstance(scale, torch.Tensor):
        return 0.0 if scale == 0 else y
    return torch.where((scale == 0) & ~y.isfinite(), 0.0, y)


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
    if node.operator == "/" and _is_product(node.operands[1]):
        # The square of a bandwidth of 1e20 is infinite in float32, that of 1e-23 is 0.
        left, right = node.operands[1].operands
        node = Operation("/", (Operation("/", (node.operands[0], left)), right))
    operands = [_evaluate(x, values, known) for x in node.operands]
    if not any(isinstance(x, torch.Tensor) for x in operands):
        operands[0] = torch.tensor(operands[0], dtype=values[VALUE].dtype, device="cpu")
    if node.operator in ("max", "min"):
        return extreme(node.operator, *operands, tie_share(node))
    return known[node.operator](*operands)


def _is_product(node: Node) -> bool:
    return isinstance(node, Operation) and node.operator == "*"


# Those of the grammar of expressions that torch leaves to MKL's vector functions.
_BY_MKL = (
    torch.cos, torch.erf, torch.exp, torch.expm1, torch.log, torch.log1p, torch.sin, torch.sqrt,
    torch.tanh,
)  # fmt: skip


def _settle_vector_functions() -> None:
    """Call each once for one number, in 0.7 ms. MKL before 2025 looks for the code of a function at
    its first call, and one by several threads at once may get some of its results from code of low
    accuracy: 2e-5 in place of 6e-8, in one process of 90 (pytorch/pytorch#188792)."""
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype, device="cpu")
        for function in _BY_MKL:
            function(one)


if torch.backends.mkl.is_available() and not is_in_torch_dispatch_mode():
    _settle_vector_functions()

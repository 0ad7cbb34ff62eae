"""Epilogues and scores in PyTorch: what the references of all families share."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kernlib.descriptors.epilogues import Epilogue, Gelu, LeakyRelu, Relu, Sigmoid, Silu
from kernlib.descriptors.expression import (
    VALUE,
    Integer,
    Name,
    Node,
    Number,
    Operation,
    names,
    tie_share,
)


def absolute(x: torch.Tensor) -> torch.Tensor:
    """``|x|``, whose derivatives at 0 are 0."""
    return torch.where(x == 0, 0.0, x.abs())


# By the operator and whether the first operand receives a part of a tie: the comparison that says
# where the second operand is taken.
_SECOND = {
    ("max", False): torch.le,
    ("max", True): torch.lt,
    ("min", False): torch.ge,
    ("min", True): torch.gt,
}


def extreme(operator: str, x, y, share: float) -> torch.Tensor:
    """The larger (``"max"``) or smaller (``"min"``) of x and y, of which one at least is a tensor.
    It is NaN if one of them is. Where both are equal, x receives ``share`` of the derivative (0, 1
    or one half) and y the rest. This is selected here, because torch's own ``clamp`` gave all of it
    to the tensor up to 2.13 and gives it nothing in 2.15."""
    if not isinstance(x, torch.Tensor):
        x, y, share = y, x, 1 - share
    second = _SECOND[operator, share > 0](x, y)
    if isinstance(y, torch.Tensor):
        second = second | y.isnan()
    chosen = torch.where(second, y, x)
    # Halves first: their sum does not overflow.
    return chosen if share in (0, 1) else torch.where(x == y, 0.5 * x + 0.5 * y, chosen)


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


# Epilogues by fewer of torch's operators than their expressions take: a sigmoid by 1 in place of
# 12. Those with a corner are written as a selection, so that their derivative at 0 does not depend
# on torch.
ACTIVATIONS: dict[type[Epilogue], Callable] = {
    LeakyRelu: lambda leaky, v: torch.where(v > 0, v, leaky.negative_slope * v),
    Relu: lambda _, v: extreme("max", v, 0.0, 0.0),
    Sigmoid: lambda _, v: torch.sigmoid(v),
    Silu: lambda _, v: F.silu(v),
}
# One pass of torch's own over bfloat16, which computes in float32 and rounds once, and so do its
# derivatives. Not those that torch takes from rounded numbers: of a tanh, and the second of a SiLU.
# Not over float16 either, whose range the squares in a second derivative leave.
BFLOAT16_ACTIVATIONS: dict[type[Epilogue], Callable] = {
    Gelu: lambda gelu, v: F.gelu(v, approximate=gelu.approximate),
    LeakyRelu: ACTIVATIONS[LeakyRelu],
    Relu: ACTIVATIONS[Relu],
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
    are read as :func:`summand` says. ``functions``, by operators and names of the language, take
    the place of torch's.
    """
    table = _FUNCTIONS | (functions or {})
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
        result = _evaluate(epilogue.tree(), {**values, VALUE: v}, table)
        if not isinstance(result, torch.Tensor):
            result = v.new_full((), result)
        v = result.to(v.device).expand(v.shape)
    return v


def summand(y: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor | float:
    """y as it is multiplied by ``scale``: where that is 0, infinities and NaN of y count as 0."""
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
    """The value of a tree: a tensor, or a number if the tree is only that. Numbers stay numbers,
    since making a tensor of each on the GPU would wait for the copy."""
    if isinstance(node, Number):
        return node.value
    if isinstance(node, Name):
        return values[node.name]
    node = _by_factors(node)
    operands = [_evaluate(x, values, known) for x in node.operands]
    return _operate(node, operands, values[VALUE].dtype, known)


def _by_factors(node: Operation) -> Operation:
    """A division by a product as divisions by each of its factors: in float32 the square of a
    bandwidth of 1e20 is infinite, and that of 1e-23 is 0."""
    if node.operator != "/" or not _is_product(node.operands[1]):
        return node
    left, right = node.operands[1].operands
    return Operation("/", (Operation("/", (node.operands[0], left)), right))


def _operate(node: Operation, operands: list, dtype: torch.dtype, known: dict) -> torch.Tensor:
    """An operation on tensors and numbers, of a tree that :func:`_by_factors` has seen."""
    if not any(isinstance(x, torch.Tensor) for x in operands):
        operands[0] = torch.tensor(operands[0], dtype=dtype, device="cpu")
    if node.operator in ("max", "min"):
        return extreme(node.operator, *operands, tie_share(node))
    return known[node.operator](*operands)


def _is_product(node: Node) -> bool:
    return isinstance(node, Operation) and node.operator == "*"


# Scores and masks: trees of kernlib.descriptors.score, whose operands are tensors that broadcast.
# Whole numbers have 64 bits here, which hold all numbers of fewer bits.


def score(tree: Node, v: torch.Tensor, values: dict[str, torch.Tensor]) -> torch.Tensor:
    """The modified logits, differentiable in v and in the floating-point ``values``, which are
    those of positions and captured tensors."""
    result = _evaluate_score(tree, _score_values(values, v.dtype) | {VALUE: v}, v.dtype)
    if not isinstance(result, torch.Tensor):
        result = v.new_full((), result)
    return result.to(v.device).expand(v.shape)


def mask(tree: Node, values: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Which logits stay, as a tensor of bools that broadcasts to their shape. Floating-point
    numbers are compared in ``dtype``."""
    return _evaluate_score(tree, _score_values(values, dtype), dtype)


def evaluate(tree: Node, values: dict, dtype: torch.dtype) -> torch.Tensor:
    """The value of a tree of numbers, whole numbers and conditions, whose names are tensors that
    broadcast, or numbers. Floating-point numbers have this dtype."""
    tensors = {name: x for name, x in values.items() if isinstance(x, torch.Tensor)}
    result = _evaluate_score(tree, {**values, **_score_values(tensors, dtype)}, dtype)
    return _as_tensor(result, dtype)


def _score_values(values: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    def value(x: torch.Tensor) -> torch.Tensor:
        if x.is_floating_point():
            return x.to(dtype)
        return x if x.dtype == torch.bool else x.long()

    return {name: value(x) for name, x in values.items()}


def _evaluate_score(node: Node, values: dict[str, torch.Tensor], dtype: torch.dtype):
    """The value of a tree of a score: a tensor, or a number if the tree is only that."""
    if isinstance(node, (Number, Integer)):
        return node.value
    if isinstance(node, Name):
        return values[node.name]
    if node.operator == "where":
        return _select(node, values, dtype)
    node = _by_factors(node)
    operands = [_evaluate_score(x, values, dtype) for x in node.operands]
    if node.operator in _OF_SCORES:
        operands = [_as_tensor(x, dtype) for x in operands]
        return reduce(_OF_SCORES[node.operator], operands[1:], operands[0])
    if node.operator in ("not", "floor", "sign"):
        return _OF_ONE[node.operator](_as_tensor(operands[0], dtype))
    if node.operator in ("float", "int64"):
        return _as_tensor(operands[0], dtype).to(dtype if node.operator == "float" else torch.long)
    if all(_is_whole(x) for x in operands):
        return _OF_WHOLE[node.operator](*(_as_tensor(x, dtype) for x in operands))
    return _operate(node, operands, dtype, _OF_FLOATS)


def _select(node: Operation, values: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """``where(condition, x, y)``. What is not selected gets no gradient, even if it is NaN or
    infinite there."""
    chosen = _as_tensor(_evaluate_score(node.operands[0], values, dtype), dtype)
    sides = []
    for tree, condition in zip(node.operands[1:], (chosen, ~chosen), strict=True):
        selected = {name: _where(condition, values[name]) for name in names(tree)}
        sides.append(_as_tensor(_evaluate_score(tree, selected, dtype), dtype))
    return torch.where(chosen, *sides)


def _where(condition: torch.Tensor, x: torch.Tensor | float) -> torch.Tensor | float:
    """x, which gets a gradient only where the condition holds."""
    if not (isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled()):
        return x
    return torch.where(condition, x, x.detach())


def _as_tensor(x: torch.Tensor | float, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(x, torch.Tensor):
        return x
    return torch.tensor(x, dtype=dtype if isinstance(x, float) else torch.long, device="cpu")


def _is_whole(x: torch.Tensor | float) -> bool:
    return x.dtype == torch.long if isinstance(x, torch.Tensor) else isinstance(x, int)


def _sign(x: torch.Tensor) -> torch.Tensor:
    """The sign of x; NaN for NaN."""
    return torch.where(x.isnan(), x.detach(), torch.sign(x))


def _ratio(x: torch.Tensor | float, y: torch.Tensor | float) -> torch.Tensor:
    """``x / y`` rounded once, which ``floor`` and comparisons show: torch divides a number by a
    tensor, and on GPUs a tensor by a number or by one in host memory, by way of a reciprocal."""
    if not isinstance(x, torch.Tensor):
        x = x * torch.ones((), dtype=y.dtype, device=y.device)
    elif not isinstance(y, torch.Tensor) or y.device != x.device:
        y = y * torch.ones((), dtype=x.dtype, device=x.device)
    return x / y


def _quotient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``x // y``, and 0 where y is 0. Division by -1 is a negation, because the processor traps
    when it divides the least number by -1."""
    is_plain = (y != 0) & (y != -1)
    return torch.where(is_plain, x // torch.where(is_plain, y, 1), torch.where(y == -1, -x, 0))


def _rest(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``x % y``, of y's sign, and 0 where y is 0."""
    is_plain = (y != 0) & (y != -1)
    return torch.where(is_plain, x % torch.where(is_plain, y, 1), 0)


_OF_FLOATS = _FUNCTIONS | {"/": _ratio}
_OF_SCORES = {
    "<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt,
    ">=": operator.ge, "and": operator.and_, "or": operator.or_,
}  # fmt: skip
_OF_ONE = {"not": operator.invert, "floor": torch.floor, "sign": _sign}
_OF_WHOLE = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": _quotient, "%": _rest,
    "neg": operator.neg, "abs": torch.abs, "max": torch.maximum, "min": torch.minimum,
}  # fmt: skip


# The functions of the language of expressions for which torch calls MKL's vector functions.
_BY_MKL = (
    torch.cos, torch.erf, torch.exp, torch.expm1, torch.log, torch.log1p, torch.sin, torch.sqrt,
    torch.tanh,
)  # fmt: skip


def _settle_vector_functions() -> None:
    """Call each function once with one number, which takes 0.7 ms. MKL before 2025 chooses the code
    of a function at its first call. If several threads make that call at once, some of the results
    may come from code of low accuracy, 2e-5 in place of 6e-8: in one process of 90
    (pytorch/pytorch#188792)."""
    for dtype in (torch.float32, torch.float64):
        sample = torch.ones(1, dtype=dtype, device="cpu")
        for function in _BY_MKL:
            function(sample)


if torch.backends.mkl.is_available() and not is_in_torch_dispatch_mode():
    _settle_vector_functions()

"""Derivatives of expressions, as expressions: what a kernel must compute for a gradient.

Where there is none, they are those of a distance of equal points
(:mod:`kernlib.families.pairwise.stages_reference`): 0 for ``abs`` and ``sqrt`` at 0, and for
``x ** y`` at 0 with y between 0 and 2 other than 1. Where two sides of ``max`` or ``min`` are
equal, ``tie_share`` of :mod:`kernlib.descriptors.expression` says what each is given. The language
of epilogues has no comparison. In place of one stands a product that saturates,
``min(x / smallest, 1)``, which is 0 at 0 and 1 from ``smallest`` on. Scores have conditions, which
have no derivative: the derivative of ``where`` is that of the selected operand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from kernlib.descriptors.epilogues import Cauchy, Epilogue, Gaussian, Matern, RationalQuadratic
from kernlib.descriptors.expression import (
    VALUE,
    Name,
    Node,
    Number,
    Operation,
    names,
    parse,
    tie_share,
)

ZERO, ONE, HALF = Number(0.0), Number(1.0), Number(0.5)
LONGEST = 200  # parts of a chain, each step written into the next, whose derivatives have 2000
_V = Name(VALUE)
_VANISHED = 800.0  # minus a logarithm that no float64 has
# Operations of scores whose derivative is 0: conditions, whole numbers, steps.
_FLAT = frozenset(
    ("<", "<=", "==", "!=", ">", ">=", "and", "or", "not", "//", "%", "floor", "sign", "float")
)


def derivative(node: Node, by: str, smallest: float) -> Node:
    """The derivative of a tree by the name ``by``. Between 0 and ``smallest``, in magnitude, it may
    be wrong near a point that has none."""
    if not isinstance(node, Operation):
        return ONE if node == Name(by) else ZERO
    if node.operator in _FLAT:
        return ZERO
    slopes = [derivative(operand, by, smallest) for operand in node.operands]
    if all(slope == ZERO for slope in slopes):
        return ZERO
    if node.operator in _CHAIN:
        (x,), (slope,) = node.operands, slopes
        return product(_CHAIN[node.operator](x, node, smallest), slope)
    if node.operator == "where":
        _, first, second = slopes
        return first if first == second else _call("where", node.operands[0], first, second)
    return _OF_TWO[node.operator](*node.operands, *slopes, node, smallest)


def substitute(node: Node, value: Node) -> Node:
    """The tree with ``value`` in place of ``v``."""
    if isinstance(node, Operation):
        return Operation(node.operator, tuple(substitute(x, value) for x in node.operands))
    return value if node == _V else node


def size(node: Node, value: int = 1) -> int:
    """The numbers, names and operations of a tree, v counting as ``value`` of them."""
    if isinstance(node, Operation):
        return 1 + sum(size(x, value) for x in node.operands)
    return value if node == _V else 1


# Trees of simple parts, simplified where a part is 0 or 1 or both are numbers. Constants of a
# product, which do not name v, come first: they are computed once a thread.


def total(x: Node, y: Node) -> Node:
    if ZERO in (x, y):
        return y if x == ZERO else x
    if _is_negative(y):
        return difference(x, _without_sign(y))
    return _folded("+", x, y, lambda a, b: a + b)


def difference(x: Node, y: Node) -> Node:
    if y == ZERO:
        return x
    if x == ZERO:
        return negative(y)
    if _is_negative(y):
        return total(x, _without_sign(y))
    return _folded("-", x, y, lambda a, b: a - b)


def negative(x: Node) -> Node:
    return _without_sign(x) if _is_negative(x) else _negated(x)


def product(x: Node, y: Node) -> Node:
    if ZERO in (x, y):
        return ZERO
    if _is_negative(x) != _is_negative(y):
        return _negated(product(_without_sign(x), _without_sign(y)))
    (c, x), (d, y) = (_separated(_without_sign(factor)) for factor in (x, y))
    return _times(_times(c, d), _times(x, y))


def quotient(x: Node, y: Node, most: float = 0.0) -> Node:
    """``x / y``, of a y that does not name v by ``1 / y``, up to ``most`` in magnitude if given."""
    if y == ONE or x == ZERO:
        return x
    if VALUE not in names(y):
        inverse = _folded("/", ONE, y, lambda a, b: a / b)
        if most and not isinstance(inverse, Number):
            inverse = _call("max", _call("min", inverse, Number(most)), Number(-most))
        return product(inverse, x)
    return Operation("/", (x, y))


def _folded(operator: str, x: Node, y: Node, compute: Callable) -> Node:
    if isinstance(x, Number) and isinstance(y, Number) and y.value:
        return Number(compute(x.value, y.value))
    return Operation(operator, (x, y))


def _times(x: Node, y: Node) -> Node:
    if ONE in (x, y):
        return y if x == ONE else x
    return _folded("*", x, y, lambda a, b: a * b)


def _separated(x: Node) -> tuple[Node, Node]:
    """The constant factor and the other."""
    if VALUE not in names(x):
        return x, ONE
    if isinstance(x, Operation) and x.operator == "*" and VALUE not in names(x.operands[0]):
        return x.operands
    return ONE, x


def separated(x: Node) -> tuple[Node, Node]:
    """The constant factor, with the sign, and the other."""
    constant, rest = _separated(_without_sign(x))
    inner, more = (ONE, rest) if rest == ONE else _separated(rest)
    while inner != ONE:
        constant, rest = product(constant, inner), more
        inner, more = (ONE, rest) if rest == ONE else _separated(rest)
    return (negative(constant) if _is_negative(x) else constant), rest


def _is_negative(x: Node) -> bool:
    if isinstance(x, Number):
        return x.value < 0
    return isinstance(x, Operation) and x.operator == "neg"


def _without_sign(x: Node) -> Node:
    if not _is_negative(x):
        return x
    return Number(-x.value) if isinstance(x, Number) else x.operands[0]


def _negated(x: Node) -> Node:
    return Number(-x.value) if isinstance(x, Number) else Operation("neg", (x,))


def _call(function: str, *operands: Node) -> Node:
    return Operation(function, operands)


# The replacement of comparisons.


def _step(x: Node, smallest: float) -> Node:
    """0 at 0 and 1 above, for x that is not negative."""
    return _call("min", product(Number(1 / smallest), x), ONE)


def _is_zero(x: Node, smallest: float) -> Node:
    return difference(ONE, _step(_call("abs", x), smallest))


def _sign(x: Node, smallest: float) -> Node:
    return _call("max", _call("min", product(Number(1 / smallest), x), ONE), Number(-1.0))


def _above(x: Node, tie: float, smallest: float) -> Node:
    """1 where x is greater than 0, ``tie`` at 0, and 0 below."""
    steep = product(Number(1 / smallest), x)
    if tie == 0:
        return _call("max", _call("min", steep, ONE), ZERO)
    if tie == 1:
        return total(ONE, _call("max", _call("min", steep, ZERO), Number(-1.0)))
    return total(HALF, product(HALF, _sign(x, smallest)))


# Rules: of functions of one x, whose value is y, and of operators and functions of two.


def root_slope(y: Node, smallest: float) -> Node:
    """The derivative of ``y = sqrt(x)`` by x: 0 at 0, and where y is infinite."""
    return product(HALF, quotient(_step(y, smallest), _call("max", y, Number(smallest))))


def _bell(factor: float, exponent: float) -> Callable:
    return lambda x, y, smallest: product(
        Number(factor), _call("exp", product(Number(exponent), product(x, x)))
    )


_CHAIN = {
    "neg": lambda x, y, smallest: Number(-1.0),
    "abs": lambda x, y, smallest: _sign(x, smallest),
    "cos": lambda x, y, smallest: negative(_call("sin", x)),
    "erf": _bell(2 / math.sqrt(math.pi), -1.0),
    "exp": lambda x, y, smallest: y,
    "expm1": lambda x, y, smallest: _call("exp", x),
    "log": lambda x, y, smallest: quotient(ONE, x),
    "log1p": lambda x, y, smallest: quotient(ONE, total(ONE, x)),
    "ndtr": _bell(1 / math.sqrt(2 * math.pi), -0.5),
    "sin": lambda x, y, smallest: _call("cos", x),
    "sqrt": lambda x, y, smallest: root_slope(y, smallest),
    "tanh": lambda x, y, smallest: difference(ONE, product(y, y)),
}


def _product_slope(x, y, to_x, to_y, node, smallest) -> Node:
    return total(product(y, to_x), product(x, to_y))


def _quotient_slope(x, y, to_x, to_y, node, smallest) -> Node:
    # An infinite 1 / y, such as of squares below 1e-38, would be NaN where the rest is 0.
    return quotient(difference(to_x, product(node, to_y)), y, 1 / smallest)


def _power_slope(x, y, to_x, to_y, node, smallest) -> Node:
    slope, zero = ZERO, _is_zero(x, smallest)
    if to_x != ZERO and isinstance(y, Number):
        slope = product(_by_base(x, y.value, zero), to_x)
    elif to_x != ZERO:
        # y x^(y - 1), but at x = 0, where y is not negative, 0, and for y = 1 the limit. Not the
        # power that is there over x, which is NaN for an infinity.
        replaced = product(_above(y, 1.0, smallest), zero)
        power = _call("pow", total(x, replaced), difference(y, ONE))
        is_one = _is_zero(difference(y, ONE), smallest)
        above = product(y, product(difference(ONE, replaced), power))
        slope = product(total(above, product(is_one, zero)), to_x)
    if to_y == ZERO:
        return slope
    return total(slope, product(product(node, _call("log", total(x, zero))), to_y))


def _by_base(x: Node, y: float, zero: Node) -> Node:
    if y in (0.0, 1.0):
        return Number(y)
    if 0 < y < 2:
        power = Operation("**", (total(x, zero), Number(y - 1)))
        return product(Number(y), product(difference(ONE, zero), power))
    return product(Number(y), x if y == 2 else Operation("**", (x, Number(y - 1))))


def _extreme_slope(x, y, to_x, to_y, node, smallest) -> Node:
    ahead = difference(x, y) if node.operator == "max" else difference(y, x)
    share = _above(ahead, tie_share(node), smallest)
    if to_y == ZERO:
        return product(share, to_x)
    return total(product(share, to_x), product(difference(ONE, share), to_y))


_OF_TWO = {
    "+": lambda x, y, to_x, to_y, *_: total(to_x, to_y),
    "-": lambda x, y, to_x, to_y, *_: difference(to_x, to_y),
    "*": _product_slope,
    "/": _quotient_slope,
    "**": _power_slope,
    "pow": _power_slope,
    "max": _extreme_slope,
    "min": _extreme_slope,
}


@dataclass(frozen=True, slots=True)
class Derivative(Epilogue):
    """The derivative of ``finish(s)``, which is an outer stage and a chain of epilogues, by ``s``
    or by a parameter of the chain; of gradients, and not for users.

    ``v`` is s itself, but for the ``outer`` stage "Sqrt" the root of s. ``by`` is "v", which stands
    for s, or a parameter: one of the chain's, or ``exponent``, that of the outer stage "Power". If
    it ``snaps``, values below a parameter ``limit`` in magnitude are 0, and constant. ``smallest``
    is a number near the least of the arithmetic that is normal.
    """

    outer: str = "Identity"
    epilogue: tuple[Epilogue, ...] = ()
    by: str = VALUE
    snaps: bool = False
    smallest: float = 1e-38

    @property
    def exponent(self) -> str:
        return free_names(self.epilogue)[0]

    @property
    def limit(self) -> str:
        return free_names(self.epilogue)[1]

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(sorted(names(_tree(self)) - {VALUE}))

    def tree(self) -> Node:
        return _tree(self)


@lru_cache(maxsize=1024)
def free_names(epilogues: tuple[Epilogue, ...]) -> tuple[str, str]:
    """Names of an exponent and of a limit that no parameter of the epilogues has."""
    used, ending = {name for epilogue in epilogues for name in epilogue.parameters}, ""
    while {f"exponent{ending}", f"limit{ending}"} & used:
        ending += "_"
    return f"exponent{ending}", f"limit{ending}"


@lru_cache(maxsize=1024)
def fits(outer: str, epilogue: tuple[Epilogue, ...], snaps: bool) -> bool:
    """Whether the derivatives of a chain are expressions of a length that a compiler is given."""
    length = 1
    for step in _steps(Derivative(outer, epilogue, snaps=snaps)):
        length = size(step.tree() if isinstance(step, Epilogue) else step, length)
    return length <= LONGEST


@lru_cache(maxsize=1024)
def _tree(record: Derivative) -> Node:
    """By the chain rule, from s outwards: the value so far, and its derivative."""
    value, slope = _V, ONE if record.by == VALUE else ZERO
    if record.outer == "Sqrt":
        slope = product(slope, root_slope(_V, record.smallest))
    for step in _steps(record):
        by_value, by_name = _slopes(step, record)
        slope = product(substitute(by_value, value), slope)
        slope = total(slope, substitute(by_name, value))
        value = substitute(step.tree() if isinstance(step, Epilogue) else step, value)
    return slope


def _steps(record: Derivative) -> list[Epilogue | Node]:
    power = Operation("**", (_V, Name(record.exponent)))
    stages = {"Abs": _call("abs", _V), "Square": product(_V, _V), "Power": power}
    steps = [stages[record.outer]] if record.outer in stages else []
    if record.snaps:
        steps.append(product(_is_above_limit(record), _V))
    return [*steps, *record.epilogue]


def _is_above_limit(record: Derivative) -> Node:
    """1, and 0 where v is below the limit in magnitude."""
    below = _call("max", difference(Name(record.limit), _call("abs", _V)), ZERO)
    return difference(ONE, _step(below, record.smallest))


def _slopes(step: Epilogue | Node, record: Derivative) -> tuple[Node, Node]:
    """The derivatives of a step by its value and by the name that is asked for."""
    if record.snaps and step == product(_is_above_limit(record), _V):
        return _is_above_limit(record), ZERO
    if isinstance(step, Matern):
        return _matern_slopes(step, record.by)
    if isinstance(step, (Gaussian, Cauchy, RationalQuadratic)):
        return _slopes_of_squares(step, record.by, 1 / record.smallest)
    tree = step.tree() if isinstance(step, Epilogue) else step
    by_name = ZERO if record.by == VALUE else derivative(tree, record.by, record.smallest)
    return derivative(tree, VALUE, record.smallest), by_name


def _slopes_of_squares(step: Epilogue, by: str, most: float) -> tuple[Node, Node]:
    """Slopes of functions of ``u = v / bandwidth^2``, v a squared distance, in closed form. Where u
    or ``1 / bandwidth^2`` is infinite, below bandwidths of 1e-19, the rules would give NaN for
    0."""
    u = "((1 / bandwidth) * v * (1 / bandwidth))"
    finite, squares = f"min({u}, {most!r})", f"min((1 / bandwidth) * (1 / bandwidth), {most!r})"
    by_alpha = "0"
    if isinstance(step, Gaussian):
        finite = f"min({u}, {2 * _VANISHED})"
        slope = f"(0.5 * exp(-0.5 * {u}))"
    elif isinstance(step, Cauchy):
        slope = f"(1 / (1 + {u}) * (1 / (1 + {u})))"
    else:
        base = f"(1 + (0.5 / alpha) * {u})"
        slope = f"(0.5 * {base} ** (-alpha - 1))"
        part = f"((0.5 / alpha) * {finite})"
        by_alpha = f"{base} ** -alpha * ({part} / (1 + {part}) - log(1 + {part}))"
    by_value = parse(f"-({squares} * {slope})", step.parameters)
    if by == "bandwidth":
        return by_value, parse(f"2 * (1 / bandwidth) * ({finite} * {slope})", step.parameters)
    return by_value, parse(by_alpha, step.parameters) if by == "alpha" else ZERO


def _matern_slopes(step: Matern, by: str) -> tuple[Node, Node]:
    """In closed form: the rules would subtract two values near 1 from each other. At a distance
    whose kernel is 0 they are 0, where an infinity before the exponential would make NaN."""
    t = f"(sqrt({2 * step.nu}) / bandwidth * v)"
    finite = f"min({t}, {_VANISHED})"
    more = f" * (1 + {finite}) / 3" if step.nu == 2.5 else ""
    slope = f"{finite}{more} * exp(-{t})"
    by_value = negative(parse(f"sqrt({2 * step.nu}) / bandwidth * ({slope})", step.parameters))
    if by != "bandwidth":
        return by_value, ZERO
    return by_value, parse(f"1 / bandwidth * ({finite} * ({slope}))", step.parameters)

"""Descriptors as formulas, and sums and products of them: ``gaussian(features=range(8)) *
laplace_l1(features=range(8, 12)) + 0.5``."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterable
from functools import lru_cache

from kernlib.descriptors.base import as_int, real, require, shown
from kernlib.descriptors.epilogues import Custom, Epilogue
from kernlib.descriptors.expression import VALUE
from kernlib.families.pairwise import stages
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.formula import plain
from kernlib.families.pairwise.formula.descriptor import Formula
from kernlib.families.pairwise.formula.spec import COL, FEATURE, ROW

POINTS = {"a": (ROW, FEATURE), "b": (COL, FEATURE)}
_OPERATORS = {"+": ast.Add(), "*": ast.Mult(), "**": ast.Pow()}
_NUMBERED = re.compile(r"(.*)_(\d+)")


@lru_cache(maxsize=1024)
def formula_of(
    descriptor: Pairwise | Formula,
    features: tuple[int, ...] | None = None,
    epilogues: tuple[Epilogue, ...] = (),
) -> Formula:
    """A descriptor as a formula of points ``a`` and ``b``, of some of their features or of all,
    with further epilogues.

    Raises TypeError for what is neither, ValueError for categories, which have no formula.
    """
    if isinstance(descriptor, Formula):
        return descriptor
    if not isinstance(descriptor, Pairwise):
        raise TypeError(f"a part must be a Pairwise or a Formula, got {shown(descriptor)}")
    if descriptor.categories:
        raise ValueError(
            f"{descriptor.describe()} has tables of categories; a formula counts features that "
            "differ by sum(where(c != d, 1, 0)), of whole numbers c and d"
        )
    text, axes = _outer(descriptor, _sums(_term(descriptor), features)), dict(POINTS)
    for epilogue in (*descriptor.epilogue, *epilogues):
        text = _with_value(epilogue.expression, text)
        axes |= dict(axes_of(epilogue))
    numbers = [*descriptor.required, *(name for each in epilogues for name in each.parameters)]
    formula = Formula(text, tuple((POINTS | dict.fromkeys(numbers, ()) | axes).items()))
    extra = (name for each in epilogues for name in each.positive)
    plain.note_positive(formula.text, descriptor.positive.union(extra))
    if not axes.keys() - POINTS.keys() and not epilogues:
        names = tuple((name, name) for name in descriptor.required)
        places = None if features is None else tuple(sorted(features))
        plain.note(formula.text, (plain.Factor(descriptor, places, names),))
    return formula


def of_call(function: Callable, values: tuple, fields: dict) -> Formula:
    """What a function that makes a descriptor makes with ``features``, or with an epilogue that
    reads tensors."""
    fields = dict(fields)
    features = as_features(fields.pop("features", None))
    epilogues = fields.pop("epilogue", ())
    epilogues = tuple(epilogues) if isinstance(epilogues, (tuple, list)) else (epilogues,)
    descriptor = function(*values, **fields)
    if descriptor.symmetric:
        raise ValueError(
            "symmetric=True is of Pairwise alone, and a formula has rows and columns: pass the "
            "points twice"
        )
    return formula_of(descriptor, features, epilogues)


def axes_of(epilogue: Epilogue) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The tensors with axes that an epilogue reads."""
    return epilogue.axes if isinstance(epilogue, Custom) else ()


@lru_cache(maxsize=256)
def with_column(descriptor: Pairwise | Formula, name: str) -> Formula:
    """A descriptor as a formula, plus a tensor of columns."""
    formula = formula_of(descriptor)
    return Formula(f"({formula.expression}) + {name}", (*formula.axes, (name, (COL,))))


def as_features(value: object) -> tuple[int, ...] | None:
    """Places of features, of a range, a slice with an end or a list of ints. Raises TypeError and
    ValueError for others."""
    if value is None:
        return None
    if isinstance(value, slice):
        require(value.stop is not None, f"features must have an end, got {value}")
        value = range(value.start or 0, value.stop, value.step or 1)
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"features must be a range or a list of ints, got {shown(value)}")
    places = tuple(as_int("features", place) for place in value)
    if not places or min(places) < 0 or len(set(places)) < len(places):
        raise ValueError(
            f"features must be places of features from 0 on, each once, got {shown(places)}"
        )
    return places


def combined(operator: str, left: object, right: object) -> Formula:
    """``left + right``, ``left * right`` or ``left ** right``, of descriptors and numbers.

    Points have one name in all parts, and so have tensors with axes. A number that several parts
    have is numbered in their order: ``bandwidth_1``, ``bandwidth_2``. Raises TypeError for other
    parts.
    """
    parts = [_part(part) for part in (left, right)]
    parts = _numbered([part for part in parts if isinstance(part, Formula)], parts)
    axes: dict[str, tuple[str, ...]] = {}
    for part in parts:
        for name, of in part.axes if isinstance(part, Formula) else ():
            require(
                axes.setdefault(name, of) == of,
                f"{name} has the axes {axes[name]} in one part and {of} in another; rename one",
            )
    sides = [_parsed(p.expression) if isinstance(p, Formula) else _number(p) for p in parts]
    tree = ast.BinOp(sides[0], _OPERATORS[operator], sides[1])
    formula = Formula(ast.unparse(tree), tuple(axes.items()))
    formulas = [part for part in parts if isinstance(part, Formula)]
    positive = frozenset().union(*(plain.positive_of(part.text) for part in formulas))
    plain.note_positive(formula.text, positive)
    factors = [plain.factors_of(part.text) for part in formulas]
    if operator == "*" and len(factors) == 2 and all(factors):
        plain.note(formula.text, (*factors[0], *factors[1]))
    return formula


def _part(value: object) -> Formula | float:
    if isinstance(value, (Pairwise, Formula)):
        return formula_of(value)
    number = real(value)
    if number is None:
        raise TypeError(
            "a part of a formula must be a Pairwise, a Formula or a number, got "
            f"{shown(value)}; a number of the call is kl.Scale() or a parameter of a Formula"
        )
    require(math.isfinite(number), f"a number of a formula must be finite, got {number}")
    return float(number)


def _number(value: float) -> ast.expr:
    return ast.Constant(int(value) if value.is_integer() and abs(value) < 2**31 else value)


def _numbered(formulas: list[Formula], parts: list) -> list:
    """The parts, numbers of the same name numbered."""
    numbers = [[name for name, axes in part.axes if not axes] for part in formulas]
    bases = [{_unnumbered(name) for name in names} for names in numbers]
    shared = set.intersection(*bases) if len(bases) == 2 else set()
    counts = dict.fromkeys(shared, 0)
    renamed = iter([_renamed(p, n, counts) for p, n in zip(formulas, numbers, strict=True)])
    return [next(renamed) if isinstance(part, Formula) else part for part in parts]


def _unnumbered(name: str) -> str:
    match = _NUMBERED.fullmatch(name)
    return match[1] if match else name


def _renamed(formula: Formula, numbers: list[str], counts: dict[str, int]) -> Formula:
    table = {}
    for name in numbers:
        base = _unnumbered(name)
        if base in counts:
            counts[base] += 1
            table[name] = f"{base}_{counts[base]}"
    tree = _parsed(formula.expression)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in table:
            node.id = table[node.id]
    axes = tuple((table.get(name, name), of) for name, of in formula.axes)
    renamed = Formula(ast.unparse(tree), axes)
    positive = (table.get(name, name) for name in plain.positive_of(formula.text))
    plain.note_positive(renamed.text, frozenset(positive))
    factors = [
        factor._replace(names=tuple((own, table.get(name, name)) for own, name in factor.names))
        for factor in plain.factors_of(formula.text)
    ]
    if factors:
        plain.note(renamed.text, tuple(factors))
    return renamed


# Stages as text.


def _parsed(text: str) -> ast.expr:
    return ast.parse(text.strip(), mode="eval").body


class _Value(ast.NodeTransformer):
    def __init__(self, value: ast.expr):
        self.value = value

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.value if node.id == VALUE else node


def _with_value(text: str, value: str) -> str:
    return ast.unparse(_Value(_parsed(value)).visit(_parsed(text)))


def _term(descriptor: Pairwise) -> str:
    d = "(b * a)" if descriptor.operator == "dot" else "(b - a)"
    power = f"where({d} == 0, 0, abs({d}) ** p)"
    return {
        stages.Identity: d,
        stages.Abs: f"abs({d})",
        stages.Square: f"{d} ** 2",
        stages.Sqrt: f"sqrt({d})",
        stages.Power: power,
        stages.ExpPower: f"exp(inner_scale * {power})",
        stages.PowerLog: f"where({d} == 0, 0, abs({d}) ** p * log(abs({d})))",
    }[type(descriptor.inner)]


def _sums(term: str, features: tuple[int, ...] | None) -> str:
    """The sum of a term over features, by runs of neighbours."""
    if features is None:
        return f"sum({term})"
    runs: list[list[int]] = []
    for place in sorted(features):
        if runs and runs[-1][1] == place:
            runs[-1][1] += 1
        else:
            runs.append([place, place + 1])
    return " + ".join(f"sum({term}, {first}, {end})" for first, end in runs)


def _outer(descriptor: Pairwise, sums: str) -> str:
    exponent = "outer_p" if "outer_p" in descriptor.required else "(1 / p)"
    return {
        stages.Identity: sums,
        stages.Abs: f"abs({sums})",
        stages.Square: f"({sums}) ** 2",
        stages.Sqrt: f"sqrt({sums})",
        stages.Power: f"({sums}) ** {exponent}",
        stages.Root: f"({sums}) ** where(p == 0, 1, 1 / p)",  # 0 counts features that differ
    }[type(descriptor.outer)]

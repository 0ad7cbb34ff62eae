"""CUDA text of a formula: ``struct Formula``, as kernel_sources/pairwise/formula/formula.cuh
describes it.

Values that depend on a row alone are computed once a row, and so are those of columns and those of
neither: they become words of arrays, which the text of a pair reads by their places.
"""

from __future__ import annotations

from typing import NamedTuple

from kernlib.descriptors.expression import Integer, Name, Node, Number, Operation, names
from kernlib.descriptors.score.kinds import FLOAT, INT, LONG, kind_of
from kernlib.families.pairwise.formula.lowering.hoist import (
    FOR_EXP2,
    PAIR,
    THREAD,
    Places,
    factors_of,
    product,
)
from kernlib.families.pairwise.formula.lowering.problem import Problem, axes_text
from kernlib.families.pairwise.formula.spec import COL, ROW, place_of
from kernlib.lowering.typed_source import TypedSource

LOG2_E = 1.4426950408889634
_ARRAYS = {THREAD: "t", ROW: "r", COL: "c"}
_INLINE = "static __device__ __forceinline__"
_FREE = "const AccT* t, const AccT* r, const AccT* c"
_FEATURED = f"{_FREE}, const AccT* tf, const AccT* rf, const AccT* cf"
_AT = "const Call& call, i64 l, int row, int col"


class Groups(NamedTuple):
    """Loops over features that share words: the group of each term, that of the unit, and how many
    features each has, 0 where the plan says it."""

    terms: tuple[int, ...]
    unit: int | None
    sizes: tuple[int, ...]


class Words(NamedTuple):
    """How many words of the arithmetic a level has: ``free`` of features, and of each group for one
    feature."""

    free: int
    featured: tuple[int, ...]

    def total(self, groups: Groups) -> int:
        """All words, of groups whose sizes are known."""
        return self.free + sum(x * k for x, k in zip(self.featured, groups.sizes, strict=True))


class Text(NamedTuple):
    """The text and the words of each level."""

    text: str
    thread: Words
    row: Words
    col: Words


def by_size(problem: Problem, width: int) -> Groups:
    """Terms of equal size share a group, and so does a unit whose ``width`` is all its features."""
    sizes = list(dict.fromkeys(problem.sizes))
    unit = None
    if problem.spec.unit is not None:
        if width != problem.features or width not in sizes:
            sizes.append(width)
            unit = len(sizes) - 1
        else:
            unit = sizes.index(width)
    terms = tuple(sizes.index(size) for size in problem.sizes)
    return Groups(terms, unit, tuple(sizes))


def by_term(problem: Problem) -> Groups:
    """Each term has a group, and the last is the unit's."""
    count = len(problem.sizes)
    unit = None if problem.spec.unit is None else count
    return Groups(tuple(range(count)), unit, (0,) * (count + (unit is not None)))


def formula(problem: Problem, groups: Groups, sums_of_pairs: bool) -> Text:
    """The struct. ``sums_of_pairs`` says that sums over features are all computed for each pair."""
    return _Source(problem, groups, sums_of_pairs).struct()


class _Source(TypedSource):
    def __init__(self, problem: Problem, groups: Groups, sums_of_pairs: bool):
        spec = problem.spec
        kinds = {**spec.kinds, ROW: INT, COL: INT}
        kinds |= {f"#{i}": FLOAT for i in range(len(spec.terms))}
        super().__init__(kinds)
        self._problem, self._groups = problem, groups
        self._places = Places(spec, sums_of_pairs)
        self._double = problem.result == "float64"
        self._level, self._group = PAIR, None
        # By level and group, None for what has no features: nodes, and whether they are exact.
        self._held: dict[tuple[str, int | None], dict[tuple[Node, bool], int]] = {}

    # What a tree becomes.

    def _is_constant(self, node: Node) -> bool:
        return False  # here, what is constant has words too

    def _level_of(self, node: Node) -> str:
        return self._places.of(node).level if names(node) else THREAD

    def _render(self, node: Node) -> str:
        if isinstance(node, (Number, Integer)):
            return super()._render(node)
        if not names(node):
            return self._operation(node)
        place = self._places.of(node)
        is_position = isinstance(node, Name) and node.name in (ROW, COL)
        if self._is_below(place) and not is_position:
            return self._word(place, node)
        if isinstance(node, Name):
            return self._load(node.name)
        if self._level == PAIR and not self._is_exact and kind_of(node, self._kinds) == FLOAT:
            return self._arranged(node)
        return self._operation(node)

    def _is_below(self, place) -> bool:
        if self._level == PAIR:
            return place.level != PAIR
        return self._level != THREAD and place.level == THREAD and not place.featured

    def _word(self, place, node: Node) -> str:
        """Text of a value that has been computed before."""
        group = self._group if place.featured else None
        held = self._held.setdefault((place.level, group), {})
        key = node, self._is_exact and isinstance(node, Operation)
        if key not in held:
            held[key] = sum(self._words_of(other) for other, _ in held)
        array = _ARRAYS[place.level] + "f" * place.featured
        kind = kind_of(node, self._kinds)
        if kind == FLOAT:
            return f"{array}[{held[key]}]"
        return f"get<{self._type_of(kind)}>({array} + {held[key]})"

    def _words_of(self, node: Node) -> int:
        return 2 if kind_of(node, self._kinds) == LONG and not self._double else 1

    def _load(self, name: str) -> str:
        if name in (ROW, COL):
            return name
        if name[0] == "#":
            return f"sums[{name[1:]}]" if self._level == PAIR else f"sum_{name[1:]}"
        place, problem = place_of(name), self._problem
        types = f"{self._type_of(self._kinds[name])}, {problem.stored(place)}"
        axes = problem.spec.inputs[place].axes
        if not axes:
            return f"scalar<{types}>(call, {problem.scalars.index(place)}, l)"
        return f"element<{types}>(call, {problem.tensors.index(place)}, l, {axes_text(axes)})"

    def _operation(self, node: Operation) -> str:
        if node.operator == "/" and not self._is_exact:
            left, right = node.operands
            if isinstance(right, Operation) and right.operator == "*":
                first, second = right.operands
                return self._operation(Operation("/", (Operation("/", (left, first)), second)))
        return super()._operation(node)

    # Numbers of a pair, in the order that costs least.

    def _arranged(self, node: Operation) -> str:
        operator = node.operator
        if operator in ("*", "/", "neg"):
            return self._product(node)
        if operator == "exp":
            return self._exponential([node.operands[0]])
        if operator == "sqrt":
            return f"fast_sqrt({self._render(node.operands[0])})"
        return self._operation(node)

    def _power(self, base: Node, exponent: Node) -> str:
        if _is(exponent, "neg") and isinstance(exponent.operands[0], Number):
            exponent = Number(-exponent.operands[0].value)
        if self._level == PAIR and not self._is_exact and isinstance(exponent, Number):
            if exponent.value == 0.5:
                return f"fast_sqrt({self._render(base)})"
            if exponent.value == 1.5:
                return f"three_halves({self._render(base)})"
            if exponent.value in (-1.0, -2.0):
                below = f"integer_power<{int(-exponent.value)}>({self._render(base)})"
                return f"quotient(AccT(1), {below})"
        return super()._power(base, exponent)

    def _product(self, node: Node, for_exp2: bool = False) -> str:
        """A product, times log2(e) if it is the exponent of 2: what is computed once a row or a
        column is multiplied there."""
        number, thread, row, col, pair = factors_of(node, self._level_of)
        is_exp = [not divides and _is(x, "exp") for x, divides in pair]
        parts = []
        exponents = [x.operands[0] for (x, _), yes in zip(pair, is_exp, strict=True) if yes]
        for (x, divides), yes in zip(pair, is_exp, strict=True):
            if not divides and not yes:
                parts.append(self._render(x))
        if exponents:
            parts.insert(0, self._exponential(exponents))
        target = row or col or thread
        scale = LOG2_E if for_exp2 else 1.0
        if target:
            first = product(number, target if target is thread else [*thread, *target])
            parts.append(self._render(Operation(FOR_EXP2, (first,)) if for_exp2 else first))
            if target is row and col:
                parts.append(self._render(product(1.0, col)))
        elif number * scale == -1.0 and parts:
            parts[0] = f"(-{parts[0]})"
        elif number * scale != 1.0:
            parts.append(self._literal(number * scale))
        text = " * ".join(parts) or "AccT(1)"
        text = f"({text})" if len(parts) > 1 else text
        for x, divides in pair:
            if divides:
                text = f"quotient({text}, {self._render(x)})"
        return text

    def _exponential(self, exponents: list[Node]) -> str:
        """Of the sum of exponents, as a product of exponentials is one."""
        if len(exponents) > 1:
            exponents = [part for each in exponents for part in _addends(each)]
        if self._double:
            return f"fast_exp({' + '.join(map(self._render, exponents))})"
        parts = (self._product(each, for_exp2=True) for each in exponents)
        return f"exp2_approximate({' + '.join(parts)})"

    # The struct.

    def struct(self) -> Text:
        spec = self._problem.spec
        terms = "".join(map(self._term, range(max(1, len(spec.terms)))))
        score = self._function(
            f"AccT score({_FREE}, const AccT* sums, {_AT})", self._pair(spec.score, None)
        )
        unit = self._function(
            f"AccT unit({_FEATURED}, {_AT}, int k)",
            self._pair(spec.unit or Number(1.0), self._groups.unit),
        )
        below = [self._free(level) + self._featured(level) for level in (ROW, COL, THREAD)]
        words = {level: self._count(level) for level in (THREAD, ROW, COL)}
        text = (
            f"struct Formula {{\n{self._constants(words)}{''.join(below)}{terms}{score}{unit}}};\n"
        )
        return Text(text, words[THREAD], words[ROW], words[COL])

    def _pair(self, node: Node, group: int | None) -> str:
        self._level, self._group = PAIR, group
        return f"        return {self._render(node)};\n"

    def _term(self, index: int) -> str:
        body = ""  # of a sum that no pair computes, as where there is none
        if index < len(self._problem.sizes) and self._level_of(Name(f"#{index}")) == PAIR:
            body = self._pair(self._problem.spec.terms[index], self._groups.terms[index])
        head = f"AccT term(Nth<{index}>, {_FEATURED}, {_AT}, int k)"
        return self._function(head, body or "        return AccT(0);\n")

    def _function(self, head: str, body: str) -> str:
        return f"    template <class Call>\n    {_INLINE} {head} {{\n{body}    }}\n"

    def _free(self, level: str) -> str:
        """The function that computes a level's words that have no features."""
        self._level, self._group = level, None
        held = self._held.get((level, None), {})
        stores = self._stores(_ARRAYS[level], held)
        sums = sorted({name for node, _ in held for name in names(node) if name[0] == "#"})
        body = "".join(map(self._sum, sums)) + stores
        arguments = {
            THREAD: "AccT* t, const Call& call, i64 l",
            ROW: "AccT* r, const AccT* t, const Call& call, i64 l, int row",
            COL: "AccT* c, const AccT* t, const Call& call, i64 l, int col",
        }[level]
        return self._function(f"void of_{level}({arguments})", body)

    def _sum(self, name: str) -> str:
        """A sum over features of what depends on one row, column or neither."""
        index = int(name[1:])
        term = self._render(self._problem.spec.terms[index])
        size = self._problem.sizes[index]
        return (
            f"        AccT sum_{index} = AccT(0);\n"
            f"        for (int k = 0; k < {size}; ++k) sum_{index} += {term};\n"
        )

    def _stores(self, array: str, held: dict[tuple[Node, bool], int]) -> str:
        lines = []
        for (node, exact), at in held.items():
            self._is_exact = exact
            text = self._load(node.name) if isinstance(node, Name) else self._operation(node)
            self._is_exact = False
            kind = kind_of(node, self._kinds)
            if kind == FLOAT:
                lines.append(f"        {array}[{at}] = {text};\n")
            else:
                lines.append(f"        put<{self._type_of(kind)}>({array} + {at}, {text});\n")
        return "".join(lines)

    def _featured(self, level: str) -> str:
        """The functions that compute its words of one feature, of each group."""
        array = f"{_ARRAYS[level]}f"
        position = {ROW: "int row", COL: "int col", THREAD: "int"}[level]
        functions = []
        for group in range(max(1, len(self._groups.sizes))):
            self._level, self._group = level, group
            body = self._stores(array, self._held.get((level, group), {}))
            head = (
                f"void {level}_feature(Nth<{group}>, AccT* {array}, const AccT* t,"
                f" const Call& call, i64 l, {position}, int k)"
            )
            functions.append(self._function(head, body))
        return "".join(functions)

    def _count(self, level: str) -> Words:
        def words(group: int | None) -> int:
            return sum(self._words_of(node) for node, _ in self._held.get((level, group), {}))

        return Words(words(None), tuple(map(words, range(len(self._groups.sizes)))))

    def _constants(self, words: dict[str, Words]) -> str:
        """Numbers of the words, and the place of each group behind them where sizes are known."""
        groups, terms = self._groups, range(len(self._problem.spec.terms))
        of_pairs = [self._level_of(Name(f"#{i}")) == PAIR for i in terms]
        lines = [
            f"int TERMS = {len(terms)}, GROUPS = {len(groups.sizes)}",
            f"int UNIT = {-1 if groups.unit is None else groups.unit}",
            _array("int SIZE", groups.sizes),
            _array("int GROUP", groups.terms),
            _array("bool OF_PAIR", [int(x) for x in of_pairs]),
        ]
        for level, each in words.items():
            letter, at, places = _ARRAYS[level].upper(), each.free, []
            for count, size in zip(each.featured, groups.sizes, strict=True):
                places.append(at)
                at += count * size
            lines.append(f"int {letter} = {each.free}, {letter}_WORDS = {at}")
            lines.append(_array(f"int {letter}_WIDTH", each.featured))
            lines.append(_array(f"int {letter}_AT", places))
        return "".join(f"    static constexpr {line};\n" for line in lines)


def _array(name: str, values) -> str:
    values = list(values) or [0]
    return f"{name}[{len(values)}] = {{{', '.join(map(str, values))}}}"


def _is(node: Node, operator: str) -> bool:
    return isinstance(node, Operation) and node.operator == operator


def _addends(node: Node) -> list[Node]:
    """What a tree is the sum of."""
    if _is(node, "+"):
        return [part for side in node.operands for part in _addends(side)]
    if _is(node, "-"):
        left, right = node.operands
        return [*_addends(left), *(Operation("neg", (part,)) for part in _addends(right))]
    if _is(node, "neg"):
        return [Operation("neg", (part,)) for part in _addends(node.operands[0])]
    return [node]

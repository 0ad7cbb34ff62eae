"""Names say what a thing is: how many say only what happened to it, counted in the syntax trees."""

import ast
from collections import Counter
from collections.abc import Iterator

from tests.architecture.package import MODULES
from tests.support.paths import ROOT

# Words that are no nouns for what a variable holds: a plan is `plan`, not `found` or `made`.
EMPTY = frozenset(
    (
        "asked", "each", "every", "found", "given", "held", "kept", "known", "left", "made", "one",
        "others", "own", "said", "taken", "wanted", "whole",
    )
)  # fmt: skip
# The percentage of kernlib's variables and arguments that have such a name: TODAY may only fall,
# and AIM is what it was brought to. Some stay: `left` beside `right`, and arguments of public
# functions.
TODAY, AIM = 1.6, 3.0


def bindings(tree: ast.AST) -> Iterator[str]:
    """Names that a file assigns: variables, targets of loops, comprehensions and ``with``,
    arguments, and what ``except`` and ``match`` name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            yield node.name


def test_the_reader_sees_every_form():
    text = (
        "def f(a, /, b, *c, d=1, **e):\n with x as g, y as (h, *i):\n  j = k = l, m = 1\n"
        " for n in o: p += 1\n except_ = [q for q in r for s in t]\n u: int = 1\n"
        " try: (v := 1)\n except E as w: pass\n match z:\n  case [x1, *x2]: pass\n"
        " lambda y1: y1.y2"
    )
    names = "a b c d e g h i j k l m n p except_ q s u v w x1 x2 y1"
    assert sorted(bindings(ast.parse(text))) == sorted(names.split())


def test_few_names_are_without_content():
    counts = {path: Counter(bindings(ast.parse(path.read_text()))) for path in MODULES}
    total = sum(sum(names.values()) for names in counts.values())
    empty = {path: sum(names[word] for word in EMPTY) for path, names in counts.items()}
    share = 100 * sum(empty.values()) / total
    most = sorted(empty, key=empty.get, reverse=True)[:5]
    worst = ", ".join(f"{path.relative_to(ROOT)} ({empty[path]})" for path in most)
    assert share <= TODAY, f"{share:.2f} % of {total} names are of EMPTY; most in {worst}"
    assert TODAY <= AIM

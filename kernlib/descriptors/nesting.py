"""How long and how deep a text may be that a parser is to read.

A parser follows a text by recursion, and what it makes is walked so: Python 3.10 has no guard of
its own where it turns a parsed text into a tree, and runs out of stack. So texts are measured
before, in time that grows with their length alone.
"""

from __future__ import annotations

LONGEST = 10_000  # characters
DEEPEST = 1_000  # operations and brackets in one another: 0.1 MB of stack in Python 3.10
_SIGNS = r"\b(?:not|if|lambda|await|in|is|and|or)\b|\*\*|//|\.(?!\d)|[^\w\s.]"


def check_size(text: str, longest: int = LONGEST, deepest: int = DEEPEST) -> None:
    """Raises ValueError for a text that is too long, or that may be nested too deep: what a
    sentence about it goes on with."""
    if len(text) > longest:
        raise ValueError(f"has {len(text)} characters, of at most {longest}")
    if len(text) > deepest and (depth := most_nested(text)) > deepest:
        raise ValueError(f"may have {depth} operations in one another, of at most {deepest}")


def most_nested(text: str) -> int:
    """No fewer than the operations and brackets in one another: all between two commas count, with
    the deepest of their brackets, as precedences are not looked at."""
    import re  # only long texts need it

    levels = [(0, 0, 0)]  # of open brackets: of parts before a comma; signs since; deepest inside
    for sign in re.findall(_SIGNS, text):
        before, signs, inside = levels[-1]
        if sign in "([{":
            levels.append((0, 0, 0))
        elif sign == ",":
            levels[-1] = (max(before, signs + inside), 0, 0)
        elif sign not in ")]}":
            levels[-1] = (before, signs + 1, inside)
        elif len(levels) > 1:
            _close(levels)
    while len(levels) > 1:
        _close(levels)
    before, signs, inside = levels[0]
    return max(before, signs + inside)


def _close(levels: list[tuple[int, int, int]]) -> None:
    before, signs, inside = levels.pop()
    depth = max(before, signs + inside)
    before, signs, inside = levels[-1]
    levels[-1] = (before, signs + 1, max(inside, depth))

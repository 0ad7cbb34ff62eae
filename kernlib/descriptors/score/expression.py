"""The expressions of an attention descriptor: a score in place of each logit, a mask that leaves
some out, and the tensors that these read."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kernlib.descriptors.base import Part, require, shown
from kernlib.descriptors.expression import POSITIONS, Node, names
from kernlib.descriptors.score.grammar import CALLS, SCORE_CONSTANTS, parse_mask, parse_score
from kernlib.descriptors.score.kinds import ANY, ARGUMENTS, FLOAT, KINDS, OWN

MEANT = ("q", "k", "v", *ARGUMENTS)  # by a name that nothing reads
# Names that no captured tensor may have: of the language, and of what a call is given.
RESERVED = {*CALLS, *SCORE_CONSTANTS, *OWN, *ARGUMENTS, "q", "k", "descriptor", "captured"}
_EXAMPLE = {"bias": ("head", "row", "col")}
_TEXTS = {"score": "v + bias", "mask": "col <= row"}


class Trees(NamedTuple):
    """The trees of score and mask, None for an absent one."""

    score: Node | None
    mask: Node | None


@dataclass(frozen=True, slots=True)
class ScoreExpression(Part):
    """``score`` is an expression of the logit ``v``, of its ``row``, ``col``, ``head`` and
    ``batch``, and of captured tensors, that takes the logit's place; ``mask`` a condition of the
    same but v, without which a logit is left out.

    ``captured`` are the tensors' names, each with the axes it has, in order, of ``"batch"``,
    ``"head"``, ``"row"`` and ``"col"``: pairs, or a dict such as ``{"bias": ("head", "row",
    "col"), "slope": "head"}``.

    Raises TypeError for what is no text or no axes, and ValueError for an invalid expression,
    whatever the tensors hold, for reserved names, and for a tensor that no expression reads."""

    score: str | None = None
    mask: str | None = None
    captured: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __post_init__(self):
        for name in ("score", "mask"):
            text = getattr(self, name)
            if text is not None and not isinstance(text, str):
                raise TypeError(
                    f"{name} must be a string or None, got {shown(text)}; one is "
                    f"{_TEXTS[name]!r}, and tensors that it names are given beside it"
                )
        object.__setattr__(self, "captured", _as_captured(self.captured))
        trees = self._parse(tuple((name, ANY) for name in self.names))
        used = frozenset().union(*(names(tree) for tree in trees if tree is not None))
        unused = [name for name in self.names if name not in used]
        if unused:
            from kernlib.hints import scores  # only errors need it

            meant = scores.unread(unused[0], MEANT) or "; name them there, or leave them out"
            raise ValueError(f"neither score nor mask reads captured tensor(s) {unused}{meant}")

    @property
    def names(self) -> tuple[str, ...]:
        """The captured tensors' names, in order."""
        return tuple(name for name, _ in self.captured)

    def kinds(self, dtypes: tuple[str, ...]) -> dict[str, str]:
        """The kind of each name, where captured tensors have these dtypes. Raises TypeError for a
        dtype that none may have."""
        for name, dtype in zip(self.names, dtypes, strict=True):
            if dtype not in KINDS:
                raise TypeError(f"{name} must be of {', '.join(KINDS)}, got {dtype}")
        captured_kinds = (KINDS[dtype] for dtype in dtypes)
        return OWN | dict(zip(self.names, captured_kinds, strict=True))

    def trees(self, dtypes: tuple[str, ...]) -> Trees:
        """Where captured tensors have these dtypes. Raises TypeError for a dtype that none may
        have, ValueError for one that the expressions have no use for."""
        kinds = self.kinds(dtypes)
        return self._parse(tuple((name, kinds[name]) for name in self.names))

    def differentiable(self, dtypes: tuple[str, ...]) -> tuple[str, ...]:
        """The captured tensors that logits have a derivative by: numbers that the score reads."""
        tree, kinds = self.trees(dtypes).score, self.kinds(dtypes)
        read = frozenset() if tree is None else names(tree)
        return tuple(name for name in self.names if name in read and kinds[name] == FLOAT)

    def _parse(self, kinds: tuple[tuple[str, str], ...]) -> Trees:
        score = None if self.score is None else parse_score(self.score, kinds)
        mask = None if self.mask is None else parse_mask(self.mask, kinds)
        return Trees(score, mask)


def _as_captured(value: object) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Pairs of names and axes. Raises TypeError and ValueError for anything else."""
    if isinstance(value, Mapping):
        value = tuple(value.items())
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"captured must be a dict such as {_EXAMPLE}, got {shown(value)}")
    pairs = tuple(_as_pair(pair) for pair in value)
    names = [name for name, _ in pairs]
    require(len(set(names)) == len(names), f"captured repeats a name: {names}")
    return pairs


def _reserved_by(name: str) -> str:
    """What reserves a name."""
    if keyword.iskeyword(name):
        return "a word of Python"
    if name in CALLS:
        return "a function of scores and masks"
    if name in SCORE_CONSTANTS or name in OWN:
        return f"a {'constant' if name in SCORE_CONSTANTS else 'variable'} of scores and masks"
    return "an argument of attention"


def _as_pair(pair: object) -> tuple[str, tuple[str, ...]]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"captured must be a dict such as {_EXAMPLE}, got {shown(pair)} in it")
    name, axes = pair
    if not isinstance(name, str) or not name.isascii() or not name.isidentifier():
        raise ValueError(f"captured {shown(name)} is not an ASCII identifier")
    if name in RESERVED or keyword.iskeyword(name):
        raise ValueError(f"captured name {name!r} is taken by {_reserved_by(name)}; choose another")
    several = "; several are a tuple of them" if isinstance(axes, str) else ""
    axes = (axes,) if isinstance(axes, str) else axes
    if not isinstance(axes, (tuple, list)):
        raise TypeError(
            f"axes of captured {name} must be a tuple of {POSITIONS}, got {shown(axes)}"
        )
    for axis in axes:
        if not isinstance(axis, str) or axis not in POSITIONS:
            raise ValueError(
                f"axes of captured {name} must be of {POSITIONS}, got {shown(axis)}{several}"
            )
    require(len(set(axes)) == len(axes), f"axes of captured {name} repeat one: {tuple(axes)}")
    return name, tuple(axes)

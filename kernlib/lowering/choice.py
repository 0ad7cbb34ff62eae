"""Choices: what tells the kernels apart that can compute one problem. Tuning times all of them and
keeps one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Choice = dict[str, Any]  # the kind of kernel and the values of its knobs, by name


def named(choice: Mapping[str, object] | None, candidates: list[Choice]) -> Choice | None:
    """The candidate that equals a choice, whose values may be given as text. None if there is none,
    as for a choice that is damaged or of another version."""
    wanted = {name: str(value) for name, value in (choice or {}).items()}
    same = (c for c in candidates if {name: str(value) for name, value in c.items()} == wanted)
    return next(same, None)

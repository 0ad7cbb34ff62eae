"""Hands each docstring that mkdocstrings reads to roles.py."""

from __future__ import annotations

import sys
from pathlib import Path

import griffe

sys.path.insert(0, str(Path(__file__).resolve().parent))

import roles


class Roles(griffe.Extension):
    """Docstrings of all objects of a package, once it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_) -> None:
        left: list[griffe.Object] = [pkg]
        while left:
            each = left.pop()
            left += [x for x in each.members.values() if not x.is_alias]
            if each.docstring is not None:
                each.docstring.value = roles.as_markdown(each.docstring.value, each.path)

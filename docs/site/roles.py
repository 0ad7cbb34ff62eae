"""Docstrings as Markdown: roles such as :class:`kernlib.Pairwise` become links to the reference,
or code where it has no such page, and examples become highlighted code.

Docstrings are plain text with roles of reST, ``code``, lists and indented formulas. Whatever else
Markdown would read as markup is escaped.
"""

from __future__ import annotations

import inspect
import re
from functools import cache

import reference

ROLE = r":(?:class|func|meth|mod|attr|data|exc|obj|const):`([^`]+)`"
_INLINE = re.compile(rf"``(.+?)``|{ROLE}|(`[^`]+`)|([*_<\[\]|])", re.S)
_EXAMPLE = re.compile(r"^Examples?::?$")


def as_markdown(text: str, scope: str, links: bool = True) -> str:
    """A docstring, of the object with this path, as Markdown."""
    chunks: list[str] = []
    prose: list[str] = []

    def flush() -> None:
        if prose:
            chunks.append(inline("\n".join(prose), scope, links))
            prose.clear()

    lines = text.splitlines()
    at = 0
    while at < len(lines):
        line, at = lines[at], at + 1
        block, end = _indented(lines, at)
        if block and _EXAMPLE.match(line):
            flush()
            chunks += ["", "**Example**", "", *_fenced(block)]
            at = end
        elif block and line.endswith("::"):
            prose += [line[:-1], ""]
            flush()
            chunks += _fenced(block)
            at = end
        elif line.startswith("    ") and (not prose or not prose[-1].strip()):
            block, at = _indented(lines, at - 1)  # a formula
            flush()
            chunks += _fenced(block)
        else:
            prose.append(line)
    flush()
    return "\n".join(chunks)


def _indented(lines: list[str], start: int) -> tuple[list[str], int]:
    """The indented block that begins there or behind empty lines, and where it ends."""
    end = start
    while end < len(lines) and (not lines[end].strip() or lines[end].startswith("    ")):
        end += 1
    block = "\n".join(lines[start:end]).strip("\n").rstrip()
    if not block:
        return [], start
    return [line.removeprefix("    ") for line in block.splitlines()], end


def _fenced(block: list[str]) -> list[str]:
    is_code = any(re.match(r"\s*(with|import|from|for|def) |\s*\w+\(|\s*\w+ = ", x) for x in block)
    language = "pycon" if ">>>" in block[0] else "python" if is_code else "text"
    return ["", f"```{language}", *block, "```", ""]


def inline(text: str, scope: str, links: bool = True) -> str:
    """Roles, code and escapes of a text without blocks."""

    def one(match: re.Match) -> str:
        code, target, quoted, symbol = match.groups()
        if symbol is not None:
            return "&lt;" if symbol == "<" else f"\\{symbol}"
        if code is not None:
            return f"`` {code} ``" if "`" in code else f"`{code}`"
        if quoted is not None:
            return quoted
        return link(target, scope) if links else f"`{target.lstrip('~')}`"

    return _INLINE.sub(one, text)


def link(target: str, scope: str) -> str:
    """A link to where the reference has this name, or the name as code."""
    shown = target.lstrip("~")
    place = resolve(shown.removesuffix("()"), scope)
    if place is None:
        return f"`{shown}`"
    place = reference.anchor(place)
    return f'<autoref identifier="{place}" optional hover><code>{shown}</code></autoref>'


@cache
def _places() -> dict[str, str]:
    """Public names by their path, and by that of where they are defined; modules too."""
    places: dict[str, str] = {}
    for name, value in reference.values().items():
        home, path = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        if home and path:
            places.setdefault(f"{home}.{path}", name)
    places |= {name: name for name in reference.values()}
    return places | {name: name for name in reference.modules()}


@cache
def _bare() -> dict[str, str]:
    """Public names without their module, where that says which one is meant. Those of kernlib
    itself come before those of predecessors."""
    bare: dict[str, str] = {}
    for name in sorted(reference.values(), key=lambda name: (".compat" in name, name.count("."))):
        bare.setdefault(name.rpartition(".")[2], name)
    return bare


def resolve(target: str, scope: str) -> str | None:
    """The identifier of a name in the reference, as a docstring of ``scope`` writes it: whole, or
    from the class, the module or the package that it is in."""
    places = _places()
    around = scope
    while around:
        whole = f"{around}.{target}"
        if whole in places:
            return places[whole]
        if around in places and places[around] not in reference.modules():  # a class
            owner = reference.values()[places[around]]
            member = getattr(owner, target.partition(".")[0], None)
            if member is not None and not inspect.isclass(member):
                return f"{places[around]}.{target}"
        around = around.rpartition(".")[0]
    if target in places:
        return places[target]
    head, _, member = target.rpartition(".")
    owner = places.get(head) or _bare().get(head)
    if owner is not None and owner in reference.values():
        return f"{owner}.{member}"
    return None if head else _bare().get(target)

"""The facts that a kernel is generated for, as the one struct that its headers read: ``Config``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from kernlib.errors import KernlibError
from kernlib.jit import sources

_READ = re.compile(r"\bConfig::(\w+)")


class Constant(NamedTuple):
    """A fact that is neither a number nor a type: the C++ text of a value, as of an enum."""

    text: str


Fact = bool | int | str | Constant  # a string names a type


def text(facts: Mapping[str, Fact], name: str = "Config") -> str:
    """A struct of facts in C++."""
    return "\n".join([f"struct {name} {{", *map(_member, facts, facts.values()), "};", ""])


def of_header(header: str, facts: Mapping[str, Fact]) -> str:
    """``struct Config`` of those facts that a header, with all that it includes, reads. Raises
    KernlibError for one that it reads and is not there: here, and not in a message of the
    compiler."""
    read = facts_read(header)
    missing = sorted(read - facts.keys())
    if missing:
        raise KernlibError(
            f"{header} reads Config::{', Config::'.join(missing)}, which its kernel lacks: "
            f"it has {', '.join(facts)}"
        )
    return text({name: fact for name, fact in facts.items() if name in read})


@cache
def facts_read(header: str) -> frozenset[str]:
    """The names that a header of ``kernel_sources``, with all that it includes, reads of Config,
    comments apart."""
    texts = map(sources.read, sources.closure(f'#include "{header}"'))
    lines = (line for text in texts for line in sources.lines_with("Config::", text))
    return frozenset(fact for line in lines for fact in _READ.findall(line.split("//")[0]))


def _member(name: str, fact: Fact) -> str:
    if isinstance(fact, str):
        return f"    using {name} = {fact};"
    if isinstance(fact, Constant):
        return f"    static constexpr auto {name} = {fact.text};"
    kind, value = ("bool", str(fact).lower()) if isinstance(fact, bool) else ("int", fact)
    return f"    static constexpr {kind} {name} = {value};"

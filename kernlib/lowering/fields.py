"""The members of a kernel's parameters that a plan fixes, said once: C++ text and bytes."""

from __future__ import annotations

import struct
from typing import NamedTuple

FORMATS = {"i64": "q", "u64": "Q", "i32": "i", "u32": "I", "float": "f"}


class Fields(NamedTuple):
    """Types and names of members, as ``("i64 stride", "u32 rows")``: those of 8 bytes first, as C++
    would leave gaps else."""

    members: tuple[str, ...]

    @property
    def format(self) -> str:
        """Of :mod:`struct`, up to whole 8 bytes."""
        text = "".join(FORMATS[member.split()[0]] for member in self.members)
        return f"<{text}{'4x' * (struct.calcsize('<' + text) % 8 // 4)}"

    def text(self, name: str = "Fixed") -> str:
        """The struct in C++. An odd number of 4 bytes has one more, as it has in ``format``."""
        lines = [f"    {member};\n" for member in self.members]
        lines += ["    u32 unused;\n"] * ("4x" in self.format)
        return f"struct {name} {{\n{''.join(lines)}}};\n"

    def values(self, **values: int) -> tuple[int, ...]:
        """Values in the order of the members. Raises KeyError for one that lacks."""
        return tuple(values[member.split()[1]] for member in self.members)

    def place(self, name: str) -> int:
        """At which byte a member begins."""
        index = [member.split()[1] for member in self.members].index(name)
        return struct.calcsize("<" + "".join(FORMATS[m.split()[0]] for m in self.members[:index]))

"""The members of a kernel's parameters that a plan fixes, said once: C++ text and bytes."""

from __future__ import annotations

from typing import NamedTuple

FORMATS = {"i64": "q", "u64": "Q", "int": "i", "u32": "I", "float": "f"}


class Fields(NamedTuple):
    """Types and names of members, as ``("i64 stride", "u32 rows", "u32 cols")``: those of 8 bytes
    first, and whole 8 bytes in all, as C++ would leave gaps else."""

    members: tuple[str, ...]

    @property
    def format(self) -> str:
        """Of :mod:`struct`."""
        return "<" + "".join(FORMATS[member.split()[0]] for member in self.members)

    def text(self, name: str = "Fixed") -> str:
        """The struct in C++."""
        return "".join([f"struct {name} {{\n", *(f"    {m};\n" for m in self.members), "};\n"])

    def values(self, **values: int) -> tuple[int, ...]:
        """Values in the order of the members. Raises KeyError for one that lacks."""
        return tuple(values[member.split()[1]] for member in self.members)

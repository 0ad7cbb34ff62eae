"""The parameter struct of a kernel: one block, passed by value, that a launch fills.

The members that a plan fixes are said once, by :class:`Fields`: C++ text, bytes, and the size that
both have.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import NamedTuple

from kernlib.lowering.arithmetic import round_up
from kernlib.lowering.steps import NUMBER

MAP_BYTES, MAP_ALIGNMENT = 128, 64  # of an encoded tensor map
ADDRESS_BYTES, SCALAR_BYTES = 8, struct.calcsize("<" + NUMBER)
# Of C++ types: the format of :mod:`struct`, and how many numbers that is. Those of structs are in
# kernel_sources: pairwise/view.cuh, blocksparse/{side,attention/strides,softmax/strides}.cuh,
# kronecker_sparse/strides.cuh and kronecker_product/types.cuh.
FORMATS = {
    "i64": ("q", 1), "u64": ("Q", 1), "double": ("d", 1),
    "int": ("i", 1), "u32": ("I", 1), "float": ("f", 1),
    "View": ("q", 3), "Side": ("q", 4), "Grid": ("i", 4),
    "Strides": ("q", 3), "CapturedStrides": ("q", 4),
    "SlotStrides": ("q", 5), "DenseStrides": ("q", 5), "FactorStrides": ("q", 4),
    "Layout": ("q", 7), "Matrix": ("q", 3), "PowerPlace": ("q", 6),
}  # fmt: skip
_MEMBER = re.compile(r"(\w+) (\w+)(?:\[(\d+)\])?")


class Parameters(NamedTuple):
    """What the struct holds, in this order: ``maps`` tensor maps, which align it to 64 bytes;
    ``pointers`` addresses; ``scalars`` numbers, each a NUMBER; and what is ``fixed`` between calls,
    in a format of :mod:`struct`."""

    pointers: int
    fixed: str
    scalars: int = 0
    maps: int = 0

    @property
    def size(self) -> int:
        """The size of the struct in bytes."""
        size = self._place() + struct.calcsize(self.fixed)
        return round_up(size, MAP_ALIGNMENT) if self.maps else size

    def pack(self, *values: int) -> bytes:
        """The bytes of the fixed values, filled up with zeros to the end of the struct."""
        return struct.pack(self.fixed, *values).ljust(self.size - self._place(), b"\0")

    def _place(self) -> int:
        """Where the fixed values begin."""
        addresses = ADDRESS_BYTES * self.pointers + SCALAR_BYTES * self.scalars
        return MAP_BYTES * self.maps + addresses


class Fields:
    """Types and names of members, as ``("i64 stride", "View a_view", "int sizes[3]")``. Raises
    ValueError where C++ would leave a gap between them or behind the last one: those of 8 bytes
    stand first, and all are whole 8 bytes where there is one. ``structs`` are types of members that
    are themselves of several members, whose :meth:`values` are theirs."""

    def __init__(self, members: Iterable[str], structs: Mapping[str, Fields] | None = None):
        self.members = tuple(members)
        self._counts: dict[str, int] = {}
        text, widest = "<", 1
        for member in self.members:
            kind, name, length = _MEMBER.fullmatch(member).groups()
            inner = (structs or {}).get(kind)
            letter, count = FORMATS[kind] if inner is None else (inner.letters, inner.count)
            width = struct.calcsize("<" + letter) if inner is None else inner.widest
            if struct.calcsize(text) % width:
                raise ValueError(
                    f"there is a gap before {member!r}; state members of 8 bytes first"
                )
            self._counts[name] = count * int(length or 1)
            repeats = self._counts[name] if inner is None else int(length or 1)
            text += f"{repeats}{letter}" if inner is None else letter * repeats
            widest = max(widest, width)
        if struct.calcsize(text) % widest:
            raise ValueError(f"behind {member!r} there is a gap; add a member that fills it")
        self.format, self.letters, self.widest = text, text[1:], widest
        self.count = sum(self._counts.values())

    @cached_property
    def size(self) -> int:
        """In bytes."""
        return struct.calcsize(self.format)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the members, in order."""
        return tuple(self._counts)

    def text(self, name: str = "Fixed") -> str:
        """The struct in C++; an empty one has the size of a base class, none."""
        lines = [f"struct {name} {{", *(f"    {member};" for member in self.members), "};"]
        if self.members:
            lines.append(f'static_assert(sizeof({name}) == {self.size}, "as the host packs it");')
        return "\n".join([*lines, ""])

    def values(self, **values: int | float | Iterable) -> tuple:
        """Values in the order of the members, those of an array or a view one after the other.
        Raises TypeError for one that is missing, too much or of another length."""
        if values.keys() != self._counts.keys():
            raise TypeError(f"values of {sorted(values)} for members {sorted(self._counts)}")
        flat: list = []
        for name, count in self._counts.items():
            value = values[name]
            numbers = tuple(value) if isinstance(value, Iterable) else (value,)
            if len(numbers) != count:
                raise TypeError(f"{name} is {count} numbers, not {len(numbers)}")
            flat += numbers
        return tuple(flat)

    def pack(self, **values: int | float | Iterable) -> bytes:
        """The bytes of :meth:`values`."""
        return struct.pack(self.format, *self.values(**values))

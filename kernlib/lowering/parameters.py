"""The parameter struct of a kernel: one block, passed by value, that a launch fills."""

from __future__ import annotations

import struct

from kernlib.lowering.arithmetic import round_up
from kernlib.lowering.steps import NUMBER
from kernlib.records import NamedTuple

MAP_BYTES, MAP_ALIGNMENT = 128, 64  # of an encoded tensor map
ADDRESS_BYTES, SCALAR_BYTES = 8, struct.calcsize("<" + NUMBER)


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

"""A KernelSpec: everything that generated code depends on, as plain data."""

from __future__ import annotations

from kernlib.canonical import encode
from kernlib.records import NamedTuple


class KernelSpec(NamedTuple):
    """One kernel to assemble and compile.

    ``source`` is the generated text: a few lines of definitions, and an include of a file below
    ``kernel_sources``. ``entry`` is its ``extern "C"`` function, ``threads`` the threads of a
    block, ``shared_bytes`` the dynamic shared memory of a launch, and ``options`` are further
    options of ptxas. ``description`` is for people and enters no key.
    """

    family: str
    source: str
    entry: str
    threads: int
    shared_bytes: int = 0
    options: tuple[str, ...] = ()
    description: str = ""

    def canonical(self) -> bytes:
        """Canonical bytes of all that decides the code."""
        parts = (
            self.family,
            self.source,
            self.entry,
            self.threads,
            self.shared_bytes,
            self.options,
        )
        return encode(parts)

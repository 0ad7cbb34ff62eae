"""What NVRTC makes of a specification, each compiled once a process: the entry, NVRTC's log and the
number of machine instructions, which unlike the time of a compilation follows no machine's pace."""

from __future__ import annotations

import struct
from functools import cache
from typing import NamedTuple

import pytest

from kernlib.jit import compiler
from kernlib.jit.entry import Entry
from kernlib.jit.spec import KernelSpec

EXECUTABLE = 4  # flag of an ELF section
INSTRUCTION_BYTES = 16  # from sm_70 on


class Compiled(NamedTuple):
    """A compiled kernel with what the tests bound."""

    entry: Entry
    log: str
    registers: int
    spilled: int  # bytes
    shared: int  # bytes
    instructions: int

    @property
    def serialized(self) -> bool:
        """Whether matrix instructions wait for the one before, which ptxas of NVRTC 12.8 lets some
        do: right, and slower."""
        known = self.entry.meta["nvrtc"].split(".")[:2] == ["12", "8"]
        return "serialized" in self.log and not known


@cache
def compiled(spec: KernelSpec, arch: str) -> Compiled:
    """Raises what :func:`kernlib.jit.compiler.compile_spec` raises."""
    run, logs = compiler.run_nvrtc, []

    def logged(wanted, arch, log, *rest):
        cubin = run(wanted, arch, log, *rest)
        logs.append(log.getvalue())
        return cubin

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "run_nvrtc", logged)
        entry = compiler.compile_spec(spec, arch)
    names = ("registers", "spill_bytes", "shared_bytes")
    report = (int(entry.meta[name]) for name in names)
    return Compiled(entry, logs[0], *report, instructions(entry.cubin))


def instructions(cubin: bytes) -> int:
    """How many instructions of the GPU a cubin holds, over all its functions."""
    assert cubin[:5] == b"\x7fELF\x02", "no 64-bit ELF file"
    (sections,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count = struct.unpack_from("<2H", cubin, 0x3A)
    found = 0
    for at in range(sections, sections + size * count, size):
        flags, length = struct.unpack_from("<Q16xQ", cubin, at + 8)
        found += length if flags & EXECUTABLE else 0
    return found // INSTRUCTION_BYTES

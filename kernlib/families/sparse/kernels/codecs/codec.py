"""What kernels that make and undo formats have in common: no epilogue, no target, and sizes that
are launch arguments."""

from __future__ import annotations

from typing import Any, ClassVar

from kernlib.families.sparse.kernels.base import SparseKernel
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.config import Fact
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.steps import Step


class Codec(SparseKernel):
    """A kernel that ``does`` "count", "write" or "read" for some formats. Its ``operands`` are
    tensors, and behind them, where the name ends in "_end", the end of the first. A subclass says
    facts and words of a variant, and has a method ``step`` of what a launch is for."""

    role = "codec"
    finishes = False
    includes = ()
    does: ClassVar[str]
    threads: ClassVar[int] = 128

    def facts(self, variant: Any) -> dict[str, Fact]:
        """What the header reads, besides the size of its parameters."""
        raise NotImplementedError

    def words(self, variant: Any) -> list[str]:
        """What tells variants apart in names, one at least."""
        raise NotImplementedError

    def spec(self, epilogue: tuple, variant: Any, arch: str) -> KernelSpec:
        """The specification of a variant, which is the same for every target."""
        first, *words = self.words(variant)
        return self.spec_of((), self.facts(variant), self.threads, 0, first, words)

    def launch_of(self, variant: Any, blocks: int, *values: int) -> Step:
        """The launch of some blocks, with the values of ``fixed`` in order."""
        fixed = self.fixed.pack(**dict(zip(self.fixed.names, values, strict=True)))
        pointers = tuple((name, 0) for name in self.operands)
        return Step(self.spec((), variant, ""), (blocks, 1), fixed, pointers)


def itemsizes(dtypes: tuple[str, ...]) -> tuple[int, ...]:
    """The bytes of values of some dtypes, each size once."""
    return tuple(dict.fromkeys(DTYPES[dtype].bytes for dtype in dtypes))

"""What kernels that make and undo formats have in common: no epilogue, no target, and sizes that
are launch arguments."""

from __future__ import annotations

from typing import Any, ClassVar

from kernlib.jit.spec import KernelSpec
from kernlib.lowering.config import Fact
from kernlib.lowering.kernel import Kernel
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import Step


class Codec(Kernel):
    """A kernel of some ``formats``, which it ``does`` "count", "write" or "read". Its ``operands``
    are tensors, and behind them, where the name ends in "_end", the end of the first. A subclass
    says facts and words of a variant, and has a method ``step`` of what a launch is for."""

    role = "codec"
    formats: ClassVar[tuple[str, ...]]
    does: ClassVar[str]
    operands: ClassVar[tuple[str, ...]]
    fixed: ClassVar[Fields]
    threads: ClassVar[int] = 128

    def facts(self, variant: Any) -> dict[str, Fact]:
        """What the header reads, besides the size of its parameters."""
        raise NotImplementedError

    def words(self, variant: Any) -> list[str]:
        """What tells variants apart in names, one at least."""
        raise NotImplementedError

    def spec(self, epilogue: tuple, variant: Any, arch: str) -> KernelSpec:
        """The specification of a variant, which is the same for every target."""
        size = Parameters(len(self.operands), self.fixed.format).size
        facts = {**self.facts(variant), "PARAMETER_BYTES": size}
        first, *words = self.words(variant)
        source = self.source(facts, self.fixed.text())
        return self.named_spec(source, self.threads, 0, first, words)

    def launch_of(self, variant: Any, blocks: int, **values: int) -> Step:
        """The launch of some blocks, with the values of ``fixed``."""
        pointers = tuple((name, 0) for name in self.operands)
        spec = self.spec((), variant, "")
        return Step(spec, (blocks, 1), self.fixed.pack(**values), pointers)

"""Zeros, for the counters of kernels that hand on what they make in the same launch."""

from __future__ import annotations

from typing import ClassVar

from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.kernel import Kernel, named
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import WORKSPACE, Step

THREADS = 256
FIXED = Fields(("i64 count",))


class Clear(Kernel):
    """A thread for each counter."""

    role = "step"
    name = "clear"
    header = "kronecker_product/modes/clear.cuh"
    entry = "kronecker_product_clear"
    reason = "the counters of `slabs` set to 0"
    description: ClassVar[str] = "kronecker_product clear"

    def spec(self, subject: None = None, variant: None = None, arch: str = "") -> KernelSpec:
        """The only specification."""
        facts = {"THREADS": THREADS, "PARAMETER_BYTES": Parameters(1, FIXED.format).size}
        source, line = self.source(facts, FIXED.text()), self.description
        return named(
            KernelSpec("kronecker_product", source, self.entry, THREADS, 0, description=line)
        )

    def step(self, counters: int) -> Step:
        """The launch for so many counters at the beginning of the workspace."""
        fixed = FIXED.pack(count=counters)
        return Step(self.spec(), (ceil_div(counters, THREADS), 1), fixed, ((WORKSPACE, 0),))


CLEAR = Clear()

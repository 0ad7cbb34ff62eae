"""What lowering answers for a call, whatever its family: launches, as plain named tuples.

Steps follow each other on one stream and share one scratch tensor, the workspace.
"""

from __future__ import annotations

from typing import NamedTuple

from kernlib.jit.spec import KernelSpec
from kernlib.lowering.tma import TensorMap

NUMBER = "dQ"  # of a scalar: its value, and its address if it is on the device
WORKSPACE = "workspace"  # its name among operands


class Step(NamedTuple):
    """One launch. ``pointers`` name operands, or the workspace, and the byte to begin at: first of
    ``maps``, then those whose addresses the parameter block holds behind the maps, before
    ``scalars`` times NUMBER, and ``fixed``. One that ``overlaps`` may begin before the step before
    it has ended, and waits for it where it reads what that one wrote: a product behind the packing
    of its own weight."""

    spec: KernelSpec
    grid: tuple[int, int]
    fixed: bytes
    pointers: tuple[tuple[str, int], ...]
    scalars: int = 0
    maps: tuple[TensorMap, ...] = ()
    overlaps: bool = False


class Lowered(NamedTuple):
    """The launches of a call, in order, and the bytes of scratch that they share. Some leave a sum
    in several ``parts``, one behind the other in the place of the result, of ``per_part`` summands
    each but the last, for the caller to combine."""

    steps: tuple[Step, ...]
    workspace: int = 0
    parts: int = 1
    per_part: int = 0

    @property
    def specs(self) -> list[KernelSpec]:
        """The kernels, in the order of their launches."""
        return [step.spec for step in self.steps]

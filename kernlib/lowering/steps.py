"""What lowering answers for a call of several launches: plain named tuples.

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
    """The launches of a call, in order, and the bytes of scratch that they share."""

    steps: tuple[Step, ...]
    workspace: int = 0

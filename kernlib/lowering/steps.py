"""What lowering returns for a call of any family: launches, as plain named tuples.

Steps follow each other on one stream and share one scratch tensor, the workspace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kernlib.jit.spec import KernelSpec
from kernlib.lowering.tma import TensorMap

NUMBER = "dQ"  # format of a scalar: its value, and its address if it is on the device, else 0
WORKSPACE = "workspace"  # the name of the workspace among operands


class Step(NamedTuple):
    """One launch. Each of ``pointers`` names an operand or the workspace, and the byte to begin at.
    The first of them are the tensors of ``maps``; the addresses of the others stand in the
    parameter block, behind the maps. Then come ``scalars`` times NUMBER, and ``fixed``. A step that
    ``overlaps`` may begin before the previous step has ended, and waits where it reads what that
    one has written, as a product does behind the packing of its own weight."""

    spec: KernelSpec
    grid: tuple[int, int]
    fixed: bytes
    pointers: tuple[tuple[str, int], ...]
    scalars: int = 0
    maps: tuple[TensorMap, ...] = ()
    overlaps: bool = False

    def placed(self, places: Mapping[str, tuple[str, int]]) -> Step:
        """The launch whose tensors of these names are others, from some byte of them on."""
        pointers = []
        for name, at in self.pointers:
            tensor, first = places.get(name, (name, 0))
            pointers.append((tensor, first + at))
        return self._replace(pointers=tuple(pointers))


class Lowered(NamedTuple):
    """The launches of a call, in order, and the bytes of scratch that they share. Some leave a sum
    in several ``parts``, which the caller must combine. The parts lie one behind the other in place
    of the result; each but the last has ``per_part`` summands."""

    steps: tuple[Step, ...]
    workspace: int = 0
    parts: int = 1
    per_part: int = 0

    @property
    def specs(self) -> list[KernelSpec]:
        """The kernels, in the order of their launches."""
        return [step.spec for step in self.steps]

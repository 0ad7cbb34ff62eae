"""What an iteration leaves in a folder, by torch.distributed.checkpoint, to go on from there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from kernlib.distributed.communicator import Processes

_SLOTS = "even", "odd"  # in turns: one can be read while the other is written
_LATEST = "latest"  # the file that says which


class Checkpoint:
    """Tensors of all processes in a folder that all of them see; without a folder, nothing.

    A folder is of one task, whose shapes and number of processes are those of the run that goes on.
    """

    def __init__(self, folder: str | os.PathLike | None, communicator: Processes):
        self.folder = None if folder is None else Path(folder)
        self.communicator = communicator
        self._count = 0

    def save(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write them all; the state before stays until they are there."""
        if self.folder is None:
            return
        slot, self._count = _SLOTS[self._count % 2], self._count + 1
        self._run(dcp.save, slot, tensors)
        if self.communicator.rank == 0:
            written = self.folder / f".{_LATEST}"
            written.write_text(slot)
            os.replace(written, self.folder / _LATEST)

    def load(self, like: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """What was saved last, of these shapes and dtypes; None where nothing was. Raises
        ValueError, in all processes, for a folder that not all of them see."""
        if self.folder is None:
            return None
        latest = self.folder / _LATEST
        slot = latest.read_text() if latest.exists() else ""
        self.communicator.agree("checkpoint", lambda: {"the latest state": slot})
        if not slot:
            return None
        tensors = [torch.empty_like(t) for t in like]
        self._run(dcp.load, slot, tensors)
        self._count = 1 + _SLOTS.index(slot)
        return tensors

    def _run(self, function, slot: str, tensors: Sequence[torch.Tensor]) -> None:
        rank, group = self.communicator.rank, self.communicator.control
        named = {f"rank {rank}, {place}": t for place, t in enumerate(tensors)}
        function(named, checkpoint_id=str(self.folder / slot), process_group=group)

"""A cache that this process cannot write. What it holds is read, as from a bundle.

Either its file system is read-only, or LMDB has no slot for this process: LMDB tells processes
apart by their ids, and processes of two containers may have the same one.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb

from kernlib.jit import permissions
from kernlib.jit.bundle import Bundle
from kernlib.jit.environment import DATA, GATE, GATE_TIMEOUT_S, LAYOUT, STORE, walk
from kernlib.jit.locks import GateHold, surely


class ReadOnlyCache(Bundle):
    """The store of a cache directory, read without LMDB's locks. A ``gate`` is a file that all
    writers hold: with it, the store is read only while nobody writes. None is for file systems that
    are read-only."""

    databases = (b"kernels", b"tuning")

    def __init__(self, store: Path, gate: Path | None):
        super().__init__(store, DATA)
        self._gate = gate

    def get(self, key: bytes) -> bytes | None:
        """A copy of the value under a key, None for a miss. Raises nothing."""
        return self.alone(super().get, key)

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Every pair, in order of key. Raises nothing."""
        return self.alone(super().items) or iter(())

    def get_tuning(self, key: bytes) -> bytes | None:
        """A copy of a tuning result, None for a miss. Raises nothing."""
        return self.alone(self._read, lambda txn: txn.get(key, db=self._tuning))

    def alone(self, verb: Callable, *arguments: object) -> object:
        """verb(*arguments) while nobody writes; None if the gate cannot be had."""
        if self._gate is None:
            return verb(*arguments)
        try:
            gate = GateHold(self._gate, GATE_TIMEOUT_S)
            with surely(gate), gate as owned:
                return verb(*arguments) if owned else None
        except OSError:
            return None


def find(directory: Path, error: Exception) -> tuple[ReadOnlyCache | None, str]:
    """The cache of a directory whose store could not be opened with this error, and what the error
    means. The cache is None if the error does not leave it readable, or if it is damaged.

    Raises PermissionError for a cache that users other than root and the current one may write.
    """
    store = directory / LAYOUT / STORE
    if getattr(error, "errno", None) == errno.EROFS:
        gate, meaning = None, str(error)
    elif isinstance(error, lmdb.LockError):
        gate = directory / LAYOUT / GATE
        meaning = (
            f"a process of another container has the process id {os.getpid()} too, by which LMDB "
            f"tells its users apart: {error}"
        )
    else:
        return None, str(error)
    if not (store / DATA).is_file():
        return None, meaning
    for part in (directory, directory / LAYOUT, store, store / DATA):
        permissions.refuse_others(part, os.stat(part), (0, os.geteuid()))
    found = ReadOnlyCache(store, gate)
    return (found if found.alone(_is_whole, store / DATA) else None), meaning


def _is_whole(data: Path) -> bool:
    try:
        return not walk(data)
    except OSError:
        return False

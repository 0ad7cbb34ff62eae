"""A cache that this process cannot write. What it holds is read, as from a bundle.

Its file system is read-only, or it is root's, or the owner has taken the right to write it from
themselves. Or LMDB has no slot for this process: it tells processes apart by their ids, and
processes of two containers may have the same one.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb

from kernlib.jit import permissions
from kernlib.jit.bundle import Bundle
from kernlib.jit.environment import DATA, GATE, GATE_TIMEOUT_S, LAYOUT, STORE, meaning_of, walk
from kernlib.jit.locks import SharedGateHold, surely

# What opening a cache answers that may be read all the same. LMDB has a class for EACCES.
NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)


class ReadOnlyCache(Bundle):
    """The store of a cache directory, read without LMDB's locks. A ``gate`` is a file that all
    writers hold: with it, the store is read only while nobody writes. None is for a cache without
    one on a file system that is read-only."""

    databases = (b"kernels", b"tuning")

    def __init__(self, store: Path, gate: Path | None):
        super().__init__(store, DATA)
        self._gate = gate

    def get(self, key: bytes) -> bytes | None:
        """A copy of the value under a key, None for a miss. Raises nothing."""
        return self._alone_or_none(super().get, key)

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Every pair, in order of key. Raises nothing."""
        return self._alone_or_none(super().items) or iter(())

    def get_tuning(self, key: bytes) -> bytes | None:
        """A copy of a tuning result, None for a miss. Raises nothing."""
        return self._alone_or_none(self._read, lambda txn: txn.get(key, db=self._tuning))

    def alone(self, verb: Callable, *arguments: object) -> object:
        """verb(*arguments) while nobody writes. Raises OSError if the gate cannot be had."""
        if self._gate is None:
            return verb(*arguments)
        gate = SharedGateHold(self._gate, GATE_TIMEOUT_S)
        with surely(gate), gate as owned:
            if not owned:
                raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), str(self._gate))
            return verb(*arguments)

    def _alone_or_none(self, verb: Callable, *arguments: object) -> object:
        try:
            return self.alone(verb, *arguments)
        except OSError:
            return None


def find(directory: Path, error: Exception) -> tuple[ReadOnlyCache | None, str]:
    """The cache of a directory whose store could not be opened with this error, and what the error
    means. The cache is None if the error does not leave it readable, or if it is damaged.

    Raises PermissionError for a cache that users other than root and the current one may write, or
    that this one may not read.
    """
    root, meaning = directory / LAYOUT, meaning_of(error)
    denied = getattr(error, "errno", None) in NOT_WRITABLE
    if not denied and not isinstance(error, (lmdb.LockError, lmdb.ReadonlyError)):
        return None, meaning
    data = root / STORE / DATA
    if not permissions.is_there(data):
        return None, meaning
    owners = (0, os.geteuid())
    for part in (directory, root, data.parent):
        permissions.refuse_others(part, os.stat(part), owners)
    permissions.refuse_odd(data, owners)
    gate = root / GATE
    if not gate.exists():
        if not permissions.is_mounted_read_only(data):
            return None, meaning  # whoever begins to write it could not be kept from doing so
        gate = None
    cache = ReadOnlyCache(data.parent, gate)
    problems = cache.alone(walk, data)
    return (None if problems else cache), meaning

"""A cache on a file system that nobody can write here: what it holds is read, as a bundle is."""

from __future__ import annotations

import os
from pathlib import Path

import lmdb

from kernlib.jit import private
from kernlib.jit.bundle import Bundle
from kernlib.jit.environment import DATA, LAYOUT, STORE, walk


class ReadOnlyCache(Bundle):
    """The store of a cache directory, read without a lock: where another machine writes it
    meanwhile, LMDB cannot tell."""

    databases = (b"kernels", b"tuning")

    def get_tuning(self, key: bytes) -> bytes | None:
        """A copy of a tuning result, None for a miss. Raises nothing."""
        try:
            self.open()
            with self._env.begin() as txn:
                return txn.get(key, db=self._tuning)
        except (lmdb.Error, OSError):
            return None


def find(directory: Path) -> ReadOnlyCache | None:
    """The cache in a directory, its pages walked once; None where there is none that is whole.

    Raises PermissionError for one that others than root and the user may write.
    """
    store = directory / LAYOUT / STORE
    owners = (0, os.geteuid())
    if not (store / DATA).is_file():
        return None
    for part in (directory, directory / LAYOUT, store, store / DATA):
        private.refuse_others(part, os.stat(part), owners)
    try:
        whole = not walk(store / DATA)
    except OSError:
        return None
    return ReadOnlyCache(store, DATA) if whole else None

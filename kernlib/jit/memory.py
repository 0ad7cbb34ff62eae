"""The store of a process that has no usable directory."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernlib.jit.bundle import ReadOnlyCache

_instances: weakref.WeakSet[MemoryStore] = weakref.WeakSet()


class MemoryStore:
    """The verbs of :class:`kernlib.jit.store.LmdbStore` on a dict, for this process only. Over the
    budget (bytes) the values that were put first are dropped.

    ``behind`` is a cache that cannot be written. It is asked for what is not in the dict.
    """

    def __init__(self, budget: int, behind: ReadOnlyCache | None = None):
        self.budget = budget
        self._behind = behind
        self._hidden: set[bytes] = set()  # keys deleted here, which the store behind may still hold
        self._values: dict[bytes, bytes] = {}
        self._tuning: dict[bytes, bytes] = {}
        self._bytes = 0
        self._evicted = (0, 0)
        self._lock = threading.RLock()
        _instances.add(self)

    @property
    def reads_a_cache(self) -> bool:
        """Whether there is one behind it."""
        return self._behind is not None

    def get(self, key: bytes) -> bytes | None:
        """The value, None for a miss."""
        value = self._values.get(key)
        if value is None and self._behind is not None and key not in self._hidden:
            value = self._behind.get(key)
        return value

    def put(self, key: bytes, value: bytes) -> bool:
        """Keep the value; False if it is larger than the budget."""
        if len(value) > self.budget:
            return False
        with self._lock:
            self._forget(key)
            kernels, used = len(self._values), self._bytes
            while self._bytes + len(value) > self.budget:
                self._forget(next(iter(self._values)))
            gone = kernels - len(self._values), used - self._bytes
            self._evicted = self._evicted[0] + gone[0], self._evicted[1] + gone[1]
            self._values[key] = bytes(value)
            self._bytes += len(value)
        return True

    def take_evicted(self) -> tuple[int, int]:
        """How many kernels, and of how many bytes, :meth:`put` has dropped since this was asked."""
        evicted, self._evicted = self._evicted, (0, 0)
        return evicted

    def delete(self, key: bytes) -> None:
        """Delete one key, here and from this process's view of the store behind."""
        with self._lock:
            self._forget(key)
            self._hidden.add(key)

    def _forget(self, key: bytes) -> None:
        self._bytes -= len(self._values.pop(key, b""))

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Every pair, those of the store behind this one included."""
        behind = () if self._behind is None else self._behind.items()
        with self._lock:
            pairs = {key: value for key, value in behind if key not in self._hidden}
            return iter((pairs | self._values).items())

    def info(self) -> dict[str, object]:
        """kind, path of the store behind, entries, tuning (number of results), bytes_used,
        budget."""
        path = None if self._behind is None else str(self._behind.folder)
        facts = {"kind": "memory", "path": path, "entries": sum(1 for _ in self.items())}
        facts["tuning"] = len(self._tuning)
        return facts | {"bytes_used": self._bytes, "budget": self.budget}

    def clear(self) -> None:
        """Drop all kernels; tuning results stay."""
        with self._lock:
            self._values.clear()
            self._bytes = 0
            self._hidden.update(key for key, _ in self.items())

    def get_tuning(self, key: bytes) -> bytes | None:
        """A tuning result, None for a miss."""
        value = self._tuning.get(key)
        if value is None and self._behind is not None:
            value = self._behind.get_tuning(key)
        return value

    def put_tuning(self, key: bytes, value: bytes) -> bool:
        """Keep a tuning result."""
        self._tuning[key] = bytes(value)
        return True

    def close(self) -> None:
        """Close the store behind, which the next verb opens again. The values stay."""
        if self._behind is not None:
            self._behind.close()


def _after_in_child() -> None:
    for store in list(_instances):
        store._lock = threading.RLock()
        store._bytes = sum(map(len, store._values.values()))  # a thread may have been changing it


os.register_at_fork(after_in_child=_after_in_child)

"""The store of a process that has no usable directory."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernlib.jit.read_only import ReadOnlyCache

_instances: weakref.WeakSet[MemoryStore] = weakref.WeakSet()


class MemoryStore:
    """The same verbs on a dict: for this process only, dropping the oldest put over the budget.

    ``behind`` is a cache that cannot be written, which is asked for what is not in the dict.
    """

    def __init__(self, budget: int, behind: ReadOnlyCache | None = None):
        self.budget = budget
        self._behind = behind
        self._hidden: set[bytes] = set()  # of what is behind: deleted here
        self._values: dict[bytes, bytes] = {}
        self._tuning: dict[bytes, bytes] = {}
        self._bytes = 0
        self._lock = threading.RLock()
        _instances.add(self)

    def get(self, key: bytes) -> bytes | None:
        found = self._values.get(key)
        if found is None and self._behind is not None and key not in self._hidden:
            found = self._behind.get(key)
        return found

    def put(self, key: bytes, value: bytes) -> bool:
        if len(value) > self.budget:
            return False
        with self._lock:
            self._forget(key)
            while self._bytes + len(value) > self.budget:
                self._forget(next(iter(self._values)))
            self._values[key] = bytes(value)
            self._bytes += len(value)
        return True

    def delete(self, key: bytes) -> None:
        with self._lock:
            self._forget(key)
            self._hidden.add(key)

    def _forget(self, key: bytes) -> None:
        self._bytes -= len(self._values.pop(key, b""))

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        behind = () if self._behind is None else self._behind.items()
        with self._lock:
            found = {key: value for key, value in behind if key not in self._hidden}
            return iter((found | self._values).items())

    def info(self) -> dict[str, object]:
        facts = {"kind": "memory", "path": None, "entries": sum(1 for _ in self.items())}
        facts["tuning"] = len(self._tuning)
        return facts | {"bytes_used": self._bytes, "budget": self.budget}

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
            self._bytes = 0
            self._hidden.update(key for key, _ in self.items())

    def get_tuning(self, key: bytes) -> bytes | None:
        found = self._tuning.get(key)
        if found is None and self._behind is not None:
            found = self._behind.get_tuning(key)
        return found

    def put_tuning(self, key: bytes, value: bytes) -> bool:
        self._tuning[key] = bytes(value)
        return True

    def close(self) -> None:
        """The values stay; what is behind is opened again by the next verb."""
        if self._behind is not None:
            self._behind.close()


def _after_in_child() -> None:
    for store in list(_instances):
        store._lock = threading.RLock()
        store._bytes = sum(map(len, store._values.values()))  # another thread was in the middle


os.register_at_fork(after_in_child=_after_in_child)

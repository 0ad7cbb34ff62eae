"""The store of a process that has no usable directory."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator

_instances: weakref.WeakSet[MemoryStore] = weakref.WeakSet()


class MemoryStore:
    """The same verbs on a dict: for this process only, dropping the oldest put over the budget."""

    def __init__(self, budget: int):
        self.budget = budget
        self._values: dict[bytes, bytes] = {}
        self._tuning: dict[bytes, bytes] = {}
        self._bytes = 0
        self._lock = threading.RLock()
        _instances.add(self)

    def get(self, key: bytes) -> bytes | None:
        return self._values.get(key)

    def put(self, key: bytes, value: bytes) -> bool:
        if len(value) > self.budget:
            return False
        with self._lock:
            self.delete(key)
            while self._bytes + len(value) > self.budget:
                self.delete(next(iter(self._values)))
            self._values[key] = bytes(value)
            self._bytes += len(value)
        return True

    def delete(self, key: bytes) -> None:
        with self._lock:
            self._bytes -= len(self._values.pop(key, b""))

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        with self._lock:
            return iter(list(self._values.items()))

    def info(self) -> dict[str, object]:
        facts = {"kind": "memory", "path": None, "entries": len(self._values)}
        facts["tuning"] = len(self._tuning)
        return facts | {"bytes_used": self._bytes, "budget": self.budget}

    def clear(self) -> None:
        with self._lock:
            self._values.clear()
            self._bytes = 0

    def get_tuning(self, key: bytes) -> bytes | None:
        return self._tuning.get(key)

    def put_tuning(self, key: bytes, value: bytes) -> bool:
        self._tuning[key] = bytes(value)
        return True

    def close(self) -> None:
        """Nothing to close; the values stay."""


def _after_in_child() -> None:
    for store in list(_instances):
        store._lock = threading.RLock()
        store._bytes = sum(map(len, store._values.values()))  # another thread was in the middle


os.register_at_fork(after_in_child=_after_in_child)

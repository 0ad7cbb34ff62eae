"""Single flight between threads: of several callers that want the value of a key, one makes it and
all get it."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class _Flight(Generic[Value]):
    """One run of `make` and whoever waits for it."""

    __slots__ = ("arrived", "done", "error", "owner", "value")

    def __init__(self) -> None:
        self.owner = threading.get_ident()
        # The runner holds this until the flight has arrived. Unlike an Event, an RLock knows its
        # owner, also if an interrupt came right after it was taken.
        self.done = threading.RLock()
        self.done.acquire()
        self.arrived = False
        self.value: Value | None = None
        self.error: Exception | None = None


class SingleFlight(Generic[Key, Value]):
    """The runs under way, one for each key. It keeps no results: the caller does, inside of
    `make`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._flights: dict[Key, _Flight[Value]] = {}
        _instances.add(self)

    def do(self, key: Key, make: Callable[[], Value]) -> Value:
        """`make()`'s value: run here, or by the thread that is already running it for this key.

        What `make` raises reaches every waiter and is kept nowhere, so the next call tries again.
        When the runner is interrupted (KeyboardInterrupt, SystemExit), only it sees that and a
        waiter runs `make` instead. Raises RuntimeError when `make` asks for its own key.
        """
        while True:
            mine: _Flight[Value] = _Flight()
            try:
                try:
                    flight = self._claim(key, mine)
                    if flight is mine:
                        return self._fly(mine, make)
                finally:
                    self._land(key, mine)
            finally:
                self._land(key, mine)  # again: an interrupt may have come into the first
            with flight.done:
                pass
            if flight.error is not None:
                raise flight.error
            if flight.arrived:
                return flight.value

    def _claim(self, key: Key, own: _Flight[Value]) -> _Flight[Value]:
        """The flight of a key, which is our own if there was none."""
        with self._lock:
            flight = self._flights.setdefault(key, own)
        if flight is not own and flight.owner == threading.get_ident():
            raise RuntimeError(f"{key!r} was asked for by the call that makes it")
        return flight

    def _fly(self, own: _Flight[Value], make: Callable[[], Value]) -> Value:
        try:
            own.value = make()
        except Exception as error:
            own.error = error
            raise
        own.arrived = True
        return own.value

    def _land(self, key: Key, own: _Flight[Value]) -> None:
        """Let the waiters of our own flight go on. Does nothing if that has been done already."""
        with self._lock:
            if self._flights.get(key) is own:  # not if a fork inside make() dropped it
                del self._flights[key]
        if own.done._is_owned():
            own.done.release()

    def _forget(self) -> None:
        """In a forked child: the threads that were flying do not exist here."""
        self._lock = threading.RLock()
        self._flights = {}


_instances: weakref.WeakSet[SingleFlight] = weakref.WeakSet()


def _after_in_child() -> None:
    for flights in list(_instances):
        flights._forget()


os.register_at_fork(after_in_child=_after_in_child)

"""Single flight between threads: of the callers that want one key, one works and all get it."""

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

    __slots__ = ("done", "error", "landed", "owner", "value")

    def __init__(self) -> None:
        self.owner = threading.get_ident()
        self.done = threading.Event()
        self.landed = False
        self.value: Value | None = None
        self.error: Exception | None = None


class Flights(Generic[Key, Value]):
    """The runs now in the air, one a key. Keeps no result: the caller publishes it in `make`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flights: dict[Key, _Flight[Value]] = {}
        _instances.add(self)

    def do(self, key: Key, make: Callable[[], Value]) -> Value:
        """`make()`'s value: run here, or by the thread that is already running it for this key.

        What `make` raises reaches every waiter and is kept nowhere, so the next call tries again.
        When the runner is interrupted (KeyboardInterrupt, SystemExit), only it sees that and a
        waiter runs `make` instead. Raises RuntimeError when `make` asks for its own key.
        """
        while True:
            flight, owned = self._claim(key)
            if owned:
                return self._fly(key, flight, make)
            flight.done.wait()
            if flight.error is not None:
                raise flight.error
            if flight.landed:
                return flight.value

    def _claim(self, key: Key) -> tuple[_Flight[Value], bool]:
        with self._lock:
            flight = self._flights.get(key)
            if flight is None:
                flight = self._flights[key] = _Flight()
                return flight, True
        if flight.owner == threading.get_ident():
            raise RuntimeError(f"{key!r} was asked for by the call that makes it")
        return flight, False

    def _fly(self, key: Key, flight: _Flight[Value], make: Callable[[], Value]) -> Value:
        try:
            flight.value = make()
            flight.landed = True
            return flight.value
        except Exception as error:
            flight.error = error
            raise
        finally:
            with self._lock:
                if self._flights.get(key) is flight:  # a fork inside make() dropped it
                    del self._flights[key]
            flight.done.set()

    def _forget(self) -> None:
        """In a forked child: the threads that were flying do not exist here."""
        self._lock = threading.Lock()
        self._flights = {}


_instances: weakref.WeakSet[Flights] = weakref.WeakSet()


def _after_in_child() -> None:
    for flights in list(_instances):
        flights._forget()


os.register_at_fork(after_in_child=_after_in_child)

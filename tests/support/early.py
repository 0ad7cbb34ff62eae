"""Threads that compile what a call needs later, which a test waits for."""

from __future__ import annotations

import threading

from kernlib.runtime import early


def join() -> None:
    """Wait for all of them; each may begin others."""
    while threads := [t for t in threading.enumerate() if t.name == early.NAME]:
        for thread in threads:
            thread.join()

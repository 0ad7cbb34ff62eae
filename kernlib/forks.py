"""A fork waits until other threads have finished their imports. In the child nobody would finish
them, and an import of the same module there would wait for ever.

Names of kernlib are loaded when they are first used, and modules by the calls that need them. So a
thread that makes its first call is in the middle of an import most of the time.
"""

from __future__ import annotations

import os
import time
from _thread import get_ident  # threading would cost the import of kernlib 3 ms
from importlib import _bootstrap

# So long that only a hang takes longer: an import of torch takes 1.6 s of a processor, so 26 s
# where 32 processes begin on two of them, and longer where no memory holds its files yet.
WAIT_S = 60.0
PAUSE_S = 0.002
# Packages that a call of kernlib loads. Others run programs inside their imports, without an end.
PACKAGES = ("kernlib", "cuda", "lmdb", "numpy", "nvmath", "platformdirs", "torch")


def imports_of_others() -> list[str]:
    """Modules of those packages that other threads are importing now, or are about to.

    NOTE: what Python keeps of that has no public name: a weak reference to a lock for each module,
    while a thread imports the module or waits for another to do so. The two cases are not told
    apart, and need not be.
    """
    me = get_ident()
    names = []
    for name, reference in list(getattr(_bootstrap, "_module_locks", {}).items()):
        lock = reference() if name.partition(".")[0] in PACKAGES else None
        if lock is not None and getattr(lock, "owner", me) != me:
            names.append(name)
    return names


def _before_fork() -> None:
    end = time.monotonic() + WAIT_S
    while imports_of_others() and time.monotonic() < end:
        time.sleep(PAUSE_S)


if hasattr(os, "register_at_fork"):  # first of all hooks, so that it runs last before a fork
    os.register_at_fork(before=_before_fork)

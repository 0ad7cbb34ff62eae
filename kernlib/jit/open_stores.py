"""Who has a store open, and whether its file is as the last of them left it.

A process that dies of a signal may have met damage, and a loss of power may have caused some. LMDB
would answer the next read of damaged pages with SIGSEGV. So each process keeps a locked file, its
mark, while it has the store open. A mark that nobody locks was left by a dead process: then the
store must not be read before its pages have been checked. The same holds for a store that was
changed while nobody had it open. That shows in its size and time of change, which each process
notes when it closes the store.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from kernlib.jit import locks, permissions


def fingerprint(path: Path) -> str:
    """What a write to a file changes: inode, size, time of change; "" where there is none."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return ""
    return f"{status.st_ino} {status.st_size} {status.st_mtime_ns}"


class Presence:
    """This process among those that have a store open. The caller holds the store's gate.

    `folder` takes the marks, `note` the fingerprint. Both verbs raise OSError.
    """

    def __init__(self, folder: Path, note: Path):
        self._folder, self._note = folder, note
        self._mark: locks.FileHold | None = None
        self._owner = 0  # the process whose mark it is

    def enter(self, found: str) -> bool:
        """Make this process's mark. True if a store of that fingerprint can be trusted: no process
        has died with it open, and others have it open now or it is as the last one has left it."""
        self.forget()
        permissions.make_private(self._folder)
        path = self._folder / f"{os.getpid()}-{time.time_ns()}"
        self._owner, self._mark = os.getpid(), locks.hold_file(path, 0)
        if not self._mark.acquire():
            raise BlockingIOError(f"{path} is locked")
        is_shared, dead = self._census(path)  # with our own mark made, which replaces dead ones
        return not dead and (is_shared or found == self._noted())

    def leave(self, found: str) -> None:
        """Take the mark back and note the fingerprint of a file that is whole."""
        if self._mark is None or self._owner != os.getpid():
            return
        permissions.write_note(self._note, found)
        self._mark.path.unlink(missing_ok=True)
        self.forget()

    def forget(self) -> None:
        """Unlock the mark but leave it in place, so that it looks like that of a dead process:
        after an unclean end, and in a forked child."""
        if self._mark is not None:
            self._mark.release()
            self._mark = None

    def _census(self, own: Path) -> tuple[bool, bool]:
        """Whether other processes have the store open, and whether one has died with it open."""
        is_shared = dead = False
        for path in self._folder.iterdir():
            if path == own:
                continue
            try:
                if _remove_if_dead(path):
                    dead = True
                else:
                    is_shared = True
            except OSError:
                dead = True  # unknown: check the pages, and still use the cache
        return is_shared, dead

    def _noted(self) -> str | None:
        try:
            return permissions.read_note(self._note)
        except (OSError, UnicodeDecodeError):
            return None


def _remove_if_dead(mark: Path) -> bool:
    """Remove a mark that no process locks, and return True; False for one that is locked. Raises
    OSError."""
    lock = locks.hold_file(mark, 0)
    with locks.surely(lock), lock as dead:
        if dead:
            mark.unlink(missing_ok=True)
        return dead


def dead_marks(folder: Path) -> list[Path]:
    """The marks of processes that have died. They stay in place, for the process that opens the
    store next. The caller holds the store's gate. Raises OSError."""
    return [path for path in folder.iterdir() if _is_dead(path)] if folder.is_dir() else []


def _is_dead(mark: Path) -> bool:
    lock = locks.hold_file(mark, 0)
    with locks.surely(lock), lock as dead:
        return dead

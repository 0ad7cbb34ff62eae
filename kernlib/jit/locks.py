"""One process at a time for each key: flock on 256 shard files, with a deadline.

Only flock is used: the system drops it when its owner dies, where a lock by the existence of a file
would outlive a crash. The shard is the key's first byte, which bounds the number of files. Two keys
of one shard wait for each other, which costs time and nothing else.

Fork: a flock belongs to the open file, which a child shares. The child closes its copies without
LOCK_UN (that would free the parent's lock), and the owner unlocks explicitly, since closing its own
copy frees nothing while a child still has one.

Interrupts: Ctrl-C may raise after any call, also right after the one that took a lock, and just
before the one that gives it back. So a lock is held by an object made beforehand, which knows what
it has taken, and which may be asked twice to give it back: ``with surely(hold), hold``. Locks of
threads are RLocks, which know their owner, and whose own ``with`` no interrupt can divide.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from kernlib.jit import permissions

SHARDS = 256
FIRST_POLL_S = 0.001
LONGEST_POLL_S = 0.05
MOST_TURNS = 24  # of 5 s: 500 processes that open one cache at once took 53 s, on two busy cores
FORK_WAIT_S = 60.0  # only a hang takes longer: of 65 compiles the longest took 1.7 s

OnWait = Callable[[], object]


class Hold:
    """Something to hold inside a ``with`` block. The ``as`` of the block gets what :meth:`acquire`
    returns."""

    def acquire(self) -> bool:
        """Take it. True if it is held, False if it could not be had."""
        raise NotImplementedError

    def release(self) -> None:
        """Give back whatever this object has taken. Does nothing if that has been done already."""
        raise NotImplementedError

    def __enter__(self) -> bool:
        try:
            return self.acquire()
        except BaseException:
            self.release()
            raise

    def __exit__(self, *_: object) -> None:
        self.release()


class Surely:
    """See :func:`surely`."""

    def __init__(self, hold: Hold):
        self._hold = hold

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._hold.release()


def surely(hold: Hold) -> Surely:
    """To stand before a hold in its ``with``. It asks the hold once more to give back what it has
    taken, in case an interrupt came between."""
    return Surely(hold)


class MemoryLocks:
    """The verb of :class:`KeyLocks` between the threads of one process, for use without a
    directory."""

    def __init__(self) -> None:
        self._renew()
        _instances.add(self)

    def _renew(self) -> None:
        self._shards = [threading.RLock() for _ in range(SHARDS)]

    def hold(self, key: bytes, timeout: float, on_wait: OnWait | None = None) -> Hold:
        """To hold the key's shard: True inside, False if it was not free within `timeout` seconds.

        `on_wait` is called once, when the lock is first found taken. Not reentrant: a thread that
        holds a shard and asks for another key of it gets False.
        """
        return _ThreadHold(self._shards[key[0]], timeout, on_wait or _nothing)


class _ThreadHold(Hold):
    def __init__(self, shard: threading.RLock, timeout: float, wait: OnWait):
        self._shard, self._wait = shard, wait
        self._deadline = time.monotonic() + timeout
        self._free = False  # whether this thread did not hold the shard before

    def acquire(self) -> bool:
        self._free = not self._shard._is_owned()
        if self._free and self._shard.acquire(blocking=False):
            return True
        self._wait()
        remaining = max(0.0, min(self._deadline - time.monotonic(), threading.TIMEOUT_MAX))
        return self._free and self._shard.acquire(timeout=remaining)

    def release(self) -> None:
        if self._free and self._shard._is_owned():
            self._shard.release()


class KeyLocks:
    """Locks for keys under `directory`, which is made when the first lock is used."""

    def __init__(self, directory: Path):
        self._directory = Path(directory)
        self._threads = MemoryLocks()

    def hold(self, key: bytes, timeout: float, on_wait: OnWait | None = None) -> Hold:
        """To hold the key against all threads and processes: True inside, else False.

        False means that the deadline passed or that the lock file cannot be used (read-only
        directory, no flock there): the caller goes on privately. Raises nothing of its own.
        `on_wait` is called once, when the lock is first found taken.
        """
        wait = _once(on_wait)
        file = FileHold(self._directory / f"{key[0]:02x}.lock", timeout, wait)
        return _KeyHold(self._threads.hold(key, timeout, wait), file)


class _KeyHold(Hold):
    def __init__(self, threads: Hold, file: FileHold):
        self._threads, self._file = threads, file

    def acquire(self) -> bool:
        if not self._threads.acquire():
            return False
        try:
            permissions.make_folder(self._file.path.parent)
            return self._file.acquire()
        except OSError:
            return False

    def release(self) -> None:
        try:
            self._file.release()
        finally:
            self._threads.release()


class FileHold(Hold):
    """To hold the file `path`, made if need be, against all other processes. The caller must keep
    its own threads apart. Raises OSError when the file cannot be opened or locked."""

    flags = os.O_RDWR | os.O_CREAT
    lock = fcntl.LOCK_EX

    def __init__(self, path: Path, timeout: float, on_wait: OnWait | None = None):
        self.path = path
        self._wait = _once(on_wait)
        self._deadline = time.monotonic() + timeout
        self._fd: int | None = None
        self._owner = 0  # the process

    def acquire(self) -> bool:
        """True with the file locked, False after the deadline; a timeout of 0 is one attempt."""
        pause = FIRST_POLL_S
        while not self._try():
            self._wait()
            remaining = self._deadline - time.monotonic()
            if remaining <= 0:
                return False
            time.sleep(min(pause, remaining))
            pause = min(2 * pause, LONGEST_POLL_S)
        return True

    def _try(self) -> bool:
        """One attempt. It opens the file anew (8 us), because the file that others wait for may
        have been removed by a clean-up: then two owners would hold two files of the same name."""
        self._owner = os.getpid()
        with _guard:
            self._fd = permissions.open_plain(self.path, self.flags)
            _open_fds[self._fd] = self
        try:
            fcntl.flock(self._fd, self.lock | fcntl.LOCK_NB)
            if os.fstat(self._fd).st_ino == os.stat(self.path).st_ino:
                return True
        except (BlockingIOError, FileNotFoundError):
            pass
        self.release()
        return False

    def release(self) -> None:
        """Unlock and close the file. Does nothing in a process forked since, whose hook has closed
        it."""
        fd = self._fd
        if fd is not None and os.getpid() == self._owner and _open_fds.get(fd) is self:
            try:
                fcntl.flock(fd, fcntl.LOCK_UN)
            finally:
                with _guard:
                    del _open_fds[fd]  # first: closed twice, fd might be another file
                    os.close(fd)
        self._fd = None


class GateHold(FileHold):
    """To hold a file that many want for a moment each: the deadline counts from when it last went
    from one to the next, so that a queue is waited for, MOST_TURNS times as long at most, and one
    that was stopped is not."""

    def __init__(self, path: Path, timeout: float):
        super().__init__(path, timeout)
        self._timeout, self._last = timeout, self._deadline + (MOST_TURNS - 1) * timeout
        self._turn: int | None = None  # when the file was last taken, as first seen here

    def _try(self) -> bool:
        if super()._try():
            self._note_turn()
            return True
        turn = self._turn_now()
        if self._turn not in (None, turn):
            self._deadline = min(time.monotonic() + self._timeout, self._last)
        self._turn = turn
        return False

    def _note_turn(self) -> None:
        os.utime(self._fd)

    def _turn_now(self) -> int | None:
        try:
            return os.stat(self.path).st_mtime_ns
        except FileNotFoundError:  # the cache is being removed
            return None


class SharedGateHold(GateHold):
    """A shared hold of such a file, which must exist, against exclusive holders. Read permission is
    enough: it may be another user's, or on a read-only file system."""

    flags = os.O_RDONLY
    lock = fcntl.LOCK_SH

    def _note_turn(self) -> None:
        pass  # only writers can, and readers are done in microseconds


def hold_file(path: Path, timeout: float) -> FileHold:
    """To hold `path` against all other processes: True inside, False after `timeout` seconds."""
    return FileHold(path, timeout)


class ForkGuard:
    """Work that a fork of another thread waits for: NVRTC's locks and half-done imports would stay
    taken in the child, whose own first use of them would hang.

    The owner registers the two hooks, and `__init__` for the child.
    """

    def __init__(self) -> None:
        self._gate = threading.RLock()  # taken between the two hooks of a fork, so that none begins
        self._inside: dict[Hold, int] = {}  # work under way, and the thread that does it

    def work(self) -> Hold:
        """To hold while working. True inside. A thread may hold several."""
        return _Work(self)

    def before_fork(self) -> None:
        """Wait until other threads have finished their work, and let none begin. The wait ends
        after FORK_WAIT_S, which only a hang takes."""
        self._gate.acquire()
        end, pause = time.monotonic() + FORK_WAIT_S, FIRST_POLL_S
        while set(self._inside.values()) - {threading.get_ident()} and time.monotonic() < end:
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_S)

    def after_in_parent(self) -> None:
        """Let work begin again."""
        if self._gate._is_owned():  # not if the hooks were registered in the middle of this fork
            self._gate.release()


class _Work(Hold):
    def __init__(self, guard: ForkGuard):
        self._guard = guard

    def acquire(self) -> bool:
        me, inside = threading.get_ident(), self._guard._inside
        if me in inside.values():  # this thread has work under way, for which a fork waits
            inside[self] = me
        else:
            with self._guard._gate:
                inside[self] = me
        return True

    def release(self) -> None:
        self._guard._inside.pop(self, None)


def _nothing() -> None:
    pass


def _once(call: OnWait | None) -> OnWait:
    calls = [call] if call else []
    return lambda: calls.pop()() if calls else None


# To a fork in another thread the guard makes opening a file and noting it a single step.
_guard = threading.RLock()
_open_fds: dict[int, FileHold] = {}
_instances: weakref.WeakSet[MemoryLocks] = weakref.WeakSet()


def _before_fork() -> None:
    _guard.acquire()


def _after_in_parent() -> None:
    if _guard._is_owned():
        _guard.release()


def _after_in_child() -> None:
    global _guard
    for fd in _open_fds:
        os.close(fd)
    _open_fds.clear()
    _guard = threading.RLock()
    for locks in list(_instances):
        locks._renew()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)

"""One process at a time for each key: flock on 256 shard files, with a deadline.

Only flock: the kernel drops it when its owner dies, where "the file exists" would outlive a crash.
The shard is the key's first byte, which bounds the litter; two keys of one shard wait for each
other, which costs time and nothing else.

Fork: a flock belongs to the open file, which a child shares. The child closes its copies without
LOCK_UN (that would free the parent's lock), and the owner unlocks explicitly, since closing its own
copy frees nothing while a child still has one.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SHARDS = 256
FIRST_POLL_S = 0.001
LONGEST_POLL_S = 0.05
FORK_WAIT_S = 20.0

OnWait = Callable[[], object]


class MemoryLocks:
    """The same verb between the threads of one process, for when there is no directory."""

    def __init__(self) -> None:
        self._renew()
        _instances.add(self)

    def _renew(self) -> None:
        self._shards = [threading.Lock() for _ in range(SHARDS)]

    @contextmanager
    def hold(self, key: bytes, timeout: float, on_wait: OnWait | None = None) -> Iterator[bool]:
        """Yield True with the key's shard locked, False when `timeout` seconds did not do.

        `on_wait` is called once, when the lock is first found taken. Not reentrant: a thread that
        holds a shard and asks for another key of it gets False after the timeout.
        """
        shard = self._shards[key[0]]
        owned = _acquire_thread(shard, time.monotonic() + timeout, on_wait or _nothing)
        try:
            yield owned
        finally:
            if owned:
                shard.release()


class KeyLocks:
    """Locks for keys under `directory`, made at the first use of one."""

    def __init__(self, directory: Path):
        self._directory = Path(directory)
        self._threads = MemoryLocks()

    @contextmanager
    def hold(self, key: bytes, timeout: float, on_wait: OnWait | None = None) -> Iterator[bool]:
        """Yield True with the key locked against all threads and processes, else False.

        False means that the deadline passed or that the lock file cannot be used (read-only
        directory, no flock there): the caller goes on privately. Raises nothing of its own.
        `on_wait` is called once, when the lock is first found taken.
        """
        deadline = time.monotonic() + timeout
        wait = _once(on_wait)
        with self._threads.hold(key, timeout, wait) as mine:
            fd = self._lock_file(key, deadline, wait) if mine else None
            owner = os.getpid()
            try:
                yield fd is not None
            finally:
                release(fd, owner)

    def _lock_file(self, key: bytes, deadline: float, wait: OnWait) -> int | None:
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            return None
        try:
            return _acquire(self._directory / f"{key[0]:02x}.lock", deadline, wait)
        except OSError:
            return None


class ForkGuard:
    """Work that a fork of another thread waits for: NVRTC's locks and half-done imports would stay
    taken in the child, whose own first use of them would hang. Not reentrant.

    The owner registers the two hooks, and `__init__` for the child.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: set[int] = set()
        self._forking: set[int] = set()  # threads between their two hooks

    def __enter__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._forking)
            self._inside.add(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._inside.discard(threading.get_ident())
            self._changed.notify_all()

    def before_fork(self) -> None:
        """Wait for the others' work, so long that only a hang takes longer, and let none begin."""
        self._changed.acquire()
        self._forking.add(threading.get_ident())
        mine = {threading.get_ident()}
        self._changed.wait_for(lambda: self._inside <= mine, FORK_WAIT_S)

    def after_in_parent(self) -> None:
        if threading.get_ident() not in self._forking:
            return  # the hooks were registered while this thread was forking already
        self._forking.discard(threading.get_ident())
        self._changed.notify_all()
        self._changed.release()


@contextmanager
def hold_file(path: Path, timeout: float) -> Iterator[bool]:
    """Yield True with `path` locked against all other processes, False after `timeout` seconds.

    Raises OSError when the file cannot be opened or locked. Threads are the caller's to serialise.
    """
    fd = _acquire(path, time.monotonic() + timeout, _nothing)
    owner = os.getpid()
    try:
        yield fd is not None
    finally:
        release(fd, owner)


def _nothing() -> None:
    pass


def _once(call: OnWait | None) -> OnWait:
    calls = [call] if call else []
    return lambda: calls.pop()() if calls else None


def _acquire_thread(lock: threading.Lock, deadline: float, wait: OnWait) -> bool:
    if lock.acquire(blocking=False):
        return True
    wait()
    return lock.acquire(timeout=max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX)))


def _acquire(path: Path, deadline: float, wait: OnWait) -> int | None:
    """The descriptor of the locked file, None after the deadline. Raises OSError."""
    wait = _once(wait)
    pause = FIRST_POLL_S
    while True:
        fd = try_lock(path)
        if fd is not None:
            return fd
        wait()
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_POLL_S)


def try_lock(path: Path) -> int | None:
    """The descriptor of the file, made if need be and locked now, or None. Raises OSError.

    Opened anew each time (8 us), for a cleaner may have removed the file that others wait for: then
    two owners would hold two files of one name."""
    with _guard:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        _open_fds.add(fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_ino == os.stat(path).st_ino:
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        _close(fd)
        raise
    _close(fd)
    return None


def release(fd: int | None, owner: int) -> None:
    """Unlock what process ``owner`` has locked, and close it; nothing in a process forked since."""
    if fd is None or os.getpid() != owner:  # forked inside the block: the hook has closed it
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        _close(fd)


def _close(fd: int) -> None:
    with _guard:
        _open_fds.discard(fd)
        os.close(fd)


# The guard makes "opened and noted" one step to a fork in another thread.
_guard = threading.RLock()
_open_fds: set[int] = set()
_instances: weakref.WeakSet[MemoryLocks] = weakref.WeakSet()


def _before_fork() -> None:
    _guard.acquire()


def _after_in_parent() -> None:
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

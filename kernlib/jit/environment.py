"""An LMDB environment on disk, shared by processes that die at any moment.

What `store.py` keeps in it is its own; here is how it is opened, guarded, checked after an unclean
end, moved aside when it is damaged, and left behind by a fork.

    <directory>/v1/store/{data.mdb, lock.mdb}     moved aside as a whole when it is damaged
    <directory>/v1/store.lock                     the gate: held to open, to move aside, to write
    <directory>/v1/open/, v1/store.left           who has it open, and what the last one left
    <directory>/v1/locks/                         the caller's, see `locks_directory`

Fork: no operation is under way while the process forks, and the child closes the environment it
inherited before anything else; its next verb opens its own. LMDB would use the old one silently.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import lmdb

from kernlib.jit import permissions
from kernlib.jit.locks import GateHold, surely
from kernlib.jit.open_stores import Presence, dead_marks, fingerprint

LAYOUT, STORE, DATA, GATE, LOCKS = "v1", "store", "data.mdb", "store.lock", "locks"
DATABASES = ("kernels", "days", "tuning")
SMALLEST_MAP_BYTES = 16 << 20
LARGEST_MAP_BYTES = 1 << 40  # a header that asks for more is damaged
MAX_READERS = 1000
GATE_TIMEOUT_S = 5.0  # writers take milliseconds; a stopped one must not stop us

DAMAGE = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.PageNotFoundError,
    lmdb.IncompatibleError,
)
SHORTAGE = (  # of something else than a whole file
    lmdb.MapFullError,
    lmdb.MapResizedError,
    lmdb.ReadersFullError,
    lmdb.MemoryError,
    lmdb.DiskError,
    lmdb.BadValsizeError,
)


def walk(data: Path) -> list[str]:
    """Faults in the pages of an LMDB file, found by reading it: 3 ms for 300 kernels. Raises
    OSError."""
    import lmdb.verify  # 3 ms, and only after an unclean end

    if not stat.S_ISREG(os.stat(data).st_mode):
        raise OSError(errno.EINVAL, "it is no plain file", str(data))  # reading a pipe hangs
    try:
        return lmdb.verify.verify(str(data), subdir=False)
    except lmdb.verify.VerifyError as error:
        return [str(error)]


def meaning_of(error: Exception) -> str:
    """What an error of opening a store or a bundle means, where its own text does not say it."""
    if "already open in this process" in str(error):
        return (
            "this process has it open by lmdb.open, and LMDB opens a file only once in a process: "
            "close that environment, or open a copy of the folder"
        )
    if isinstance(error, lmdb.LockError):
        return (
            f"a process of another container has the process id {os.getpid()} too, by which LMDB "
            f"tells its users apart: {error}"
        )
    return str(error)


def moved_aside(directory: Path) -> list[Path]:
    """The damaged stores of a cache directory that were moved aside, the newest last; none of one
    that cannot be read."""
    with contextlib.suppress(PermissionError):
        return sorted((Path(directory) / LAYOUT).glob("store.corrupt-*"))
    return []


def unclean_ends(directory: Path) -> list[float]:
    """The times at which processes that died with the store open had opened it. The next process
    that opens it deals with them, and then this is empty. Raises OSError."""
    root = Path(directory) / LAYOUT
    if not root.is_dir():
        return []
    gate = GateHold(root / GATE, GATE_TIMEOUT_S)
    with surely(gate), gate as owned:
        marks = dead_marks(root / "open") if owned else []
        return sorted(mark.stat().st_mtime for mark in marks)


class Guarded:
    """An object that has an environment of LMDB open. One lock serialises its threads (a read takes
    4 us), and a fork takes it too. Else py-lmdb, when the child closes its copy, would wait for
    ever for the end of an operation that another thread had begun (19 of 20 children, beside a busy
    reader)."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._env: lmdb.Environment | None = None
        self._warned = False
        _instances.add(self)

    def _warn_once(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _close_env(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def _after_fork(self) -> None:
        """In a forked child, before anything else."""
        self._lock = threading.RLock()
        self._close_env()


class Environment(Guarded):
    """The environment under `directory`. No transaction is open when the map must move.

    `open` raises OSError and lmdb.Error; `safely` turns both into None.
    """

    def __init__(self, directory: Path, map_bytes: int):
        self.directory = Path(directory)
        root = self.directory / LAYOUT
        self.path = root / STORE
        self._data = self.path / DATA
        self._gate_path = root / GATE
        self._presence = Presence(root / "open", root / "store.left")
        self._map_bytes = map_bytes
        self._file = (0, 0)  # device and inode of the data file that is open
        super().__init__()  # last: from then on a fork finds it

    # Opening and closing. The caller of what follows holds self._lock.

    def open(self) -> None:
        """Open or create it; a damaged one is moved aside. Raises OSError, lmdb.Error."""
        permissions.refuse_network(self.directory)
        permissions.refuse_bundle(self.directory)
        root = self.directory / LAYOUT
        for folder in (self.directory, root, self.path, root / LOCKS):
            permissions.make_private(folder)
        for file in (self._data, self.path / "lock.mdb"):
            permissions.refuse_odd(file)
        try:
            self._gated(self._open_checked)
        except BaseException:
            self._abandon()
            raise

    def _open_checked(self) -> None:
        try:
            if not self._presence.enter(fingerprint(self._data)):
                self._check_pages()
            self._attach()
        except (lmdb.Error, OSError) as error:
            # Damage has other names as well: a map of 2**62 bytes is "Cannot allocate memory".
            if not isinstance(error, DAMAGE) and not (self._data.is_file() and walk(self._data)):
                raise
            self._move_aside()
            permissions.make_private(self.path)
            self._attach()

    def _check_pages(self) -> None:
        """Raises CorruptedError for a file that LMDB should not be given."""
        problems = walk(self._data) if self._data.exists() else []
        if problems:
            raise lmdb.CorruptedError(f"{self._data}: {problems[0]}")

    def verify(self) -> list[str]:
        """Faults that a walk over all pages finds. Raises OSError."""
        with self._lock:
            return self._gated(walk, self._data)

    def set_aside(self) -> None:
        """Move the whole store aside, as damage found in use does; the next verb starts afresh."""
        with self._lock:
            self._recover()

    def close(self) -> None:
        """Close it and leave word that the file is whole; the next verb opens it again."""
        with self._lock:
            if self._env is None:
                return
            try:
                with contextlib.suppress(OSError):
                    self._gated(self._leave)
            finally:
                self._abandon()

    def _leave(self) -> None:
        self._close_env()
        self._presence.leave(fingerprint(self._data))

    def _gated(self, work: Callable, *arguments: object) -> object:
        """work(*arguments) by one process at a time, with a deadline, which LMDB's own writer lock
        has not."""
        gate = GateHold(self._gate_path, GATE_TIMEOUT_S)
        with surely(gate), gate as owned:
            if not owned:
                reason = f"another process held it for {GATE_TIMEOUT_S:.0f} s"
                raise TimeoutError(errno.ETIMEDOUT, reason, str(self._gate_path))
            return work(*arguments)

    def _attach(self) -> None:
        """Open with the largest map that address space (ulimit -v), file size and disk allow."""
        permissions.reserve_lock_file(self.path / "lock.mdb")
        size = self._map_bytes
        while True:
            try:
                return self._attach_map()
            except (lmdb.MemoryError, OSError):
                self._close_env()
                if self._map_bytes // 4 < SMALLEST_MAP_BYTES:
                    self._map_bytes = size  # its size was not what was wrong
                    raise
                self._map_bytes //= 4
            except BaseException:
                self._close_env()
                raise

    def _attach_map(self) -> None:
        size = self._data.stat().st_size if self._data.exists() else None
        if size == 0:
            raise lmdb.InvalidError(f"{self._data} is empty")
        self._env = lmdb.open(
            os.fsencode(self.path),  # it takes only text that the locale's encoding has
            map_size=self._map_bytes,
            create=False,
            mode=0o700,  # less the x bits for the files
            max_dbs=4,
            max_readers=MAX_READERS,
            max_spare_txns=0,  # a child that closed its copy of one would free our reader's slot
            metasync=False,  # power loss may undo the last put, and cannot break the tree
            lib_version=0,  # 1.0 writes another format, and LMDB_DEFAULT_LIB_VERSION asks for it
        )
        need = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        if size is not None and size < need:  # ours are as long as their map, see _extend
            raise lmdb.CorruptedError(f"{self._data} is cut: {size} of {need} bytes")
        self._extend()
        if size is None:
            os.chmod(self._data, 0o600)  # whatever the umask says
        self._file = permissions.identity(self._data)
        self._env.reader_check()
        with self._env.begin(write=True) as txn:
            self._kernels, self._days, self._tuning = (
                self._env.open_db(name.encode(), txn=txn) for name in DATABASES
            )

    def _extend(self) -> None:
        """Make the file as long as its map, sparsely: reading a map past the end of its file is
        SIGBUS, which killed 145 of 150 readers of truncated files. Under the gate; extends only."""
        size = self._env.info()["map_size"]
        if size > LARGEST_MAP_BYTES:
            raise lmdb.InvalidError(f"a map of {size} bytes")
        if os.stat(self._data).st_size < size:
            os.truncate(self._data, size)

    def _move_aside(self) -> None:
        """Rename the whole directory; data.mdb alone would share its lock file with the next one.
        Under the gate. The newest is kept to be looked at, older ones go."""
        self._close_env()
        os.rename(self.path, f"{self.path}.corrupt-{time.time_ns()}-{os.getpid()}")
        for old in moved_aside(self.directory)[:-1]:
            shutil.rmtree(old, ignore_errors=True)

    def _recover(self) -> None:
        """Move a store found damaged in use aside, unless another process has done so already."""
        self._abandon()
        with contextlib.suppress(OSError):  # the next verb opens it again, and meets the same
            self._gated(self._move_aside_if_ours)

    def _move_aside_if_ours(self) -> None:
        if permissions.identity(self._data) == self._file:
            self._move_aside()

    def _abandon(self) -> None:
        """Close it without a word: whoever opens it next walks its pages."""
        self._close_env()
        self._presence.forget()

    def _reopen(self) -> None:
        """Open it after a fork, a close or an error, and say so if nothing is kept from now on."""
        try:
            self.open()
        except (FileNotFoundError, TimeoutError, *DAMAGE):  # which pass, or are mended
            raise
        except (OSError, lmdb.Error) as error:
            self._warn_once(
                f"the kernel cache in {self.directory} cannot be used ({meaning_of(error)}); until "
                "it can, this process keeps no kernels"
            )
            raise

    # Transactions.

    def _safely(self, verb: Callable, *args: object) -> object:
        """verb(*args), or None for whatever LMDB or the system raised; damage is moved aside."""
        with self._lock:
            try:
                if self._env is not None and permissions.identity(self._data) != self._file:
                    self._abandon()  # another process has moved it aside
                if self._env is None:
                    self._reopen()
                return verb(*args)
            except DAMAGE:
                self._recover()
            except FileNotFoundError:
                self._abandon()  # the directory was removed: anew
            except (*SHORTAGE, OSError):
                pass
            except lmdb.Error:
                self._abandon()  # a write that failed, or damage by another name: the walk tells
        return None

    def _transact(self, work: Callable[[lmdb.Transaction], object], write: bool = False) -> object:
        """work(txn), once more when another process has grown the map, or when dead ones held all
        readers' slots. Raises lmdb.Error."""
        try:
            return self._attempt(work, write)
        except lmdb.MapResizedError:
            self._follow_map()
        except lmdb.ReadersFullError:
            self._env.reader_check()
        return self._attempt(work, write)

    def _attempt(self, work: Callable[[lmdb.Transaction], object], write: bool) -> object:
        if write:
            return self._gated(self._in_transaction, work, True)
        return self._in_transaction(work, False)

    def _in_transaction(self, work: Callable[[lmdb.Transaction], object], write: bool) -> object:
        with self._env.begin(write=write) as txn:
            return work(txn)

    def _follow_map(self) -> None:
        try:
            self._gated(self._take_map)
        except BaseException:
            self._abandon()  # NOTE: the old map is unmapped already, any use is SIGSEGV
            raise

    def _take_map(self) -> None:
        self._env.set_mapsize(0)
        self._extend()

    def _after_fork(self) -> None:
        self._presence.forget()
        super()._after_fork()


_instances: weakref.WeakSet[Guarded] = weakref.WeakSet()
_held: list[threading.RLock] = []


# NOTE: locks.py registers its hooks first, so they run after these before a fork, as they must:
# a thread inside a verb needs its guard to leave. No thread holds one of these and waits for
# another; those of layers.py and store.py, held while one is opened, are taken before them.
def _before_fork() -> None:
    for guarded in list(_instances):
        _held.append(guarded._lock)
        guarded._lock.acquire()


def _after_in_parent() -> None:
    while _held:
        lock = _held.pop()
        if lock._is_owned():  # not if an interrupt came before
            lock.release()


def _after_in_child() -> None:
    _held.clear()
    for guarded in list(_instances):
        guarded._after_fork()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)

"""Where compiled kernels are kept: bytes under 32-byte keys, in LMDB, or in memory without a disk.

Two verbs, `get` and `put`, and housekeeping. None raises for a bad, full or vanished store: what
cannot be read is a miss, what cannot be kept is not kept. What the bytes mean is the caller's.

    <directory>/v1/store/{data.mdb, lock.mdb}     moved aside as a whole when it is damaged
    <directory>/v1/store.lock                     the gate: held to open, to move aside, to write
    <directory>/v1/locks/                         the caller's, see `locks_directory`

Fork: no transaction is open while the process forks, and the child closes the environment it
inherited before anything else; its next verb opens its own. LMDB would use the old one silently.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import shutil
import struct
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb

from kernlib.jit import private
from kernlib.jit.locks import hold_file
from kernlib.jit.memory import MemoryStore
from kernlib.settings import MAP_BYTES

LAYOUT = "v1"
SMALLEST_MAP_BYTES = 16 << 20
LARGEST_MAP_BYTES = 1 << 40  # a header that asks for more is damaged
MAX_READERS = 1000
GATE_TIMEOUT_S = 5.0  # writers take milliseconds; a stopped one must not stop us
MAP_SHARE = 0.8  # of the map for the budget: fuller, freed pages no longer suffice to free more
EVICT_TO = 0.75
EVICT_KEYS = 256
RESCUE_KEYS = 4  # in one transaction on a full map, where deleting many fails as well
RESCUE_ROUNDS = 64

_DAY = struct.Struct("<I")
_DAMAGE = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.PageNotFoundError,
    lmdb.IncompatibleError,
)


def open_store(directory: Path, budget: int, map_bytes: int = MAP_BYTES) -> LmdbStore | MemoryStore:
    """The store of a cache directory, the same object for every name of it in this process.

    Never raises for the directory's sake: one that cannot be used (read-only, full, another
    user's, on a network) is warned about once, naming KERNLIB_CACHE_DIR, the path and the reason,
    and replaced by a MemoryStore. `budget` is in bytes, at most 80 % of the map.
    """
    name = os.path.realpath(directory)
    with _registry:
        store = _stores.get(name)
        if store is not None:
            store.budget = budget
            return store
        store, reason = _open_or_memory(Path(directory), LmdbStore(Path(name), budget, map_bytes))
        _stores[name] = store
    if reason:
        warnings.warn(
            f"the kernel cache in {directory} cannot be used ({reason}); kernels are kept in memory"
            " for this process only. Set KERNLIB_CACHE_DIR to a local folder of your own",
            RuntimeWarning,
            stacklevel=2,
        )
    return store


def locks_directory(directory: Path) -> Path:
    """Where the key locks of this cache directory live: outside what is moved aside."""
    return Path(directory) / LAYOUT / "locks"


def _open_or_memory(named: Path, store: LmdbStore) -> tuple[LmdbStore | MemoryStore, str]:
    try:
        if str(named).startswith("~"):
            raise FileNotFoundError(errno.ENOENT, "no home directory")
        store.open()
    except (OSError, lmdb.Error) as error:
        return MemoryStore(store.budget), str(error)
    return store, ""


class LmdbStore:
    """An LMDB environment under `directory`, shared by all processes that open it.

    Made by `open_store`, which sees to it that a process has one for each directory. One lock
    serialises its threads (a read takes 4 us), so that no transaction is open when the map must
    move or the process forks. `open` raises OSError and lmdb.Error, the verbs neither.
    """

    def __init__(self, directory: Path, budget: int, map_bytes: int = MAP_BYTES):
        self.directory = Path(directory)
        self.path = self.directory / LAYOUT / "store"
        self._gate_path = self.directory / LAYOUT / "store.lock"
        self._map_bytes = map_bytes
        self.budget = budget
        self._lock = threading.RLock()
        self._env: lmdb.Environment | None = None
        self._file = (0, 0)  # device and inode of the data file that is open
        self._hits: dict[bytes, int] = {}  # day of last use, for keys whose stamp is older
        _instances.add(self)

    @property
    def budget(self) -> int:
        """Bytes of used pages above which the longest unused kernels go."""
        return min(self._budget, int(self._map_bytes * MAP_SHARE))

    @budget.setter
    def budget(self, budget: int) -> None:
        self._budget = budget

    def get(self, key: bytes) -> bytes | None:
        """A copy of the value, None for a miss; a hit is noted in memory as today's."""
        return self._safely(self._get, key)

    def put(self, key: bytes, value: bytes) -> bool:
        """Keep the value, dropping the longest unused ones over the budget; False if it cannot."""
        return bool(self._safely(self._put, key, value))

    def delete(self, key: bytes) -> None:
        """Forget one key, if it is there and can be."""
        self._safely(self._transact, lambda txn: self._drop(txn, [key]), True)

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Every pair; no transaction stays open between two, so what goes meanwhile is skipped."""
        for key in self._safely(self._transact, self._keys) or []:
            value = self._safely(self._transact, lambda txn, k=key: txn.get(k, db=self._kernels))
            if value is not None:
                yield key, value

    def info(self) -> dict[str, object]:
        """kind, path, entries, bytes_used, budget; zeros for a store that cannot be read."""
        entries, used = self._safely(self._transact, self._count) or (0, 0)
        facts = {"kind": "lmdb", "path": str(self.path), "entries": entries}
        return facts | {"bytes_used": used, "budget": self.budget}

    def clear(self) -> None:
        """Drop all kernels; tuning results stay."""
        self._safely(self._clear)

    def close(self) -> None:
        """Write the noted days and close; the next verb opens it again."""
        with self._lock:
            if self._env is not None:
                self._safely(self._flush)
            self._close_env()

    # Opening and closing. The caller of what follows holds self._lock.

    def open(self) -> None:
        """Open or create it; a damaged one is moved aside. Raises OSError, lmdb.Error."""
        private.refuse_network(self.directory)
        for folder in (self.directory, self.directory / LAYOUT, self.path):
            private.make_private(folder)
        with self._gate():
            try:
                self._attach()
            except _DAMAGE:
                self._move_aside()
                private.make_private(self.path)
                self._attach()

    @contextlib.contextmanager
    def _gate(self) -> Iterator[None]:
        """One process at a time, with a deadline, which LMDB's own writer lock has not."""
        with hold_file(self._gate_path, GATE_TIMEOUT_S) as owned:
            if not owned:
                reason = f"another process held it for {GATE_TIMEOUT_S:.0f} s"
                raise TimeoutError(errno.ETIMEDOUT, reason, str(self._gate_path))
            yield

    def _attach(self) -> None:
        """Open with the largest map that address space (ulimit -v), file size and disk allow."""
        private.reserve_lock_file(self.path / "lock.mdb")
        while True:
            try:
                return self._attach_map()
            except (lmdb.MemoryError, OSError):
                self._close_env()
                if self._map_bytes // 4 < SMALLEST_MAP_BYTES:
                    raise
                self._map_bytes //= 4
            except BaseException:
                self._close_env()
                raise

    def _attach_map(self) -> None:
        data = self.path / "data.mdb"
        size = data.stat().st_size if data.exists() else None
        if size == 0:
            raise lmdb.InvalidError(f"{data} is empty")
        self._env = lmdb.open(
            str(self.path),
            map_size=self._map_bytes,
            create=False,
            mode=0o700,  # less the x bits for the files
            max_dbs=4,
            max_readers=MAX_READERS,
            metasync=False,  # power loss may undo the last put, and cannot break the tree
            lib_version=0,  # 1.0 writes another format, and LMDB_DEFAULT_LIB_VERSION asks for it
        )
        need = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        if size is not None and size < need:  # ours are as long as their map, see _extend
            raise lmdb.CorruptedError(f"{data} is cut: {size} of {need} bytes")
        self._extend()
        self._file = private.identity(data)
        self._env.reader_check()
        with self._env.begin(write=True) as txn:
            self._kernels = self._env.open_db(b"kernels", txn=txn)
            self._days = self._env.open_db(b"days", txn=txn)
            self._tuning = self._env.open_db(b"tuning", txn=txn)  # eviction never touches it

    def _extend(self) -> None:
        """Make the file as long as its map, sparsely: reading a map past the end of its file is
        SIGBUS, which killed 145 of 150 readers of truncated files. Under the gate; extends only."""
        size = self._env.info()["map_size"]
        if size > LARGEST_MAP_BYTES:
            raise lmdb.InvalidError(f"a map of {size} bytes")
        if os.stat(self.path / "data.mdb").st_size < size:
            os.truncate(self.path / "data.mdb", size)

    def _move_aside(self) -> None:
        """Rename the whole directory; data.mdb alone would share its lock file with the next one.
        Under the gate. The newest is kept to be looked at, older ones go."""
        self._close_env()
        os.rename(self.path, f"{self.path}.corrupt-{time.time_ns()}-{os.getpid()}")
        for old in sorted(self.path.parent.glob(f"{self.path.name}.corrupt-*"))[:-1]:
            shutil.rmtree(old, ignore_errors=True)

    def _recover(self) -> None:
        """Move a store found damaged in use aside, unless another process has done so already."""
        self._close_env()
        try:
            with self._gate():
                if private.identity(self.path / "data.mdb") == self._file:
                    self._move_aside()
        except OSError:
            pass  # the next verb opens it again, and meets the same damage

    def _close_env(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()

    # Transactions.

    def _safely(self, verb: Callable, *args: object) -> object:
        """verb(*args), or None for whatever LMDB or the system raised; damage is moved aside."""
        with self._lock:
            try:
                if self._env is None:
                    self.open()
                return verb(*args)
            except _DAMAGE:
                self._recover()
            except (lmdb.PanicError, FileNotFoundError):
                self._close_env()  # after a failed write, or the directory was removed: anew
            except (lmdb.Error, OSError):
                pass
        return None

    def _transact(self, work: Callable[[lmdb.Transaction], object], write: bool = False) -> object:
        """work(txn), once more when another process has grown the map. Raises lmdb.Error."""
        try:
            return self._attempt(work, write)
        except lmdb.MapResizedError:
            self._follow_map()
        return self._attempt(work, write)

    def _attempt(self, work: Callable[[lmdb.Transaction], object], write: bool) -> object:
        with (
            self._gate() if write else contextlib.nullcontext(),
            self._env.begin(write=write) as txn,
        ):
            return work(txn)

    def _follow_map(self) -> None:
        with self._gate():
            try:
                self._env.set_mapsize(0)
                self._extend()
            except BaseException:
                self._close_env()  # NOTE: the old map is unmapped already, any use is SIGSEGV
                raise

    # What the verbs do inside.

    def _get(self, key: bytes) -> bytes | None:
        value, stamp = self._transact(
            lambda txn: (txn.get(key, db=self._kernels), txn.get(key, db=self._days))
        )
        if value is not None:
            self._note(key, stamp)
        return value

    def _note(self, key: bytes, stamp: bytes | None) -> None:
        """Note a hit unless it is stamped today; those noted on an earlier day are written."""
        today = _today()
        if self._hits and next(iter(self._hits.values())) != today:
            self._flush()
        if stamp != _DAY.pack(today):
            self._hits[key] = today

    def _flush(self) -> None:
        hits, self._hits = self._hits, {}
        if not hits:
            return
        try:
            self._transact(lambda txn: self._stamp(txn, hits), True)
        except _DAMAGE:
            raise
        except (lmdb.Error, OSError):
            pass  # the order of eviction is a day off

    def _stamp(self, txn: lmdb.Transaction, hits: dict[bytes, int]) -> None:
        kernels = txn.cursor(db=self._kernels)
        for key, day in hits.items():
            if kernels.set_key(key):  # it may have gone meanwhile
                txn.put(key, _DAY.pack(day), db=self._days)

    def _put(self, key: bytes, value: bytes) -> bool:
        if len(value) > self.budget:
            return False
        _, used = self._transact(self._count)
        if used + len(value) > self.budget:
            self._evict(int(self.budget * EVICT_TO) - len(value))
        try:
            return self._transact(lambda txn: self._write(txn, key, value), True)
        except lmdb.MapFullError:
            _, used = self._transact(self._count)
        self._evict(int(used * EVICT_TO) - len(value), RESCUE_ROUNDS)
        self._settle()
        return self._transact(lambda txn: self._write(txn, key, value), True)

    def _write(self, txn: lmdb.Transaction, key: bytes, value: bytes) -> bool:
        hits, self._hits = self._hits, {}
        self._stamp(txn, hits)
        txn.put(key, _DAY.pack(_today()), db=self._days)
        return txn.put(key, value, db=self._kernels)

    def _count(self, txn: lmdb.Transaction) -> tuple[int, int]:
        """Kernels, and bytes of used pages: the file's size says nothing, it is sparse."""
        stats = [txn.stat(database) for database in (self._kernels, self._days, self._tuning)]
        pages = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)
        return stats[0]["entries"], pages * stats[0]["psize"]

    def _keys(self, txn: lmdb.Transaction) -> list[bytes]:
        return list(txn.cursor(db=self._kernels).iternext(keys=True, values=False))

    def _oldest(self, txn: lmdb.Transaction) -> list[bytes]:
        """All keys by day of last use; one without a stamp comes first."""
        days = {key: int.from_bytes(day, "little") for key, day in txn.cursor(db=self._days)}
        return sorted(self._keys(txn), key=lambda key: days.get(key, 0))

    def _evict(self, target: int, small: int = 0) -> None:
        """Drop the longest unused until `target` bytes are used, EVICT_KEYS a transaction; the
        next `small` transactions, and those after a MapFullError, take RESCUE_KEYS only."""
        victims = self._transact(self._oldest)
        while victims:
            batch = RESCUE_KEYS if small else EVICT_KEYS
            keys, rest = victims[:batch], victims[batch:]
            try:
                if self._transact(lambda txn, keys=keys: self._drop(txn, keys, target), True):
                    return
            except lmdb.MapFullError:
                if not small:
                    small = RESCUE_ROUNDS
                    continue
            victims, small = rest, max(0, small - 1)

    def _settle(self) -> None:
        """Two transactions that free nothing: pages freed by one serve the second after it."""
        for write in (lmdb.Transaction.put, lmdb.Transaction.delete):
            with contextlib.suppress(lmdb.MapFullError):
                self._transact(lambda txn, write=write: write(txn, b"-", b"", db=self._days), True)

    def _drop(self, txn: lmdb.Transaction, keys: list[bytes], target: int = -1) -> bool:
        """Delete keys until `target` bytes are used; True when they are."""
        for key in keys:
            if self._count(txn)[1] <= target:
                return True
            txn.delete(key, db=self._kernels)
            txn.delete(key, db=self._days)
        return self._count(txn)[1] <= target

    def _clear(self) -> None:
        self._hits = {}
        self._evict(-1)
        self._evict(-1)  # those that a full map held back
        self._settle()


def _today() -> int:
    return int(time.time() // 86400)  # wall clock: a monotonic one means nothing after a reboot


_registry = threading.RLock()
_stores: dict[str, LmdbStore | MemoryStore] = {}
_instances: weakref.WeakSet[LmdbStore] = weakref.WeakSet()
_held: list[threading.RLock] = []


# NOTE: locks.py registers its hooks first, so they run after these before a fork, as they must:
# a thread inside a verb needs its guard to leave.
def _before_fork() -> None:
    _registry.acquire()
    for store in list(_instances):
        store._lock.acquire()
        _held.append(store._lock)


def _after_in_parent() -> None:
    while _held:
        _held.pop().release()
    _registry.release()


def _after_in_child() -> None:
    global _registry
    _held.clear()
    _registry = threading.RLock()
    for store in list(_instances):
        store._lock = threading.RLock()
        store._hits = {}  # the parent writes them
        store._close_env()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)


@atexit.register
def _close_all() -> None:
    for store in list(_instances):
        store.close()

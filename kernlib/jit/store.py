"""Where compiled kernels are kept: bytes under 32-byte keys, in LMDB, or in memory if that cannot
be used.

There are two verbs, `get` and `put`, the same two for tuning results, and housekeeping. None raises
for a bad, full or vanished store: what cannot be read is a miss, and what cannot be kept is not
kept. Only the caller knows what the bytes mean. `environment.py` has how the LMDB environment
survives crashes and forks.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import struct
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import lmdb

from kernlib.jit import permissions
from kernlib.jit.environment import DAMAGE, LAYOUT, LOCKS, Environment
from kernlib.jit.memory import MemoryStore
from kernlib.settings import CACHE_ADVICE, MAP_BYTES

# The part of the map that a budget may use. In a fuller map the free pages do not suffice for the
# transactions that delete entries.
MAP_SHARE = 0.8
EVICT_TO = 0.75  # part of the budget that is used after an eviction
EVICT_KEYS = 256  # deleted in one transaction
RESCUE_KEYS = 4  # the same on a full map, where a transaction that deletes many fails too
RESCUE_ROUNDS = 64  # such transactions

_DAY = struct.Struct("<I")


def open_store(directory: Path, budget: int, map_bytes: int = MAP_BYTES) -> LmdbStore | MemoryStore:
    """The store of a cache directory, the same object for every name of it in this process.

    Never raises for the directory's sake: one that cannot be used (read-only, full, another
    user's, on a network) is warned about once, naming KERNLIB_CACHE_DIR, the path and the reason,
    and replaced by a MemoryStore. `budget` is in bytes, at most 80 % of the map.
    """
    try:
        name = os.path.realpath(directory)
    except OSError:  # relative, and the working directory was removed: opening it fails as well
        name = str(directory)
    with _registry:
        store = _stores.get(name)
        if store is not None:
            store.budget = budget
            return store
        # Kept before it is opened: if an interrupt made us lose an open one, LMDB would refuse to
        # open it again.
        disk = _opening.setdefault(name, LmdbStore(Path(name), budget, map_bytes))
        store, message = _open_or_memory(Path(directory), disk)
        store.budget = budget
        _stores[name] = store
        del _opening[name]
    if message:
        warnings.warn(f"{message}. {CACHE_ADVICE}", RuntimeWarning, stacklevel=2)
    return store


def locks_directory(directory: Path) -> Path:
    """The folder of a cache directory with the locks of its keys. It is outside of the store, so
    that it stays when that is moved aside."""
    return Path(directory) / LAYOUT / LOCKS


def _open_or_memory(named: Path, store: LmdbStore) -> tuple[LmdbStore | MemoryStore, str]:
    """The opened store and "", or a store in memory and the text of a warning about that."""
    cannot = f"the kernel cache in {named} cannot be "
    memory = "; kernels are kept in memory for this process only"
    try:
        if str(named).startswith("~"):
            raise FileNotFoundError(errno.ENOENT, "no home directory")
        store.open()
    except (OSError, lmdb.Error) as error:
        from kernlib.jit import bundle  # few processes need it

        try:
            behind, reason = bundle.readable_cache(store.directory, error)
        except OSError as refused:
            behind, reason = None, str(refused)
        if behind is not None:
            message = f"{cannot}written ({reason}){memory}, beside those it holds"
            return MemoryStore(store.budget, behind), message
        return MemoryStore(store.budget), f"{cannot}used ({reason}){memory}"
    return store, ""


class LmdbStore(Environment):
    """Kernels, the day each was last used, and tuning results, each a database of one environment.

    Made by `open_store`, so that a process has only one for each directory. `open` raises OSError
    and lmdb.Error; the verbs raise neither.
    """

    def __init__(self, directory: Path, budget: int, map_bytes: int = MAP_BYTES):
        super().__init__(directory, map_bytes)
        self.budget = budget
        self._hits: dict[bytes, int] = {}  # day of last use, for keys whose stored day is older
        self._evicted = (0, 0)

    @property
    def budget(self) -> int:
        """Bytes of used pages above which the longest unused kernels are dropped."""
        return min(self._budget, int(self._map_bytes * MAP_SHARE))

    @budget.setter
    def budget(self, budget: int) -> None:
        self._budget = budget

    def open(self) -> None:
        """Open the environment unless it is open. Raises OSError, lmdb.Error."""
        if self._env is None:
            super().open()
        _close_with_worker()

    def get(self, key: bytes) -> bytes | None:
        """A copy of the value, None for a miss. The day of a hit is noted in memory."""
        return self._safely(self._get, key)

    def put(self, key: bytes, value: bytes) -> bool:
        """Keep the value, and drop the longest unused ones where the budget asks for it. False if
        the value cannot be kept."""
        return bool(self._safely(self._put, key, value))

    def take_evicted(self) -> tuple[int, int]:
        """How many kernels, and of how many bytes, :meth:`put` has dropped since this was asked."""
        evicted, self._evicted = self._evicted, (0, 0)
        return evicted

    def delete(self, key: bytes) -> None:
        """Delete one key, if it is there and can be deleted."""
        self._safely(self._transact, lambda txn: self._drop(txn, [key]), True)

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Every pair. No transaction stays open between two of them, so what is deleted meanwhile
        is skipped."""
        for key in self._safely(self._transact, self._keys) or []:
            value = self._safely(self._transact, lambda txn, k=key: txn.get(k, db=self._kernels))
            if value is not None:
                yield key, value

    def info(self) -> dict[str, object]:
        """kind, path, entries, tuning (number of results), bytes_used, budget; zeros for a store
        that cannot be read."""
        entries, used, tuned = self._safely(self._transact, self._sizes) or (0, 0, 0)
        facts = {"kind": "lmdb", "path": str(self.path), "entries": entries, "tuning": tuned}
        return facts | {"bytes_used": used, "budget": self.budget}

    def clear(self) -> None:
        """Drop all kernels; tuning results stay."""
        self._safely(self._clear)

    def get_tuning(self, key: bytes) -> bytes | None:
        """A copy of a tuning result, None for a miss."""
        return self._safely(self._transact, lambda txn: txn.get(key, db=self._tuning))

    def put_tuning(self, key: bytes, value: bytes) -> bool:
        """Keep a tuning result, which is never evicted. False if it cannot be kept."""
        return bool(
            self._safely(self._transact, lambda txn: txn.put(key, value, db=self._tuning), True)
        )

    def clear_tuning(self) -> int:
        """Delete all tuning results; returns how many there were."""
        return self._safely(self._transact, self._forget_tuning, True) or 0

    def days(self) -> dict[bytes, int]:
        """The day on which each key was last used, in days since 1970."""
        return self._safely(self._transact, self._read_days) or {}

    def prune(self, unused_days: int | None = None, to_bytes: int | None = None) -> int:
        """Drop kernels unused for more than so many days, then the longest unused until at most so
        many bytes are used; returns how many went."""
        before = self.info()["entries"]
        self._safely(self._prune, unused_days, to_bytes)
        return before - self.info()["entries"]

    def set_aside(self) -> None:
        """Move the whole store aside, as happens when damage is found in use. It need not have been
        opened: LMDB may crash on the damage that :meth:`verify` has found. The next verb starts an
        empty store."""
        with self._lock:
            if self._env is None:
                with contextlib.suppress(OSError):
                    self._file = permissions.identity(self._data)
            super().set_aside()

    def close(self) -> None:
        """Write the noted days of hits, and close. The next verb opens the store again."""
        with self._lock:
            if self._env is not None:
                self._safely(self._flush)
            super().close()

    # What the verbs do, inside of _safely().

    def _get(self, key: bytes) -> bytes | None:
        value, stamp = self._transact(
            lambda txn: (txn.get(key, db=self._kernels), txn.get(key, db=self._days))
        )
        if value is not None:
            self._note(key, stamp)
        return value

    def _note(self, key: bytes, stamp: bytes | None) -> None:
        """Note a hit, unless its stored day is today's. Hits of an earlier day are written
        first."""
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
        except DAMAGE:
            raise
        except (lmdb.Error, OSError):
            pass  # then the order of eviction is a day off

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
            self._make_room(int(self.budget * EVICT_TO) - len(value))
        try:
            return self._transact(lambda txn: self._write(txn, key, value), True)
        except lmdb.MapFullError:
            _, used = self._transact(self._count)
        self._make_room(int(used * EVICT_TO) - len(value), RESCUE_ROUNDS)
        self._settle()
        return self._transact(lambda txn: self._write(txn, key, value), True)

    def _make_room(self, target: int, small: int = 0) -> None:
        """:meth:`_evict`, and count what went."""
        kernels, used = self._transact(self._count)
        self._evict(target, small)
        remaining, uses = self._transact(self._count)  # other processes may have stored meanwhile
        gone, freed = max(0, kernels - remaining), max(0, used - uses)
        self._evicted = self._evicted[0] + gone, self._evicted[1] + freed

    def _write(self, txn: lmdb.Transaction, key: bytes, value: bytes) -> bool:
        hits, self._hits = self._hits, {}
        self._stamp(txn, hits)
        txn.put(key, _DAY.pack(_today()), db=self._days)
        return txn.put(key, value, db=self._kernels)

    def _count(self, txn: lmdb.Transaction) -> tuple[int, int]:
        """The number of kernels, and the bytes of used pages. The size of the file says nothing: it
        is sparse."""
        stats = [txn.stat(database) for database in (self._kernels, self._days, self._tuning)]
        pages = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)
        return stats[0]["entries"], pages * stats[0]["psize"]

    def _sizes(self, txn: lmdb.Transaction) -> tuple[int, int, int]:
        return (*self._count(txn), txn.stat(self._tuning)["entries"])

    def _keys(self, txn: lmdb.Transaction) -> list[bytes]:
        return list(txn.cursor(db=self._kernels).iternext(keys=True, values=False))

    def _oldest(self, txn: lmdb.Transaction) -> list[bytes]:
        """All keys in order of their day of last use; those without a day come first."""
        days = self._read_days(txn)
        return sorted(self._keys(txn), key=lambda key: days.get(key, 0))

    def _evict(self, target: int, small: int = 0) -> None:
        """Drop the longest unused kernels until `target` bytes are used, EVICT_KEYS in a
        transaction. The first `small` transactions, and those after a MapFullError, drop only
        RESCUE_KEYS."""
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
        """Run two transactions that free nothing. LMDB uses pages that a transaction has freed from
        the second transaction after it on."""
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

    def _read_days(self, txn: lmdb.Transaction) -> dict[bytes, int]:
        return {key: int.from_bytes(day, "little") for key, day in txn.cursor(db=self._days)}

    def _forget_tuning(self, txn: lmdb.Transaction) -> int:
        count = txn.stat(self._tuning)["entries"]
        txn.drop(self._tuning, delete=False)
        return count

    def _prune(self, unused_days: int | None, to_bytes: int | None) -> None:
        self._flush()
        if unused_days is not None:
            days, oldest = self._transact(self._read_days), _today() - unused_days
            old = [key for key in self._transact(self._keys) if days.get(key, 0) < oldest]
            for at in range(0, len(old), EVICT_KEYS):
                keys = old[at : at + EVICT_KEYS]
                self._transact(lambda txn, keys=keys: self._drop(txn, keys), True)
        if to_bytes is not None:
            self._evict(to_bytes)

    def _clear(self) -> None:
        self._hits = {}
        self._evict(-1)
        self._evict(-1)  # what could not be deleted at first, because the map was full
        self._settle()

    def _after_fork(self) -> None:
        self._hits = {}  # the parent writes them
        super()._after_fork()


def _today() -> int:
    return int(time.time() // 86400)  # wall clock: a monotonic one means nothing after a reboot


_registry = threading.RLock()
_stores: dict[str, LmdbStore | MemoryStore] = {}
_opening: dict[str, LmdbStore] = {}


def _before_fork() -> None:
    _registry.acquire()


def _after_in_parent() -> None:
    if _registry._is_owned():  # not if an interrupt came before
        _registry.release()


def _after_in_child() -> None:
    global _registry
    _registry = threading.RLock()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)


@atexit.register
def _close_all() -> None:
    for store in list(_stores.values()):
        store.close()


_finalized = 0  # the process that has told multiprocessing


def _close_with_worker() -> None:
    """Have the stores closed at the end of a process of multiprocessing, which does not run
    functions registered by atexit."""
    global _finalized
    if "multiprocessing.process" in sys.modules and _finalized != os.getpid():
        from multiprocessing import parent_process, util

        if parent_process() is not None:
            util.Finalize(None, _close_all, exitpriority=0)
        _finalized = os.getpid()

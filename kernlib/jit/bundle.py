"""Kernels in LMDB files that are only read: bundles, and caches that this process cannot write.

A bundle, to be shipped and mounted, is a folder with one file, ``kernels.mdb``: a compacted LMDB
file, with equal bytes for equal kernels. Its keys are the portable ones, which do not cover NVRTC's
version: a cubin runs whichever release of the same CUDA major version made it. The file must not
change while it is open; a new version of a bundle replaces the file as a whole.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import lmdb

from kernlib.jit import entry, permissions, toolchain
from kernlib.jit.entry import Entry
from kernlib.jit.environment import (
    DATA,
    GATE,
    GATE_TIMEOUT_S,
    LAYOUT,
    STORE,
    Guarded,
    meaning_of,
    walk,
)
from kernlib.jit.locks import SharedGateHold, surely

FILE = permissions.BUNDLE
DATABASE = b"kernels"
KEY_BYTES = 32
ROOM = 64 << 20  # bytes of the map in which a bundle is written, besides twice its contents
# Left out of an entry's meta, since these differ between equal kernels.
NOT_SHIPPED = ("compile_ms", "created", "portable")
# What opening a cache answers that may be read all the same. LMDB has a class for EACCES.
NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)


class Bundle(Guarded):
    """A bundle opened for reading. Made by :func:`open_bundle`; `get` and `items` raise nothing."""

    databases: tuple[bytes, ...] = (DATABASE,)

    def __init__(self, folder: Path, file: str = FILE):
        self.folder = Path(folder)
        self._path = self.folder / file
        super().__init__()

    def open(self) -> None:
        """Open the file, whose pages must have been checked. Raises lmdb.Error, OSError."""
        with self._lock:
            if self._env is not None:
                return
            try:
                self._env = lmdb.open(
                    os.fsencode(self._path),  # see environment.py
                    subdir=False,
                    readonly=True,
                    lock=False,  # a read-only file system takes no lock file
                    max_dbs=len(self.databases),
                    lib_version=0,
                )
                opened = [self._env.open_db(name, create=False) for name in self.databases]
                self._kernels, self._tuning = opened[0], opened[-1]
            except BaseException:
                self._close_env()
                raise

    def get(self, key: bytes) -> bytes | None:
        """A copy of the value under a portable key, None for a miss."""
        return self._read(lambda txn: txn.get(key, db=self._kernels))

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Every pair, in order of key."""
        return iter(self._read(lambda txn: list(txn.cursor(db=self._kernels))) or ())

    def info(self) -> dict[str, object]:
        """kind, path, entries, bytes_used."""
        used = self._path.stat().st_size if self._path.exists() else 0
        entries = self._read(lambda txn: txn.stat(self._kernels)["entries"]) or 0
        return {
            "kind": "bundle",
            "path": str(self.folder),
            "entries": entries,
            "bytes_used": used,
        }

    def _read(self, work: Callable[[lmdb.Transaction], object]) -> object:
        """work(txn), or None if LMDB or the system raised an error."""
        with self._lock:
            try:
                self.open()
            except (lmdb.Error, OSError) as error:
                self._warn_once(f"{self._path} cannot be read: {meaning_of(error)}")
                return None
            try:
                with self._env.begin() as txn:
                    return work(txn)
            except (lmdb.Error, OSError):
                return None

    def close(self) -> None:
        """Close it; the next verb opens it again."""
        with self._lock:
            self._close_env()


def open_bundle(folder: Path, found: Bundle | None = None) -> Bundle:
    """The bundle in ``folder``, opened after a check of its pages. ``found`` is the object for it,
    if the caller has one.

    Raises OSError when there is none, when users other than root and the current one may write it,
    or when it is cut or damaged.
    """
    folder = Path(folder)
    _refuse_others(folder)
    problems = walk(folder / FILE)
    if problems:
        raise OSError(f"{folder / FILE} is damaged ({problems[0]}); export it again")
    found = found or Bundle(folder)
    try:
        found.open()
    except lmdb.Error as error:
        raise OSError(f"{folder / FILE} cannot be opened: {meaning_of(error)}") from error
    return found


def _refuse_others(folder: Path) -> None:
    """Raises OSError where there is no bundle, PermissionError for one that users other than root
    and the current one may write: cubins are executable code."""
    path = folder / FILE
    if folder.is_file():
        raise NotADirectoryError(f"{folder} is a file; name the folder that holds {FILE}")
    if not path.exists():
        advice = "a bundle is what `kernlib cache export` writes"
        if (folder / LAYOUT).is_dir():
            advice = "this is a cache, which may change while it is read: " + advice
        raise FileNotFoundError(f"{folder} holds no {FILE}; {advice}")
    _refuse_writable(folder, path)


def _refuse_writable(*parts: Path) -> None:
    for part in parts:
        status = os.stat(part)
        if status.st_uid not in (0, os.geteuid()):
            raise PermissionError(
                f"{part} belongs to user {status.st_uid}, who may change it; a bundle must be "
                "root's or your own, as a copy of it is"
            )
        mode = status.st_mode
        if mode & 0o022 and not (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
            raise PermissionError(
                f"others may write {part} (mode {mode & 0o777:o}); chmod go-w would do"
            )


def collect(items: Iterable[tuple[bytes, bytes]], archs: tuple[str, ...] = ()) -> dict:
    """The undamaged entries of a store for ``archs`` (for all if there are none), by portable key.

    Of a kernel that several NVRTCs have compiled the newest one's stays. What differs between two
    compiles of a kernel, such as their time, is left out.
    """
    kernels: dict[bytes, Entry] = {}
    for key, value in items:
        kernel = entry.unpack(key, value)
        if kernel is None or (archs and kernel.meta.get("arch") not in archs):
            continue
        portable = _portable(kernel) or key
        if len(portable) != KEY_BYTES:
            continue
        newest = kernels.get(portable)
        if newest is None or _version(newest) < _version(kernel):
            kernels[portable] = shipped(kernel)
    return kernels


def shipped(kernel: Entry) -> Entry:
    """An entry as a bundle has it: without what differs between two compiles of a kernel."""
    meta = {name: text for name, text in kernel.meta.items() if name not in NOT_SHIPPED}
    return kernel._replace(meta=meta)


def _portable(found: Entry) -> bytes | None:
    """The portable key that an entry names; None if it names none."""
    try:
        key = bytes.fromhex(found.meta.get("portable", ""))
    except ValueError:
        return None
    return key if len(key) == KEY_BYTES else None


def _version(found: Entry) -> tuple[int, ...]:
    parts = found.meta.get("nvrtc", "").split(".")
    return tuple(int(part) for part in parts if part.isdecimal() and len(part) < KEY_BYTES)


def copy_into(store, found: Bundle) -> dict[str, int]:
    """Copy a bundle's kernels into a store, under their portable keys. Counts those ``added``,
    ``known`` before, ``damaged``, and ``declined`` by the store. Raises nothing.

    What the current compiler has compiled here, under its exact key, counts as known as well: a
    copy of it would never be used, and be counted as a second kernel."""
    counts = dict.fromkeys(("added", "known", "damaged", "declined"), 0)
    added, compiled = [], _compiled(store)
    for key, value in found.items():
        if len(key) != KEY_BYTES or entry.unpack(key, value) is None:
            counts["damaged"] += 1
        elif key in compiled or store.get(key) == value:
            counts["known"] += 1
        elif store.put(key, value):
            added.append(key)
        else:
            counts["declined"] += 1
    counts["added"] = sum(store.get(key) is not None for key in added)
    counts["declined"] += len(added) - counts["added"]  # dropped again, over the budget
    return counts


def _compiled(store) -> set[bytes]:
    """Portable keys of the kernels in a store that the current NVRTC has compiled: a call finds
    these under their exact keys."""
    nvrtc, keys = toolchain.nvrtc_version(), set()
    for key, value in store.items():
        kernel = entry.unpack(key, value)
        if kernel is not None and kernel.meta.get("nvrtc") == nvrtc:
            keys.add(_portable(kernel) or key)
    return keys


def refuse_target(folder: Path, replace: bool, advice: str) -> None:
    """Raises OSError for a folder that has a bundle, unless that is to be replaced, where it says
    the ``advice``, and for a cache."""
    if (folder / FILE).exists() and not replace:
        raise FileExistsError(f"{folder} has a bundle already; {advice}")
    if (folder / LAYOUT).is_dir():
        raise FileExistsError(f"{folder} is a cache; give the bundle a folder of its own")


def make_folder(folder: Path) -> None:
    """Make the folder of a bundle that will be written later. Raises OSError where that would fail,
    and where no process would read it because others may write there."""
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".export-", dir=folder):
            pass
    except OSError as error:
        text = f"no bundle can be written there: {error.strerror}"
        raise OSError(error.errno, text, str(folder)) from error
    _refuse_writable(folder)


def write(folder: Path, kernels: dict[bytes, Entry]) -> None:
    """Write a bundle: equal kernels give equal bytes, and a reader sees the old file or the new.

    Raises OSError.
    """
    folder = Path(folder)
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    pairs = [(key, entry.pack(key, kernels[key])) for key in sorted(kernels)]
    with tempfile.TemporaryDirectory(prefix=".export-", dir=folder) as work:
        compact = Path(work) / FILE
        try:
            _write_compact(Path(work) / "all.mdb", compact, pairs)
        except lmdb.Error as error:
            raise OSError(f"{folder} cannot take the bundle: {error}") from error
        compact.chmod(0o644)
        os.replace(compact, folder / FILE)


def _write_compact(scratch: Path, compact: Path, pairs: list[tuple[bytes, bytes]]) -> None:
    room = ROOM + 2 * sum(len(value) for _, value in pairs)
    path = os.fsencode(scratch)
    env = lmdb.open(path, subdir=False, lock=False, map_size=room, max_dbs=1, lib_version=0)
    with env:
        with env.begin(write=True) as txn:
            kernels = env.open_db(DATABASE, txn=txn)
            for key, value in pairs:
                txn.put(key, value, db=kernels, append=True)
        descriptor = os.open(compact, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            env.copyfd(descriptor, compact=True)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# A cache that this process cannot write. What it holds is read, as from a bundle. Its file system
# is read-only, or it is root's, or the owner has taken the right to write it from themselves. Or
# LMDB has no slot for this process: it tells processes apart by their ids, and processes of two
# containers may have the same one.


class ReadOnlyCache(Bundle):
    """The store of a cache directory, read without LMDB's locks. A ``gate`` is a file that all
    writers hold: with it, the store is read only while nobody writes. None is for a cache without
    one on a file system that is read-only."""

    databases = (b"kernels", b"tuning")

    def __init__(self, store: Path, gate: Path | None):
        super().__init__(store, DATA)
        self._gate = gate

    def get(self, key: bytes) -> bytes | None:
        """A copy of the value under a key, None for a miss. Raises nothing."""
        return self._alone_or_none(super().get, key)

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Every pair, in order of key. Raises nothing."""
        return self._alone_or_none(super().items) or iter(())

    def get_tuning(self, key: bytes) -> bytes | None:
        """A copy of a tuning result, None for a miss. Raises nothing."""
        return self._alone_or_none(self._read, lambda txn: txn.get(key, db=self._tuning))

    def alone(self, verb: Callable, *arguments: object) -> object:
        """verb(*arguments) while nobody writes. Raises OSError if the gate cannot be had."""
        if self._gate is None:
            return verb(*arguments)
        gate = SharedGateHold(self._gate, GATE_TIMEOUT_S)
        with surely(gate), gate as owned:
            if not owned:
                raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), str(self._gate))
            return verb(*arguments)

    def _alone_or_none(self, verb: Callable, *arguments: object) -> object:
        try:
            return self.alone(verb, *arguments)
        except OSError:
            return None


def readable_cache(directory: Path, error: Exception) -> tuple[ReadOnlyCache | None, str]:
    """The cache of a directory whose store could not be opened with this error, and what the error
    means. The cache is None if the error does not leave it readable, or if it is damaged.

    Raises PermissionError for a cache that users other than root and the current one may write, or
    that this one may not read.
    """
    root, meaning = directory / LAYOUT, meaning_of(error)
    denied = getattr(error, "errno", None) in NOT_WRITABLE
    if not denied and not isinstance(error, (lmdb.LockError, lmdb.ReadonlyError)):
        return None, meaning
    data = root / STORE / DATA
    if not permissions.is_there(data):
        return None, meaning
    owners = (0, os.geteuid())
    for part in (directory, root, data.parent):
        permissions.refuse_others(part, os.stat(part), owners)
    permissions.refuse_odd(data, owners)
    gate = root / GATE
    if not gate.exists():
        if not permissions.is_mounted_read_only(data):
            return None, meaning  # whoever begins to write it could not be kept from doing so
        gate = None
    cache = ReadOnlyCache(data.parent, gate)
    problems = cache.alone(walk, data)
    return (None if problems else cache), meaning

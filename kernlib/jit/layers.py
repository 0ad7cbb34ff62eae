"""The places where a compiled kernel may lie: the writable store, then read-only bundles.

A kernel has two keys. The exact one covers NVRTC's version, since an update may fix the code that
it generates; under this key the store keeps what is compiled here. The portable one covers only the
CUDA major version. Bundles keep kernels under it, and so does the store where they were imported.
"""

from __future__ import annotations

import hashlib
import os
import threading
import warnings
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from kernlib import events, settings
from kernlib.canonical import encode
from kernlib.jit import entry, sources, toolchain
from kernlib.jit.entry import Entry
from kernlib.jit.locks import KeyLocks, MemoryLocks
from kernlib.jit.spec import KernelSpec
from kernlib.jit.store import LmdbStore, MemoryStore, locks_directory, open_store


class Request(NamedTuple):
    """A kernel for one target, with the exact and the portable key it is kept under."""

    spec: KernelSpec
    arch: str
    key: bytes
    portable: bytes

    def emit(self, name: str, **fields: object) -> None:
        """Emit an event of this kernel."""
        events.emit(name, self.key.hex(), self.arch, self.spec.description, **fields)


def request_of(spec: KernelSpec, arch: str) -> Request:
    """The kernel with its keys, which are sha256 over all that decides its cubin. They are cached
    until one of these changes, since each step of a first call asks for them."""
    headers = sources.system_includes(spec.source)
    portable = (
        arch,
        entry.SCHEMA,
        sources.digest(spec.source),
        toolchain.OPTIONS,
        toolchain.cuda_major(),
        toolchain.environment(),
    )
    exact = (toolchain.nvrtc_version(), *((toolchain.header_digest(headers),) if headers else ()))
    return _request(spec, id(spec), portable, exact)


@lru_cache(maxsize=64)  # by the spec's id too: Python takes specs for equal that share no key
def _request(spec: KernelSpec, _: int, portable: tuple, exact: tuple) -> Request:
    arch, schema, texts, options, major, environment = portable
    parts = (schema, spec.family, spec.canonical(), arch, texts, options, major, *environment)
    key = hashlib.sha256(encode(parts)).digest()
    return Request(spec, arch, hashlib.sha256(encode((key, *exact))).digest(), key)


class Layers(NamedTuple):
    """The writable store, the locks of its keys, and the bundles that are asked after it."""

    store: LmdbStore | MemoryStore
    locks: KeyLocks | MemoryLocks
    bundles: tuple = ()

    def find(self, kernel: Request) -> Entry | None:
        """The first undamaged entry of a kernel in the store and the bundles, or None."""
        for where, key, value in self._values(kernel):
            hit = None if value is None else entry.unpack(key, value)
            if hit is not None:
                at = kernel._replace(key=key)  # the key by which `kernlib cache show` finds it
                at.emit("hit", where=where)
                return hit
        return None

    def _values(self, kernel: Request) -> Iterator[tuple[str, bytes, bytes | None]]:
        for key in (kernel.key, kernel.portable):
            yield self.kind, key, self.store.get(key)
        if kernel.portable not in _refused:
            for bundle in self.bundles:
                yield "bundle", kernel.portable, bundle.get(kernel.portable)

    def keep(self, kernel: Request, made: Entry) -> None:
        """Put a compiled kernel into the store, which may decline it."""
        meta = {**made.meta, "portable": kernel.portable.hex()}
        value = entry.pack(kernel.key, Entry(made.kernel, made.cubin, meta))
        is_kept = self.store.put(kernel.key, value)
        kernels, freed = self.store.take_evicted()
        if kernels:
            events.emit("evict", "", "", "", kernels=kernels, bytes=freed, where=self.kind)
        if is_kept:
            kernel.emit("store", bytes=len(value), where=self.kind)

    def drop(self, kernel: Request) -> None:
        """Delete a kernel from the store, and from now on ignore it in the bundles."""
        _refused.add(kernel.portable)
        for key in (kernel.key, kernel.portable):
            self.store.delete(key)

    @property
    def kind(self) -> str:
        """Where the store keeps its entries, as events say it: "memory" or "store"."""
        return "memory" if isinstance(self.store, MemoryStore) else "store"


_opening = threading.RLock()
_layers: tuple[tuple, Layers] | None = None
_bundles: dict[tuple[str, str], object] = {}  # by path and fingerprint; None if it is unusable
_opening_bundles: dict[tuple[str, str], object] = {}
_refused: set[bytes] = set()  # portable keys of kernels that the driver has refused


def layers() -> Layers:
    """The layers of the current settings, opened when they are first used."""
    global _layers
    current = settings.current()
    place = (current.cache_dir, current.cache_bytes)
    with _opening:
        if _layers is None or _layers[0] != place:
            _layers = (place, _open(*place))
        return _layers[1]


def _open(directories: tuple[Path, ...], budget: int) -> Layers:
    store = open_store(directories[0], budget)
    memory = isinstance(store, MemoryStore)
    locks = MemoryLocks() if memory else KeyLocks(locks_directory(store.directory))
    bundles = (_open_bundle(folder) for folder in directories[1:])
    return Layers(store, locks, tuple(bundle for bundle in bundles if bundle is not None))


def _open_bundle(folder: Path):
    """The bundle in a folder, opened once for each file and process. None, after a warning, for one
    that cannot be used."""
    from kernlib.jit import bundle  # few processes need it
    from kernlib.jit.open_stores import fingerprint

    real = str(folder)
    try:
        real = os.path.realpath(folder)
        name = (real, fingerprint(folder / bundle.FILE))
    except OSError as error:  # opening it meets this too
        name = (real, str(error))
    if name not in _bundles:
        # Kept before it is opened: if an interrupt made us lose an open one, LMDB would refuse to
        # open it again.
        opening = _opening_bundles.setdefault(name, bundle.Bundle(Path(name[0])))
        try:
            _bundles[name] = bundle.open_bundle(opening.folder, opening)
        except OSError as error:
            _bundles[name] = None
            warnings.warn(
                f"{folder} of KERNLIB_CACHE_DIR is passed over: {error}",
                RuntimeWarning,
                stacklevel=2,
            )
        del _opening_bundles[name]
    return _bundles[name]


def _before_fork() -> None:
    _opening.acquire()  # in the child LMDB would refuse a file that a thread was just opening


def _after_in_parent() -> None:
    if _opening._is_owned():  # not if an interrupt came before
        _opening.release()


def _after_in_child() -> None:
    global _opening, _layers
    _opening, _layers = threading.RLock(), None


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)

"""From a KernelSpec to a loaded kernel: memory, store, or one compile among all who want it.

Keys are content hashes, an entry is one value, a broken cache is a miss. Nothing here knows a
tensor or a family, and nothing touches the driver but :func:`load`.
"""

from __future__ import annotations

import hashlib
import os
import threading
from typing import NamedTuple

from kernlib import events, settings
from kernlib.canonical import encode
from kernlib.errors import CompileError, NotCachedError
from kernlib.jit import entry, sources, toolchain
from kernlib.jit.entry import Entry
from kernlib.jit.flights import Flights
from kernlib.jit.locks import KeyLocks, MemoryLocks
from kernlib.jit.spec import KernelSpec
from kernlib.jit.store import MemoryStore, locks_directory, open_store

# What the driver says of a cubin that is none, or one for another device.
REJECTED = ("INVALID_IMAGE", "NO_BINARY_FOR_GPU", "INVALID_PTX", "INVALID_SOURCE", "NOT_FOUND")
STATIC_SHARED_LIMIT = 48 * 1024  # what a launch may use without asking the driver first


class Kernel(NamedTuple):
    """A kernel of one device, ready to launch. ``function`` is the CUfunction as an int; ``owner``
    keeps it alive."""

    spec: KernelSpec
    key: str
    arch: str
    function: int
    owner: object


_kernels: dict[tuple[int, bytes], Kernel] = {}
_loads: Flights = Flights()
_builds: Flights = Flights()
_failures: dict[bytes, tuple] = {}  # arguments of CompileErrors: a raised one holds its callers
_opening = threading.Lock()
_layer: tuple | None = None


def digest(spec: KernelSpec, arch: str) -> bytes:
    """The key of a kernel in the writable store: sha256 over all that decides its cubin."""
    parts = (
        entry.SCHEMA,
        spec.family,
        spec.canonical(),
        arch,
        sources.digest(spec.source),
        toolchain.OPTIONS,
        toolchain.nvrtc_version(),
    )
    return hashlib.sha256(encode(parts)).digest()


def loaded(spec: KernelSpec, device: int, arch: str) -> Kernel | None:
    """The kernel if this process has it loaded on ``device`` already."""
    return _kernels.get((device, digest(spec, arch)))


def kernel(spec: KernelSpec, device: int, arch: str) -> Kernel:
    """The kernel for ``device``, which must be current, loaded from the store or compiled.

    Raises CompileError, UnsupportedError or NotCachedError; never for a bad cache.
    """
    key = digest(spec, arch)
    found = _kernels.get((device, key))
    return found or _loads.do((device, key), lambda: _publish(spec, key, device, arch))


def build(spec: KernelSpec, arch: str) -> Entry:
    """The compiled entry for ``arch``: from the store, or compiled once and kept. Needs no GPU.

    Raises CompileError (remembered: the same source is not tried twice in a process),
    UnsupportedError, or NotCachedError under KERNLIB_ASSERT_CACHED.
    """
    key = digest(spec, arch)
    return _builds.do(key, lambda: _find_or_compile(spec, key, arch))


def forget() -> None:
    """Drop loaded kernels and remembered failures; the store stays."""
    _kernels.clear()
    _failures.clear()


def layer() -> tuple:
    """The writable store of the current settings and its locks, opened at the first use."""
    global _layer
    current = settings.current()
    wanted = (current.cache_dir[0], current.cache_bytes)
    with _opening:
        if _layer is None or _layer[0] != wanted:
            _layer = (wanted, *_open_layer(*wanted))
        return _layer[1:]


def _open_layer(directory, budget) -> tuple:
    store = open_store(directory, budget)
    locks = (
        MemoryLocks() if isinstance(store, MemoryStore) else KeyLocks(locks_directory(directory))
    )
    return store, locks


def _find_or_compile(spec: KernelSpec, key: bytes, arch: str) -> Entry:
    name = key.hex()
    events.emit("lookup", name, arch, spec.description)
    store, locks = layer()
    found = _read(store, key, spec, arch)
    if found is not None:
        return found
    if key in _failures:
        raise CompileError(*_failures[key])
    if settings.current().assert_cached:
        raise NotCachedError(
            f"KERNLIB_ASSERT_CACHED is set and {spec.description} for {arch} is not in the cache"
        )

    def waiting() -> None:
        events.emit("wait", name, arch, spec.description, pid=os.getpid())

    with locks.hold(key, settings.current().lock_timeout, waiting):
        return _read(store, key, spec, arch) or _compile(store, spec, key, arch)


def _read(store, key: bytes, spec: KernelSpec, arch: str) -> Entry | None:
    """What the store holds under ``key``; anything odd is a miss."""
    value = store.get(key)
    found = None if value is None else entry.unpack(key, value)
    if found is not None:
        events.emit("hit", key.hex(), arch, spec.description, where=_where(store))
    return found


def _where(store) -> str:
    return "memory" if isinstance(store, MemoryStore) else "store"


def _compile(store, spec: KernelSpec, key: bytes, arch: str) -> Entry:
    from kernlib.jit import compiler  # 4 ms that a hit does not pay

    name = key.hex()
    try:
        made = compiler.compile_spec(spec, arch)
    except CompileError as error:
        _failures[key] = error.args
        events.emit("failed", name, arch, spec.description)
        raise
    report = {f: made.meta[f] for f in ("registers", "spill_bytes", "shared_bytes")}
    events.emit("compile", name, arch, spec.description, ms=made.meta["compile_ms"], **report)
    value = entry.pack(key, made)
    if store.put(key, value):
        events.emit("store", name, arch, spec.description, bytes=len(value), where=_where(store))
    return made


def _publish(spec: KernelSpec, key: bytes, device: int, arch: str) -> Kernel:
    found = _kernels.get((device, key))
    if found is None:
        found = _kernels[device, key] = _load_or_rebuild(spec, key, device, arch)
    return found


def _load_or_rebuild(spec: KernelSpec, key: bytes, device: int, arch: str) -> Kernel:
    try:
        return load(build(spec, arch), spec, key, device, arch)
    except Exception as error:
        if not any(reason in str(error) for reason in REJECTED):
            raise
    # Whole by its checksum and refused by the driver: the store holds what we did not make.
    store, _ = layer()
    store.delete(key)
    return load(build(spec, arch), spec, key, device, arch)


def load(built: Entry, spec: KernelSpec, key: bytes, device: int, arch: str) -> Kernel:
    """Load a cubin on ``device``, which must be current, and raise its shared-memory limit."""
    core = toolchain.cuda_core()
    from cuda.bindings import driver

    owner = core.ObjectCode.from_cubin(built.cubin).get_kernel(built.kernel)
    # The function itself, so that a lazy driver loads it now and not inside a graph's capture.
    function = _check(driver.cuKernelGetFunction(int(owner.handle)))
    if spec.shared_bytes > STATIC_SHARED_LIMIT:
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(function, limit, spec.shared_bytes))
    events.emit("load", key.hex(), arch, spec.description, device=device, bytes=len(built.cubin))
    return Kernel(spec, key.hex(), arch, int(function), owner)


def _check(result: tuple):
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA driver: {status.name}")
    return values[0] if values else None


def _after_in_child() -> None:
    global _opening, _layer
    _opening, _layer = threading.Lock(), None
    _kernels.clear()


os.register_at_fork(after_in_child=_after_in_child)

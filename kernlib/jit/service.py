"""From a KernelSpec to a loaded kernel: from memory, from the store, or by a compile, which all
threads and processes that want the kernel share.

Keys are hashes of contents, an entry is one value, and a broken cache is a miss. Nothing here knows
a tensor or a family, and only :func:`load` touches the driver.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from kernlib import settings
from kernlib.errors import CompileError, NotCachedError
from kernlib.jit import toolchain
from kernlib.jit.entry import Entry
from kernlib.jit.layers import Layers, Request, layers, request_of
from kernlib.jit.locks import ForkGuard, surely
from kernlib.jit.single_flight import SingleFlight
from kernlib.jit.spec import KernelSpec

# Parts of the driver's errors for what is no cubin, or a cubin for another device.
REJECTED = ("INVALID_IMAGE", "NO_BINARY_FOR_GPU", "INVALID_PTX", "INVALID_SOURCE", "NOT_FOUND")
# Dynamic shared memory up to which the driver need not be asked to permit it. It permits 48 KB by
# itself, but that includes a kernel's static shared memory, for which this leaves 16 KB.
UNASKED_SHARED_BYTES = 32 * 1024


class Kernel(NamedTuple):
    """A kernel of one device, ready to launch until the process ends: its library is never
    unloaded. ``function`` is the CUfunction as an int."""

    spec: KernelSpec
    key: str
    arch: str
    function: int


_kernels: dict[tuple[int, bytes], Kernel] = {}
_loads: SingleFlight = SingleFlight()
_builds: SingleFlight = SingleFlight()
_ahead: dict[bytes, Entry] = {}  # built for a load to come
_unforked = ForkGuard()  # around NVRTC, and around imports of many modules
# What to call before a kernel is compiled that is in no cache.
missed: ContextVar[Callable[[], None] | None] = ContextVar("kernlib_missed", default=None)
# Arguments of CompileErrors by key, not the errors: a raised one keeps the frames of its callers.
_failures: dict[bytes, tuple] = {}


def digest(spec: KernelSpec, arch: str) -> bytes:
    """The key that a kernel compiled here is kept under."""
    return request_of(spec, arch).key


def loaded(spec: KernelSpec, device: int, arch: str) -> Kernel | None:
    """The kernel if this process has it loaded on ``device`` already."""
    return _kernels.get((device, digest(spec, arch)))


def kernel(spec: KernelSpec, device: int, arch: str) -> Kernel:
    """The kernel for ``device``, which must be current, loaded from the store or compiled.

    Raises CompileError, UnsupportedError or NotCachedError; never for a bad cache.
    """
    request = request_of(spec, arch)
    ready = _kernels.get((device, request.key))
    return ready or _loads.do((device, request.key), lambda: _publish(request, device))


def build(spec: KernelSpec, arch: str) -> Entry:
    """The compiled entry for ``arch``: from the store or a bundle, or compiled once and kept. Needs
    no GPU.

    Raises CompileError (remembered: the same source is not tried twice in a process),
    UnsupportedError, or NotCachedError under KERNLIB_ASSERT_CACHED.
    """
    request = request_of(spec, arch)
    return _builds.do(request.key, lambda: _find_or_compile(request))


def build_ahead(spec: KernelSpec, arch: str) -> None:
    """:func:`build`, and keep the entry for the next load of the kernel, which then does not look
    for it again."""
    _ahead[digest(spec, arch)] = build(spec, arch)


@contextmanager
def apart_from_forks() -> Iterator[None]:
    """A block of imports and the like for whose end a fork of another thread waits."""
    work = _unforked.work()
    with surely(work), work:
        yield


def forget() -> None:
    """Drop loaded kernels, entries built ahead and remembered failures. The store stays."""
    _kernels.clear()
    _ahead.clear()
    _failures.clear()


def _find_or_compile(asked: Request) -> Entry:
    asked.emit("lookup")
    hit = layers().find(asked)
    if hit is not None:
        return hit
    if asked.key in _failures:
        raise CompileError(*_failures[asked.key])
    current = settings.current()
    if current.assert_cached:
        raise NotCachedError(
            f"KERNLIB_ASSERT_CACHED is set and {asked.spec.description} for {asked.arch} is not in "
            "the cache; make it with `kernlib compile` or without that variable, or name a bundle "
            "that holds it in KERNLIB_CACHE_DIR"
        )
    notify = missed.get()
    if notify is not None:
        notify()

    def waiting() -> None:
        asked.emit("wait", pid=os.getpid())

    lock = layers().locks.hold(asked.key, current.lock_timeout, waiting)
    with surely(lock), lock:
        return layers().find(asked) or _compile(layers(), asked)


def _compile(into: Layers, asked: Request) -> Entry:
    try:
        work = _unforked.work()
        with surely(work), work:
            from kernlib.jit import compiler  # 4 ms that a hit does not pay

            compiled = compiler.compile_spec(asked.spec, asked.arch)
    except CompileError as error:
        if not getattr(error, "passing", False):
            _failures[asked.key] = error.args
        asked.emit("failed")
        raise
    report = {f: compiled.meta[f] for f in ("registers", "spill_bytes", "shared_bytes")}
    asked.emit("compile", ms=compiled.meta["compile_ms"], **report)
    now = request_of(asked.spec, asked.arch)  # whose NVRTC is the one that was loaded
    if now.portable == asked.portable:  # else the sources have been read again meanwhile
        into.keep(now, compiled)
    return compiled


def _publish(asked: Request, device: int) -> Kernel:
    ready = _kernels.get((device, asked.key))
    if ready is None:
        ready = _kernels[device, asked.key] = _load_or_rebuild(asked, device)
    return ready


def _load_or_rebuild(asked: Request, device: int) -> Kernel:
    built = _ahead.pop(asked.key, None) or build(asked.spec, asked.arch)
    try:
        return load(built, asked, device)
    except Exception as error:
        if not any(reason in str(error) for reason in REJECTED):
            raise
    # The entry is whole by its checksum, but the driver refuses it: the cache holds what this
    # process would not make.
    layers().drop(asked)
    return load(build(asked.spec, asked.arch), asked, device)


def load(built: Entry, asked: Request, device: int) -> Kernel:
    """Load a cubin on ``device``, which must be current, and permit its kernel the shared memory
    that it needs. Raises UnsupportedError without the driver's bindings, RuntimeError for an error
    of the driver."""
    work = _unforked.work()
    with surely(work), work:
        driver = toolchain.cuda_driver()
    spec = asked.spec
    library = _check(driver.cuLibraryLoadData(built.cubin, [], [], 0, [], [], 0))
    kernel = _check(driver.cuLibraryGetKernel(library, built.kernel.encode()))
    # Asking for the function has a lazy driver load it now, not while a CUDA graph is captured.
    function = _check(driver.cuKernelGetFunction(kernel))
    if spec.shared_bytes > UNASKED_SHARED_BYTES:
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(function, limit, spec.shared_bytes))
    asked.emit("load", device=device, bytes=len(built.cubin))
    return Kernel(spec, asked.key.hex(), asked.arch, int(function))


def _check(result: tuple):
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA driver: {status.name}")
    return values[0] if values else None


def _after_in_child() -> None:
    """Forget the parent's kernels: a child cannot use the parent's driver."""
    _kernels.clear()
    _unforked.__init__()


# Registered last, so it runs first: nothing else is held while a fork waits for a compile.
os.register_at_fork(
    before=_unforked.before_fork,
    after_in_parent=_unforked.after_in_parent,
    after_in_child=_after_in_child,
)

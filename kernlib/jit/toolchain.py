"""The compiler as pip installed it: NVRTC's version, CUDA headers, and what to do without them."""

from __future__ import annotations

import email.parser  # noqa: F401  metadata imports it when asked, where no fork waits for that
import os
import threading
from functools import lru_cache
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType

from kernlib.errors import INSTALL, UnsupportedError
from kernlib.jit import sources

NVRTC_WHEELS = {"nvidia-cuda-nvrtc": "13", "nvidia-cuda-nvrtc-cu12": "12"}  # and their majors
# What is imported to compile, and the packages that have it.
_PACKAGES = {
    "cuda.pathfinder": "cuda-pathfinder",
    "cuda.bindings": "cuda-bindings",
    "cuda.core": "cuda-core",
}
UNKNOWN_VERSION = "probe-failed"
STANDARD = "c++17"
OPTIONS = (STANDARD, "no-source-include")  # of every compile, for the key
# What NVRTC and ptxas read of the environment and generate other code by. They read more, which
# leaves the code as it is, and no search path for headers, such as CPATH.
CODE_VARIABLES = (
    "FINALIZER_USE_LEGACY_ELF_BUILDER",
    "NVRTC_APPEND_FLAGS",
    "NVRTC_PREPEND_FLAGS",
    "NV_NVVM_VERSION",
)


def missing(what: str, error: Exception) -> UnsupportedError:
    """The error that says which extra brings a missing piece."""
    return UnsupportedError(
        f"kernels cannot be compiled or launched without {what} ({error}). To install: {INSTALL}"
    )


def absent() -> str:
    """What is not there of what compiling needs, such as ``cuda-bindings and NVRTC``, or "". An
    import of cuda.core fails without cuda.bindings and says no more than that."""
    names = [package for name, package in _PACKAGES.items() if not _is_found(name)]
    names += ["NVRTC"] if nvrtc_version() == UNKNOWN_VERSION else []
    *others, last = names or [""]
    return f"{', '.join(others)} and {last}" if others else last


def _is_found(name: str) -> bool:
    from importlib.util import find_spec  # of what goes wrong only

    try:
        return find_spec(name) is not None
    except ImportError:  # not even a folder cuda
        return False
    except ValueError:  # it is loaded, and has no spec
        return True


_importing = threading.RLock()  # an import runs what finalizers there are, and may come back


def cuda_core() -> ModuleType:
    """The module cuda.core, which compiles; 70 ms that a kernel from the cache does without. Raises
    UnsupportedError, naming the extra, when it cannot be imported.

    NOTE: cuda.core replaces its own ``__spec__`` half-way, so that a second thread importing it
    sees it unfinished; hence one lock around every import.
    """
    return _imported("cuda.core")


def cuda_driver() -> ModuleType:
    """The module cuda.bindings.driver, which loads and launches. Raises as :func:`cuda_core`."""
    return _imported("cuda.bindings.driver")


def _imported(name: str) -> ModuleType:
    with _importing:
        try:
            return import_module(name)
        except ImportError as error:
            raise missing(absent() or name, error) from error


def _after_in_child() -> None:
    global _importing
    _importing = threading.RLock()


os.register_at_fork(after_in_child=_after_in_child)


@lru_cache(maxsize=1)
def _wheel_version() -> str:
    """The version of the wheel whose NVRTC cuda.bindings loads. Both majors may be installed, as
    torch brings one; the bindings decide."""
    bindings = _version_of("cuda-bindings").partition(".")[0]
    wheels = [wheel for wheel in NVRTC_WHEELS if bindings in (UNKNOWN_VERSION, NVRTC_WHEELS[wheel])]
    found = [_version_of(wheel) for wheel in wheels]
    return next((version for version in found if version != UNKNOWN_VERSION), UNKNOWN_VERSION)


def _version_of(wheel: str) -> str:
    try:
        return metadata.version(wheel)
    except metadata.PackageNotFoundError:
        return UNKNOWN_VERSION


_loaded: str | None = None  # where it is not the wheel's


def nvrtc_version() -> str:
    """NVRTC's version from the wheel's metadata, 2 ms, without loading it (200 ms); that of the
    loaded one, once it has turned out to be another.

    ``probe-failed`` where no wheel is installed: it enters keys, where it must not look like a
    version.
    """
    return _loaded or _wheel_version()


def confirm_nvrtc() -> None:
    """Compare the loaded NVRTC with the wheel: a search path may have brought another."""
    global _loaded
    version = nvrtc_version()
    if version != UNKNOWN_VERSION:
        from cuda.bindings import nvrtc  # which a compile has loaded

        status, *numbers = nvrtc.nvrtcVersion()
        if int(status) == 0 and [str(number) for number in numbers] != version.split(".")[:2]:
            _loaded = ".".join(map(str, numbers))
            cuda_major.cache_clear()


def nvrtc_caches() -> bool:
    """Whether the NVRTC that compiles, which this loads, has a cache of its own, as from 12.9 on;
    older ones refuse the option against it."""
    from cuda.bindings import nvrtc

    status, *numbers = nvrtc.nvrtcVersion()
    return int(status) != 0 or numbers >= [12, 9]


@lru_cache(maxsize=1)
def cuda_major() -> str:
    """The CUDA major whose cubins are made and loaded here: NVRTC's, or where there is none that
    of the driver's bindings, which run what others have compiled."""
    version = nvrtc_version()
    if version == UNKNOWN_VERSION:
        version = _version_of("cuda-bindings")
    return version.partition(".")[0]


def environment() -> tuple[str, ...]:
    """Those of CODE_VARIABLES that are set, with their values, for the key; mostly none."""
    return tuple(f"{name}={os.environ[name]}" for name in CODE_VARIABLES if name in os.environ)


@lru_cache(maxsize=64)
def header_digest(names: frozenset[str]) -> str:
    """Digest of the CUDA headers of these names and all they include, read once a process: of
    their contents, as a toolkit on the machine has no version of a wheel. ``probe-failed`` where
    there are none, which a kernel that is found needs not."""
    try:
        return sources.folder_digest(Path(header_directory()), names).hex()
    except (UnsupportedError, OSError):
        return UNKNOWN_VERSION


@lru_cache(maxsize=1)
def header_directory() -> str:
    """The folder of ``cuda_fp16.h`` and its like in the CUDA runtime's wheel.

    Raises UnsupportedError, naming the extra, when there is none.
    """
    try:
        from cuda.pathfinder import find_nvidia_header_directory

        directory = find_nvidia_header_directory("cudart")
    except ImportError as error:
        raise missing("cuda-pathfinder", error) from error
    if directory is None:
        raise missing("the CUDA headers", FileNotFoundError("cuda_fp16.h"))
    return directory

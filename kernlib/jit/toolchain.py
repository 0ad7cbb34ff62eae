"""The compiler as pip installed it: NVRTC's version, CUDA's headers, and errors where they are
missing."""

from __future__ import annotations

import email.parser  # noqa: F401  which metadata imports later, where no fork would wait for it
import os
import threading
from functools import lru_cache
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType

from kernlib.errors import INSTALL, UnsupportedError
from kernlib.jit import sources

# The wheels of NVRTC, and their major versions.
NVRTC_WHEELS = {"nvidia-cuda-nvrtc": "13", "nvidia-cuda-nvrtc-cu12": "12"}
# The modules that compiling imports, and the packages that have them.
_PACKAGES = {
    "cuda.pathfinder": "cuda-pathfinder",
    "cuda.bindings": "cuda-bindings",
    "cuda.core": "cuda-core",
}
UNKNOWN_VERSION = "probe-failed"
STANDARD = "c++17"
OPTIONS = (STANDARD, "no-source-include")  # of every compile; they enter the key
# Environment variables that change the code which NVRTC and ptxas generate. The others that they
# read leave the code as it is, and search paths for headers, such as CPATH, they do not read.
CODE_VARIABLES = (
    "FINALIZER_USE_LEGACY_ELF_BUILDER",
    "NVRTC_APPEND_FLAGS",
    "NVRTC_PREPEND_FLAGS",
    "NV_NVVM_VERSION",
)


def missing(what: str, error: Exception) -> UnsupportedError:
    """The error for a missing piece, which says which extra to install."""
    return UnsupportedError(
        f"kernels cannot be compiled or launched without {what} ({error}). To install: {INSTALL}"
    )


def not_loaded(error: Exception) -> UnsupportedError:
    """The error for an NVRTC that is not there, or that is and cannot be loaded."""
    if absent():
        return missing("NVRTC", error)
    return UnsupportedError(
        f"NVRTC {nvrtc_version()} is installed, and cannot be loaded ({error}): install its wheel "
        "again, or name the folder of libnvrtc.so in LD_LIBRARY_PATH"
    )


def absent() -> str:
    """The packages that compiling needs and that are not there, such as ``cuda-bindings and
    NVRTC``, or "". The import of cuda.core by itself fails without saying that cuda.bindings is
    missing."""
    names = [package for name, package in _PACKAGES.items() if not _is_found(name)]
    names += ["NVRTC"] if nvrtc_version() == UNKNOWN_VERSION else []
    *rest, last = names or [""]
    return f"{', '.join(rest)} and {last}" if rest else last


def _is_found(name: str) -> bool:
    from importlib.util import find_spec  # only errors need it

    try:
        return find_spec(name) is not None
    except ImportError:  # there is no package cuda at all
        return False
    except ValueError:  # it is loaded, and has no __spec__
        return True


_importing = threading.RLock()  # reentrant, since an import may run finalizers that import too


def cuda_core() -> ModuleType:
    """The module cuda.core, which compiles. Its import takes 70 ms, which a kernel from the cache
    does not pay. Raises UnsupportedError, naming the extra, when it cannot be imported.

    NOTE: cuda.core replaces its own ``__spec__`` during its import, so that a second thread that
    imports it would get it unfinished. Hence one lock around every import.
    """
    return _imported("cuda.core")


def cuda_driver() -> ModuleType:
    """The module cuda.bindings.driver, which loads and launches. Raises what :func:`cuda_core`
    does."""
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
    return _version_of(_wheel() or "")


def _wheel() -> str | None:
    """The wheel whose NVRTC cuda.bindings loads; None without one. NVRTC of both major versions may
    be installed, since torch brings one; the major version of the bindings decides."""
    bindings = _version_of("cuda-bindings").partition(".")[0]
    wheels = [wheel for wheel in NVRTC_WHEELS if bindings in (UNKNOWN_VERSION, NVRTC_WHEELS[wheel])]
    return next((wheel for wheel in wheels if _version_of(wheel) != UNKNOWN_VERSION), None)


def _version_of(wheel: str) -> str:
    try:
        return metadata.version(wheel)
    except (metadata.PackageNotFoundError, ValueError):  # the second of a name that is empty
        return UNKNOWN_VERSION


_loaded: str | None = None  # the version of the loaded NVRTC, if that is not the wheel's


def nvrtc_version() -> str:
    """NVRTC's version, from the metadata of its wheel: that takes 2 ms, and loading NVRTC 200. Once
    another NVRTC has turned out to be loaded, it is the version of that.

    ``probe-failed`` where no wheel is installed. This enters keys, where it must not look like a
    version.
    """
    return _loaded or _wheel_version()


def confirm_nvrtc() -> None:
    """Compare the loaded NVRTC with the wheel: a search path may have led to another."""
    global _loaded
    version = nvrtc_version()
    if version != UNKNOWN_VERSION:
        from cuda.bindings import nvrtc  # the compile has loaded it

        status, *numbers = nvrtc.nvrtcVersion()
        if int(status) == 0 and [str(number) for number in numbers] != version.split(".")[:2]:
            _loaded = ".".join(map(str, numbers))
            cuda_major.cache_clear()


def nvrtc_caches() -> bool:
    """Whether NVRTC, which this loads, has a cache of its own, as it has from 12.9 on. Older ones
    refuse the option that turns it off. Raises OSError or RuntimeError where NVRTC is not found."""
    from cuda.bindings import nvrtc

    try:
        status, *numbers = nvrtc.nvrtcVersion()
    except (OSError, RuntimeError):  # cuda.bindings looks into site-packages, and not into sys.path
        if not _load_wheel():
            raise
        status, *numbers = nvrtc.nvrtcVersion()
    return int(status) != 0 or numbers >= [12, 9]


def _load_wheel() -> bool:
    """Load the NVRTC of its wheel, wherever that is on ``sys.path``: whoever asks for NVRTC then
    gets this one. False where its files are not known. Raises OSError for a file that is broken."""
    import ctypes

    files = metadata.files(_wheel() or "cuda-bindings") or ()
    paths = [file.locate() for file in files if file.name.startswith("libnvrtc.so.")]
    # Which some versions look for in their own folder, and others only among what is loaded.
    builtins = [file.locate() for file in files if file.name.startswith("libnvrtc-builtins.so.")]
    for path in [*builtins, *paths]:
        ctypes.CDLL(str(path))
    return bool(paths)


@lru_cache(maxsize=1)
def cuda_major() -> str:
    """The CUDA major version whose cubins are made and loaded here: that of NVRTC, or without NVRTC
    that of the driver's bindings, which run kernels compiled elsewhere."""
    version = nvrtc_version()
    if version == UNKNOWN_VERSION:
        version = _version_of("cuda-bindings")
    return version.partition(".")[0]


def environment() -> tuple[str, ...]:
    """The CODE_VARIABLES that are set, with their values, for the key. Mostly none is."""
    return tuple(f"{name}={os.environ[name]}" for name in CODE_VARIABLES if name in os.environ)


@lru_cache(maxsize=64)
def header_digest(names: frozenset[str]) -> str:
    """Digest of the contents of these CUDA headers and of all that they include, which are read
    once a process. It covers contents because the headers of an installed toolkit have no wheel's
    version. ``probe-failed`` where there are no headers: a kernel from the cache needs none."""
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

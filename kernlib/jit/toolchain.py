"""The compiler as pip installed it: NVRTC's version, CUDA headers, and what to do without them."""

from __future__ import annotations

import os
import threading
from functools import lru_cache
from importlib import import_module, metadata
from pathlib import Path
from types import ModuleType

from kernlib.errors import UnsupportedError
from kernlib.jit import sources

NVRTC_WHEELS = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
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
        f"{what} is needed to compile or launch kernels and cannot be used ({error}). Install it "
        "with: pip install 'kernlib[cu13]' (driver 580 or later) or 'kernlib[cu12]'"
    )


_importing = threading.Lock()


def cuda_core() -> ModuleType:
    """The module cuda.core. Raises UnsupportedError, naming the extra, when it cannot be imported.

    NOTE: cuda.core replaces its own ``__spec__`` half-way, so that a second thread importing it
    sees it unfinished; hence one lock around every import.
    """
    with _importing:
        try:
            return import_module("cuda.core")
        except ImportError as error:
            raise missing("cuda.core", error) from error


def _after_in_child() -> None:
    global _importing
    _importing = threading.Lock()


os.register_at_fork(after_in_child=_after_in_child)


@lru_cache(maxsize=1)
def nvrtc_version() -> str:
    """NVRTC's version from the wheel's metadata, 2 ms, without loading it (200 ms).

    ``probe-failed`` where no wheel is installed: it enters keys, where it must not look like a
    version.
    """
    for wheel in NVRTC_WHEELS:
        try:
            return metadata.version(wheel)
        except metadata.PackageNotFoundError:
            continue
    return UNKNOWN_VERSION


def nvrtc_caches() -> bool:
    """Whether NVRTC has a cache of its own, as from 12.9 on; older ones refuse the option."""
    numbers = [int(part) for part in nvrtc_version().split(".")[:2] if part.isdecimal()]
    return numbers >= [12, 9] or not numbers


@lru_cache(maxsize=1)
def cuda_major() -> str:
    """The CUDA major whose cubins are made and loaded here: NVRTC's, or where there is none that
    of the driver's bindings, which run what others have compiled."""
    version = nvrtc_version()
    if version == UNKNOWN_VERSION:
        try:
            version = metadata.version("cuda-bindings")
        except metadata.PackageNotFoundError:
            return UNKNOWN_VERSION
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

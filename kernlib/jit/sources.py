"""Where the CUDA sources lie, and the digest of all that one kernel includes."""

from __future__ import annotations

import hashlib
from functools import cache, lru_cache
from pathlib import Path

from kernlib.errors import KernlibError

_OWN, _SYSTEM = '#include "', "#include <"


@lru_cache(maxsize=1)
def root() -> Path:
    """The folder of CUDA sources: inside the installed package, or beside it in a checkout.

    Raises KernlibError when neither is there.
    """
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "kernel_sources", package.parent / "kernel_sources"):
        if (folder / "common").is_dir():
            return folder
    raise KernlibError(f"kernel_sources is missing beside {package}; reinstall kernlib")


@cache
def closure(source: str) -> tuple[str, ...]:
    """Names, relative to :func:`root`, of all files that ``source`` includes, sorted."""
    found: set[str] = set()
    waiting = _included(source, _OWN)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _included(_read(name), _OWN)
    return tuple(sorted(found))


def system_includes(source: str) -> frozenset[str]:
    """CUDA headers (``<cuda_fp16.h>`` ...) that ``source`` and its closure ask for."""
    texts = (source, *(_read(name) for name in closure(source)))
    return frozenset(name for text in texts for name in _included(text, _SYSTEM))


def _included(text: str, start: str) -> list[str]:
    """Names behind the include lines that begin with ``start``."""
    lines = (line for line in text.splitlines() if line.startswith(start))
    return [line[len(start) :].split('"')[0].split(">")[0] for line in lines]


@cache
def _digest_of(names: tuple[str, ...]) -> bytes:
    digest = hashlib.sha256()
    for name in names:
        digest.update(f"{name}\0{len(_read(name))}\0".encode())
        digest.update(_read(name).encode())
    return digest.digest()


def digest(source: str) -> bytes:
    """Digest by content of all files that ``source`` includes; read once a process."""
    return _digest_of(closure(source))


@cache
def _read(name: str) -> str:
    return (root() / name).read_text()


def forget() -> None:
    """Read the files anew: for those who edit kernels in a running process."""
    for cached in (root, closure, _digest_of, _read):
        cached.cache_clear()

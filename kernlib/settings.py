"""Every environment variable kernlib reads, typed, read once at first use through `current()`.

Reading raises ValueError for a value that cannot be used, naming the variable, the value and what
would do; nothing here touches the disk.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

MAP_BYTES = 1 << 30  # one constant map: about 14 k cubins of 60 KB, and no need to resize it
MAX_CACHE_BYTES = MAP_BYTES * 8 // 10  # in a fuller map it is hard to free pages, see jit/store.py
MIN_CACHE_BYTES = 1 << 20
DEFAULT_CACHE_BYTES = 512 << 20
DEFAULT_LOCK_TIMEOUT_S = 60.0

CACHE_ADVICE = (
    "Set KERNLIB_CACHE_DIR to a local folder of your own; behind a colon it takes bundles, which "
    "bring along kernels of another user or machine: `kernlib cache export BUNDLE` there writes one"
)

PREFIX = "KERNLIB_"
SHOWN_CHARACTERS = 100  # of a value that is refused
MOST_DIGITS = 30

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = r"(?i)(?P<number>\d+)\s*(?P<unit>[KMG]?)(?:I?B)?"  # compiled when used, see errors.py
_BOOLS = {"1": True, "true": True, "yes": True, "on": True}
_BOOLS |= {"0": False, "false": False, "no": False, "off": False}


class Variable(NamedTuple):
    """One row of the table that the documentation and the command line print: the ``name`` of a
    variable of the environment, its ``default`` as a text, and its ``meaning``."""

    name: str
    default: str
    meaning: str


VARIABLES = (
    Variable(
        "KERNLIB_CACHE_DIR",
        "the user's cache folder",
        "where compiled kernels are kept: a folder of your own on a local disk; what follows it, "
        "behind colons, are bundles to read from",
    ),
    Variable(
        "KERNLIB_CACHE_BYTES",
        "512M",
        "size at which the longest unused kernels go, from 1M to 819M; suffixes K, M, G",
    ),
    Variable("KERNLIB_DEBUG", "0", "1 writes a line to stderr for each event"),
    Variable(
        "KERNLIB_NVTX",
        "0",
        "1 puts an NVTX range around each kernel that is loaded or launched, for Nsight Systems",
    ),
    Variable("KERNLIB_ASSERT_CACHED", "0", "1 turns every compilation into a NotCachedError"),
    Variable(
        "KERNLIB_PORTABLE",
        "0",
        "1 takes on Hopper the kernels of other GPUs, for target sm_90: to compare with its own",
    ),
    Variable(
        "KERNLIB_LOCK_TIMEOUT",
        "60",
        "seconds to wait for a process that compiles the same kernel before compiling it here too",
    ),
)


@dataclass(frozen=True)
class Settings:
    """The environment's settings, a field for each of :data:`VARIABLES`. The first of ``cache_dir``
    is the cache, the others are bundles. ``cache_bytes`` is the size at which kernels are evicted,
    ``lock_timeout`` in seconds; ``debug``, ``nvtx``, ``assert_cached`` and ``portable`` are
    bools."""

    cache_dir: tuple[Path, ...]
    cache_bytes: int = DEFAULT_CACHE_BYTES
    debug: bool = False
    nvtx: bool = False
    assert_cached: bool = False
    portable: bool = False
    lock_timeout: float = DEFAULT_LOCK_TIMEOUT_S

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """The settings of an environment ``environ``, by default the process's. Raises ValueError
        for a value that cannot be used, naming the variable.

        Example:
            >>> kl.settings.Settings.read({"KERNLIB_CACHE_BYTES": "64M"}).cache_bytes
            67108864
        """
        env = os.environ if environ is None else environ
        return cls(
            cache_dir=_paths(env.get("KERNLIB_CACHE_DIR", "")),
            cache_bytes=_size(env, "KERNLIB_CACHE_BYTES", DEFAULT_CACHE_BYTES),
            debug=_bool(env, "KERNLIB_DEBUG"),
            nvtx=_bool(env, "KERNLIB_NVTX"),
            assert_cached=_bool(env, "KERNLIB_ASSERT_CACHED"),
            portable=_bool(env, "KERNLIB_PORTABLE"),
            lock_timeout=_seconds(env, "KERNLIB_LOCK_TIMEOUT", DEFAULT_LOCK_TIMEOUT_S),
        )


_current: Settings | None = None


def current() -> Settings:
    """The settings in force; the environment is read the first time. Raises ValueError for a
    value that cannot be used, naming the variable.

    Example:
        >>> with kl.settings.override(lock_timeout=5.0):
        ...     kl.settings.current().lock_timeout
        5.0
    """
    global _current
    if _current is None:
        _current = Settings.read()
    return _current


def reset() -> None:
    """Forget what was read: the next `current()` reads the environment again.

    Example:
        >>> with kl.settings.override(lock_timeout=5.0):
        ...     kl.settings.reset()
        ...     kl.settings.current() == kl.settings.Settings.read()
        True
    """
    global _current
    _current = None


@contextmanager
def override(**fields: object) -> Iterator[Settings]:
    """Other values for some ``fields`` of :class:`Settings` inside the block, in every thread. For
    tests. Raises TypeError for a name that is no field.

    Example:
        >>> with kl.settings.override(nvtx=True) as settings:
        ...     settings.nvtx
        True
    """
    global _current
    before = current()
    _current = replace(before, **fields)
    try:
        yield _current
    finally:
        _current = before


def _paths(text: str) -> tuple[Path, ...]:
    first, *rest = text.split(os.pathsep)
    bundles = (_expanded(part) for part in rest if part.strip())
    return (_expanded(first) if first.strip() else _default_folder(), *bundles)


def _default_folder() -> Path:
    import platformdirs  # 3 ms that only the default costs

    try:
        return Path(platformdirs.user_cache_dir("kernlib", appauthor=False))
    except RuntimeError:  # the user has no entry in the password database, and HOME is not set
        return Path("~/.cache/kernlib")


def _expanded(part: str) -> Path:
    """The folder as an absolute path, so that a later change of the working directory does not
    matter. Where there is no such home, the ``~`` stays, and where the working directory was
    removed, the path stays relative: the store refuses both."""
    try:
        return Path(part).expanduser().absolute()
    except (RuntimeError, OSError):
        return Path(part)


def unread(environ: Mapping[str, str]) -> list[str]:
    """Variables of an environment, ``environ``, that look like kernlib's, and that it does not
    read. Raises nothing.

    Example:
        >>> kl.settings.unread({"KERNLIB_DEBUG": "1", "KERNLIB_CACHE": "/tmp"})
        ['KERNLIB_CACHE']
    """
    names = {variable.name for variable in VARIABLES}
    return sorted(name for name in environ if name.upper().startswith(PREFIX) and name not in names)


def _bad(name: str, text: str, expected: str) -> ValueError:
    shown = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
    return ValueError(f"{name}={shown!r} cannot be used: expected {expected}")


def _size(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "").strip()
    if not text:
        return default
    size = parse_size(text)
    if size is None or not MIN_CACHE_BYTES <= size <= MAX_CACHE_BYTES:
        raise _bad(name, text, "a size from 1M to 819M, in bytes or with K, M or G, such as 512M")
    return size


def parse_size(text: str) -> int | None:
    """Bytes of a ``text`` such as ``512M`` or ``64 KiB``, None for what is no size: it raises
    nothing. A number of absurdly many digits becomes another one that is too large for any disk.

    Example:
        >>> kl.settings.parse_size("64 KiB"), kl.settings.parse_size("many")
        (65536, None)
    """
    match = re.fullmatch(_SIZE, text.strip())
    if match is None:
        return None
    digits = match["number"].lstrip("0")[:MOST_DIGITS]  # int() refuses thousands of them
    return int(digits or "0") * _UNITS[match["unit"].upper()]


def _bool(env: Mapping[str, str], name: str) -> bool:
    text = env.get(name, "").strip()
    if not text:
        return False
    if text.lower() not in _BOOLS:
        raise _bad(name, text, "1 or 0, true or false, yes or no, on or off")
    return _BOOLS[text.lower()]


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name, "").strip()
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:  # also refuses nan
        raise _bad(name, text, "a number of seconds, 0 or more, such as 60")
    return seconds

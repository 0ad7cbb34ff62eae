"""The places that commands look into, and how they fare: the store, and the bundles behind it."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import click

from kernlib.cli.output import plain
from kernlib.settings import CACHE_ADVICE


class Mounted(NamedTuple):
    """A further folder of KERNLIB_CACHE_DIR: its bundle, or the reason for passing it over."""

    folder: Path
    bundle: object | None
    reason: str = ""


def folder() -> Path:
    """The cache's folder, of the user's own."""
    from kernlib import settings

    return settings.current().cache_dir[0]


def opened() -> tuple:
    """The service's layers, and what it says of places that cannot be used."""
    from kernlib.jit import service

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache_layers = service.layers()
    return cache_layers, [str(warning.message) for warning in caught]


def layers():
    """The service's layers; what cannot be used is said on stderr."""
    cache_layers, messages = opened()
    for text in messages:
        click.echo(f"Warning: {text}", err=True)
    return cache_layers


def readable_layers():
    """Layers whose store is on disk, or reads one there that this user cannot write. Raises
    ClickException without either."""
    cache_layers, messages = opened()
    if not getattr(cache_layers.store, "reads_a_cache", False):
        refuse_memory(cache_layers, messages)
    for text in messages:
        click.echo(f"Warning: {text}", err=True)
    return cache_layers


def disk_layers():
    """Layers whose store is on disk. Raises ClickException for a cache that cannot be used."""
    cache_layers, messages = opened()
    refuse_memory(cache_layers, messages)
    for text in messages:
        click.echo(f"Warning: {text}", err=True)
    return cache_layers


def refuse_memory(cache_layers, messages: list[str]) -> None:
    """Raises ClickException, naming KERNLIB_CACHE_DIR, for a store that is not on disk."""
    if cache_layers.kind == "memory":
        raise click.ClickException(f"{why_in_memory(messages)}. {CACHE_ADVICE}")


def why_in_memory(messages: list[str]) -> str:
    """The reason in the messages of :func:`opened`, without what the process does about it."""
    start = "the kernel cache in "
    for text in messages:
        if text.startswith(start):
            return text.partition("; kernels are kept in memory")[0]
    return f"{start}{folder()} cannot be used"


def mounted(cache_layers=None) -> list[Mounted]:
    """Every bundle of KERNLIB_CACHE_DIR; ``cache_layers`` are the layers, if open."""
    from kernlib import settings

    return [_mounted(folder, cache_layers) for folder in settings.current().cache_dir[1:]]


def _mounted(folder: Path, cache_layers) -> Mounted:
    try:
        return Mounted(folder, bundle_in(folder, cache_layers))
    except OSError as error:
        return Mounted(folder, None, str(error))


def bundle_in(folder: Path, cache_layers=None):
    """The bundle in a folder, the layers' own if it is one of theirs: LMDB refuses a second opening
    in one process. Raises OSError."""
    from kernlib.jit import bundle

    real = Path(os.path.realpath(folder))
    for candidate in cache_layers.bundles if cache_layers is not None else ():
        if candidate.folder == real:
            return candidate
    return bundle.open_bundle(real)


# How they fare.


@dataclass(frozen=True, slots=True)
class Before:
    """A cache's folder before this process opens the store in it.

    ``pages`` are the faults that a walk over the store's pages finds, ``died`` the times at which
    processes opened it that died with it open, ``aside`` the damaged stores that were moved
    aside."""

    pages: list[str]
    died: list[float]
    aside: list[Path]


@dataclass(slots=True)
class Contents:
    """What a place holds: kernels by arch and by CUDA major, and the keys of damaged entries."""

    archs: Counter = field(default_factory=Counter)
    majors: Counter = field(default_factory=Counter)
    damaged: list[bytes] = field(default_factory=list)

    @property
    def kernels(self) -> int:
        return self.archs.total()


def before_opening(folder: Path) -> Before:
    """Look without LMDB, which may die of a damaged page. Raises nothing: opening the store says
    why a folder cannot be used."""
    from kernlib.jit.environment import moved_aside, unclean_ends
    from kernlib.jit.store import LmdbStore

    pages: list[str] = []
    died: list[float] = []
    aside: list[Path] = []
    with suppress(OSError):
        aside = moved_aside(folder)
        died = unclean_ends(folder)
        store = LmdbStore(folder, 0)
        pages = store.verify() if (store.path / "data.mdb").exists() else []
    return Before(pages, died, aside)


def moved_since(folder: Path, before: Before) -> list[Path]:
    """The stores moved aside after ``before`` was seen."""
    from kernlib.jit.environment import moved_aside

    return [path for path in moved_aside(folder) if path not in before.aside]


def contents(items: Iterable[tuple[bytes, bytes]]) -> Contents:
    """Read every entry of a store or a bundle."""
    from kernlib.jit import entry

    counts = Contents()
    for key, value in items:
        kernel = entry.unpack(key, value)
        if kernel is None:
            counts.damaged.append(key)
            continue
        counts.archs[kernel.meta.get("arch", "?")] += 1
        counts.majors[kernel.meta.get("nvrtc", "").partition(".")[0]] += 1
    return counts


def per_arch(archs: Counter) -> str:
    """``3 sm_80, 1 sm_90a``."""
    return ", ".join(f"{number} {plain(arch)}" for arch, number in sorted(archs.items()))


def taken(folder: Path) -> int:
    """Bytes on disk of a folder's files, which may be sparse; what cannot be read counts as 0."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.lstat().st_blocks * 512
    return total


def aside_facts(folder: Path) -> list[dict]:
    """Path and size of each store that was moved aside, the newest last."""
    from kernlib.jit.environment import moved_aside

    return [{"path": str(path), "bytes": taken(path)} for path in moved_aside(folder)]

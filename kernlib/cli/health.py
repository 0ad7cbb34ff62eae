"""How the store and the bundles fare, as `kernlib doctor` and `kernlib cache verify` tell it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kernlib.cli.output import plain


@dataclass(frozen=True, slots=True)
class Before:
    """A cache's folder before this process opens the store in it.

    ``pages`` is what a walk over the store's pages finds wrong, ``died`` when processes opened it
    that died with it open, ``aside`` the damaged stores beside it.
    """

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

    found = Contents()
    for key, value in items:
        kernel = entry.unpack(key, value)
        if kernel is None:
            found.damaged.append(key)
            continue
        found.archs[kernel.meta.get("arch", "?")] += 1
        found.majors[kernel.meta.get("nvrtc", "").partition(".")[0]] += 1
    return found


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

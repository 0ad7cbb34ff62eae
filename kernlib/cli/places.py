"""The places that the commands look into: the store, and the bundles behind it."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import NamedTuple

import click

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
        found = service.layers()
    return found, [str(warning.message) for warning in caught]


def layers():
    """The service's layers; what cannot be used is said on stderr."""
    found, said = opened()
    for text in said:
        click.echo(f"Warning: {text}", err=True)
    return found


def readable_layers():
    """Layers whose store is on disk, or reads one there that this user cannot write. Raises
    ClickException without either."""
    cache_layers, said = opened()
    if not getattr(cache_layers.store, "reads_a_cache", False):
        refuse_memory(cache_layers, said)
    for text in said:
        click.echo(f"Warning: {text}", err=True)
    return cache_layers


def disk_layers():
    """Layers whose store is on disk. Raises ClickException for a cache that cannot be used."""
    found, said = opened()
    refuse_memory(found, said)
    for text in said:
        click.echo(f"Warning: {text}", err=True)
    return found


def refuse_memory(found, said: list[str]) -> None:
    """Raises ClickException, naming KERNLIB_CACHE_DIR, for a store that is not on disk."""
    if found.kind == "memory":
        raise click.ClickException(f"{why_in_memory(said)}. {CACHE_ADVICE}")


def why_in_memory(said: list[str]) -> str:
    """The reason among what :func:`opened` gave, less what the process does about it."""
    start = "the kernel cache in "
    for text in said:
        if text.startswith(start):
            return text.partition("; kernels are kept in memory")[0]
    return f"{start}{folder()} cannot be used"


def mounted(found=None) -> list[Mounted]:
    """Every bundle of KERNLIB_CACHE_DIR; ``found`` are the layers, if they are open."""
    from kernlib import settings

    return [_mounted(folder, found) for folder in settings.current().cache_dir[1:]]


def _mounted(folder: Path, found) -> Mounted:
    try:
        return Mounted(folder, bundle_in(folder, found))
    except OSError as error:
        return Mounted(folder, None, str(error))


def bundle_in(folder: Path, found=None):
    """The bundle in a folder, the layers' own if it is one of theirs: LMDB refuses a second opening
    in one process. Raises OSError."""
    from kernlib.jit import bundle

    real = Path(os.path.realpath(folder))
    for candidate in found.bundles if found is not None else ():
        if candidate.folder == real:
            return candidate
    return bundle.open_bundle(real)

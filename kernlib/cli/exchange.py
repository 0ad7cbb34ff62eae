"""``kernlib cache export`` and ``import``: kernels from this machine to others, in bundles."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click

from kernlib import progress
from kernlib.cli import places
from kernlib.cli.options import arch_option, json_option
from kernlib.cli.output import counted, plain_errors, print_json, size

folder_argument = click.argument("folder", type=Path)


@click.command()
@folder_argument
@arch_option("Only kernels for this target; may be repeated. All without it.")
@click.option("--force", is_flag=True, help="Replace the bundle that is in FOLDER.")
@json_option
def export(folder: Path, archs: tuple[str, ...], force: bool, as_json: bool) -> None:
    """Write the store's kernels into FOLDER, as a bundle to ship.

    Equal kernels give equal bytes. Processes that have a replaced bundle open keep the old one.
    Exits with 1 if nothing would be exported, or FOLDER has a bundle and --force is not given.
    """
    from kernlib.jit import bundle

    with plain_errors():
        bundle.refuse_target(folder, force, "--force replaces it")
        with progress.busy("exporting"):
            facts = _export(folder, archs)
    if as_json:
        print_json(facts)
        return
    listed = places.per_arch(facts["archs"])
    click.echo(f"Exported {counted(facts['kernels'], 'kernel')}: {listed}")
    click.echo(f"file    {facts['path']}, {size(facts['bytes'])}")
    click.echo(f"sha256  {facts['sha256']}")
    click.echo(f"use     {facts['use']}, or where it is copied to")


def _export(folder: Path, archs: tuple[str, ...]) -> dict:
    """Write and open it; the facts. Raises ClickException and OSError."""
    from kernlib.jit import bundle

    store, seen = places.readable_layers().store, places.Contents()
    kernels = bundle.collect(_noted(store.items(), seen), archs)
    if not kernels:
        raise click.ClickException(_nothing(archs, seen))
    counts = Counter(kernel.meta.get("arch", "?") for kernel in kernels.values())
    _say_left_out(archs, counts, seen)
    bundle.write(folder, kernels)
    try:
        bundle.open_bundle(folder).close()
    except OSError as error:
        raise click.ClickException(f"the bundle is written and cannot be used: {error}") from error
    path = (folder / bundle.FILE).resolve()
    return {
        "path": str(path),
        "kernels": len(kernels),
        "archs": dict(sorted(counts.items())),
        "bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "use": f"KERNLIB_CACHE_DIR=$HOME/.cache/kernlib:{path.parent}",
    }


def _noted(items: Iterator[tuple[bytes, bytes]], seen: places.Contents) -> Iterator:
    """The items again; ``seen`` is told of each."""
    for pair in items:
        one = places.contents([pair])
        seen.archs += one.archs
        seen.damaged += one.damaged
        yield pair


def _nothing(archs: tuple[str, ...], seen: places.Contents) -> str:
    if not seen.kernels:
        return "the cache holds no kernels to export; `kernlib compile` makes some"
    found = places.per_arch(seen.archs)
    return f"the cache holds no kernels for {', '.join(archs)}, but {found}"


def _say_left_out(archs: tuple[str, ...], counts: Counter, seen: places.Contents) -> None:
    for arch in archs:
        if not counts[arch]:
            click.echo(f"Warning: the cache holds no kernels for {arch}", err=True)
    if seen.damaged:
        entries = counted(len(seen.damaged), "damaged entry")
        click.echo(f"Warning: {entries} left out", err=True)


@click.command("import")
@folder_argument
@json_option
def import_bundle(folder: Path, as_json: bool) -> None:
    """Copy the kernels of the bundle in FOLDER into the store.

    Exits with 1 if FOLDER has no bundle that can be used, or if a kernel was damaged or could not
    be kept.
    """
    from kernlib.jit import bundle

    with plain_errors():
        layers = places.disk_layers()
        with progress.busy("importing"):
            counts = bundle.copy_into(layers.store, places.bundle_in(folder, layers))
    if as_json:
        print_json({**counts, "path": str(places.folder())})
    else:
        known = f"{counts['known']} were there already" if counts["known"] else ""
        added = f"Added {counted(counts['added'], 'kernel')} to {places.folder()}"
        click.echo("; ".join(filter(None, (added, known))) + ".")
    bad = [f"{counts[name]} {name}" for name in ("damaged", "declined") if counts[name]]
    if bad:
        raise click.ClickException(f"not copied: {', '.join(bad)}; {_advice(counts)}")


def _advice(counts: dict[str, int]) -> str:
    if counts["damaged"]:
        return "have the bundle exported again where it was made"
    return "see `kernlib doctor` for the store, and KERNLIB_CACHE_BYTES for its size"

"""``kernlib cache``: look into the kernel cache and empty it."""

from __future__ import annotations

import json
from datetime import datetime

import click

from kernlib.cli.output import plain_errors, print_table, size

KEY_DIGITS = 12  # as many as an event's line shows
COLUMNS = {
    "key": "left",
    "arch": "left",
    "registers": "right",
    "spills": "right",
    "shared": "right",
    "compile ms": "right",
    "cubin": "right",
    "created": "left",
    "description": "left",
}
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


@click.group()
def cache() -> None:
    """Look into the cache of compiled kernels, or empty it."""


@cache.command()
@json_option
def info(as_json: bool) -> None:
    """Where the cache is, how many kernels it holds and how full it is."""
    with plain_errors():
        facts = _store().info()
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    click.echo(f"kind     {facts['kind']}")
    click.echo(f"path     {facts['path'] or 'none: kernels are kept for this process only'}")
    click.echo(f"kernels  {facts['entries']}")
    click.echo(f"used     {size(facts['bytes_used'])} of {size(facts['budget'])}")


@cache.command("list")
@json_option
def list_kernels(as_json: bool) -> None:
    """One row for each kernel, the newest first."""
    with plain_errors():
        kernels, damaged = _kernels(_store())
    if as_json:
        click.echo(json.dumps(kernels, indent=2))
    elif kernels:
        print_table(COLUMNS, [_row(kernel) for kernel in kernels])
    else:
        click.echo("The cache holds no kernels.")
    if damaged:
        click.echo(f"{damaged} damaged entries are left out; they count as missing.", err=True)


@cache.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear(yes: bool) -> None:
    """Drop all kernels; they are compiled again when they are next wanted."""
    with plain_errors():
        store = _store()
        facts = store.info()
    if not facts["entries"]:
        click.echo("The cache holds no kernels.")
        return
    if not yes:
        click.confirm(f"Drop {facts['entries']} kernels in {facts['path']}?", abort=True)
    store.clear()
    left = store.info()["entries"]
    click.echo(f"Dropped {facts['entries'] - left} kernels.")
    if left:
        raise click.ClickException(f"{left} kernels could not be dropped from {facts['path']}")


def _store():
    from kernlib.jit import service

    return service.layer()[0]


def _kernels(store) -> tuple[list[dict], int]:
    """What each readable entry says of itself, newest first, and the number of damaged ones."""
    from kernlib.jit import entry

    found = [(key, entry.unpack(key, value)) for key, value in store.items()]
    kernels = [_facts(key, kernel) for key, kernel in found if kernel is not None]
    kernels.sort(key=lambda kernel: kernel["created"] or 0, reverse=True)
    return kernels, len(found) - len(kernels)


def _facts(key: bytes, kernel) -> dict:
    meta = kernel.meta
    counts = ("registers", "spill_bytes", "shared_bytes", "compile_ms", "created")
    return {
        "key": key.hex(),
        "kernel": kernel.kernel,
        "family": meta.get("family", ""),
        "arch": meta.get("arch", ""),
        "nvrtc": meta.get("nvrtc", ""),
        **{name: _count(meta.get(name)) for name in counts},
        "cubin_bytes": len(kernel.cubin),
        "description": meta.get("description", ""),
    }


def _count(text: str | None) -> int | None:
    """A number of the metadata; None for one that was not known or is not there."""
    return int(text) if text is not None and text.isdecimal() else None


def _row(kernel: dict) -> tuple:
    reports = ("registers", "spill_bytes", "shared_bytes", "compile_ms")
    counts = ("?" if kernel[name] is None else kernel[name] for name in reports)
    created = kernel["created"]
    return (
        kernel["key"][:KEY_DIGITS],
        kernel["arch"],
        *counts,
        size(kernel["cubin_bytes"]),
        "?" if created is None else f"{datetime.fromtimestamp(created):%Y-%m-%d %H:%M}",
        kernel["description"],
    )

"""``kernlib cache``: look into the kernel cache, and take kernels from this machine to others, in
bundles; its upkeep is in another file."""

from __future__ import annotations

import difflib
import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click

from kernlib import progress
from kernlib.cli import kernels, places
from kernlib.cli.kernels import KEY_DIGITS, Kept
from kernlib.cli.options import arch_option, days_option, json_option
from kernlib.cli.output import counted, plain, plain_errors, print_json, print_table, say, size
from kernlib.cli.upkeep import clear, prune, verify
from kernlib.settings import CACHE_ADVICE

SHOWN_CANDIDATES = 8
folder_argument = click.argument("folder", type=Path)
COLUMNS = {
    "key": "left",
    "arch": "left",
    **kernels.REPORTS,
    "created": "left",
    "last used": "left",
    "where": "left",
    "description": "left",
}
# Columns that a narrow terminal drops, in this order.
SPARE = ("shared", "compile ms", "spills", "created", "registers", "cubin", "where", "last used")


@click.group()
def cache() -> None:
    """Look into the kernel cache, repair, empty and ship it."""


for _command in (verify, prune, clear):
    cache.add_command(_command)


@cache.command()
@json_option
def info(as_json: bool) -> None:
    """Say where the cache is, what it holds and which bundles it has.

    A cache that cannot be used, and a bundle that is passed over, are said and are no error:
    `kernlib doctor` judges.
    """
    with plain_errors():
        layers, messages = places.opened()
        facts = _info(layers)
    if as_json:
        print_json(facts)
        return
    if facts["kind"] == "memory":
        click.echo(f"Warning: {places.why_in_memory(messages)}. {CACHE_ADVICE}", err=True)
    for name, text in _info_lines(facts):
        say(str(text), start=f"{name:12s}", hang=" " * 12)


def _info(layers) -> dict:
    facts = layers.store.info()
    facts["moved_aside"] = places.aside_facts(places.folder())
    facts["bundles"] = [_bundle_info(mounted) for mounted in places.mounted(layers)]
    return facts


def _bundle_info(mounted: places.Mounted) -> dict:
    path = str(mounted.folder)
    if mounted.bundle is None:
        return {"path": path, "entries": 0, "bytes_used": 0, "archs": {}, "refused": mounted.reason}
    facts = mounted.bundle.info()
    archs = places.contents(mounted.bundle.items()).archs
    return {
        "path": path,
        "entries": facts["entries"],
        "bytes_used": facts["bytes_used"],
        "archs": dict(sorted(archs.items())),
        "refused": None,
    }


def _info_lines(facts: dict) -> list[tuple[str, str]]:
    lines = [
        ("kind", facts["kind"]),
        ("path", _path_line(facts)),
        ("kernels", facts["entries"]),
        ("used", f"{size(facts['bytes_used'])} of {size(facts['budget'])}"),
        ("tuning", counted(facts["tuning"], "result")),
    ]
    for old in facts["moved_aside"]:
        lines.append(("moved aside", f"{old['path']}, damaged, {size(old['bytes'])}"))
    return lines + [("bundle", _bundle_line(bundle)) for bundle in facts["bundles"]]


def _path_line(facts: dict) -> str:
    if facts["kind"] != "memory":
        return facts["path"]
    return f"{facts['path'] or 'none'}: new kernels are kept for this process only"


def _bundle_line(bundle: dict) -> str:
    if bundle["refused"]:
        return f"{bundle['path']} is passed over: {bundle['refused']}"
    listed = f" ({places.per_arch(bundle['archs'])})" if bundle["archs"] else ""
    number = counted(bundle["entries"], "kernel")
    return f"{bundle['path']}, {number}{listed}, {size(bundle['bytes_used'])}"


@cache.command("list")
@arch_option("Only kernels for this target; may be repeated.")
@click.option("--family", metavar="FAMILY", help="Only kernels of this family, such as pairwise.")
@days_option("Only kernels of the store that nobody has used for more than so many days.")
@json_option
def list_kernels(
    archs: tuple[str, ...], family: str | None, days: int | None, as_json: bool
) -> None:
    """List the kernels of store and bundles, the newest first.

    Damaged entries are left out and counted on stderr; `kernlib cache verify` names them.
    """
    with plain_errors(), progress.busy("reading the cache"):
        listed, damaged = _listed(places.layers(), days)
    chosen = [
        kernel
        for kernel in listed
        if kernel["arch"] in (archs or (kernel["arch"],))
        and kernel["family"] == (family or kernel["family"])
    ]
    if as_json:
        print_json(chosen)
    elif chosen:
        print_table(COLUMNS, [_row(kernel) for kernel in chosen], spare=SPARE)
    else:
        click.echo("No such kernels." if listed or days else "The cache holds no kernels.")
    if damaged:
        entries = counted(damaged, "damaged entry")
        click.echo(f"{entries} left out, which count as missing.", err=True)


def _listed(layers, days: int | None) -> tuple[list[dict], int]:
    """The whole entries, newest first, and the number of damaged ones."""
    rows, damaged = [], 0
    for kernel in kernels.kept(layers):
        if kernel.entry is None:
            damaged += 1
        elif days is None or _unused(kernel, layers.kind, days):
            rows.append(kernel.facts())
    rows.sort(key=lambda kernel: kernel["created"] or 0, reverse=True)
    return rows, damaged


def _unused(kernel: Kept, store: str, days: int) -> bool:
    """What `prune` with as many days would drop."""
    return kernel.where == store and (kernel.day or 0) < kernels.today() - days


def _row(kernel: dict) -> tuple:
    created = kernel["created"]
    return (
        kernel["key"][:KEY_DIGITS],
        kernel["arch"],
        *kernels.reports(kernel),
        "?" if created is None else kernels.moment(created),
        kernels.unknown(kernel["last_used"]),
        kernel["where"],
        kernel["description"],
    )


@cache.command()
@click.argument("prefix", metavar="KEY-PREFIX")
@click.option("--cubin", type=Path, metavar="FILE", help="Write the cubin there, for nvdisasm.")
@click.option("--force", is_flag=True, help="Let --cubin replace a file.")
@json_option
def show(prefix: str, cubin: Path | None, force: bool, as_json: bool) -> None:
    """Show all that is known of one kernel, by its key's first digits.

    Exits with 1 if no kernel's key begins so, or several do, or the entry is damaged.
    """
    prefix = prefix.lower()
    if not prefix or set(prefix) - set("0123456789abcdef"):
        message = f"{prefix!r} is no beginning of a key; its first digits do, as in cache list."
        raise click.BadParameter(message, param_hint="KEY-PREFIX")
    if force and cubin is None:
        raise click.UsageError("--force is about the file of --cubin; give --cubin FILE too.")
    with plain_errors():
        copies = _unique(places.layers(), prefix)
        if cubin is not None:
            _write(cubin, copies[0].entry.cubin, force)
    _print_kernel(copies, as_json)
    if cubin is not None:
        click.echo(f"Wrote {size(len(copies[0].entry.cubin))} to {cubin}.", err=as_json)


def _unique(layers, prefix: str) -> list[Kept]:
    """One kernel, once for each place that holds it. Raises ClickException."""
    matches = [kernel for kernel in kernels.kept(layers) if kernel.key.hex().startswith(prefix)]
    if not matches:
        raise click.ClickException(_unknown(layers, prefix))
    if len({kernel.key for kernel in matches}) > 1:
        lines = "\n".join(_candidates(matches))
        raise click.ClickException(f"several kernels' keys begin with {prefix}:\n{lines}")
    intact = [kernel for kernel in matches if kernel.entry is not None]
    if not intact:
        raise click.ClickException(
            f"the entry of {matches[0].key.hex()} is damaged and counts as missing; "
            "`kernlib cache verify --repair` drops it"
        )
    return intact


def _unknown(layers, prefix: str) -> str:
    """The message about a prefix that nothing begins with, with the keys that look most like it."""
    by_key = {kernel.key.hex(): kernel for kernel in kernels.kept(layers)}
    if not by_key:
        return f"no kernel's key begins with {prefix}: the cache holds no kernels"
    starts = {key[: len(prefix)]: key for key in by_key}
    close = difflib.get_close_matches(prefix, starts, SHOWN_CANDIDATES, cutoff=0.0)
    lines = "\n".join(_candidates([by_key[starts[start]] for start in close]))
    return f"no kernel's key begins with {prefix}; there are:\n{lines}"


def _candidates(matches: list[Kept]) -> list[str]:
    distinct = list({kernel.key: kernel for kernel in matches}.values())
    lines = [_candidate(kernel) for kernel in distinct[:SHOWN_CANDIDATES]]
    more = len(distinct) - len(lines)
    return [*lines, f"  and {more} more"] if more else lines


def _candidate(kernel: Kept) -> str:
    meta = kernel.entry.meta if kernel.entry else {"description": "damaged"}
    words = (kernel.key.hex()[:16], meta.get("arch", ""), meta.get("description", ""))
    return "  " + "  ".join(plain(word) for word in words if word)


def _write(path: Path, cubin: bytes, force: bool) -> None:
    try:
        with path.open("wb" if force else "xb") as file:
            file.write(cubin)
    except FileExistsError:
        raise click.ClickException(f"{path} is there already; --force replaces it") from None


def _print_kernel(copies: list[Kept], as_json: bool) -> None:
    facts = copies[0].facts()
    facts["where"] = [kernel.where for kernel in copies]
    facts["meta"] = dict(sorted(copies[0].entry.meta.items()))
    if as_json:
        print_json(facts)
        return
    lines = {**facts.pop("meta"), **facts, "where": ", ".join(facts["where"])}
    lines["created"] = None if facts["created"] is None else kernels.moment(facts["created"])
    lines["cubin_bytes"] = f"{facts['cubin_bytes']} ({size(facts['cubin_bytes'])})"
    order = dict.fromkeys((*facts, *lines))
    for name in order:
        label = plain(name.replace("_", " "))
        say(plain(kernels.unknown(lines[name])), start=f"{label:14s}", hang=" " * 14)


# Bundles.


@cache.command()
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
        content = places.contents([pair])
        seen.archs += content.archs
        seen.damaged += content.damaged
        yield pair


def _nothing(archs: tuple[str, ...], seen: places.Contents) -> str:
    if not seen.kernels:
        return "the cache holds no kernels to export; `kernlib compile` makes some"
    present = places.per_arch(seen.archs)
    return f"the cache holds no kernels for {', '.join(archs)}, but {present}"


def _say_left_out(archs: tuple[str, ...], counts: Counter, seen: places.Contents) -> None:
    for arch in archs:
        if not counts[arch]:
            click.echo(f"Warning: the cache holds no kernels for {arch}", err=True)
    if seen.damaged:
        entries = counted(len(seen.damaged), "damaged entry")
        click.echo(f"Warning: {entries} left out", err=True)


@cache.command("import")
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
        present = f"{counts['known']} were there already" if counts["known"] else ""
        added = f"Added {counted(counts['added'], 'kernel')} to {places.folder()}"
        click.echo("; ".join(filter(None, (added, present))) + ".")
    bad = [f"{counts[name]} {name}" for name in ("damaged", "declined") if counts[name]]
    if bad:
        raise click.ClickException(f"not copied: {', '.join(bad)}; {_advice(counts)}")


def _advice(counts: dict[str, int]) -> str:
    if counts["damaged"]:
        return "have the bundle exported again where it was made"
    return "see `kernlib doctor` for the store, and KERNLIB_CACHE_BYTES for its size"

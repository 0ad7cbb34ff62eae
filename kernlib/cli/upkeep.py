"""``kernlib cache verify``, ``prune`` and ``clear``: what keeps the store whole and small."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from kernlib import progress
from kernlib.cli import places
from kernlib.cli.options import Size, days_option, json_option, yes_option
from kernlib.cli.output import counted, plain_errors, print_json, print_table, size

PLACES = {"where": "left", "kernels": "right", "result": "left", "path": "left"}
SHOWN_PAGES = 5  # of a damaged file; the first tells as much as all


@click.command()
@click.option("--repair", is_flag=True, help="Drop damaged entries, move a damaged store aside.")
@json_option
def verify(repair: bool, as_json: bool) -> None:
    """Read all pages of store and bundles, and check every entry.

    Exits with 1 if anything is wrong, and with --repair if anything is left wrong: a bundle is
    never written. A damaged store that is moved aside keeps nothing of its kernels, which are
    compiled again when they are wanted; `kernlib cache prune` removes it.
    """
    with plain_errors(), progress.busy("reading every page"):
        store, layers = _store(repair)
        facts = [store, *(_bundle(mounted) for mounted in places.mounted(layers))]
    wrong = [place for place in facts if _unrepaired(place)]
    if as_json:
        print_json({"ok": not wrong, "places": facts})
    else:
        _print(facts)
    if wrong:
        raise click.ClickException(_conclusion(wrong, repair))


def _store(repair: bool) -> tuple[dict, object | None]:
    """The facts about the store, after what ``repair`` asks for, and the layers if it was opened.
    It is not opened on damaged pages, of which LMDB may die."""
    folder = places.folder()
    before = places.before_opening(folder)
    problems = [_problem("pages", text, repaired=repair) for text in before.pages[:SHOWN_PAGES]]
    if problems and not repair:
        return _place("store", folder, 0, problems), None
    if problems:
        _set_aside(folder)
    layers, messages = places.opened()
    places.refuse_memory(layers, messages)
    contents = places.contents(layers.store.items())
    problems += [_entry(key, repair and _drop(layers.store, key)) for key in contents.damaged]
    moved = places.moved_since(folder, before)
    problems += [_problem("aside", f"damaged, now {path}", repaired=repair) for path in moved]
    return _place("store", folder, contents.kernels, problems), layers


def _set_aside(folder: Path) -> None:
    from kernlib.jit.store import LmdbStore

    LmdbStore(folder, 0).set_aside()


def _drop(store, key: bytes) -> bool:
    store.delete(key)
    return store.get(key) is None


def _bundle(mounted: places.Mounted) -> dict:
    if mounted.bundle is None:
        return _place("bundle", mounted.folder, 0, [_problem("refused", mounted.reason)])
    contents = places.contents(mounted.bundle.items())
    problems = [_entry(key, False) for key in contents.damaged]
    return _place("bundle", mounted.folder, contents.kernels, problems)


def _place(where: str, path: Path, kernels: int, problems: list[dict]) -> dict:
    return {"where": where, "path": str(path), "kernels": kernels, "problems": problems}


def _problem(kind: str, text: str, key: str | None = None, repaired: bool = False) -> dict:
    return {"kind": kind, "key": key, "text": text, "repaired": repaired}


def _entry(key: bytes, repaired: bool) -> dict:
    return _problem("entry", "the entry is damaged and counts as missing", key.hex(), repaired)


def _print(facts: list[dict]) -> None:
    rows = [(p["where"], p["kernels"], _result(p), p["path"]) for p in facts]
    print_table(PLACES, rows)
    for place in facts:
        for problem in place["problems"]:
            key = f" {problem['key']}" if problem["key"] else ""
            end = " (repaired)" if problem["repaired"] else ""
            click.echo(f"{place['path']}:{key} {problem['text']}{end}")


def _unrepaired(place: dict) -> list[dict]:
    """The problems that are not repaired."""
    return [problem for problem in place["problems"] if not problem["repaired"]]


def _result(place: dict) -> str:
    if not place["problems"]:
        return "ok"
    return counted(len(_unrepaired(place)), "problem") if _unrepaired(place) else "repaired"


def _conclusion(wrong: list[dict], repair: bool) -> str:
    parts = [f"{counted(sum(len(_unrepaired(place)) for place in wrong), 'problem')} found"]
    if wrong[0]["where"] == "store":
        advice = "--repair drops damaged entries and moves a damaged store aside"
        parts.append("what is left of the store's cannot be repaired" if repair else advice)
    if wrong[-1]["where"] == "bundle":
        parts.append("a bundle is not repaired; have it exported again where it was made")
    return "; ".join(parts)


@click.command()
@days_option("Drop kernels that nobody has used for more than so many days.")
@click.option(
    "--to",
    "to_bytes",
    type=Size(),
    metavar="SIZE",
    help="Then drop the longest unused until the store takes at most so much, such as 100M.",
)
@yes_option
@json_option
def prune(days: int | None, to_bytes: int | None, yes: bool, as_json: bool) -> None:
    """Drop kernels that are long unused, and damaged stores moved aside.

    Before it removes such a store it asks; with --json it leaves them unless --yes. Tuning results
    stay. Kernels that other processes have loaded stay loaded there.
    """
    with plain_errors():
        if days is None and to_bytes is None and not places.aside_facts(places.folder()):
            message = "nothing says what to drop: give --unused DAYS, --to SIZE or both."
            raise click.UsageError(message)
        store = places.disk_layers().store
        dropped = store.prune(days, to_bytes)
        facts = store.info()
        if not as_json:
            used = f"{size(facts['bytes_used'])} of {size(facts['budget'])}"
            remaining = counted(facts["entries"], "kernel")
            click.echo(f"Dropped {counted(dropped, 'kernel')}; {remaining} left, {used}.")
        removed = _remove_aside(yes, as_json)
    if as_json:
        counts = {"entries": facts["entries"], "bytes_used": facts["bytes_used"]}
        print_json({"dropped": dropped, **counts, "removed": removed})


def _remove_aside(yes: bool, as_json: bool) -> list[dict]:
    """Path and size of each damaged store that was removed. Raises OSError."""
    removed = []
    for old in places.aside_facts(places.folder()):
        question = f"Remove the damaged store {old['path']} ({size(old['bytes'])})?"
        if yes or (not as_json and click.confirm(question, err=True)):
            shutil.rmtree(old["path"])
            removed.append(old)
            if not as_json:
                click.echo(f"Removed {old['path']}.")
    return removed


@click.command()
@click.option("--tuning", is_flag=True, help="Forget tuning results too.")
@yes_option
@json_option
def clear(tuning: bool, yes: bool, as_json: bool) -> None:
    """Drop all kernels of the store.

    They are compiled again when they are next wanted. Bundles stay as they are, and so do tuning
    results without --tuning.
    """
    with plain_errors():
        store = places.disk_layers().store
        before = store.info()
        contents = counted(before["entries"], "kernel")
        if tuning:
            contents += f" and {counted(before['tuning'], 'tuning result')}"
        if before["entries"] or (tuning and before["tuning"]):
            if not yes:
                click.confirm(f"Drop {contents} in {places.folder()}?", abort=True, err=True)
            store.clear()
            if tuning:
                store.clear_tuning()
        after = store.info()
    _print_cleared(before, after, tuning, as_json)


def _print_cleared(before: dict, after: dict, tuning: bool, as_json: bool) -> None:
    dropped = before["entries"] - after["entries"]
    forgotten = before["tuning"] - after["tuning"]
    if as_json:
        print_json({"dropped": dropped, "tuning": forgotten})
    elif before["entries"] or forgotten:
        more = f" and {counted(forgotten, 'tuning result')}" if tuning else ""
        click.echo(f"Dropped {counted(dropped, 'kernel')}{more}.")
    else:
        click.echo("The cache holds no kernels.")
    if after["entries"]:
        remaining = counted(after["entries"], "kernel")
        raise click.ClickException(f"{remaining} could not be dropped from {after['path']}")

"""What `kernlib doctor` checks of the cache: the store, its disk, and the bundles behind it."""

from __future__ import annotations

import shutil
from pathlib import Path

from kernlib.cli import health, kernels, machine, places
from kernlib.cli.checks import Finding
from kernlib.cli.output import counted, size
from kernlib.settings import CACHE_ADVICE

REPAIR = "`kernlib cache verify --repair` moves it aside; its kernels are compiled again"


def store() -> list[Finding]:
    """The store, what happened to it, and room on its disk."""
    folder = _folder()
    if folder is None:
        return []  # said under settings
    before = health.before_opening(folder)
    if before.pages:  # opening it might end this process by a signal
        text = f"the store in {folder} is damaged: {before.pages[0]}"
        return [Finding("cache", text, REPAIR, needed=True), *_aside(folder)]
    layers, said = places.opened()
    if layers.kind == "memory":
        advice = _lowered(CACHE_ADVICE)
        return [Finding("cache", places.why_in_memory(said), advice, needed=True)]
    facts = layers.store.info()
    found = [_held(folder, facts), *_died(before.died), *_damaged(layers.store)]
    return [*found, *_aside(folder), _room(folder, facts)]


def _folder() -> Path | None:
    try:
        return places.folder()
    except ValueError:
        return None


def _lowered(text: str) -> str:
    return text[0].lower() + text[1:]


def _held(folder: Path, facts: dict) -> Finding:
    used = f"{size(facts['bytes_used'])} of {size(facts['budget'])}"
    held = f"{counted(facts['entries'], 'kernel')}, {counted(facts['tuning'], 'tuning result')}"
    return Finding("cache", f"{facts['kind']}, {folder}, {held}, {used}", details=facts)


def _died(died: list[float]) -> list[Finding]:
    if not died:
        return []
    text = (
        f"{counted(len(died), 'process')} died with it open, the last of those since "
        f"{kernels.moment(died[-1])}; its pages are read now and whole"
    )
    return [Finding("cache", text, details={"died": died})]


def _damaged(store) -> list[Finding]:
    found = health.contents(store.items())
    if not found.damaged:
        return []
    of = f"of {found.kernels + len(found.damaged)}"
    text = f"{counted(len(found.damaged), 'damaged entry')} {of}, missing when they are wanted"
    advice = "`kernlib cache verify --repair` drops them"
    return [Finding("cache", text, advice, details={"damaged": [k.hex() for k in found.damaged]})]


def _aside(folder: Path) -> list[Finding]:
    """The damaged stores beside it."""
    return [
        Finding(
            "cache",
            f"a damaged store was moved aside: {old['path']}, {size(old['bytes'])}",
            f"nothing reads it: rm -r {old['path']}, or let `kernlib cache prune` remove it",
            details=old,
        )
        for old in health.aside_facts(folder)
    ]


def _room(folder: Path, facts: dict) -> Finding:
    """Whether the disk has what the store may still take."""
    free = shutil.disk_usage(folder).free
    wanted = max(0, facts["budget"] - facts["bytes_used"])
    text = f"{size(free)} left on its disk"
    details = {"free": free, "may_grow": wanted}
    if free >= wanted:
        return Finding("disk", text, details=details)
    advice = f"the cache may still grow by {size(wanted)}: make room, or lower KERNLIB_CACHE_BYTES"
    return Finding("disk", text, advice, details=details)


def bundles() -> list[Finding]:
    """What each bundle holds, above all for this machine."""
    folder = _folder()
    if folder is None:
        return []
    layers = None if health.before_opening(folder).pages else places.opened()[0]
    here = machine.archs()
    return [_bundle(mounted, here) for mounted in places.mounted(layers)]


def _bundle(mounted: places.Mounted, here: list[str]) -> Finding:
    if mounted.bundle is None:
        text = f"{mounted.folder} is passed over: {mounted.reason}"
        advice = "mend it, or take the folder out of KERNLIB_CACHE_DIR"
        return Finding("bundle", text, advice, details={"path": str(mounted.folder), "archs": {}})
    found = health.contents(mounted.bundle.items())
    listed = f": {health.per_arch(found.archs)}" if found.archs else ""
    text = f"{mounted.folder}, {counted(found.kernels, 'kernel')}{listed}"
    details = {"path": str(mounted.folder), "archs": dict(sorted(found.archs.items()))}
    details["damaged"] = len(found.damaged)
    return Finding("bundle", text, _bundle_advice(found, here), details=details)


def _bundle_advice(found: health.Contents, here: list[str]) -> str:
    from kernlib.jit import toolchain

    major = toolchain.cuda_major()
    if found.damaged:
        return f"{counted(len(found.damaged), 'entry')} damaged: have it exported again"
    if not found.kernels:
        return "it is empty: take it out of KERNLIB_CACHE_DIR, or have it exported again"
    if major != toolchain.UNKNOWN_VERSION and not found.majors[major]:
        return f"nothing in it is for CUDA {major}, so it is never found: have one made with that"
    if here and not any(found.archs[arch] for arch in here):
        options = " ".join(f"--arch {arch}" for arch in here)
        return f"nothing in it is for this machine's GPU: compile it with {options}, export again"
    return ""

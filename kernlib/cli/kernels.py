"""The facts of stored kernels, as the commands show them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, datetime, timedelta
from typing import NamedTuple

from kernlib.cli import places
from kernlib.cli.output import size

KEY_DIGITS = 12  # as many as an event's line shows
REPORTS = {
    "registers": "right",
    "spills": "right",
    "shared": "right",
    "compile ms": "right",
    "cubin": "right",
}
LONGEST_NUMBER = 15  # digits
_COUNTS = ("registers", "spill_bytes", "shared_bytes", "compile_ms")


class Kept(NamedTuple):
    """An entry and its place; without ``entry`` it is damaged. ``day`` is that of its last use, in
    days since 1970, which only the store knows."""

    key: bytes
    where: str
    entry: object | None
    day: int | None = None

    def facts(self) -> dict:
        """What the commands print as JSON."""
        last_used = None if self.day is None else _date(self.day)
        return {
            "key": self.key.hex(),
            **facts(self.entry),
            "last_used": last_used,
            "where": self.where,
        }


def _date(day: int) -> str | None:
    try:
        return (date(1970, 1, 1) + timedelta(day)).isoformat()
    except OverflowError:  # of a damaged stamp
        return None


def kept(layers) -> Iterator[Kept]:
    """Everything in the store, then in the bundles, one at a time: cubins are large."""
    from kernlib.jit import entry

    days = layers.store.days() if layers.kind == "store" else {}
    for key, value in layers.store.items():
        yield Kept(key, layers.kind, entry.unpack(key, value), days.get(key))
    for mounted in places.mounted(layers):
        for key, value in mounted.bundle.items() if mounted.bundle else ():
            yield Kept(key, str(mounted.folder), entry.unpack(key, value))


def today() -> int:
    """As the store counts days."""
    from time import time

    return int(time() // 86400)


def facts(entry) -> dict:
    """An entry as JSON; unknown numbers are None."""
    meta = entry.meta
    return {
        "kernel": entry.kernel,
        "family": meta.get("family", ""),
        "arch": meta.get("arch", ""),
        "nvrtc": meta.get("nvrtc", ""),
        **{name: count(meta.get(name)) for name in (*_COUNTS, "created")},
        "cubin_bytes": len(entry.cubin),
        "description": meta.get("description", ""),
    }


def count(text: str | None) -> int | None:
    """A number of the metadata; None for one that is not known, not there or cannot be meant."""
    if text is None or len(text) > LONGEST_NUMBER or not (text.isascii() and text.isdecimal()):
        return None
    return int(text)


def reports(kernel: dict) -> tuple:
    """The cells under :data:`REPORTS`."""
    cells = (unknown(kernel[name]) for name in _COUNTS)
    return (*cells, size(kernel["cubin_bytes"]))


def unknown(value: object) -> object:
    """A cell, with a question mark for an unknown value."""
    return "?" if value is None else value


def moment(seconds: float) -> str:
    """A time for people, to the minute; a question mark for one that no calendar has."""
    try:
        return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"
    except (OverflowError, ValueError, OSError):
        return "?"

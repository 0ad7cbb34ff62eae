"""Random damage to the data file of a store, and processes that call for all its kernels.

The time of change tells the next process that somebody has touched the file, unless the damage
leaves it as it was: that is what failing memory or a failing disk would do.
"""

from __future__ import annotations

import os
import random
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from benchmarks.service.soak_workers import ARCH, fill, forked, right, spec, use
from kernlib.jit import layers, service
from kernlib.jit.environment import walk
from kernlib.jit.open_stores import fingerprint

KEYS = 120  # enough for a branch page above the leaves
PAGE = 4096
# The 0.9 format: fields of a page, a meta page, a node and a database's record.
FLAGS_AT, LOWER_AT, HEAD = 10, 12, 16
BRANCH = 0x01
FREE_AT, MAIN_AT, LAST_PAGE_AT, TRANSACTION_AT = 40, 88, 136, 144
NODE_HEAD, SUBDATABASE = 8, 0x02
ROOT_AT, NO_ROOT = 40, 2**64 - 1
LIMIT_S = 60


def lane(folder: Path, count: int, keys: int, seed: int) -> dict[str, object]:
    """So many damages of one store, each followed by the calls; sums, and what was broken."""
    folder.mkdir(parents=True)
    choose = random.Random(seed)
    status, _ = forked(lambda: fill(folder, keys), LIMIT_S)
    if status:
        raise RuntimeError(f"the first calls ended with {status}")
    whole = Snapshot(folder / "cache" / "v1")
    counts, broken = Counter(), []
    for at in range(count):
        kind, kept = choose.choice(list(DAMAGES)), bool(at % 2)
        whole.restore()
        DAMAGES[kind](whole, choose)
        if kept:
            whole.keep_time()
        text = f"{kind}, file time {'kept' if kept else 'changed'}, seed {seed}, number {at}"
        broken += [f"{text}: {what}" for what in calls(folder, keys, kept, counts)]
        counts["aside"] += len(list(whole.root.glob("store.corrupt-*")))
    return {"counts": counts, "broken": broken}


def calls(folder: Path, keys: int, kept: bool, counts: Counter) -> list[str]:
    """Two processes, one after the other, call for everything; what they did wrong."""
    counts["kept" if kept else "changed"] += 1
    status, wrong = forked(lambda: call_all(folder, keys), LIMIT_S)
    broken = _judged(status, wrong, keys, counts)
    if status < 0 and kept:
        counts["kept signals"] += 1
        broken = []  # nothing had announced it; the next one must do
    elif status < 0:
        counts["signals"] += 1
    if status:
        status, wrong = forked(lambda: call_all(folder, keys), LIMIT_S)
        counts["after"] += bool(status)
        broken += [f"after that {what}" for what in _judged(status, wrong, keys, counts)]
    return broken


def _judged(status: int, wrong: int | None, keys: int, counts: Counter) -> list[str]:
    if status:
        return [f"the process ended with {status}"]
    counts["calls"] += 2 * keys
    counts["wrong"] += wrong
    return [f"{wrong} wrong calls"] if wrong else []


def call_all(folder: Path, keys: int) -> int:
    """Call for all kernels twice, and count what was wrong; whatever is raised is."""
    use(folder)
    wrong = 0
    for number in (*range(keys), *range(keys)):
        try:
            wrong += not right(number, service.build(spec(number), ARCH))
        except Exception:
            wrong += 1
    layers.layers().store.close()
    return wrong


class Snapshot:
    """A store that was left whole, and its pages by kind."""

    def __init__(self, root: Path):
        self.root, self.data = root, root / "store" / "data.mdb"
        self.size = self.data.stat().st_size
        assert not walk(self.data)
        with open(self.data, "rb") as file:
            self.content = file.read(2 * PAGE)
            newest = max((0, PAGE), key=lambda meta: self._number(meta + TRANSACTION_AT))
            last = self._number(newest + LAST_PAGE_AT)
            self.content += file.read((last - 1) * PAGE)
        self.pages = range(last + 1)
        self.structure = [0, 1, *self._tree(newest + FREE_AT), *self._tree(newest + MAIN_AT)]
        self._time = 0

    def _number(self, at: int, kind: str = "Q") -> int:
        return struct.unpack_from("<" + kind, self.content, at)[0]

    def _tree(self, record: int) -> list[int]:
        """Branch and leaf pages of a database and of those that it holds."""
        found, waiting = [], [self._number(record + ROOT_AT)]
        while waiting:
            page = waiting.pop()
            if page != NO_ROOT:
                found.append(page)
                below, databases = self._below(page * PAGE)
                waiting += below
                found += [inner for at in databases for inner in self._tree(at)]
        return found

    def _below(self, page: int) -> tuple[list[int], list[int]]:
        """Of a page the pages it points to, and where it holds records of databases."""
        below, databases = [], []
        for at in range(page + HEAD, page + self._number(page + LOWER_AT, "H"), 2):
            node = page + self._number(at, "H")
            if self._number(page + FLAGS_AT, "H") & BRANCH:
                below.append(self._number(node) & (1 << 48) - 1)
            elif self._number(node + 4, "H") & SUBDATABASE:
                databases.append(node + NODE_HEAD + self._number(node + 6, "H"))
        return below, databases

    def restore(self) -> None:
        """As its last process left it, word for who comes next included."""
        for path in (self.root / "open").iterdir():
            path.unlink()
        for path in self.root.glob("store.corrupt-*"):
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
        self.data.parent.mkdir(mode=0o700, exist_ok=True)  # the last verb may have moved it aside
        (self.root / "store" / "lock.mdb").unlink(missing_ok=True)
        with open(self.data, "wb") as file:
            file.write(self.content)
            file.truncate(self.size)
        (self.root / "store.left").write_text(fingerprint(self.data))
        self._time = self.data.stat().st_mtime_ns

    def keep_time(self) -> None:
        os.utime(self.data, ns=(self._time, self._time))

    def write(self, at: int, content: bytes) -> None:
        with open(self.data, "r+b") as file:
            file.seek(at)
            file.write(content[: max(0, len(self.content) - at)])
        found = self.data.stat().st_mtime_ns
        if found == self._time:  # within one tick of the clock of files
            os.utime(self.data, ns=(found + 1, found + 1))


def _byte(store: Snapshot, choose: random.Random) -> None:
    store.write(choose.randrange(len(store.content)), choose.randbytes(1))


def _run(store: Snapshot, choose: random.Random) -> None:
    at, size = choose.randrange(len(store.content)), 1 << choose.randrange(4, 14)
    store.write(at, choose.randbytes(size))


def _zeroed(store: Snapshot, choose: random.Random) -> None:
    store.write(choose.choice(store.pages) * PAGE, bytes(PAGE * choose.choice((1, 1, 2, 8))))


def _structural_byte(store: Snapshot, choose: random.Random) -> None:
    at = choose.choice(store.structure) * PAGE + choose.randrange(PAGE)
    store.write(at, choose.randbytes(1))


def _structural_header(store: Snapshot, choose: random.Random) -> None:
    at = choose.choice(store.structure) * PAGE + choose.randrange(160)
    store.write(at, choose.randbytes(choose.choice((1, 2, 4, 8))))


def _structural_run(store: Snapshot, choose: random.Random) -> None:
    at, size = choose.randrange(PAGE), 1 << choose.randrange(3, 12)
    store.write(choose.choice(store.structure) * PAGE + at, choose.randbytes(min(size, PAGE - at)))


def _structural_zeroed(store: Snapshot, choose: random.Random) -> None:
    store.write(choose.choice(store.structure) * PAGE, bytes(PAGE))


def _truncated(store: Snapshot, choose: random.Random) -> None:
    os.truncate(store.data, choose.randrange(len(store.content)))


DAMAGES: dict[str, Callable[[Snapshot, random.Random], None]] = {
    "a byte": _byte,
    "a run": _run,
    "zeroed pages": _zeroed,
    "a byte of a structural page": _structural_byte,
    "a header of a structural page": _structural_header,
    "a run in a structural page": _structural_run,
    "a zeroed structural page": _structural_zeroed,
    "truncated": _truncated,
}

"""Shared by the tests of the command line: a cache of a test's own, and entries nobody compiled."""

import os
import re
import subprocess
import sys
from pathlib import Path

from kernlib import settings
from kernlib.jit import bundle, entry, layers, service
from kernlib.jit import store as store_module
from kernlib.jit.entry import Entry
from tests.support.terminals import drained, left, terminal


def fresh():
    """Forget what this process has open, as if the next command were another's first."""
    for store in store_module._stores.values():
        store.close()
    store_module._stores.clear()
    for found in layers._bundles.values():
        if found is not None:
            found.close()
    layers._layers = None
    layers._bundles.clear()
    layers._refused.clear()
    service.forget()
    settings.reset()


def key_of(description: str) -> bytes:
    return description.encode().ljust(32, b".")


def made(description: str, cubin: bytes = b"cubin", **meta: str) -> Entry:
    """An entry that nobody compiled."""
    known = {"description": description, "arch": "sm_90a", "family": "pairwise"}
    return Entry("pairwise", cubin, known | meta)


def keep(description: str, cubin: bytes = b"cubin", **meta: str) -> bytes:
    """Put such an entry into the store; returns its key."""
    key = key_of(description)
    value = entry.pack(key, made(description, cubin, **meta))
    assert service.layers().store.put(key, value)
    return key


def keep_used(description: str, days_ago: int, monkeypatch) -> bytes:
    """Put an entry whose last use is so many days ago."""
    day = store_module._today() - days_ago
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "_today", lambda: day)
        return keep(description)


def keep_stamped(description: str, stamp: bytes) -> bytes:
    """Put an entry, and bytes where the day of its last use stands."""
    key, store = keep(description), service.layers().store
    store._transact(lambda txn: txn.put(key, stamp, db=store._days), True)
    return key


def keep_damaged(description: str) -> bytes:
    key = key_of(description)
    assert service.layers().store.put(key, b"junk")
    return key


def make_bundle(folder: Path, *entries: Entry) -> Path:
    """A bundle of entries, found under the keys of their descriptions."""
    bundle.write(folder, {key_of(found.meta["description"]): found for found in entries})
    return folder


def damage_bundle(folder: Path, part: bytes = b"cubin") -> None:
    """Change an entry behind its checksum; the pages stay in order."""
    path = folder / bundle.FILE
    path.write_bytes(path.read_bytes().replace(part, part.swapcase(), 1))


def damage_pages(cache_dir: Path) -> None:
    """Overwrite the pages of a closed store, behind its two headers."""
    fresh()
    data = cache_dir / "v1" / "store" / "data.mdb"
    with open(data, "r+b") as file:
        file.seek(2 * 4096)
        file.write(b"\xff" * 8 * 4096)


def aside(cache_dir: Path) -> list[Path]:
    return sorted((cache_dir / "v1").glob("store.corrupt-*"))


def command(*arguments: object, cwd=None, **variables: str) -> subprocess.CompletedProcess:
    """The command as a user runs it, without a GPU."""
    return subprocess.run(
        [sys.executable, "-c", "from kernlib.cli import main; main()", *map(str, arguments)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables},
        capture_output=True,
        text=True,
        cwd=cwd,
    )


def on_terminal(width: int, *arguments: object, **variables: str) -> tuple[int, list[str]]:
    """The command on a terminal of so many columns, without a GPU: its exit code, and the lines
    that are left on the screen, without colours."""
    code = "from kernlib.cli import main; main()"
    words = [sys.executable, "-c", code, *map(str, arguments)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TERM": "xterm", **variables}
    environment.pop("COLUMNS", None)
    primary, secondary = terminal(width)
    child = subprocess.Popen(words, env=environment, stdout=secondary, stderr=secondary)
    os.close(secondary)
    drawn = drained(primary)
    return child.wait(), left(drawn)


def plain(result, code: int, *parts: str) -> None:
    """A failure is one message on stderr and no traceback."""
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert len(re.findall(r"(?m)^Error: ", result.stderr)) == 1 and "Traceback" not in result.stderr
    for part in parts:
        assert part in " ".join(result.stderr.split()), result.stderr

"""The processes of the soak, forked from one that has not opened the store.

Their compiler is a fake, so that the cache is what works. None may import torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kernlib import events, settings
from kernlib.jit import compiler, layers, service
from kernlib.jit.entry import Entry, pack, unpack
from kernlib.jit.spec import KernelSpec

ARCH = "sm_90a"
SLEEP_S = 0.03  # at most, of a compile
SHARDS = 256
KNOWN = {"store", "store.lock", "store.left", "open", "locks", "data.mdb", "lock.mdb"}
REPORT = {"registers": "1", "spill_bytes": "0", "shared_bytes": "0", "compile_ms": "1"}


class Child(NamedTuple):
    """A forked process and the end of the pipe that brings its answer."""

    pid: int
    answer: int

    def result(self) -> tuple[int, object]:
        """Its exit status, negative for a signal, and what its work returned; waits for it."""
        with open(self.answer, "rb") as pipe:
            text = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return status, json.loads(text) if text else None


def fork(work: Callable[[], object], limit_s: int) -> Child:
    """Begin ``work()`` in a forked process, which SIGALRM ends after ``limit_s``."""
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return Child(pid, read)
    status = 1
    try:
        os.close(read)
        signal.alarm(limit_s)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with open(write, "w") as pipe:
            json.dump(work(), pipe)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def forked(work: Callable[[], object], limit_s: int) -> tuple[int, object]:
    return fork(work, limit_s).result()


def spec(number: int) -> KernelSpec:
    return KernelSpec("soak", f"// {number}\n", "entry", 32, description=f"kernel {number}")


def expected(number: int) -> tuple[str, bytes]:
    """Entry point and cubin of a kernel, 1 to 20 KB."""
    noise = hashlib.sha256(str(number).encode()).digest()
    return "entry", noise * (32 + noise[0] * 608 // 255)


def right(number: int, found: Entry | None) -> bool:
    return found is not None and (found.kernel, found.cubin) == expected(number)


def key(number: int) -> bytes:
    return service.digest(spec(number), ARCH)


def made(number: int) -> Entry:
    return Entry(*expected(number), REPORT)


def use(folder: Path, compiling: Callable[[int], None] = lambda number: None) -> None:
    """This process's cache, its compiler, and no patience with warnings. Only after a fork."""
    os.environ["KERNLIB_CACHE_DIR"] = str(folder / "cache")
    settings.reset()
    warnings.simplefilter("error")

    def compile_spec(wanted: KernelSpec, arch: str) -> Entry:
        number = int(wanted.source[3:])
        compiling(number)
        return made(number)

    compiler.compile_spec = compile_spec


def restless(folder: Path, pipe: int, seed: int, limit: int) -> None:
    """Build, get and put, and say what is committed, until killed."""
    choose = random.Random(seed)

    def say(what: str, number: int) -> None:
        os.write(pipe, f"{what} {os.getpid()} {number}\n".encode())

    def compiling(number: int) -> None:
        say("compiling", number)
        time.sleep(choose.uniform(0, SLEEP_S))

    def committed(event: events.Event) -> None:
        if event.name in ("store", "hit"):
            say("committed", int(event.description.split()[-1]))

    use(folder, compiling)
    events.subscribe(committed)
    while True:
        number = choose.randrange(limit)
        what = choose.random()
        if what < 0.6 and not right(number, service.build(spec(number), ARCH)):
            say("wrong-build", number)
        elif what < 0.8:
            found = layers.layers().store.get(key(number))
            if found is not None and not right(number, unpack(key(number), found)):
                say("wrong-get", number)
        elif layers.layers().store.put(key(number), pack(key(number), made(number))):
            say("committed", number)


def fill(folder: Path, keys: int) -> None:
    """All kernels, some of them twice, so that there are freed pages as well."""
    use(folder)
    for numbers in (range(keys), range(0, keys, 5)):
        for number in numbers:
            layers.layers().store.delete(key(number))
            service.build(spec(number), ARCH)
    layers.layers().store.close()


def take_over(folder: Path, number: int) -> float:
    """Milliseconds of a build, from opening the store, of what a killed process was compiling."""
    use(folder)
    start = time.perf_counter()
    assert right(number, service.build(spec(number), ARCH))
    milliseconds = (time.perf_counter() - start) * 1e3
    layers.layers().store.close()
    return milliseconds


def check(folder: Path, committed: Sequence[int]) -> tuple[int, list[str]]:
    """How many committed kernels are gone, and what else is not as it must be. Alone."""
    use(folder)
    store, locks, _ = layers.layers()
    broken = []
    found = ((number, store.get(key(number)) or b"") for number in committed)
    lost = sum(not right(number, unpack(key(number), value)) for number, value in found)
    for shard in range(SHARDS):
        with locks.hold(bytes([shard]) + bytes(31), 0) as owned:
            if not owned:
                broken.append(f"lock {shard:02x} is stale")
    if not right(-1, service.build(spec(-1), ARCH)):
        broken.append("a call was wrong")
    broken += [f"pages: {problem}" for problem in store.verify()[:3]]
    store.close()
    return lost, broken + _leftovers(folder / "cache" / "v1")


def _leftovers(root: Path) -> list[str]:
    """Files that nobody has a use for: marks of the dead, stores moved aside, temporary ones."""
    known = [path for path in root.iterdir() if path.name not in KNOWN]
    inside = [path for path in (root / "store").iterdir() if path.name not in KNOWN]
    marks = list((root / "open").iterdir())
    return [f"left over: {path}" for path in (*known, *inside, *marks)]

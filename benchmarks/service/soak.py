"""The kernel cache under load: many cold processes, killed ones, and a damaged file.

``python -m benchmarks.service.soak [--processes 64] [--keys 200] [--kills 1000] [--damages 300]
[--json FILE]`` needs no GPU and is no part of CI. It exits 1 when a promise is broken; with
``--json`` its rows go into a result file of the family ``service``. On 16 cores it takes two
minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event, Thread

from benchmarks.service import soak_damages
from benchmarks.service.soak_workers import (
    ARCH,
    check,
    fork,
    forked,
    restless,
    take_over,
)

ROOT = Path(__file__).resolve().parents[2]
SOURCE = '#include "pairwise/direct/direct.cuh"'
COUNT = "count"
CHECK_EVERY = 100  # kills
OWNERS_EVERY = 10  # kills are of a process that compiles, and the next one is timed
TAKE_OVER_MUST_MS = 1000.0  # the lock's timeout is 60 s


@dataclass
class Found:
    """What one part measured: (case, unit, value, must), and every promise that was broken."""

    rows: list[tuple[str, str, float, float | None]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def row(self, case: str, unit: str, value: float, must: float | None = None) -> None:
        self.rows.append((case, unit, value, must))
        if must is not None and value > must:
            self.broken.append(f"{case}: {value:g} ({unit}), must be at most {must:g}")


# Many cold processes and one store.

LOWERED = """
import json, sys, kernlib as kl
from kernlib.families.pairwise.kernels.direct import DIRECT
from kernlib.families.pairwise.lowering.problem import Scope
descriptors = (kl.l1_distance(), kl.gaussian(), kl.laplace_l1(), kl.matern32(), kl.cauchy(),
               kl.matern52(), kl.squared_distance(), kl.rational_quadratic(), kl.l2_distance())
lists = [DIRECT.specs(d, Scope(("float32",), "sm_90a"), "sm_90a") for d in descriptors]
specs = [tuple(s) for several in zip(*lists) for s in several]
json.dump(specs, sys.stdout)
"""


def lowered(count: int) -> list[list]:
    """Fields of real kernels' specs, evenly from all that there are."""
    command = [sys.executable, "-c", LOWERED]
    specs = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
    if count > len(specs):
        raise SystemExit(f"--keys can be at most {len(specs)}")
    return [specs[at * len(specs) // count] for at in range(count)]


def build_all(folder: str, index: str) -> None:
    """The part of one process: all kernels in an order of its own, its events in a file."""
    from kernlib import events
    from kernlib.jit import service
    from kernlib.jit.spec import KernelSpec

    warnings.simplefilter("error")
    specs = json.loads(Path(folder, "specs.json").read_text())
    random.Random(index).shuffle(specs)
    with open(Path(folder, f"events-{index}"), "a", buffering=1) as log:
        events.subscribe(lambda event: log.write(f"{event.name} {event.key}\n"))
        print("ready", flush=True)
        sys.stdin.readline()
        for *fields, options, description in specs:
            service.build(KernelSpec(*fields, tuple(options), description), ARCH)
    print("torch" if "torch" in sys.modules else "done", flush=True)
    sys.stdin.readline()  # keep the memory until it has been counted


def cold(folder: Path, processes: int, keys: int) -> Found:
    """Start them together; every kernel must be compiled once, whoever does it."""
    (folder / "specs.json").write_text(json.dumps(lowered(keys)))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KERNLIB_")}
    environment["KERNLIB_CACHE_DIR"] = str(folder / "cache")
    with ExitStack() as stack:
        children = [stack.enter_context(_child(folder, i, environment)) for i in range(processes)]
        for child in children:
            child.stdout.readline()
        memory = Memory([child.pid for child in children])
        start = time.perf_counter()
        for child in children:
            with suppress(BrokenPipeError):  # one that has failed already is counted below
                child.stdin.write("go\n")
                child.stdin.flush()
        answers = [child.stdout.readline().strip() for child in children]
        seconds = time.perf_counter() - start
        memory.stop()
        for child in children:
            with suppress(BrokenPipeError):
                child.stdin.close()
        codes = [child.wait() for child in children]
    found = Found()
    if set(answers) != {"done"} or any(codes):
        errors = [(folder / f"errors-{i}").read_text()[-500:] for i in range(processes)]
        found.broken.append(f"processes ended with {Counter(codes)}: {max(errors, key=len)}")
    _cold_rows(found, f"soak {processes}x{keys}", folder, keys, seconds, memory)
    return found


def _child(folder: Path, index: int, environment: dict[str, str]) -> subprocess.Popen:
    code = f"from benchmarks.service.soak import build_all; build_all({str(folder)!r}, '{index}')"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with open(folder / f"errors-{index}", "wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, env=environment, stderr=errors, **pipes
        )


def _cold_rows(
    found: Found, name: str, folder: Path, keys: int, seconds: float, memory: Memory
) -> None:
    logs = (log.read_text().splitlines() for log in folder.glob("events-*"))
    lines = [line.split() for log in logs for line in log]
    compiles = Counter(key for event, key in lines if event == "compile")
    found.row(f"{name} cold", "s", seconds)
    found.row(f"{name} compiles per key", COUNT, max(compiles.values(), default=0), 1)
    if len(compiles) != keys:
        found.broken.append(f"{name}: {len(compiles)} of {keys} keys were compiled")
    failed = [event for event, _ in lines if event == "failed"]
    if failed:
        found.broken.append(f"{name}: {len(failed)} compiles failed")
    found.row(f"{name} peak memory", "bytes", memory.peak)
    found.row(f"{name} largest process", "bytes", memory.largest)


class Memory:
    """The most that processes held together, and the most that one did: their shares of pages
    (PSS), looked at twice a second."""

    def __init__(self, pids: Sequence[int]):
        self.peak = self.largest = 0
        self._pids, self._stop = pids, Event()
        self._thread = Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while True:
            ended = self._stop.wait(0.5)
            shares = [_share(pid) for pid in self._pids]
            self.peak, self.largest = max(self.peak, sum(shares)), max(self.largest, *shares)
            if ended:
                return

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def _share(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


# Processes that are killed at any moment.


class Killer:
    """Keeps processes busy on one store and kills them; what they committed must stay."""

    def __init__(self, folder: Path, workers: int):
        self.folder, self.workers = folder, workers
        self.killed = 0
        self.committed: set[int] = set()
        self.broken: list[str] = []
        self.take_overs: list[float] = []
        self.lost = 0
        self._live: dict[int, float] = {}  # pid to when it dies
        self._compiling: dict[int, int] = {}  # pid to number
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        self._rest = b""

    def run(self, kills: int) -> None:
        while self.killed < kills:
            until = min(kills, self.killed + CHECK_EVERY)
            while self.killed < until:
                self._step()
            self._kill(list(self._live))
            self._drain()
            self._check()

    def _step(self) -> None:
        while len(self._live) < self.workers:
            # More keys with each kill: there is always something to compile.
            busy = partial(
                restless, self.folder, self._write, random.getrandbits(32), 50 + 3 * self.killed
            )
            child = fork(busy, 120)
            self._live[child.pid] = time.monotonic() + random.uniform(0.001, 0.15)
            os.close(child.answer)
        self._drain()
        if self.killed % OWNERS_EVERY == 0 and self._compiling:
            self._kill_an_owner()
        now = time.monotonic()
        self._kill([pid for pid, moment in self._live.items() if moment <= now])
        time.sleep(0.0005)

    def _kill_an_owner(self) -> None:
        pid, number = self._compiling.popitem()
        if pid in self._live:
            self._kill([pid])
            status, answer = forked(lambda: take_over(self.folder, number), 60)
            if status:
                self.broken.append(f"the one after a killed owner ended with {status}")
            else:
                self.take_overs.append(answer)

    def _kill(self, pids: list[int]) -> None:
        for pid in pids:
            del self._live[pid]
            self._compiling.pop(pid, None)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.broken.append(f"a process ended by itself with wait status {status}")
                continue
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self.killed += 1

    def _drain(self) -> None:
        try:
            self._rest += os.read(self._read, 1 << 20)
        except BlockingIOError:
            return
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            what, pid, number = line.decode().split()
            if what == "committed":
                self.committed.add(int(number))
                self._compiling.pop(int(pid), None)
            elif what == "compiling":
                self._compiling[int(pid)] = int(number)
            else:
                self.broken.append(f"{what} for key {number}")

    def _check(self) -> None:
        status, answer = forked(lambda: check(self.folder, sorted(self.committed)), 120)
        if status:
            self.broken.append(f"the check after {self.killed} kills ended with {status}")
            return
        lost, broken = answer
        self.lost += lost
        self.broken += [f"after {self.killed} kills: {text}" for text in broken]


def kills(folder: Path, count: int) -> Found:
    killer = Killer(folder, max(4, (os.cpu_count() or 1) // 2))
    start = time.perf_counter()
    killer.run(count)
    found = Found(broken=killer.broken)
    case = f"soak {count} kills: "
    found.row(case + "entries committed", COUNT, len(killer.committed))
    found.row(case + "entries lost", COUNT, killer.lost, 0)
    slowest = max(killer.take_overs, default=0.0)
    found.row(case + "slowest build after a killed owner", "ms", slowest, TAKE_OVER_MUST_MS)
    found.row(case + "time", "s", time.perf_counter() - start)
    return found


# Damage.


def damages(folder: Path, count: int, keys: int) -> Found:
    """Lanes, one a core, damage stores of their own and call for all kernels."""
    lanes = min(os.cpu_count() or 1, max(1, count // 10))
    shares = [len(range(lane, count, lanes)) for lane in range(lanes)]
    children = []
    for lane, share in enumerate(shares):
        seed = random.getrandbits(32)
        work = partial(soak_damages.lane, folder / str(lane), share, keys, seed)
        children.append(fork(work, 3600))
    found, sums = Found(), Counter()
    for child in children:
        status, answer = child.result()
        if status:
            found.broken.append(f"a lane of damages ended with {status}")
            continue
        sums.update(answer["counts"])
        found.broken += answer["broken"]
    case = f"soak {count} damages: "
    found.row(case + "calls", COUNT, sums["calls"])
    found.row(case + "wrong calls", COUNT, sums["wrong"], 0)
    found.row(case + "signals, file time changed", COUNT, sums["signals"], 0)
    found.row(case + "signals, file time kept", COUNT, sums["kept signals"])
    found.row(case + "failures after a signal", COUNT, sums["after"], 0)
    found.row(case + "stores moved aside", COUNT, sums["aside"])
    return found


# The command.


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service.soak")
    for name, count in (("processes", 64), ("keys", 200), ("kills", 1000), ("damages", 300)):
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--seed", type=int, help="of an earlier run; processes race all the same")
    parser.add_argument("--json", type=Path, help="put the rows into this file of results")
    return parser.parse_args(argv)


def parts(options: argparse.Namespace, folder: Path) -> list[Callable[[], Found]]:
    wanted = [
        (options.processes * options.keys, cold, (options.processes, options.keys)),
        (options.kills, kills, (options.kills,)),
        (options.damages, damages, (options.damages, soak_damages.KEYS)),
    ]
    return [
        lambda part=part, arguments=arguments: part(folder / part.__name__, *arguments)
        for count, part, arguments in wanted
        if count
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    options = parse(argv)
    if forked(partial(merged, [], options.json), 120)[0]:  # before any work; torch stays out
        return 1
    seed = random.getrandbits(32) if options.seed is None else options.seed
    random.seed(seed)
    print(f"seed {seed}", flush=True)
    found = Found()
    with tempfile.TemporaryDirectory(prefix="kernlib-soak-") as work:
        for name in ("cold", "kills", "damages"):
            Path(work, name).mkdir()
        for part in parts(options, Path(work)):
            one = part()
            found.rows += one.rows
            found.broken += one.broken
    report(found, options.json)
    for text in found.broken:
        print(f"BROKEN: {text}", file=sys.stderr)
    return 1 if found.broken else 0


def merged(rows: list[dict], path: Path | None) -> dict | None:
    """The file of results with these rows. Raises ValueError when it is of another GPU."""
    from benchmarks.common import harness  # torch, which no process of the soak may have
    from kernlib.jit import sources

    if path is None:
        return None
    head = {**harness.machine(), "sources": sources.digest(SOURCE).hex()}
    return harness.merge(head, rows, harness.read(path))


def report(found: Found, path: Path | None) -> None:
    from benchmarks.common import harness

    rows = [harness.Row(case, unit, ours, must=must) for case, unit, ours, must in found.rows]
    results = merged([row.as_json() for row in rows], path)
    if path is not None:
        harness.write(path, results)
    harness.print_table("soak", rows)


if __name__ == "__main__":
    sys.exit(main())

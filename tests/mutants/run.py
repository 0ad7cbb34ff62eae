"""Puts each fault into a copy of the tree and runs the tests that reach its lines until one fails.

``python -m tests.mutants.run --suite fast [--jobs N] [--first N] [--sites device] [NAME ...]``
A fault that ``results.json`` has an outcome of is not tried again; ``--again`` does. ``--table``
prints what is known. Outcomes are "found", "missed", "unreached" (no test reaches the lines) and
"late" (nothing failed in 120 seconds) and "broken" (pytest did not run them).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

from tests.mutants import only
from tests.mutants.faults import Mutant, load
from tests.mutants.reach import MAP, Map
from tests.support.paths import ROOT

RESULTS = Path(__file__).parent / "results.json"
LIMIT_S = 120.0
COPIED = ("kernlib", "kernel_sources", "tests", "benchmarks", "docs", "examples", ".ci")
SUITES = {  # arguments of pytest
    "fast": ("--cases", "few"),
    "full": ("-m", "not gpu", "--cases", "all"),
    "gpu": ("-m", "gpu", "--cases", "few"),
    "gpu_full": ("-m", "gpu", "--cases", "many"),
}
COLUMNS = ("before", *SUITES)  # of the table; "before": the fast tests of 867fd83, all cases
# These compare the tree with what was measured before: they know of every change, not of faults.
LEFT_OUT = ("tests/architecture/test_gpu_record.py", "tests/docs/")
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.M)


class Runner:
    """Copies of the tree, one for each job, and what the tests say of them."""

    def __init__(self, suite: str, reach: Map, folder: Path, jobs: int):
        self.suite, self.reach, self.folder = suite, reach, folder
        self.copies: Queue[Path] = Queue()
        for i in range(jobs):
            self.copies.put(self._copy(folder / f"tree-{i}"))
        self.pristine = self._copy(folder / "pristine")

    @staticmethod
    def _copy(to: Path) -> Path:
        to.mkdir()
        ignored = shutil.ignore_patterns("*.pyc", ".hypothesis")
        for name in COPIED:
            shutil.copytree(ROOT / name, to / name, ignore=ignored)
        for path in ROOT.glob("*.*"):
            if path.is_file():
                shutil.copy(path, to)
        return to

    def outcome(self, mutant: Mutant) -> dict:
        """What the tests say of one fault."""
        functions = self._reaching(mutant)
        functions = [name for name in functions if not name.startswith(LEFT_OUT)]
        begun = time.monotonic()
        if not functions:
            return {"outcome": "unreached"}
        tree = self.copies.get()
        text = mutant.apply(tree)
        try:
            while True:
                left = LIMIT_S - (time.monotonic() - begun)
                outcome, test = self._tests(tree, functions, left)
                took = round(time.monotonic() - begun, 1)
                if outcome != "found" or "::" not in test or self._is_sound(functions, test):
                    break
                functions = [name for name in functions if name != test.split("[")[0]]
                if not functions:
                    outcome, test = "missed", ""
                    break
        finally:
            (tree / mutant.file).write_text(text)
            self.copies.put(tree)
        return {"outcome": outcome, "seconds": took, "functions": len(functions), "test": test}

    def _reaching(self, mutant: Mutant) -> list[str]:
        """Of a map without lines of the host, as of a GPU's machine, which has no coverage: the
        tests of the family and of what all share."""
        if mutant.on_device or self.reach.lines:
            return self.reach.reaching(mutant.file, mutant.lines())
        folder = f"tests/gpu/families/{mutant.family}/"
        if not (ROOT / folder).is_dir():  # of layers and the service every family's
            folder = "tests/gpu/"
        return self.reach.in_folders(("tests/gpu/shared/", folder))

    def _is_sound(self, functions: list[str], test: str) -> bool:
        """Whether a test passes without the fault, behind the same others as with it: one that
        fails by what ran before it finds nothing."""
        before = functions[: functions.index(test.split("[")[0]) + 1]
        return self._tests(self.pristine, before, LIMIT_S)[0] == "missed"

    def _tests(self, tree: Path, names: list[str], limit_s: float) -> tuple[str, str]:
        """Outcome and the test that failed."""
        listed = self.folder / f"tests-{threading.get_ident()}.txt"  # jobs share the pristine tree
        names = [name for name in names if _exists(tree, name)]
        listed.write_text("\n".join(names))
        environment = {**os.environ, "PYTHONPATH": self._path(tree), only.LIST: str(listed)}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
        files = dict.fromkeys(name.split("::")[0] for name in names)
        command += ["-p", "tests.mutants.only", *SUITES[self.suite], *files]
        with subprocess.Popen(
            command,
            cwd=tree,
            env=environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:
            try:
                said, _ = process.communicate(timeout=max(limit_s, 1.0))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return "late", ""
        if process.returncode in (0, 5):  # 5: of what reaches the lines the suite runs nothing
            return ("missed" if process.returncode == 0 else "unreached"), ""
        failed = FAILED.search(said)
        if failed is None or "::" not in failed[1]:  # a crash of the process
            last = said.strip().splitlines()[-1][:80]
            return "broken" if process.returncode in (3, 4) else "found", last
        return "found", failed[1]

    @staticmethod
    def _path(tree: Path) -> str:
        """For the processes that tests start, which have no working directory of their own."""
        return os.pathsep.join(filter(None, (str(tree), os.environ.get("PYTHONPATH"))))


def _exists(tree: Path, name: str) -> bool:
    """Whether a test of the map is still there."""
    file, function = name.split("[")[0].split("::")[:2]
    path = tree / file
    return path.exists() and f"def {function}(" in path.read_text()


def read(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}


def run(mutants: list[Mutant], runner: Runner, path: Path, jobs: int) -> None:
    """Try faults, keeping each outcome at once."""
    lock = threading.Lock()

    def one(mutant: Mutant) -> None:
        outcome = runner.outcome(mutant)
        with lock:
            results = read(path)
            results.setdefault(mutant.id, {})[runner.suite] = outcome
            path.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
            print(f"{mutant.id:55} {outcome['outcome']:9} {outcome.get('seconds', 0):6}  "
                  f"{outcome.get('test', '')}", flush=True)  # fmt: skip

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, mutants))


def table(mutants: list[Mutant], results: dict) -> str:
    """Markdown: each fault with the seconds in which each suite finds it."""
    suites = [name for name in COLUMNS if any(name in row for row in results.values())]
    head = ["fault", "in", "kind", *suites, "found by"]
    lines = [f"| {' | '.join(head)} |", "|---|---|---|" + "---:|" * len(suites) + "---|"]
    for mutant in mutants:
        row = results.get(mutant.id, {})
        if row:
            cells = [_cell(row.get(suite)) for suite in suites]
            tests = (row[suite].get("test", "") for suite in suites if suite in row)
            test = next(filter(None, tests), "").split("[")[0].removeprefix("tests/")
            place = "device" if mutant.on_device else "host"
            lines.append(f"| {' | '.join([mutant.id, place, mutant.kind, *cells, test])} |")
    for suite in suites:
        rows = [row[suite] for row in results.values() if suite in row]
        seconds = [row["seconds"] for row in rows if row["outcome"] == "found"]
        median = f"{statistics.median(seconds):.1f} s" if seconds else "none"
        lines.append(f"\n{suite}: {len(seconds)} of {len(rows)} found, median {median}")
    return "\n".join(lines)


def _cell(row: dict | None) -> str:
    if row is None:
        return ""
    return f"{row['seconds']:.0f}" if row["outcome"] == "found" else row["outcome"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="FAMILY/NAME")
    parser.add_argument("--suite", choices=SUITES, default="fast")
    parser.add_argument("--sites", choices=("device", "host"))
    parser.add_argument("--first", type=int, metavar="N")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--map", type=Path, default=MAP)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--table", action="store_true")
    chosen = parser.parse_args()
    mutants = load()
    if chosen.table:
        print(table(mutants, read(chosen.results)))
        return
    mutants = mutants[: chosen.first]
    if chosen.sites:
        mutants = [m for m in mutants if m.on_device == (chosen.sites == "device")]
    if chosen.names:
        mutants = [m for m in mutants if m.id in chosen.names or m.family in chosen.names]
    if not chosen.again:
        held = read(chosen.results)
        mutants = [m for m in mutants if chosen.suite not in held.get(m.id, {})]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        runner = Runner(chosen.suite, Map.read(chosen.map), Path(folder), chosen.jobs)
        run(mutants, runner, chosen.results, chosen.jobs)
    print(table(load(), read(chosen.results)))


if __name__ == "__main__":
    main()

"""Which tests reach which lines: the map by which a fault runs only the tests that could find it.

``python -m tests.mutants.reach [FILE] [argument of pytest ...]`` runs the tests under coverage. A
test function counts as one, whatever its cases. Lines of a header are reached by the tests that
compile or emulate a source that includes it, all of its lines alike.

The module is a plugin of pytest too (``-p tests.mutants.reach``), which with
``KERNLIB_REACH=FOLDER`` writes what each of its processes saw.
"""

from __future__ import annotations

import gzip
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections import defaultdict
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.speeds import cpu_s

MAP = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kernlib-reach.json.gz"
FOLDER = "KERNLIB_REACH"
TEST = "KERNLIB_REACH_TEST"  # read by coverage in the processes that a test starts
SETTINGS = """[run]
source = {root}/kernlib
data_file = {folder}/coverage
parallel = true
context = ${{KERNLIB_REACH_TEST-}}
patch =
    subprocess
    fork
    _exit
"""


class Map:
    """``lines[file][line]`` and ``headers[name]``, sets of test functions, and ``seconds``, of the
    processor, that the cases of each took."""

    def __init__(self, lines: dict, headers: dict, seconds: dict):
        self.lines, self.headers, self.seconds = lines, headers, seconds

    @classmethod
    def read(cls, path: Path = MAP) -> Map:
        held = json.loads(gzip.decompress(path.read_bytes()))
        names = held["tests"]
        lines = defaultdict(dict)
        for file, groups in held["lines"].items():
            for numbers, tests in groups:
                lines[file] |= {number: {names[i] for i in tests} for number in numbers}
        headers = {name: {names[i] for i in tests} for name, tests in held["headers"].items()}
        return cls(lines, headers, held["seconds"])

    def write(self, path: Path) -> None:
        names = sorted(self.seconds)
        index = {name: i for i, name in enumerate(names)}
        lines = {}
        for file, reached in self.lines.items():
            groups = defaultdict(list)
            for line, tests in reached.items():
                groups[tuple(sorted(index[name] for name in tests if name in index))].append(line)
            lines[file] = [[numbers, tests] for tests, numbers in groups.items()]
        headers = {
            name: sorted(index[test] for test in tests if test in index)
            for name, tests in self.headers.items()
        }
        held = {"tests": names, "lines": lines, "headers": headers, "seconds": self.seconds}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(json.dumps(held).encode()))

    def reaching(self, file: str, numbers: range) -> list[str]:
        """Test functions that reach one of these lines, the cheapest first, then those that reach
        others of the file: the map is of a few cases, and another case may reach them."""
        if file.startswith("kernel_sources/"):
            return self._cheapest(self.headers.get(file.removeprefix("kernel_sources/"), set()))
        reached = self.lines.get(file, {})
        here = set().union(*(reached.get(number, set()) for number in numbers))
        return self._cheapest(here) + self._cheapest(set().union(*reached.values()) - here)

    def in_folders(self, folders: tuple[str, ...]) -> list[str]:
        """Test functions of these folders, the cheapest first."""
        return self._cheapest({name for name in self.seconds if name.startswith(folders)})

    def _cheapest(self, tests: set[str]) -> list[str]:
        return sorted(tests, key=lambda name: (self.seconds.get(name, 0.0), name))


def merged(folder: Path) -> Map:
    """What all processes of a run saw."""
    from coverage.numbits import numbits_to_nums

    lines, headers = defaultdict(lambda: defaultdict(set)), defaultdict(set)
    seconds: dict[str, float] = defaultdict(float)
    query = (
        "select file.path, context.context, numbits from line_bits "
        "join file on file.id = file_id join context on context.id = context_id"
    )
    for path in folder.glob("coverage.*"):
        # Coverage's own reader asks for one line's contexts at a time, which takes minutes. Files
        # of processes that a test killed may be damaged.
        with suppress(sqlite3.DatabaseError), closing(sqlite3.connect(path)) as database:
            for measured, context, bits in database.execute(query).fetchall():
                file, test = os.path.relpath(measured, ROOT), context.split("|")[-1]
                for line in numbits_to_nums(bits):
                    lines[file][line] |= {test} if test else set()
    for path in folder.glob("seen-*.json"):
        seen = json.loads(path.read_text())
        for header, tests in seen["headers"].items():
            headers[header] |= set(tests)
        for test, took in seen["seconds"].items():
            seconds[test] += took
    return Map(lines, headers, seconds)


def function_of(nodeid: str) -> str:
    return nodeid.split("[")[0]


class Recorder:
    """Notes the lines and headers of each test of this process."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.headers: dict[str, set[str]] = defaultdict(set)
        self.seconds: dict[str, float] = defaultdict(float)
        self.test, self.coverage = "", None

    def start(self) -> None:
        """Note headers from here on, and lines where coverage is installed."""
        from kernlib.jit import sources
        from tests.support import compiled_kernels
        from tests.support.emulation import emulator

        digest, compiled = sources.digest, compiled_kernels.compiled
        library = emulator.Emulator._library

        def noted(source: str) -> None:
            for name in sources.closure(source):
                self.headers[name].add(self.test)

        def of_digest(source):
            noted(source)
            return digest(source)

        def of_compiled(spec, arch):
            noted(spec.source)
            return compiled(spec, arch)

        def of_library(emulated, spec):
            noted(spec.source)
            return library(emulated, spec)

        sources.digest, compiled_kernels.compiled = of_digest, of_compiled
        emulator.Emulator._library = of_library
        settings = os.environ.get("COVERAGE_PROCESS_START")
        if settings:
            import coverage

            self.coverage = coverage.Coverage.current() or coverage.Coverage(config_file=settings)
            self.coverage.start()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item):
        self.test = os.environ[TEST] = function_of(item.nodeid)
        if self.coverage is not None:
            if sys.gettrace() is None:  # a test that traces has ended it
                self.coverage.stop()
                self.coverage.start()
            self.coverage.switch_context(self.test)
        begun = cpu_s()
        yield
        self.seconds[self.test] += cpu_s() - begun

    def pytest_sessionfinish(self):
        if self.coverage is not None:
            self.coverage.stop()
            self.coverage.save()
        headers = {name: sorted(tests) for name, tests in self.headers.items()}
        seen = {"headers": headers, "seconds": self.seconds}
        (self.folder / f"seen-{os.getpid()}.json").write_text(json.dumps(seen))


def pytest_configure(config):
    folder = os.environ.get(FOLDER)
    controls = getattr(config.option, "dist", "no") != "no" and not hasattr(config, "workerinput")
    if folder and not controls:
        recorder = Recorder(Path(folder))
        recorder.start()
        config.pluginmanager.register(recorder, "reach")


def main(path: str = str(MAP), *arguments: str) -> int:
    """Run the tests and write the map."""
    with tempfile.TemporaryDirectory() as name:
        settings = Path(name) / "coveragerc"
        settings.write_text(SETTINGS.format(root=ROOT, folder=name))
        environment = {**os.environ, FOLDER: name, "COVERAGE_PROCESS_START": str(settings)}
        command = [sys.executable, "-m", "pytest", "-p", "tests.mutants.reach", *arguments]
        done = subprocess.run(command, env=environment, cwd=ROOT)
        merged(Path(name)).write(Path(path))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Two speeds of tests: which are slow, how many workers share the rest, and what a run shows.

``pytest`` runs a few cases (``selection``) of each test that is not marked ``slow``, on a few
workers of pytest-xdist where that is installed. Slow are, by their meaning: sweeps of compiles but
for one specification a kernel, documents, examples, benchmarks and the demo when they are executed,
soaks and kills, Inductor, and gradient checks beyond one case a stage. ``pytest -m slow`` runs
those, ``pytest -m ""`` all, and ``--part K/N`` the K-th of N parts of what would run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import pytest

from tests.support import selection

FAST = "not slow"  # the -m of pyproject.toml
WORKERS = 8  # at most: each has torch and, on a GPU, a context of its own
FEW_FILES = 3  # whose tests are over before workers have imported torch
SILENCE_S = 15.0
LEFT_OUT = {  # why tests of a run were left out, and how to run them
    "emulated": "run kernels on the host, which needs g++",
    "slow": "are slow: pytest -m slow",
    "part": "are in other parts: --part K/N",
    "cases": "are further cases of tests: pytest --cases all",
}


def slow_but(fast: Collection, cases: Iterable) -> list:
    """Parameters of a sweep, of which all but ``fast`` are slow. Raises ValueError if a name in
    ``fast`` is no case."""
    cases = list(cases)
    absent = [case for case in fast if case not in cases]
    if absent:
        raise ValueError(f"no cases: {absent}")
    return [case if case in fast else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def one_of_each(kind: Callable, cases: Mapping) -> list:
    """The first name of each ``kind(case)``."""
    return list({kind(case): name for name, case in reversed(cases.items())}.values())


def part_of(text: str) -> tuple[int, int]:
    """``K/N`` as what the hash of a test's name leaves, and by what. Raises
    argparse.ArgumentTypeError."""
    part, _, count = text.partition("/")
    if not (part.isdigit() and count.isdigit() and 1 <= int(part) <= int(count)):
        message = f"--part must be K/N with 1 <= K <= N, as 1/2, got {text!r}"
        raise argparse.ArgumentTypeError(message)
    return int(part) - 1, int(count)


def is_in_part(item: pytest.Item, part: tuple[int, int]) -> bool:
    """Whether a test runs in this part."""
    rest, count = part
    return zlib.crc32(item.nodeid.encode()) % count == rest


def workers(config: pytest.Config) -> int:
    """How many share a run whose command line does not say; 0 is this process alone."""
    option = config.option
    if option.usepdb or option.capture == "no" or option.collectonly:
        return 0
    paths = [Path(argument.split("::")[0]) for argument in config.args]
    if len(paths) <= FEW_FILES and not any(path.is_dir() for path in paths):
        return 0
    cores = len(os.sched_getaffinity(0))
    return min(cores, WORKERS) if cores > 1 else 0


def cpu_s() -> float:
    """Seconds of the processor of this process and of its children that have ended."""
    found = os.times()
    return found.user + found.system + found.children_user + found.children_system


class Speeds:
    """A run's hooks: it measures tests, counts what is left out, and breaks long silences."""

    def __init__(self, config: pytest.Config):
        self.config = config
        self.left_out = dict.fromkeys(LEFT_OUT, 0)
        self.taken: dict[str, float] = {}
        self._running: dict[str, None] = {}
        self._start = 0.0
        self._heard, self._over = threading.Event(), False
        self._watch: threading.Thread | None = None

    # What is left out.

    @pytest.hookimpl(hookwrapper=True)
    def pytest_pycollect_makeitem(self):
        outcome = yield
        items = outcome.get_result()
        if isinstance(items, list):  # the cases of a function
            chosen = selection.thinned(items, selection.cases_of(self.config))
            self.left_out["cases"] += sum(map(self._counts, items)) - sum(map(self._counts, chosen))
            outcome.force_result(chosen)

    def _counts(self, item: pytest.Item) -> bool:
        """Whether a case would have run."""
        return not (self.config.option.markexpr == FAST and item.get_closest_marker("slow"))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items):
        part = self.config.option.part
        if part is not None:
            others = [item for item in items if not is_in_part(item, part)]
            self.config.hook.pytest_deselected(items=others)
            items[:] = [item for item in items if is_in_part(item, part)]
            self.left_out["part"] = len(others)
        if shutil.which("g++") is None:
            self._leave_out("emulated", items)

    def _leave_out(self, mark: str, items: list[pytest.Item]) -> None:
        count = len(items)
        items[:] = [item for item in items if not item.get_closest_marker(mark)]
        self.left_out[mark] = count - len(items)

    def pytest_deselected(self, items):
        if self.config.option.markexpr == FAST:
            self.left_out["slow"] += sum(bool(item.get_closest_marker("slow")) for item in items)

    def pytest_sessionfinish(self):
        output = getattr(self.config, "workeroutput", None)
        if output is not None:  # this is a worker
            output["left_out"] = self.left_out
        self._over = True
        self._heard.set()
        if self._watch is not None:
            self._watch.join()

    @pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which need not be there
    def pytest_testnodedown(self, node):
        found = getattr(node, "workeroutput", {}).get("left_out", {})  # all collect the same
        self.left_out = {name: max(n, found.get(name, 0)) for name, n in self.left_out.items()}

    def pytest_terminal_summary(self, terminalreporter):
        limit = self.config.option.cpu_over
        if limit is not None:
            terminalreporter.section(f"processor's seconds above {limit:g}, not marked slow")
            for test, taken in sorted(self.taken.items(), key=lambda pair: -pair[1]):
                if taken > limit:
                    terminalreporter.write_line(f"{taken:8.2f} {test}")
        for name, count in self.left_out.items():
            if count:
                terminalreporter.write_line(f"{count} tests {LEFT_OUT[name]}")

    # What tests take.

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        found = yield
        report = found.get_result()
        if call.when == "teardown" and not item.get_closest_marker("slow"):
            report.user_properties.append(("cpu_s", cpu_s() - self._start))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self):
        self._start = cpu_s()

    def pytest_runtest_logreport(self, report):
        for name, value in report.user_properties:
            if name == "cpu_s":
                self.taken[report.nodeid] = value
        self._heard.set()

    # What runs. Only the process that reads what workers say has time to watch.

    def pytest_sessionstart(self):
        if getattr(self.config.option, "dist", "no") != "no":
            self._watch = threading.Thread(target=self._break_silences, daemon=True)
            self._watch.start()

    def pytest_runtest_logstart(self, nodeid):
        self._running[nodeid] = None

    def pytest_runtest_logfinish(self, nodeid):
        self._running.pop(nodeid, None)

    def _break_silences(self) -> None:
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        while not self._over:
            if self._heard.wait(SILENCE_S):
                self._heard.clear()
            else:
                reporter.ensure_newline()
                reporter.write_line(f"running: {', '.join(self._running) or 'collection'}")

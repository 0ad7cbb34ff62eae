"""Two speeds of tests: which are slow, how many workers share the rest, and what a run shows.

``pytest`` runs what is not marked ``slow``, on a few workers of pytest-xdist where that is
installed. Slow are, by their meaning: sweeps of compiles but for one specification a kernel,
documents, examples, benchmarks and the demo when they are executed, soaks and kills, Inductor, and
gradient checks beyond one case a stage. ``pytest -m slow`` runs those, ``pytest -m ""`` all, and
``--sweeps K/N`` leaves out all but the K-th of N parts of sweeps of kernels: of slow tests of
``lowering``, which compile kernels or run them on the host. ``--cases N`` runs every test but those
sweeps, documents and examples with N of its cases at most, the same N each time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import pytest

FAST = "not slow"  # the -m of pyproject.toml
WORKERS = 8  # at most: each has torch and, on a GPU, a context of its own
FEW_FILES = 3  # whose tests are over before workers have imported torch
SILENCE_S = 15.0
LEFT_OUT = {  # why tests of a run were left out, and how to run them
    "gpu": "need an NVIDIA GPU that torch can use",
    "emulated": "run kernels on the host, which needs g++",
    "slow": "are slow: pytest -m slow",
    "sweeps": "are in other parts of slow sweeps of kernels: pytest -m slow --sweeps K/N",
    "cases": "are further cases of tests: pytest without --cases",
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


def sweep_part(text: str) -> tuple[int, int]:
    """``K/N`` as what the hash of a test's name leaves, and by what. Raises pytest.UsageError."""
    part, _, count = text.partition("/")
    if not (part.isdigit() and count.isdigit() and 1 <= int(part) <= int(count)):
        raise pytest.UsageError(f"--sweeps must be K/N with 1 <= K <= N, as 1/2, got {text!r}")
    return int(part) - 1, int(count)


def is_sweep(item: pytest.Item) -> bool:
    """Whether a test is of those that ``--sweeps`` parts."""
    return "lowering" in item.path.parts and bool(item.get_closest_marker("slow"))


def is_in_part(item: pytest.Item, text: str) -> bool:
    """Whether a test runs in this part of the sweeps."""
    if not is_sweep(item):
        return True
    rest, count = sweep_part(text)
    return zlib.crc32(item.nodeid.encode()) % count == rest


def count_of_cases(text: str) -> int:
    """What follows ``--cases``. Raises argparse.ArgumentTypeError."""
    if not (text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"--cases must be 1 or more, got {text!r}")
    return int(text)


def spread(items: list[pytest.Item], limit: int) -> list[pytest.Item]:
    """Of each test at most ``limit`` cases: the first, the last and those evenly between. Sweeps,
    which have parts, stay whole, and documents and examples, which are no cases of one thing."""
    cases, kept = defaultdict(list), set()
    for item in items:
        if is_sweep(item) or "docs" in item.path.parts:
            kept.add(item)
        else:
            cases[item.nodeid.partition("[")[0]].append(item)
    for each in cases.values():
        count = min(limit, len(each))
        kept.update(each[i * (len(each) - 1) // max(1, count - 1)] for i in range(count))
    return [item for item in items if item in kept]


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

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items):
        self._leave_out_kinds(items)
        yield  # -m selects
        limit = self.config.option.cases
        if limit is not None:
            kept = dict.fromkeys(spread(items, limit))
            left_out = [item for item in items if item not in kept]
            self.config.hook.pytest_deselected(items=left_out)
            items[:], self.left_out["cases"] = kept, len(left_out)

    def _leave_out_kinds(self, items: list[pytest.Item]) -> None:
        import torch

        sweeps = self.config.option.sweeps
        if sweeps is not None:
            sweep_part(sweeps)
            count = len(items)
            items[:] = [item for item in items if is_in_part(item, sweeps)]
            self.left_out["sweeps"] = count - len(items)
        if not torch.cuda.is_available():
            self._leave_out("gpu", items)
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

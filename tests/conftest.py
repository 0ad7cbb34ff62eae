"""GPU tests are marked, left out without a GPU and recorded with one; no test sees a real cache."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest
import torch

from kernlib import settings
from kernlib.runtime import tensors
from tests.support import early, gpu_kernels, record, selection, speeds

# Tensors in host memory stand for a GPU's, which have no address below 4 GiB. A python linked to a
# fixed place, as Debian's is, has its heap there, behind where such programs begin.
if torch.zeros(1).data_ptr() < tensors.LOWEST_ADDRESS:
    tensors.LOWEST_ADDRESS = 1 << 22
# No example fails because the machine is busy: one of 3 ms has taken 870, where 200 are allowed by
# default.
hypothesis.settings.register_profile(
    "kernlib", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("kernlib")
RUN = pytest.StashKey[record.Run]()
WATCH = pytest.StashKey[gpu_kernels.Watch]()
OUTPUT = "gpu_record"  # where a worker's output holds what its run knows
KERNELS = "gpu_kernels"


def pytest_addoption(parser):
    text = "list tests without the mark slow that take more seconds of the processor than this"
    parser.addoption("--cpu-over", type=float, metavar="SECONDS", help=text)
    text = "of all that would run the K-th of N parts"
    parser.addoption("--part", type=speeds.part_of, metavar="K/N", help=text)
    text = "how many cases of each test run: few (by default), many, all or a number"
    parser.addoption("--cases", type=selection.count_of_cases, metavar="N", help=text)
    text = "count GPU tests together with those of earlier runs of the same code, which FILE keeps"
    parser.addoption("--gpu-runs", metavar="FILE", type=Path, help=text)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads it
def pytest_cmdline_main(config):
    option = config.option
    if hasattr(option, "numprocesses") and not hasattr(config, "workerinput"):
        if option.numprocesses is None:
            option.numprocesses = speeds.workers(config)
        # Tests of a file then stay with a worker, and its kernels, until another has none left:
        # by turns the long ones of the sanitizer, side by side, were all one's.
        if option.numprocesses and option.dist == "no":
            option.dist = "worksteal"


def pytest_configure(config):
    suite = record.SUITES.get(selection.cases_of(config), "")
    config.stash[RUN] = record.Run(suite)
    config.stash[WATCH] = gpu_kernels.Watch()
    if torch.cuda.is_available():
        config.stash[WATCH].start()
    config.pluginmanager.register(speeds.Speeds(config), "speeds")
    # Workers of pytest-xdist share the cores: references in float64 else take five times as long.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))


def pytest_ignore_collect(collection_path):
    # Not even imported where they cannot run: a quarter of all that is collected.
    if collection_path == record.GPU_TESTS and not torch.cuda.is_available():
        return True
    return None


def pytest_collectstart(collector):
    if isinstance(collector, pytest.Module) and record.family_of(collector.path) is not None:
        collector.config.stash[RUN].files.add(collector.path)


def pytest_itemcollected(item):
    if record.GPU_TESTS in item.path.parents:
        item.add_marker(pytest.mark.gpu)


# The record. With pytest-xdist workers see the run, each its part, and the controller writes.


def pytest_deselected(items):
    for item in items:
        family, option = record.family_of(item.path), item.config.option
        if family is None:
            continue
        run = item.config.stash[RUN]
        if option.part is not None and option.gpu_runs is not None:  # another run has it
            run.collected(family, item.path, item.nodeid)
        else:
            run.partial.add(family)


def pytest_collection_finish(session):
    run = session.config.stash[RUN]
    for item in session.items:
        family = record.family_of(item.path)
        if family is not None and torch.cuda.is_available():
            run.collected(family, item.path, item.nodeid)
    for argument in session.config.args:
        name, *single = str(argument).split("::")
        family = record.family_of((session.config.invocation_params.dir / name).resolve())
        if single and family is not None:
            run.partial.add(family)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    watch = item.config.stash[WATCH]
    watch.entry = record.family_of(item.path)
    yield
    watch.entry = None


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    found = yield
    report = found.get_result()
    family = record.family_of(item.path)
    if family is not None and torch.cuda.is_available():
        expected = report.skipped and hasattr(report, "wasxfail")
        outcome = "passed" if expected else report.outcome
        if outcome != "passed" or call.when == "teardown":
            item.config.stash[RUN].outcome(family, item.nodeid, outcome)


def pytest_sessionfinish(session):
    output = getattr(session.config, "workeroutput", None)
    if output is not None:  # this is a worker
        output[OUTPUT] = session.config.stash[RUN].state()
        output[KERNELS] = session.config.stash[WATCH].state()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which need not be there
def pytest_testnodedown(node):
    output = getattr(node, "workeroutput", {})  # a worker that crashed has none
    node.config.stash[RUN].merge(output.get(OUTPUT))
    if KERNELS in output:
        node.config.stash[WATCH].merge(output[KERNELS])


def pytest_terminal_summary(terminalreporter, config):
    run = config.stash[RUN]
    if not torch.cuda.is_available() and not hasattr(config, "workerinput"):
        terminalreporter.write_line("tests/gpu needs an NVIDIA GPU that torch can use")
    if not run.tests or hasattr(config, "workerinput") or config.option.collectonly:
        return
    if settings.current().portable:
        terminalreporter.write_line("gpu record: not written, with KERNLIB_PORTABLE")
        return
    if config.option.gpu_runs is not None:
        run.resume(config.option.gpu_runs)
    results = run.results()
    for family in run.tests:
        status = results[family]["status"] if family in results else "incomplete, not recorded"
        terminalreporter.write_line(f"gpu record: {family} {status}")
    watch = config.stash[WATCH]
    terminalreporter.write_line(f"gpu kernels: {watch}")
    if results:
        terminalreporter.write_line(f"gpu record: written to {record.write(results)}")
        if run.suite == "gpu":
            kernels = {name: watch.kernels[name] for name in results if name in watch.kernels}
            gpu_kernels.write(kernels, record.record_path().with_name(gpu_kernels.NAME))


# Fixtures.


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory):
    """A cache of this session's own, also for its child processes. On a GPU all workers share one,
    behind which lies the bundle of kernels that were compiled beforehand."""
    before = os.environ.get("KERNLIB_CACHE_DIR")
    if torch.cuda.is_available() and "PYTEST_XDIST_WORKER" in os.environ:
        directory = tmp_path_factory.getbasetemp().parent / "kernlib-cache"
        directory.mkdir(exist_ok=True)
    else:
        directory = tmp_path_factory.mktemp("kernlib-cache")
    places = [str(directory), os.environ.get(gpu_kernels.BUNDLE)]
    os.environ["KERNLIB_CACHE_DIR"] = os.pathsep.join(filter(None, places))
    settings.reset()
    yield directory
    if before is None:
        del os.environ["KERNLIB_CACHE_DIR"]
    else:
        os.environ["KERNLIB_CACHE_DIR"] = before
    settings.reset()


@pytest.fixture(autouse=True)
def fresh_settings():
    """What a test sets in the environment, and what it begins in threads, ends with it."""
    yield
    early.join()
    settings.reset()


@pytest.fixture
def device() -> str:
    """The device of GPU tests."""
    return "cuda"


@pytest.fixture
def seed() -> int:
    """A new seed each run, given to torch, shown when the test fails; KERNLIB_SEED repeats it."""
    given = os.environ.get("KERNLIB_SEED")
    value = int(given) if given else int.from_bytes(os.urandom(4), "little")
    torch.manual_seed(value)
    print(f"KERNLIB_SEED={value}")
    return value

"""Two speeds of tests: what is slow, who shares a run, and what no test looks at."""

import argparse
import re
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest

from kernlib.jit.spec import KernelSpec
from tests.support import speeds
from tests.support.compiled_kernels import compiled
from tests.support.paths import ROOT, TESTS

CLOCKS = re.compile(r"\b(perf_counter|monotonic|thread_time|process_time|time\.time)(_ns)?\(\)")
MAY_LOOK = {"process_cases.py"}  # waits for other processes, so long that only a hang takes longer


def test_no_test_looks_at_the_clock():
    for path in TESTS.rglob("*.py"):
        if path.name not in MAY_LOOK:
            found = CLOCKS.search(path.read_text())
            assert not found, f"{path.name}: {found[0]}; count what the time stands for"


def test_no_gpu_test_is_slow():
    """``pytest tests/gpu`` is all of them, as the record asks."""
    for path in (TESTS / "gpu").rglob("*.py"):
        assert not re.search(r"mark\.slow|slow_but", path.read_text()), path.name


def test_a_sweep_keeps_some_cases_fast():
    first, second = speeds.slow_but(["a"], "ab")
    assert first == "a" and second.values == ("b",) and second.marks[0].name == "slow"
    with pytest.raises(ValueError, match=r"no cases: \['c'\]"):
        speeds.slow_but(["c"], "ab")
    cases = {"x": 1, "y": 3, "z": 2}
    assert sorted(speeds.one_of_each(lambda case: case % 2, cases)) == ["x", "z"]


def test_parts_of_sweeps_are_all_of_them():
    def item(path, mark=True):
        return SimpleNamespace(path=Path(path), nodeid=path, get_closest_marker=lambda _: mark)

    sweep = [item(f"tests/lowering/test_a.py::test[{i}]") for i in range(40)]
    parts = [[t.nodeid for t in sweep if speeds.is_in_part(t, f"{k}/3")] for k in (1, 2, 3)]
    assert all(parts) and sorted(chain(*parts)) == sorted(t.nodeid for t in sweep)
    rest = [item("tests/docs/test_a.py::test"), item("tests/lowering/test_b.py::test", None)]
    assert all(speeds.is_in_part(t, f"{k}/3") for t in rest for k in (1, 2, 3))


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "-1/2", "a/b", "1/2/3"])
def test_a_part_that_there_is_not(text):
    with pytest.raises(pytest.UsageError, match="--sweeps must be K/N"):
        speeds.sweep_part(text)


def test_cases_of_a_test_are_spread():
    class Item(SimpleNamespace):
        __hash__ = object.__hash__

    def items(file, *names):
        marked = {"path": Path(file), "get_closest_marker": lambda _: True}
        return [Item(nodeid=f"{file}::{name}", **marked) for name in names]

    several = items("tests/a.py", *(f"test[{i}]" for i in range(11)))
    few, one = items("tests/a.py", "test_few[a]", "test_few[b]"), items("tests/a.py", "test_one")
    files = ("tests/docs/a.py", "tests/lowering/a.py")
    whole = [item for file in files for item in items(file, *(f"test[{i}]" for i in range(5)))]
    every = [*few[:1], *several, *one, *few[1:], *whole]
    kept = [few[0], several[0], several[5], several[10], *one, few[1], *whole]
    assert speeds.spread(every, 3) == kept
    assert speeds.spread(every, 1) == [few[0], several[0], *one, *whole]
    assert speeds.spread(every, 100) == every


@pytest.mark.parametrize("text", ["", "0", "-1", "a", "1.5"])
def test_no_count_of_cases(text):
    with pytest.raises(argparse.ArgumentTypeError, match="--cases must be 1 or more"):
        speeds.count_of_cases(text)


@pytest.mark.parametrize(
    ("arguments", "options", "shared"),
    [
        (["tests"], {}, True),
        (["tests/gpu"], {}, True),
        (["a.py", "b.py", "c.py", "d.py"], {}, True),
        (["a.py", "b.py::test", "c.py"], {}, False),
        (["tests"], {"usepdb": True}, False),
        (["tests"], {"capture": "no"}, False),
        (["tests"], {"collectonly": True}, False),
    ],
)
def test_who_shares_a_run(arguments, options, shared, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(100))
    known = {"usepdb": False, "capture": "fd", "collectonly": False} | options
    config = SimpleNamespace(option=SimpleNamespace(**known), args=arguments)
    assert speeds.workers(config) == (speeds.WORKERS if shared else 0)


def test_instructions_are_counted():
    def built(body):
        source = f'extern "C" __global__ void f(float* x) {{ {body} }}\n'
        return compiled(KernelSpec("test", source, "f", 32), "sm_90a")

    few, many = built("x[0] = 1.0f;"), built("for (int i = 0; i < 40; ++i) x[i] = sqrtf(x[i]);")
    assert 8 <= few.instructions < many.instructions
    assert few.spilled == 0 and "registers" in few.log

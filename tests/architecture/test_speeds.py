"""Two speeds of tests: what is slow, who shares a run, and what no test looks at."""

import argparse
import re
from itertools import chain, combinations, product
from types import SimpleNamespace

import pytest

from kernlib.jit.spec import KernelSpec
from tests.support import selection, speeds
from tests.support.compiled_kernels import compiled
from tests.support.paths import ROOT, TESTS

CLOCKS = re.compile(r"\b(perf_counter|monotonic|thread_time|process_time|time\.time)(_ns)?\(\)")
# The first waits for other processes, so long that only a hang takes longer; the others say what
# something took, and no test of theirs is run with the rest.
MAY_LOOK = {"process_cases.py", "gpu_kernels.py", "mutants"}


def test_no_test_looks_at_the_clock():
    for path in TESTS.rglob("*.py"):
        if MAY_LOOK.isdisjoint((path.name, path.parent.name)):
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


def test_parts_are_all_of_them():
    items = [SimpleNamespace(nodeid=f"tests/test_a.py::test[{i}]") for i in range(40)]
    parts = [
        [item.nodeid for item in items if speeds.is_in_part(item, speeds.part_of(f"{k}/3"))]
        for k in (1, 2, 3)
    ]
    assert all(parts) and sorted(chain(*parts)) == sorted(item.nodeid for item in items)


def test_a_part_that_there_is_not():
    for text in ("", "1", "0/2", "3/2", "-1/2", "a/b", "1/2/3"):
        with pytest.raises(argparse.ArgumentTypeError, match="--part must be K/N"):
            speeds.part_of(text)


def test_few_cases_meet_in_pairs():
    """Twelve of 3 x 3 x 4 cases have every pair of values, and three have no value twice."""
    rows = list(product(range(3), range(3), range(4)))
    chosen = [rows[i] for i in selection.covering(rows, 12)]
    pairs = {pair for row in chosen for pair in combinations(enumerate(row), 2)}
    assert len(pairs) >= 30  # of 9 + 12 + 12
    few = [rows[i] for i in selection.covering(rows, 3)]
    assert all(len(set(column)) == 3 for column in zip(*few, strict=True))


def test_few_cases_of_one_list_are_spread():
    rows = [(i, i) for i in range(11)]
    assert selection.covering(rows, 3) == [0, 5, 10]
    assert selection.covering(rows, 1) == [0]
    assert selection.covering(rows, 0) == []
    assert selection.covering(rows, 100) == list(range(11))


def item(*marks, case=0, slow=False):
    held = {mark.name: mark for mark in marks}
    if slow:
        held["slow"] = pytest.mark.slow.mark
    return SimpleNamespace(
        callspec=SimpleNamespace(indices={"case": case}), get_closest_marker=held.get
    )


@pytest.mark.few(100)
@pytest.mark.parametrize(
    ("marks", "cases", "count"),
    [
        ((), "few", selection.FEW),
        ((pytest.mark.emulated.mark,), "few", selection.FEW_EMULATED),
        ((pytest.mark.emulated.mark, pytest.mark.few(1).mark), "few", 1),
        ((pytest.mark.few(5).mark,), "few", 5),
        ((pytest.mark.few(0).mark,), "few", 0),
        ((pytest.mark.few(0).mark,), "many", selection.MANY),
        ((), "all", 20),
        ((), 4, 4),
    ],
)
def test_how_many_cases_a_run_has(marks, cases, count):
    items = [item(*marks, case=i) for i in range(20)]
    assert len(selection.thinned(items, cases)) == count


def test_one_case_of_each_value():
    items = [item(pytest.mark.few(by="kind").mark, case=i) for i in range(20)]
    for i, one in enumerate(items):
        one.callspec.params = {"kind": ("a", "b", "c")[i % 3]}
    chosen = selection.thinned(items, "few")
    assert [one.callspec.indices["case"] for one in chosen] == [0, 1, 2]
    assert len(selection.thinned(items, "all")) == 20


def test_slow_cases_are_chosen_apart():
    items = [item(case=i, slow=i > 3) for i in range(20)]
    chosen = selection.thinned(items, 2)
    assert [one.callspec.indices["case"] for one in chosen] == [0, 3, 4, 19]


def test_no_count_of_cases():
    for text in ("", "0", "-1", "a", "1.5"):
        with pytest.raises(argparse.ArgumentTypeError, match="--cases must be few, many, all"):
            selection.count_of_cases(text)
    assert [selection.count_of_cases(text) for text in ("few", "7")] == ["few", 7]


@pytest.mark.few(100)
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

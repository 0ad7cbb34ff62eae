"""The benchmarks' own arithmetic, files and report; what they measure needs a GPU."""

import json
import math
import subprocess
import sys

import pytest
import torch

from benchmarks import report
from benchmarks.common import drawing, harness, summary, timing
from benchmarks.common.harness import Row
from benchmarks.pairwise import run as pairwise
from benchmarks.report import picture
from benchmarks.service import run as service
from tests.benchmarks.cases import COMMITTED, HEAD, ROW, check_schema


def row(case="a", **fields):
    return Row(case, "ms", 2.0, 1.0, "bytes", {"torch": 50.0}, 1e-7, {"torch": 2e-7}, **fields)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_committed_results_have_the_schema(path):
    check_schema(json.loads(path.read_text()))


def test_rows_have_the_schema():
    check_schema(harness.merge(HEAD, [row(must=70.0).as_json()], None))
    assert set(row().as_json()) == ROW
    assert row(must=1 / 3).as_json()["must"] == 0.33333


# Merging.


def test_merge_replaces_by_case_in_order():
    old = harness.merge(HEAD, [row("b").as_json(), row("gone").as_json()], None)
    again = {**row("b").as_json(), "ours": 1.0}
    found = harness.merge(HEAD, [again, row("a").as_json()], old, ["a", "b"])
    assert [one["case"] for one in found["rows"]] == ["a", "b", "gone"]
    assert found["rows"][1]["ours"] == 1.0


def test_merge_puts_portable_cases_behind_all_others():
    old = harness.merge(HEAD, [row("b").as_json()], None)
    found = harness.merge(HEAD, [row("a portable").as_json()], old, ["a portable"])
    assert [one["case"] for one in found["rows"]] == ["b", "a portable"]
    found = harness.merge(HEAD, [row("c").as_json()], found, ["c", "b"])
    assert [one["case"] for one in found["rows"]] == ["c", "b", "a portable"]


def test_merge_keeps_the_digest_of_older_rows():
    old = harness.merge(HEAD, [row("a").as_json(), row("b").as_json()], None)
    found = harness.merge({**HEAD, "sources": "cd34"}, [row("a").as_json()], old)
    assert [one.get("sources") for one in found["rows"]] == [None, "ab12"]
    back = harness.merge(HEAD, [], found)
    assert [one.get("sources") for one in back["rows"]] == ["cd34", None]


def test_merge_keeps_the_host_of_rows_of_another():
    old = harness.merge(HEAD | {"host": "slow"}, [row("a").as_json(), row("b").as_json()], None)
    found = harness.merge(HEAD | {"host": "fast"}, [row("a").as_json()], old)
    assert [one.get("host") for one in found["rows"]] == [None, "slow"]
    back = harness.merge(HEAD | {"host": "slow"}, [], found)
    assert [one.get("host") for one in back["rows"]] == ["fast", None]
    check_schema(back)
    assert "on NVIDIA H200, host slow, driver" in report.tables.section("service", back)


def test_merge_refuses_another_gpu():
    with pytest.raises(ValueError, match="holds results of NVIDIA H200"):
        harness.merge({**HEAD, "gpu": "other"}, [], harness.merge(HEAD, [], None))


# The command.


@pytest.fixture
def run(tmp_path, capsys):
    def measure(name):
        return harness.Case(name, lambda session: row(name))

    def broken(session):
        raise RuntimeError("no memory")

    cases = [measure("one"), measure("two"), harness.Case("broken", broken)]

    def go(*arguments):
        path = tmp_path / "deep" / "r.json"
        status = harness.main("test", cases, pairwise.SOURCE, ["--json", str(path), *arguments])
        return status, harness.read(path), capsys.readouterr()

    return go


def test_main_measures_chosen_cases_and_merges(run):
    status, found, _ = run("--case", "two")
    assert status == 0 and [one["case"] for one in found["rows"]] == ["two"]
    status, found, printed = run("--case", "one", "--case", "two", "--quick")
    assert status == 0 and [one["case"] for one in found["rows"]] == ["one", "two"]
    assert "torch 50.0" in printed.out and "25.0" in printed.out


def test_main_goes_on_after_a_failure_and_says_so(run):
    status, found, printed = run()
    assert status == 1 and len(found["rows"]) == 2
    assert "broken failed" in printed.err and "no memory" in printed.err


def test_main_fails_where_nothing_matches(run):
    assert run("--case", "nothing")[:2] == (1, None)


def test_rivals_that_fail_are_left_out(capsys):
    assert harness.attempt("torch", "case", lambda: 1 / 0) is None
    assert "case: torch is left out (ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("one", "verdict"),
    [
        (row(), ""),
        (row(must=2.0), "met <= 2.00"),
        (row(must=1.9), "MISSED <= 1.90"),
        (row(must=2.0, must_error=2e-8), "MISSED <= 2.00, error <= 2e-08"),
        (row(must_error=2e-7), "met, error <= 2e-07"),
    ],
)
def test_verdict(one, verdict):
    assert harness.verdict(one) == verdict


@pytest.mark.parametrize(
    ("value", "text"),
    [(2083.4, "2083"), (61.25, "61.2"), (9.994, "9.99"), (0.0123, "0.0123"), (None, ""), (0, "0")],
)
def test_number(value, text):
    assert harness.number(value) == text


# Timing, with a clock of the test's own.


def test_a_portable_case_is_the_same_without_a_target():
    row = harness.Row("case", "ms", 2.0, must=1.0, must_error=1e-3)
    found = harness.Case("case", lambda session: row).portable()
    assert found.name == "case portable"
    assert found.measure(harness.Session()) == harness.Row(found.name, "ms", 2.0, must_error=1e-3)


class Clock:
    def __init__(self, *times):
        self.times, self.replays = list(times), 0

    def swept(self, call, buffers):
        call(*buffers)
        return self.times.pop(0)

    def replayed(self, call, buffers, repetitions):
        self.replays += repetitions
        return 0.25


def test_long_calls_take_the_median_of_swept_ones():
    calls = []
    clock = Clock(9.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
    assert timing.time_call(clock, calls.append, (1,)) == 5.0
    assert len(calls) == 7 and clock.replays == 0


def test_short_calls_are_replayed():
    clock = Clock(0.9)
    assert timing.time_call(clock, lambda: None, ()) == 0.25 and clock.replays >= 5


def test_a_call_that_the_host_made_long_is_timed_by_its_second():
    clock = Clock(2.6, 0.3)
    assert timing.time_call(clock, lambda: None, ()) == 0.25 and not clock.times
    clock = Clock(400.0, 300.0, 200.0)
    assert timing.time_call(clock, lambda: None, ()) == 300.0 and clock.replays == 0


@pytest.mark.parametrize(("ms", "count"), [(2.0, 7), (299.0, 7), (400.0, 3), (2083.0, 2)])
def test_repetitions(ms, count):
    assert timing.repetitions(ms) == count and timing.repetitions(ms, quick=True) == 1


def test_rotated_buffers_exceed_the_cache(monkeypatch):
    monkeypatch.setattr(timing, "ROTATED_BYTES", 1000)
    a, out = torch.randn(10, 5), torch.empty(10, 5)
    sets = timing.rotated((a, out))
    assert len(sets) == 3 and sets[0][0] is a
    assert len({t.data_ptr() for one in sets for t in one}) == 6
    assert all(torch.equal(one[0], a) for one in sets)


def test_sample_rows_reach_both_ends():
    rows = timing.sample_rows(30000, "cpu")
    assert len(set(rows.tolist())) == 64 and rows[0] == 0 and rows[-1] == 29999
    assert timing.sample_rows(3, "cpu").tolist() == [0, 1, 2]
    assert timing.sample_rows(1, "cpu").tolist() == [0]


def test_relative_error():
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert timing.relative_error(torch.tensor([3.0, 4.5]), exact) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="nan"):
        timing.relative_error(torch.tensor([math.nan, 0]), exact)


def test_host_time_is_per_call():
    calls, waits = [], []
    found = service.host_us(lambda: calls.append(1), lambda: waits.append(1))
    assert 0 < found < 100
    assert len(calls) == 100 + service.BATCHES * service.CALLS
    assert len(waits) == 2 * service.BATCHES


# The service.


def test_case_names_of_the_service_are_the_agreed_ones():
    names = {case.name for case in service.cases()}
    assert {"first call cold", "first call cached", "hot call 64x64x8", "compile p=1"} <= names
    attention = {f"first call attention {kind}" for kind in ("cold", "cached")}
    attention |= {f"first use attention{way} filled" for way in ("", " backward")}
    assert attention | {"hot call attention", "hot step attention"} <= names


def test_the_first_use_of_what_loads_cholesky_may_take_as_much_more(monkeypatch):
    times = {"use('solve_kernel')": 300.0, "use('cdist p=2')": 90.0, "use_cholesky()": 200.0}
    ran = []

    def child(code, directory):
        ran.append(code.split("; ")[1])
        return {"ms": times[ran[-1]]}

    monkeypatch.setattr(service, "child", child)
    session = harness.Session()
    rows = [service.first_use_row("solve_kernel", kind, session) for kind in ("empty", "filled")]
    assert [one.must for one in rows] == [1200.0, 300.0]
    assert all(one.rivals == {"cholesky": 200.0} for one in rows)
    assert ran.count("use_cholesky()") == 3 and summary.others(rows[0].rivals) == {}
    plain = service.first_use_row("cdist p=2", "filled", session)
    assert plain.must == 100.0 and not plain.rivals


def test_attention_of_the_service_is_torch_s(monkeypatch, seed):
    monkeypatch.setattr(service, "ROWS", 256)
    call, check = service.FIRST["attention "]("cpu")
    check(call())
    with pytest.raises(AssertionError):
        check(call() + 1)


def torch_loads_nvrtc():
    """Whether torch alone maps NVRTC, as its CUDA builds do from 2.15 on."""
    code = "import torch; raise SystemExit('libnvrtc' in open('/proc/self/maps').read())"
    return bool(subprocess.run([sys.executable, "-c", code]).returncode)


@pytest.mark.few(0)
def test_child_processes_see_the_given_cache_only(tmp_path, monkeypatch):
    monkeypatch.setenv("KERNLIB_DEBUG", "1")
    code = (
        "import os, json; from benchmarks.service.run import nvrtc_is_loaded as loaded\n"
        "print(json.dumps({**{k: v for k, v in os.environ.items() if k[:3] in ('KER', 'CUD')},"
        " 'loaded': loaded()}))"
    )
    found = service.child(code, str(tmp_path), KERNLIB_ASSERT_CACHED="1")
    assert found["KERNLIB_CACHE_DIR"] == str(tmp_path) and found["CUDA_CACHE_DISABLE"] == "1"
    assert found["KERNLIB_ASSERT_CACHED"] == "1" and "KERNLIB_DEBUG" not in found
    assert found["loaded"] is torch_loads_nvrtc()
    with pytest.raises(RuntimeError, match="oh no"):
        service.child("raise SystemExit('oh no')", str(tmp_path))


@pytest.mark.parametrize("wanted", [True, False])
def test_child_processes_find_bytecode_though_the_environment_wants_none(
    tmp_path, monkeypatch, wanted
):
    monkeypatch.setattr(sys, "dont_write_bytecode", not wanted)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "" if wanted else "1")
    code = (
        "import json, os, importlib.util as util\n"
        "found = util.cache_from_source(util.find_spec('kernlib').origin)\n"
        "was = os.path.exists(found)\n"
        "import kernlib\n"
        "print(json.dumps({'was': was, 'cache': os.environ['KERNLIB_CACHE_DIR'],\n"
        "                  'cached': os.environ.get('KERNLIB_ASSERT_CACHED')}))"
    )
    found = service.child(code, str(tmp_path), KERNLIB_ASSERT_CACHED="1")
    assert found == {"was": True, "cache": str(tmp_path), "cached": "1"}


# The report.


@pytest.fixture
def project(tmp_path):
    readme, folder = tmp_path / "README.md", tmp_path / "results"
    readme.write_text(f"# k\n\n{report.BEGIN}\nold\n{report.END}\n\nend\n")

    def go(*arguments):
        return report.main(list(arguments), readme, folder)

    return go, readme, folder


def test_report_without_results(project):
    go, readme, _ = project
    assert go("--check") == 1 and "old" in readme.read_text()
    assert go() == 0 and go("--check") == 0
    assert readme.read_text() == f"# k\n\n{report.BEGIN}\n{report.NOTHING}\n{report.END}\n\nend\n"


def test_report_tables(project):
    go, readme, folder = project
    cubin = Row("cubin p=1", "bytes", 56328)
    slow = Row("slow", "ms", 2.0, rivals={"torch": 1.0, "other": 3.0})
    tie = Row("tie", "ms", 2.0, rivals={"torch": 1.95})
    rows = [each.as_json() for each in (row("cdist"), cubin, slow, tie)]
    harness.write(folder / "h200" / "pairwise.json", harness.merge(HEAD, rows, None))
    harness.write(folder / "h200" / "service.json", harness.merge(HEAD, rows, None))
    (folder / "h200" / "pairwise.svg").touch()
    assert go("--check") == 1 and go() == 0 and go("--check") == 0
    page = readme.parent / "docs" / "results" / "pairwise.md"
    text = page.read_text()
    assert "**Pairwise** on NVIDIA H200, driver 580, torch 2.11.0, NVRTC 13.0, 2026-01-01" in text
    assert "| cdist | 2.00 ms | 1.00 ms (bytes) | torch 50.0 ms (25×, error 2.0e-07) | 1" in text
    assert "| cubin p=1 | 55.0 KB |  |  |  |" in text
    assert (
        "| slow | 2.00 ms | torch 1.00 ms | 0.500× |" in text and "| tie | 2.00 ms | t" not in text
    )
    assert "![Pairwise](../../results/h200/pairwise.svg)" in text
    text = readme.read_text()
    losses = "[1](docs/results/pairwise.md#where-a-rival-is-faster-on-nvidia-h200)"
    assert f"| Pairwise | H200 | 3 | 1 | {losses} | 2.30× | 0.500× | 25.0× | [results/" in text
    assert "`slow`" not in text and "| Service |" not in text
    page.write_text("old")
    assert go("--check") == 1


def test_a_page_lists_losses_the_worst_first():
    rows = [Row(f"n={n}", "us", 10.0, rivals={"torch": n}).as_json() for n in (3, 1, 20, 2)]
    lines = report.verdict.section(rows).splitlines()[2:]
    assert [text.split(" | ")[0] for text in lines] == ["| n=1", "| n=2", "| n=3"]
    assert report.verdict.section(rows[:0]) == "No rival is faster by more than 5 % in any case."


def test_report_counts_no_kernels_of_other_gpus_and_no_choices_of_all_families():
    slow = Row("cdist portable", "us", 10.0, rivals={"torch": 1.0}).as_json()
    assert report.verdict.compared([slow]) == []
    choice = Row("auto sparse 3x4", "us", 10.0, rivals={"torch": 1.0}).as_json()
    results = {**HEAD, "rows": [choice, {**choice, "ours": 1.0}]}
    assert report.verdict.measured([("auto", results)]) == []
    assert "| Sparse | 2 | 1 | 0.316× | 0.100× |" in report.tables.section("auto", results)


def test_nothing_is_faster_than_its_floor():
    rows = [row for _, found in report.load(drawing.RESULTS) for row in found["rows"]]
    beaten = [row["case"] for row in rows if row["floor"] and row["ours"] < row["floor"]]
    assert rows and not beaten


def test_a_format_of_others_by_own_kernels_is_no_rival():
    both = Row("spmv", "us", 10.0, rivals={"cublas": 20.0, "macko": 5.0})
    alone = Row("spmv alone", "us", 10.0, rivals={"macko": 5.0})
    rows = [both.as_json(), alone.as_json()]
    assert summary.best_rival(rows[0]) == "cublas" and summary.speed_up(rows[0]) == 2.0
    found = summary.summarise(rows)
    assert (found.compared, found.wins, found.speed_up) == (1, 1, 2.0)
    assert report.verdict.compared(rows) == rows[:1] and report.verdict.lost(rows) == []
    assert (harness.speed_up(both), harness.speed_up(alone)) == (2.0, None)
    assert "macko 5.00 µs" in report.tables.section("other", {**HEAD, "rows": rows})


def test_the_picture_is_of_the_results(project, capsys):
    _, _, folder = project
    rows = [row(f"cdist {index}").as_json() for index in range(picture.FEWEST)]
    rows += [Row("x", "us", 1.0).as_json(), Row("y", "us", 1.0, rivals={"few": 2.0}).as_json()]
    for name in ("pairwise", "service"):
        harness.write(folder / "h200" / f"{name}.json", harness.merge(HEAD, rows, None))
    ((path, found, _),) = picture.drawings(folder)
    assert path == folder / "h200" / picture.NAME
    assert found == {"Pairwise / torch": [25.0] * picture.FEWEST}
    assert (
        picture.main(["--check"], folder) == 1
        and "families.svg is stale" in capsys.readouterr().err
    )
    drawn = f"<dc:description>{drawing.digest(found)}</dc:description>"
    path.write_text(drawn)
    assert picture.main(["--check"], folder) == 0
    pytest.importorskip("matplotlib")
    assert picture.main([], folder) == 0 and picture.main(["--check"], folder) == 0


def test_report_needs_markers(project, capsys):
    go, readme, _ = project
    readme.write_text("# k\n")
    assert go() == 1 and go("--check") == 1
    assert "results:begin" in capsys.readouterr().err and readme.read_text() == "# k\n"

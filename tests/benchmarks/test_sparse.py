"""The benchmark of sparse matrices: its cases, floors, targets and summaries; times need a GPU."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise

import pytest
import torch

from benchmarks.common import drawing
from benchmarks.common.harness import Session
from benchmarks.sparse import plot, problems, rivals, summary
from benchmarks.sparse import run as benchmark
from benchmarks.sparse.problems import Problem
from kernlib import sparse
from kernlib.families.sparse.formats import registry
from tests.support.paths import ROOT

CASES = {name: benchmark.cases(name) for name in benchmark.SECTIONS}
NAMES = [case.name for section in CASES.values() for case in section]


class Clock:
    """A timer by which every call takes the same, and which runs each of them."""

    def __init__(self, ms: float = 0.25):
        self.ms, self.runs = ms, []

    def replayed(self, calls, quick=False):
        self.runs.append(len(calls))
        for call in calls[:2]:
            call()
        return self.ms

    queued = replayed

    def once(self, call, quick=False):
        call()
        return self.ms


@pytest.fixture
def few_copies(monkeypatch):
    monkeypatch.setattr(rivals, "ROTATED_BYTES", 1)


# Cases.


def test_matrices_of_one_size_are_measured_one_after_the_other():
    """For their values are drawn once."""
    for section, found in CASES.items():
        drawn = [(p.rows, p.cols, p.kind) for p in problems.problems(section)]
        changes = sum(a != b for a, b in pairwise(drawn))
        assert changes == len(set(drawn)) - 1 and len(drawn) == len(found), section


def test_the_digest_covers_all_kernels():
    assert "sparse/" in benchmark.SOURCE


# Problems.


@pytest.mark.parametrize("kind", problems.DTYPES)
def test_matrices_have_exactly_so_many_entries_anywhere(kind):
    problems.drawn.cache_clear()
    for density in (1.0, 0.5, 0.05):
        problem = Problem("grid", 96, 400, density, kind)
        dense = problems.weight(problem, "cpu")
        assert dense.dtype == problem.dtype
        assert torch.count_nonzero(dense) == round(density * 96 * 400)
        by_row = torch.count_nonzero(dense, 1).double() / 400
        assert (by_row - density).abs().max() <= 5 * (density * (1 - density) / 400) ** 0.5
    problems.drawn.cache_clear()


def test_float64_is_that_of_all_rows(monkeypatch):
    monkeypatch.setattr(problems, "EXACT_ENTRIES", 1000)
    for columns in (1, 8):
        problem = Problem("grid", 70, 300, 0.5, columns=columns)
        dense, x = problems.weight(problem, "cpu"), problems.vectors(problem, "cpu")
        wanted = torch.nn.functional.linear(x.double(), dense.double())
        assert torch.allclose(problems.exact(dense, x), wanted, rtol=1e-12)
        assert 0.3 < wanted.std() < 3
    problems.drawn.cache_clear()


def test_floors():
    problem = Problem("headline", 8192, 28672, 0.5)
    assert problem.dense_bytes == 2 * 8192 * 28672
    half = 0.5625 * problem.dense_bytes
    assert problem.floor_us(half) == pytest.approx(61.5, rel=1e-2)
    assert problem.compress_floor_ms(half) == pytest.approx(0.28, rel=1e-2)


def test_targets_are_those_of_the_figures():
    large = Problem("headline", 8192, 28672, 0.5)
    rivals = {"cublas": 145.0, "macko": 200.0}
    assert large.must_us(rivals, None) == pytest.approx(100)
    assert large.must_us({"cublas": 145.0, "macko": 80.0}, None) == pytest.approx(82.4)
    small = large._replace(rows=4096, cols=4096)
    assert small.must_us({"cublas": 130.0}, None) == pytest.approx(100)
    assert large._replace(density=0.9).must_us(rivals, None) == pytest.approx(145 * 1.03)
    eight = large._replace(columns=8)
    assert eight.must_us(rivals, 100.0) == pytest.approx(125)
    assert eight.must_us(rivals, None) is None and eight.named(1) == large.name
    assert large._replace(columns=4).must_us(rivals, 1.0) is None
    assert large._replace(format="u8").must_us(rivals, None) is None
    over = [problems.OVER_CUBLAS[density] for density in problems.SHOWN_DENSITIES]
    assert over == [1.10, 1.45, 2.1, 4.3]


# Values.


@pytest.mark.parametrize("columns", (1, 8))
def test_ours_and_all_rivals_agree(columns, few_copies):
    problem = Problem("headline", 64, 512, 0.5, columns=columns)
    dense, x = problems.weight(problem, "cpu"), problems.vectors(problem, "cpu")
    wanted = problems.exact(dense, x)
    contenders = {"cublas": rivals.cublas(dense, x)}
    contenders |= {name: make() for name, make in rivals.rivals(problem, dense, x).items()}
    if columns == 1:
        contenders["cusparse"] = rivals.cusparse(dense.float(), x.float())
        assert not contenders["cusparse"].captured
    for format in registry.FORMATS:
        contenders[format] = rivals.compressed(sparse.compress(dense, format), x)
    assert {"cublas", "macko"} <= set(contenders)
    for name, contender in contenders.items():
        for form, calls in contender.forms.items():
            assert len(calls) == 2, name  # copies
            for call in calls:
                assert benchmark.checked_error(call(), wanted) < 1e-3, (name, form)
    problems.drawn.cache_clear()


def test_copies_are_other_memory_and_enough_of_it(few_copies):
    matrix = sparse.compress(torch.eye(64).half(), "bitmap")
    for frozen in (False, True):
        calls = rivals.compressed(matrix, torch.ones(64).half(), frozen).forms[""]
        matrices = [call.__defaults__[0] for call in calls]
        addresses = {w.operands[0].data_ptr() for w in matrices}
        assert len(addresses) == len(calls) == 2
        assert all(w.frozen == frozen for w in matrices)


def test_copies_are_400_mb_in_all():
    assert rivals.copies(1 << 30) == 2
    for nbytes in (1 << 20, 3_000_000, 33_554_432, 150 << 20):
        assert rivals.copies(nbytes) * nbytes >= 400e6
    assert rivals.copies(10) == rivals.MAX_SETS


def test_cusparse_is_measured_beside_some():
    found = [
        p for p in problems.problems("headline")
        if "cusparse" in rivals.rivals(p, torch.empty(0), torch.empty(0))
    ]  # fmt: skip
    assert [p.name for p in found] == [
        f"spmv {shape} density={density} auto fp16"
        for shape in ("8192x28672", "4096x4096") for density in (0.5, 0.1)
    ]  # fmt: skip


def test_a_row(few_copies):
    session = Session(timer=Clock())
    one = benchmark.measure(Problem("headline", 64, 512, 0.5), session, "cpu")
    assert one.case == "spmv 64x512 density=0.5 auto fp16" and one.unit == "us"
    assert one.ours == 250 and one.bound.startswith("bytes, ") and 0 < one.error < 1e-3
    assert set(one.rivals) == set(one.rival_errors) == {"cublas", "macko"}
    assert one.must_error == pytest.approx(1.05 * one.rival_errors["cublas"])
    assert one.must == pytest.approx(250 * problems.NOISE)
    session.ours[one.case] = one.ours
    eight = benchmark.measure(Problem("headline", 64, 512, 0.5, columns=8), session, "cpu")
    assert eight.must == pytest.approx(1.25 * 250)
    frozen = benchmark.measure(Problem("frozen", 64, 512, 0.5, frozen=True), session, "cpu")
    assert frozen.case == f"{one.case} frozen" and set(frozen.rivals) == {"cublas"}
    small = benchmark.measure(Problem("quantised", 64, 512, 0.5, values="int4"), session, "cpu")
    assert small.case == "spmv 64x512 density=0.5 int4 fp16" and small.error < 1e-3
    assert set(small.rivals) == {"cublas", "kernlib fp16"} and small.bound == "bytes, bitmap-int4"
    assert small.must == pytest.approx(250 / 1.6)
    plain = benchmark.measure(Problem("formats", 64, 512, 0.5, format="u8"), session, "cpu")
    assert plain.bound == "bytes, u8" and not plain.rivals and plain.must is None
    problems.drawn.cache_clear()


def test_the_fastest_form_of_cublas_is_measured_alone_at_other_densities(few_copies):
    clock = Clock()
    session = Session(timer=clock)
    counts = []
    for density in (0.5, 0.1):
        clock.runs.clear()
        benchmark.measure(Problem("grid", 64, 512, density), session, "cpu")
        counts.append(len(clock.runs))
    assert counts == [6, 3]  # ours, MACKO's format and four forms; then one
    problems.drawn.cache_clear()


def test_a_row_of_compression():
    row = benchmark.measure_compression(
        Problem("compress", 64, 512, 0.5), Session(timer=Clock(2.0)), "cpu"
    )
    assert row.case == "compress 64x512 density=0.5 fp16" and row.unit == "ms"
    assert row.ours == 2.0 and row.must == 50 and row.floor > 0
    problems.drawn.cache_clear()


def test_wrong_results_are_no_results():
    wanted = torch.ones(8, dtype=torch.float64)
    with pytest.raises(ValueError, match="zero everywhere"):
        benchmark.checked_error(torch.zeros(8), wanted)
    with pytest.raises(ValueError, match="zero everywhere"):
        benchmark.checked_error(torch.zeros(8), 0 * wanted)
    with pytest.raises(ValueError, match="the result is wrong"):
        benchmark.checked_error(torch.full((8,), 1.1), wanted)
    with pytest.raises(ValueError, match=r"the result is \(4,\), not"):
        benchmark.checked_error(torch.ones(4), wanted)
    with pytest.raises(ValueError, match="nan"):
        benchmark.checked_error(torch.full((8,), math.nan), wanted)


# The command.


def test_a_run_writes_its_rows(tmp_path, monkeypatch, few_copies, capsys):
    small = {
        "headline": [Problem("headline", 64, 512, 0.5, columns=n) for n in (1, 8)],
        "compress": [Problem("compress", 64, 512, 0.5)],
        "formats": [Problem("formats", 64, 512, 0.1, format="u8")],
    }
    measured = {name: getattr(benchmark, name) for name in ("measure", "measure_compression")}
    for name, call in measured.items():
        monkeypatch.setattr(benchmark, name, lambda p, s, call=call: call(p, s, "cpu"))
    monkeypatch.setattr(benchmark, "problems", lambda section: small.get(section, []))
    monkeypatch.setattr(benchmark, "Timer", Clock)
    path = tmp_path / "cpu" / "sparse.json"
    assert benchmark.main(["--json", str(path), "--quick"]) == 0
    found = json.loads(path.read_text())
    assert [row["case"] for row in found["rows"]] == [
        "spmv 64x512 density=0.5 auto fp16", "spmv 64x512 density=0.5 auto N=8 fp16",
        "compress 64x512 density=0.5 fp16", "spmv 64x512 density=0.1 u8 fp16",
    ]  # fmt: skip
    assert found["rows"][1]["must"] == 1.25 * 250 and len(found["sources"]) == 64
    assert "4 of 4" in capsys.readouterr().err
    assert benchmark.main(["--only", "formats", "--case", "N=8"]) == 1
    assert benchmark.main(["--only", "formats", "--case", "u8"]) == 0


# Summaries.


def rows() -> list[dict]:
    """A result file's rows, with made-up times."""
    found = []
    for section, every in (("headline", ("fp16",)), ("frozen", ("fp16",)), ("grid", ("fp16",))):
        for p in problems.problems(section):
            if p.kind in every:
                ours = 100 * (p.density + 0.1) * (1.2 if p.columns == 8 else 1) - p.frozen
                times = {"cublas": 110.0, "macko": 150 * (p.density + 0.1)}
                format = "dense" if p.density > 0.9 else "bitmap"
                found.append({
                    "case": p.name, "unit": "us", "ours": ours, "floor": 0.8 * ours,
                    "bound": f"bytes, {format}", "rivals": times, "error": 2e-4,
                    "rival_errors": {},
                })  # fmt: skip
    found.append({
        "case": "compress 8192x28672 density=0.5 fp16", "unit": "ms", "ours": 3.0, "floor": 0.28,
        "bound": "bytes, bitmap", "rivals": {}, "error": None, "rival_errors": {}, "must": 50.0,
    })  # fmt: skip
    return found


def test_places():
    at = summary.place("spmv 8192x28672 density=0.05 auto N=8 bf16")
    assert at == (8192, 28672, 0.05, "auto", 8, "bf16", False) and at.shape == (8192, 28672)
    assert summary.place("spmv 8192x28672 density=0.05 auto N=8 bf16 frozen") == (*at[:-1], True)
    assert summary.place("spmv 4096x4096 density=1 bitmap fp16") == (
        4096, 4096, 1.0, "bitmap", 1, "fp16", False,
    )  # fmt: skip
    assert summary.place("compress 8192x28672 density=0.5 fp16") is None
    for name in NAMES:
        assert name.startswith("compress") or summary.place(name) is not None, name


def test_the_grid_is_summarised_by_density():
    found = summary.grid(rows())
    assert list(found) == list(problems.DENSITIES)
    assert all(group.cases == 31 for group in found.values())
    half = found[0.5]
    assert half.formats == {"bitmap": 31} and half.over["macko"][0] == pytest.approx(1.5)
    assert half.over["cublas"] == pytest.approx((110 / 60,) * 3)
    assert half.over_floor == pytest.approx(1.25) and half.error == 2e-4
    assert len(summary.lines(rows())) == 11
    assert summary.lines(rows()[:1]) and summary.lines([]) == []


def test_tables_for_the_readme():
    headline, grid, others = summary.tables(rows())
    for header, rule, lines in (headline, grid, others):
        assert rule.count("|") == len(header) + 1
        assert all(len(line) == len(header) for line in lines)
    assert len(headline[2]) == 15 and headline[2][0][0] == "8192x28672"
    assert headline[2][0][2] == "60.0 µs (1.83×)" and headline[2][10][0].endswith(", 8 vectors")
    assert headline[2][5][:3] == ("8192x28672, frozen", "79.0 µs (1.39×)", "59.0 µs (1.86×)")
    assert len(grid[2]) == 11 and grid[2][0][:2] == ("1", "dense")
    (line,) = others[2]
    assert line[:3] == (
        "compress 8192x28672 density=0.5 fp16", "3.00 ms", "0.280 ms (bytes, bitmap)",
    )  # fmt: skip
    assert summary.tables([]) == []


def test_a_missed_target_is_said():
    row = rows()[0] | {"must": 1.0}
    assert "MISSED 1" in summary.line(row) and "macko" in summary.line(row)
    assert "MISSED" not in summary.line(rows()[0])


# The drawing.


def test_points_are_those_of_the_grid():
    found = plot.points(rows())
    assert [density for density, *_ in found["ours"]] == sorted(problems.DENSITIES)
    assert found["ours"][0][1] == pytest.approx(110 / 15)
    assert found["macko"][0][1] == pytest.approx(110 / 22.5)
    assert plot.points([]) == {}


def test_a_stale_drawing_is_found_and_drawn_anew(tmp_path, capsys):
    results = {"gpu": "a GPU", "rows": rows()}
    folder = tmp_path / "h200"
    folder.mkdir()
    (folder / "sparse.json").write_text(json.dumps(results))
    assert plot.main(["--check"], tmp_path) == 1 and "stale" in capsys.readouterr().err
    digest = drawing.digest(plot.points(results["rows"]))
    picture = folder / "sparse.svg"
    picture.write_text(f"<dc:description>{digest}</dc:description>")
    assert plot.main(["--check"], tmp_path) == 0
    picture.write_text("<dc:description>other</dc:description>")
    assert plot.main(["--check"], tmp_path) == 1
    pytest.importorskip("matplotlib")
    assert plot.main([], tmp_path) == 0 and plot.main(["--check"], tmp_path) == 0


def test_the_committed_drawing_is_that_of_the_committed_results():
    assert plot.main(["--check"]) == 0


def test_the_document_says_which_format_is_smallest():
    text = (ROOT / "docs" / "families" / "sparse_formats.md").read_text()
    table = text[text.index("| format | what is stored") :].split("\n\n")[0]
    ranges = {}
    for line in table.splitlines()[2:]:
        cells = line.strip("| ").split(" | ")
        low, high = 0.0, 1.0
        numbers = [float(n) for n in re.findall(r"[\d.]+", cells[3])]
        if cells[3].startswith("below"):
            high = numbers[0]
        else:
            low, high = (*numbers, 1.0)[:2]
        ranges[cells[0].strip('`"')] = (low, high)
    assert set(ranges) == set(registry.FORMATS)
    torch.manual_seed(0)
    weight = torch.randn(512, 2048).half()
    for density in (0.02, 0.08, 0.13, 0.2, 0.26, 0.5, 0.8, 0.92, 0.95, 1.0):
        sizes, _ = registry.measured(sparse.magnitude(weight, density))
        low, high = ranges[min(sizes, key=sizes.get)]
        assert low <= density <= high, (density, sizes)

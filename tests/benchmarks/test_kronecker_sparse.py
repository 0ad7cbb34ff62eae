"""The Kronecker-sparse benchmark: its cases, floors, rivals and summaries; times need a GPU."""

import math
import re
from collections import Counter

import pytest
import torch

from benchmarks.common import harness, timing
from benchmarks.common import summary as common
from benchmarks.common.harness import Row, Session
from benchmarks.kronecker_sparse import host, problems, rivals, summary, training
from benchmarks.kronecker_sparse import run as benchmark
from benchmarks.kronecker_sparse.problems import Problem
from benchmarks.report import tables
from kernlib import ahead
from kernlib.families.kronecker_sparse import reference
from kernlib.jit import sources
from tests.benchmarks.cases import Clock, committed

CASES = {name: benchmark.planned(name) for name in benchmark.SECTIONS}
NAMES = [plan.case.name for section in CASES.values() for plan in section]
SMALL = [(2, 3, 5, 4), (6, 4, 4, 1), (1, 6, 4, 2), (1, 5, 3, 16), (1, 4, 7, 1), (3, 1, 1, 2)]
TOLERANCE = {"fp16": 2e-3, "bf16": 2e-2, "fp32": 1e-6, "tf32": 1e-6}


def small(pattern, last, kind="fp32", section="patterns", batch=7):
    return Problem(section, pattern, last, kind, batch)


# Cases.


def test_the_grid_is_that_of_ksmm():
    grid = problems.grid()
    assert len(set(grid)) == 376
    assert Counter(d for *_, d in grid) == {4: 185, 16: 127, 64: 64}
    chosen = problems.sample()
    assert len(set(chosen)) == 40 and set(chosen) <= set(grid)
    assert chosen == problems.sample() and {d for *_, d in chosen} == {4, 16, 64}


def test_a_run_fits_the_time_it_is_given():
    seconds = {name: sum(plan.seconds for plan in found) for name, found in CASES.items()}
    assert seconds["grid"] < 120 and sum(seconds.values()) < 240
    assert all(plan.seconds > 0 for plan in CASES["patterns"])


# Floors.


@pytest.mark.parametrize("section", ["patterns", "grid", "train"])
def test_floors_are_those_that_were_measured_against(section):
    known = committed("kronecker_sparse")
    for plan in CASES[section]:
        milliseconds, bound = plan.problem.floor()
        row = known[plan.case.name]
        assert (milliseconds, bound) == (pytest.approx(row["floor"], rel=2e-3), row["bound"])


def test_dense_is_left_out_where_it_is_hopeless():
    assert all(rivals.has_dense(plan.problem) for plan in CASES["patterns"])
    kept = [plan.problem for plan in CASES["grid"] if rivals.has_dense(plan.problem)]
    assert 20 < len(kept) < len(CASES["grid"])
    assert all(p.pattern[0] * p.pattern[3] <= rivals.GRID_LANES for p in kept)
    assert all(rivals.dense_ms(p) <= rivals.DENSE_MS for p in kept)
    assert all(math.prod(p.features) * p.dtype.itemsize <= 4e9 for p in kept)
    assert not rivals.has_dense(Problem("patterns", (128, 512, 512, 4), False, "fp16"))


def test_estimates_of_dense_are_those_that_were_measured():
    for kind, ms in (("fp32", 35.7), ("fp16", 2.08)):
        found = rivals.dense_ms(Problem("patterns", (4, 192, 48, 16), False, kind))
        assert found == pytest.approx(ms, rel=0.25)


# Values.


@pytest.mark.parametrize("kind", problems.KINDS)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("pattern", SMALL)
def test_ours_and_all_rivals_agree_with_the_dense_matrix(pattern, last, kind):
    problem = small(pattern, last, kind)
    x, weight, out = problems.tensors(problem, "cpu")
    shape = (7, problem.features[0])
    assert problems.pick(problem, x, torch.arange(7)).shape == shape
    points = x.double().T if last else x.double()
    wanted = points @ reference.dense(pattern, weight.double()).T
    rows = torch.tensor([0, 3, 6])
    exact = problems.exact(problem, x, weight, rows)
    assert torch.allclose(exact, wanted[rows], rtol=1e-12)
    calls = {"ours": (benchmark.kernel(problem), weight)}
    for name, make in rivals.rivals(problem).items():
        if name != "torch.compile":
            rival = make()
            calls[name] = (rival.call, rival.store(weight))
    assert set(calls) == {"ours", "bmm", "einsum", "dense"}
    for name, (call, held) in calls.items():
        result = call(x, held, out.fill_(math.nan))
        assert result.shape == out.shape and result.is_contiguous(), name
        found = problems.pick(problem, result, torch.arange(7))
        assert timing.relative_error(found, wanted) < TOLERANCE[kind], name


def test_bmm_copies_only_what_strides_cannot_say(monkeypatch):
    direct, bmm = [], torch.bmm

    def watched(left, right, out=None):
        direct.append(out is not None)
        return bmm(left, right, out=out)

    monkeypatch.setattr(torch, "bmm", watched)
    for pattern, last in [((6, 4, 4, 1), False), ((6, 4, 4, 1), True), ((1, 6, 4, 2), True),
                          ((1, 6, 4, 2), False), ((2, 3, 5, 4), True)]:  # fmt: skip
        problem = small(pattern, last)
        x, weight, out = problems.tensors(problem, "cpu")
        assert rivals.bmm(problem)(x, rivals.blocks(weight), out) is out
    assert direct == [True, True, True, False, False]


@pytest.mark.few(1)
@pytest.mark.parametrize("last", [False, True])
def test_the_compiled_rival_is_one_graph(last, monkeypatch):
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **o: compile(f, backend="eager", **o))
    for pattern in SMALL * 2:  # more than Dynamo's limit of recompilations
        problem = small(pattern, last)
        x, weight, out = problems.tensors(problem, "cpu")
        stored = rivals.blocks(weight)
        found = rivals.compiled(problem)(x, stored, out)
        assert torch.equal(found, rivals.einsum(problem)(x, stored))


def test_float32_products_are_as_accurate_as_the_case_says():
    before = torch.get_float32_matmul_precision()
    for kind, wanted in (("tf32", "high"), ("fp32", "highest"), ("fp16", "highest")):
        with problems.float32_products(small(SMALL[0], False, kind)):
            assert torch.get_float32_matmul_precision() == wanted
    assert torch.get_float32_matmul_precision() == before
    assert small(SMALL[0], True, "tf32").descriptor.precision == "tf32"
    assert small(SMALL[0], True, "fp32").descriptor.precision == "fp32"


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("pattern", SMALL)
def test_training_steps_agree_with_autograd_in_float64(pattern, last):
    problem = small(pattern, last, section="train")
    x, weight, grad = problems.tensors(problem, "cpu")
    grad.normal_()
    rows = torch.arange(7)
    by_x, by_weight = training.gradients(problem, x, weight, grad, rows)
    wide_x, wide_w = x.double().requires_grad_(), weight.double().requires_grad_()
    y = reference.multiply(pattern, wide_x, wide_w, last)
    plain = torch.autograd.grad(y, (wide_x, wide_w), grad.double())
    assert torch.allclose(by_x, problems.pick(problem, plain[0], rows))
    assert torch.allclose(by_weight, plain[1])
    found = training.ours(problem)(x, weight, grad)
    assert training.worst_error(problem, found, (by_x, by_weight), rows) < 1e-6
    step = training.step(rivals.einsum(problem))
    other = step(x, rivals.blocks(weight), grad)
    wanted = (by_x, rivals.blocks(by_weight))
    assert training.worst_error(problem, other, wanted, rows) < 1e-6
    assert all(t.is_contiguous() and not t.requires_grad for t in (*found, *other))


# Rows.


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(rivals, "compiled", rivals.einsum)
    return Session(timer=Clock(0.25, 0.125))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("section", ["patterns", "grid", "train"])
def test_a_row_has_times_floor_and_errors(section, last, on_cpu):
    problem = small((2, 3, 5, 4), last, section=section)
    work = training.measure if section == "train" else benchmark.measure
    row = work(problem, on_cpu, "cpu")
    wanted = {
        "patterns": {"bmm", "einsum", "torch.compile", "dense"},
        "grid": {"bmm", "einsum", "dense"},
        "train": {"einsum"},
    }[section]
    assert set(row.rivals) == set(row.rival_errors) == wanted
    assert row.case == problem.name and row.unit == "ms" and row.ours == 0.125
    assert (row.floor, row.bound) == problem.floor()
    assert row.must_error == 1e-6 and "met" in harness.verdict(row)
    assert max(row.error, *row.rival_errors.values()) < 1e-6


def test_a_rival_with_another_result_is_left_out(on_cpu, monkeypatch, capsys):
    def permuted(problem):
        call = rivals.einsum(problem)
        return lambda x, stored, out: call(x, stored).mT.contiguous().mT

    monkeypatch.setattr(rivals, "bmm", permuted)
    row = benchmark.measure(small((2, 3, 5, 4), False), on_cpu, "cpu")
    assert "bmm" not in row.rivals and "einsum" in row.rivals
    assert "bmm is left out (ValueError: the result is (7, 24) with strides" in (
        capsys.readouterr().err
    )


def test_a_slow_compiler_does_not_hold_up_the_rest(on_cpu, capsys):
    problem = small((2, 3, 5, 4), False)
    benchmark.measure(problem, on_cpu, "cpu")
    assert 0 < on_cpu.ours["torch.compile"] < 10
    on_cpu.ours["torch.compile"] = benchmark.COMPILE_BUDGET_S + 1
    assert "torch.compile" not in benchmark.measure(problem, on_cpu, "cpu").rivals
    assert "torch.compile is left out, it has taken 76 s so far" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ms", "quick", "calls", "found"),
    [(2.0, False, 3, 2.0), (2.0, True, 1, 2.0), (0.5, 0, 1, 0.25)],
)
def test_the_grid_is_timed_briefly(ms, quick, calls, found):
    session = Session(quick=bool(quick), timer=Clock(ms, ms / 2))
    assert benchmark.briefly(session, lambda: None, ()) == found
    assert session.timer.sweeps == calls


# Kernels.


@pytest.mark.parametrize("section", ["patterns", "grid", "train"])
def test_every_case_has_kernels_and_the_digest_covers_them(section):
    covered = set(sources.closure(benchmark.SOURCE))
    for plan in CASES[section]:
        made = problems.stand_ins(plan.problem)
        assert made[0].requires_grad == (section == "train")
        found = ahead.specs(plan.problem.descriptor, "sm_90a", made, {})
        assert found, plan.case.name
        for source in {spec.source for spec in found}:
            assert set(sources.closure(source)) <= covered


def test_hot_calls_launch_once_and_the_last_packs_first():
    counts = []
    for pattern, batch, _ in host.HOT_CALLS:
        problem = Problem("host", pattern, False, "fp16", batch)
        found = ahead.specs(problem.descriptor, "sm_90a", problems.stand_ins(problem), {})
        counts.append(len(found))
    assert counts == [1, 1, 2]


def test_hot_call(monkeypatch):
    monkeypatch.setattr(host, "host_us", lambda call, wait, quick: (call(), 5.0)[1])
    row = host.hot_call((6, 64, 64, 1), 64, 12.0, Session(), "cpu")
    assert row.case == "kronecker_sparse hot call (6,64,64,1) fp16" and row.unit == "us"
    assert row.rivals == {"einsum": 5.0, "dense": 5.0} and row.error < 1e-3 and row.must == 12.0


def test_compiled_kernels_are_distinct_and_of_every_kind():
    found = host.kernels("sm_90a")
    assert len({spec.canonical() for spec in found}) == len(found) > 20
    words = " ".join(spec.description for spec in found)
    assert all(kind in words for kind in ("hopper", "interleaved", "pack", "tf32", "bfloat16"))


# The command.


def test_the_command_merges_the_chosen_sections(tmp_path, monkeypatch, capsys):
    kernels = host.kernels("sm_80")[:2]
    monkeypatch.setattr(host, "kernels", lambda arch: kernels)
    path = tmp_path / "kronecker_sparse.json"
    arguments = ["--only", "host", "--case", "compile", "--json", str(path)]
    monkeypatch.setattr(host, "milliseconds", lambda spec, arch: 100.0 + kernels.index(spec))
    harness.write(path, harness.merge(head(), [row("kronecker_sparse compile median")], None))
    assert benchmark.main(arguments) == 0
    found = {one["case"]: one["ours"] for one in harness.read(path)["rows"]}
    assert found == {
        "kronecker_sparse compile maximum": 101.0,
        "kronecker_sparse compile median": 100.5,
    }
    printed = capsys.readouterr().err
    assert re.search(r"\d s of about 15: kronecker_sparse compile maximum: 101 ms", printed)


def test_the_file_keeps_the_order_of_all_cases(tmp_path, monkeypatch):
    path = tmp_path / "kronecker_sparse.json"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(benchmark, "measure", lambda p, s: Row(p.name, "ms", 1.0))
    monkeypatch.setattr(training, "measure", lambda p, s: Row(p.name, "ms", 1.0))
    for section, case in (("train", "(6,64,64,1)"), ("patterns", "(6,64,64,1) last")):
        arguments = ["--only", section, "--case", case, "--json", str(path)]
        assert benchmark.main(arguments) == 0
    found = [one["case"] for one in harness.read(path)["rows"]]
    assert len(found) == 8 and found == [name for name in NAMES if name in found]
    assert "train" not in found[3] and "train" in found[4]


def test_the_command_fails_where_nothing_matches(capsys):
    assert benchmark.main(["--only", "train", "--case", "bf16"]) == 1
    assert "no case is called so" in capsys.readouterr().err


# Summaries.


def head():
    return {**harness.machine(), "sources": "ab12"}


def row(case, ours=2.0, floor=1.0, error=1e-4, **rivals):
    made = Row(case, "ms", ours, floor, "memory", rivals, error, dict.fromkeys(rivals, 2e-4))
    return made.as_json()


ROWS = [
    row("kronecker_sparse (6,64,64,1) last fp16", einsum=8.0, bmm=4.0),
    row("kronecker_sparse (6,64,64,1) last fp32", error=3e-7, dense=1.0),
    row("kronecker_sparse (6,64,64,1) last bf16", einsum=8.0),
    row("kronecker_sparse (1,256,256,16) first bf16", error=2e-3, einsum=4.0),
    row("kronecker_sparse (4,64,64,1) first bf16"),
    row("kronecker_sparse grid (1,256,256,16) first fp16", bmm=1.0),
    row("kronecker_sparse train (6,64,64,1) last fp16", einsum=6.0),
    row("kronecker_sparse hot call (6,64,64,1) fp16", floor=None, einsum=20.0),
    row("kronecker_sparse compile maximum", floor=None, error=None),
    row("kronecker_sparse compile median", floor=None, error=None),
]  # fmt: skip


@pytest.mark.parametrize("section", CASES)
def test_names_say_where_a_case_belongs(section):
    for plan in CASES[section]:
        found, problem = summary.place(plan.case.name), plan.problem
        if problem is None:
            assert found is None
        else:
            layout = "last" if problem.batch_last else "first"
            assert found == (section, problems.text_of(problem.pattern), layout, problem.kind)


def test_summaries_count_and_average():
    found = common.summarise(ROWS[2:5])
    assert (found.cases, found.compared, found.wins) == (3, 2, 2)
    assert found.speed_up == pytest.approx(math.sqrt(8)) and found.least == 2.0
    assert found.over_floor == pytest.approx(2.0) and found.error == 2e-3
    assert common.summarise(ROWS[5:6]).wins == 0
    nothing = common.Summary(1, 0, 0, None, None, None, None)
    assert common.summarise(ROWS[-1:]) == nothing


def test_rows_in_a_line():
    wanted = "kronecker_sparse (6,64,64,1) last fp16: 2.00 ms, 2.00 x floor, bmm 4.00 (2.0 x)"
    assert summary.line(ROWS[0]) == wanted
    assert summary.line(ROWS[-1]) == "kronecker_sparse compile median: 2.00 ms"


def test_lines_for_the_terminal():
    found = summary.lines(ROWS)
    assert (
        "patterns bf16 first: 2 cases, 2.00 x floor, fastest in 1 of 1, best rival 2.00 x on "
        "average, 2.00 x at least, error 2.0e-03"
    ) in found
    assert sum(line.startswith("patterns bf16") for line in found) == 3
    assert any(line.startswith("grid fp16 d > 1: 1 cases") for line in found)
    assert not any("hot" in line for line in found) and summary.lines([]) == []


# The report.


def test_report_has_few_rows_for_many_cases():
    every = [row(name, einsum=3.0, bmm=5.0) for name in NAMES]
    text = tables.section("kronecker_sparse", {**head(), "rows": every})
    found = re.findall(r"(?:^\|.*\n?)+", text, re.M)
    counts = [len(table.splitlines()) - 2 for table in found]
    assert counts == [16, 6, 4]
    for table in found:
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_report_shows_factors_summaries_and_the_rest():
    text = tables.section("kronecker_sparse", {**head(), "rows": ROWS})
    lines = text.splitlines()
    assert "**Kronecker-sparse** on" in lines[0]
    assert lines[2] == (
        "| factor | fp16 | floor | best rival | error | fp32 | floor | best rival | error |"
    )
    assert lines[4] == (
        "| (6,64,64,1) last | 2.00 ms | 1.00 ms (memory) | bmm 4.00 ms (2.0×) | 1.0e-04 "
        "| 2.00 ms | 1.00 ms (memory) | dense 1.00 ms (0.50×) | 3.0e-07 |"
    )
    assert "| the same in bf16: 3 | 2 of 2 | 2.83× | 2.00× | 2.00× | 2.0e-03 |" in lines
    assert "| grid of patterns with d > 1, fp16: 1 | 0 of 1 | 0.500× | 0.500× |" in text
    assert "| training step, fp16: 1 | 1 of 1 | 3.00× |" in text
    assert "| kronecker_sparse hot call (6,64,64,1) fp16 | 2.00 ms |" in text
    assert "compile maximum" in text and "compile median" not in text


def test_report_of_part_of_a_run():
    half = ROWS[:1]
    text = tables.section("kronecker_sparse", {**head(), "rows": half})
    assert text.endswith("| bmm 4.00 ms (2.0×) | 1.0e-04 |  |  |  |  |")
    text = tables.section("kronecker_sparse", {**head(), "rows": ROWS[-2:]})
    assert "| case | kernlib |" in text and "| factor |" not in text

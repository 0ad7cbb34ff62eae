"""`kernlib demo` and `kernlib bench`: a call of every family, beside torch."""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module

import pytest
import torch

from kernlib import errors, events, settings
from kernlib.cli import machine, output, workloads
from kernlib.cli.machine import Gpu
from kernlib.jit import toolchain
from tests.cli.cases import command, on_terminal, plain
from tests.support.paths import ROOT

BENCH = import_module("kernlib.cli.bench")
FAMILIES = ("pairwise", "Kronecker-sparse", "Kronecker product", "sparse", "block-sparse")
DEMO = import_module("kernlib.cli.demo")
KERNELS = 10  # of the demo


def counts(stderr: str) -> dict[str, int]:
    lines = [line.split()[1] for line in stderr.splitlines() if line.startswith("kernlib ")]
    return {name: lines.count(name) for name in events.NAMES}


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(FAMILIES)]


def small(precision: str) -> tuple:
    """A call of each family that takes no time."""
    return (
        lambda make: make.pairwise("gaussian", 20, 30, 8, 2.0),
        lambda make: make.kronecker_sparse((2, 4, 6, 3), 20, precision),
        lambda make: make.kronecker_product((4, 5), 20, precision),
        lambda make: make.sparse(64, 64, precision),
        lambda make: make.block_sparse(128, 20, precision),
    )


# The demo.


@pytest.fixture
def few(monkeypatch, compiles):
    """A demo that compiles nothing and is quick; the fixture's value is what would be compiled."""
    monkeypatch.setattr(DEMO, "CASES", small("fp32"))
    return compiles


@pytest.mark.slow
def test_the_second_demo_compiles_nothing(cache_dir):
    first = command("demo", "--events")
    assert first.returncode == 0, first.stderr
    seen = counts(first.stderr)
    assert (seen["lookup"], seen["compile"], seen["store"]) == (KERNELS, KERNELS, KERNELS)
    assert "registers=" in first.stderr and "spill_bytes=" in first.stderr
    assert f"{KERNELS} of {KERNELS} kernels were compiled" in first.stdout
    second = command("demo", "--events", KERNLIB_ASSERT_CACHED="1")
    assert second.returncode == 0, second.stderr
    seen = counts(second.stderr)
    assert (seen["lookup"], seen["compile"], seen["hit"]) == (KERNELS, 0, KERNELS)
    assert "Nothing was compiled" in second.stdout
    assert len(re.findall(r" [1-9] found ", second.stdout)) == len(rows(second.stdout))


def test_demo_shows_every_family_beside_torch(run, few):
    """And which of it ran where; its events it keeps to itself."""
    result = run("demo")
    assert result.exit_code == 0 and result.stderr == ""
    assert result.stdout.startswith("No GPU to run on: kernlib computes on the CPU")
    assert "compiled for sm_90a and do not run" in result.stdout
    for name in ("kernlib", "torch", "error"):
        assert name in result.stdout.splitlines()[3].split()
    found = rows(result.stdout)
    assert {next(name for name in FAMILIES if row.startswith(name)) for row in found} == {*FAMILIES}
    assert all(re.search(r" [\d.]+ +[\d.]+ +\de-\d\d +[1-9] compiled ", row) for row in found)
    assert {arch for _, arch in few} == {"sm_90a"} and len(few) >= len(FAMILIES)
    assert f"{len(few)} of {len(few)} kernels were compiled" in result.stdout
    assert "error: kernlib's, relative to float64. On a CPU both are" in result.stdout
    last = result.stdout.splitlines()[-1]
    assert "`python examples/quickstart.py`" in last and "doctor" not in last
    assert (ROOT / "examples" / "quickstart.py").exists()


def test_demo_as_json(run, few):
    """All of the table, by the names that the bench has too."""
    result = run("demo", "--json")
    assert result.exit_code == 0 and result.stderr == ""
    facts = json.loads(result.stdout)
    assert (facts["gpu"], facts["arch"], facts["unit"]) == (None, "sm_90a", "ms")
    assert facts["not_compiled"] is None and facts["path"]
    assert {call["family"] for call in facts["calls"]} == {*FAMILIES}
    for call in facts["calls"]:
        assert call["kernlib"] > 0 and call["torch"] > 0 and call["error"] <= call["bound"]
        assert call["kernels"] and call["precision"] == "fp32"
    needed = {key for call in facts["calls"] for key in call["kernels"]}
    assert needed == {*facts["compiled"]} and len(needed) == len(few)
    assert json.loads(run("demo", "--json").stdout)["compiled"] == []


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("case", ["demo", "bench"])
def test_a_narrow_terminal_does_without_columns(run, few, timed, monkeypatch, case, width):
    """Which a line on stderr names; the longest names of calls are those of the real ones."""
    monkeypatch.setattr(output, "terminal_width", lambda: width)
    longest = "(1,768,192,2), 25088 rows" if case == "bench" else "(6,64,64,1), 1024 rows"
    made = workloads.Maker.kronecker_sparse
    monkeypatch.setattr(
        workloads.Maker, "kronecker_sparse", lambda *given: made(*given)._replace(name=longest)
    )
    if case == "demo":
        monkeypatch.setattr(machine, "gpus", lambda: [])
    result = run(case)
    assert result.exit_code == 0, result.output
    assert len(rows(result.stdout)) == len(FAMILIES)
    assert {*longest.split()} <= {*result.stdout.split()}  # whose words no fold has broken
    assert max(len(line.rstrip()) for line in rows(result.stdout)) <= width
    gone = {"demo": "torch, kernels", "bench": "torch, faster, error"}[case]
    said = " ".join(result.stderr.split())
    assert said == ("" if width == 80 else f"A wider terminal, a pipe and --json show {gone} too.")


def test_demo_writes_events_when_asked(run, few):
    assert counts(run("demo", "--events").stderr)["compile"] == len(few) > 0


@pytest.mark.slow
@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_demo_is_one_screen(cache_dir, width):
    """Of 24 lines, without progress, which has gone when the table comes. Only the path of a cache
    may be wider, as it has no place to break."""
    code, lines = on_terminal(width, "demo")
    table = lines[next(i for i, line in enumerate(lines) if "Milliseconds" in line) :]
    assert code == 0 and len(table) <= 20 and len(rows("\n".join(table))) == 6
    assert max(len(line) for line in table if " " in line.strip()) <= width


def test_demo_with_asserted_cache_says_what_is_missing(run, few, monkeypatch):
    monkeypatch.setenv("KERNLIB_ASSERT_CACHED", "1")
    settings.reset()
    plain(run("demo"), 1, "is not in the cache")


@pytest.mark.parametrize("compiler", ["few", "without_cuda_core"])
def test_demo_fails_when_a_result_is_wrong(run, monkeypatch, request, compiler):
    request.getfixturevalue(compiler)
    monkeypatch.setitem(workloads.BOUNDS, "fp32", 0.0)
    plain(run("demo"), 1, "the error is too large: gaussian 20x30x8; ")
    result = run("demo", "--json")
    plain(result, 1, "the error is too large: gaussian 20x30x8; ")
    assert all(call["bound"] == 0 for call in json.loads(result.stdout)["calls"])


def test_demo_without_a_cache_says_so_once_and_runs(run, few, unusable_cache):
    result = run("demo")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("Warning: the kernel cache in /proc/kernlib") == 1
    assert "are lost with this process" in result.stdout


@pytest.fixture
def without_cuda_core(cache_dir, monkeypatch):
    """Small calls, and no compiler."""
    monkeypatch.setattr(DEMO, "CASES", small("fp32"))
    monkeypatch.setitem(sys.modules, "cuda.core", None)


def test_demo_without_a_compiler_runs_every_call_and_says_once_what_is_missing(
    run, without_cuda_core
):
    result = run("demo")
    assert result.exit_code == 0 and result.stderr == "", result.output
    assert result.stdout.count("not compiled. Missing: cuda-core. To install: ") == 1
    assert errors.INSTALL in result.stdout.splitlines()[0]
    facts = json.loads(run("demo", "--json").stdout)
    assert facts["not_compiled"] in result.stdout and facts["compiled"] == []
    assert {call["kernels"] for call in facts["calls"]} == {None}
    found = rows(result.stdout)
    assert {next(name for name in FAMILIES if row.startswith(name)) for row in found} == {*FAMILIES}
    assert all(re.search(r" [\d.]+ +[\d.]+ +\de-\d\d +not compiled ", row) for row in found)
    assert "were compiled" not in result.stdout and "found in the cache" not in result.stdout


def test_demo_names_all_that_is_missing(run, without_cuda_core, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: toolchain.UNKNOWN_VERSION)
    assert "Missing: cuda-bindings, cuda-core and NVRTC. " in run("demo").stdout


def test_demo_of_a_gpu_needs_a_compiler(run, without_cuda_core, monkeypatch):
    monkeypatch.setattr(machine, "gpus", lambda: [Gpu(0, "G 100", "sm_90a")])
    monkeypatch.setattr(workloads, "Maker", lambda device: None)
    monkeypatch.setattr(DEMO, "CASES", ())
    monkeypatch.setattr(workloads, "compiled", lambda calls, place: toolchain.cuda_core())
    plain(run("demo"), 1, "cannot be compiled or launched without cuda-core (", errors.INSTALL)


def test_the_gate_reads_events_that_the_demo_writes_when_asked():
    """Without the option it would prove nothing."""
    text = (ROOT / ".ci" / "functions").read_text()
    assert "KERNLIB_ASSERT_CACHED=1 kernlib demo --events" in text


# The bench.


def test_bench_without_a_gpu(run, monkeypatch):
    result = run("bench")
    plain(result, 1, "needs an NVIDIA GPU", "`kernlib doctor`", "`kernlib demo` runs on the CPU")
    assert result.stdout == ""
    monkeypatch.setattr(machine, "gpus", lambda: [Gpu(0, "A", None, "A is too old")])
    plain(run("bench"), 1, "needs an NVIDIA GPU", "A is too old")


@pytest.fixture
def timed(monkeypatch, compiles):
    """A GPU that is the CPU, and small calls: what is not the GPU's is as it is."""
    monkeypatch.setattr(BENCH, "CASES", small("fp16"))
    monkeypatch.setattr(BENCH, "ready", lambda gpu: (torch.device("cpu"), machine.CpuClock()))
    monkeypatch.setattr(machine, "gpus", lambda: [Gpu(None, "G 100", "sm_90a")])


def test_bench_has_a_row_a_call(run, timed):
    result = run("bench")
    assert result.exit_code == 0, result.output
    assert "Milliseconds on G 100 (sm_90a)" in result.stdout
    found = rows(result.stdout)
    assert len(found) == len(FAMILIES) and "fp16 (2,4,6,3), 20 rows" in found[1]
    assert all(re.search(r" [\d.]+ +[\d.]+ +[\d.]+× +\de-\d\d  fp", row) for row in found)


def test_bench_as_json(run, timed):
    facts = json.loads(run("bench", "--json").stdout)
    assert (facts["gpu"], facts["arch"], facts["unit"]) == ("G 100", "sm_90a", "ms")
    for call in facts["calls"]:
        assert call["kernlib"] > 0 and call["torch"] > 0 and call["error"] <= call["bound"]
        assert call["faster"] == pytest.approx(call["torch"] / call["kernlib"])


def test_bench_fails_when_a_result_is_wrong(run, timed, monkeypatch):
    monkeypatch.setitem(workloads.BOUNDS, "fp16", 0.0)
    result = run("bench")
    plain(result, 1, "the error is too large: fp16 (2,4,6,3), 20 rows; ")
    assert len(rows(result.stdout)) == len(FAMILIES)


@pytest.mark.parametrize(
    "amount, text",
    [(130.4, "130"), (12.34, "12.3"), (0.0123, "0.0123"), (0.00042, "0.0004"), (99.96, "100")],
)
def test_milliseconds_have_three_digits(amount, text):
    assert machine.milliseconds(amount) == text


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", ["demo", "bench"])
def test_on_the_gpu(name, tmp_path):
    found = command(name, KERNLIB_CACHE_DIR=str(tmp_path), CUDA_VISIBLE_DEVICES="0")
    assert found.returncode == 0, found.stderr
    assert len(rows(found.stdout)) >= len(FAMILIES)

"""CPU tensors beside plain torch: the benchmark's rows."""

import pytest
import torch

from benchmarks import report
from benchmarks.common.harness import UNITS_PER_MS, Row, Session, merge
from benchmarks.cpu import run
from benchmarks.cpu.problems import PROBLEMS, distance, gaussian
from tests.benchmarks.cases import check_schema

SMALL = tuple(name for name in PROBLEMS if "10x10x3" in name)


def test_rows_have_the_schema_and_name_the_cpu():
    rows = [run.measure(name, Session(quick=True)) for name in SMALL]
    found = merge({**run.machine(), "sources": "none"}, [row.as_json() for row in rows], None)
    check_schema(found)
    assert found["gpu"].endswith(f"{torch.get_num_threads()} threads")
    for row in rows:
        assert list(row.rivals) == ["torch"] and row.error < 1e-6
        scale = UNITS_PER_MS[row.unit]
        least = row.rivals["torch"] + run.HOST_MS * scale
        assert row.must == pytest.approx(max(1.1 * row.rivals["torch"], least))


def test_the_least_of_several_batches_counts():
    times = iter((5.0,) * 100)
    slow, fast = run.least((lambda: sum(range(20000)), lambda: next(times, 0)), 0.05)
    assert 0 < fast < slow


def test_what_a_case_may_take():
    assert run.permitted(distance(2.0, 5, 3), 100.0) == pytest.approx(110.0)
    assert run.permitted(gaussian(5, 3), 0.01) == pytest.approx(0.05)
    assert run.permitted(gaussian(5, 3), 0.01, pace=3.0) == pytest.approx(0.13)


def test_rows_of_a_cpu_are_none_of_a_family():
    head = {"gpu": "AMD EPYC, 2 threads", "driver": "none", "torch": "2", "nvrtc": "13"}
    row = Row("cdist", "ms", 2.0, rivals={"torch": 1.0}).as_json()
    results = {**head, "date": "2026-01-01", "rows": [row]}
    assert report.verdict.measured([("cpu", results)]) == []
    assert "**CPU tensors** on AMD EPYC, 2 threads" in report.page("cpu", [results], [])

"""The benchmark of Kronecker products: its cases, and that all ways to them agree."""

import math

import pytest
import torch

from benchmarks.kronecker_product import problems, rivals, run, summary, training
from benchmarks.report import tables

CASES = problems.problems()


def test_drawn_shapes_are_mixed_and_fit():
    shapes = problems.drawn()
    assert shapes == problems.drawn() and len(shapes) == problems.DRAWN
    for rows, sizes in shapes:
        assert 1 <= rows <= 4096 and 2 <= len(sizes) <= 8
        assert all(2 <= size <= 128 for pair in sizes for size in pair)
        ends = [math.prod(pair[side] for pair in sizes) for side in (0, 1)]
        assert 8 * rows * sum(ends) <= problems.MOST_BYTES


@pytest.mark.parametrize("section", ["named", "left"])
def test_ours_and_all_rivals_agree(section, seed):
    sizes = ((3, 4), (5, 2), (2, 6))
    case = problems.Problem(section, 7, sizes, "fp64")
    x, factors, out = problems.tensors(case, "cpu")
    some = torch.tensor([0, 3, 6])
    wanted = problems.exact(x, factors, case.side, some)
    ways = rivals.rivals(case) | {"ours": lambda x, fs: run.kl.kron_matmul(x, fs, side=case.side)}
    ways["torch.compile"] = lambda x, fs: rivals.einsum(x, fs, -1 if section == "named" else -2)
    for call in ways.values():
        found = call(x, factors)
        assert found.shape == out.shape
        part = found[some] if section == "named" else found[:, some].mT
        torch.testing.assert_close(part, wanted)


def test_floors_are_of_memory_or_of_operations():
    times = {case.name: case.floor() for case in CASES}
    milliseconds, bound = times["kronecker_product 1024 8^5 fp32"]
    assert bound == "memory" and 0.05 < milliseconds < 0.07
    assert times["kronecker_product 320 128^3 fp32"][1] == "tensor cores"


def row(name, ours=2.0, **rivals):
    numbers = {"unit": "ms", "ours": ours, "floor": 1.0, "bound": "memory", "error": 1e-7}
    return {"case": name, **numbers, "rivals": rivals, "rival_errors": {}}


def test_every_case_has_a_place():
    for case in CASES:
        assert summary.place(case.name)[0::2] == (case.section, case.kind), case.name
    assert summary.place(run.HOT_NAME) is None


def test_report_shows_named_cases_and_summaries():
    every = [row(case.name, shuffle=4.0, strided=3.0) for case in CASES]
    factors, summaries = (table.splitlines() for table in tables.TABLES["kronecker_product"](every))
    assert len(factors) == 2 + 4 * len(problems.NAMED)
    assert (
        "1024 8^5, left" in factors[2 + len(problems.NAMED)]
        and "strided 3.00 ms (1.5×)" in factors[2]
    )
    assert len(summaries) == 2 + 7
    assert "| factors of drawn sizes, fp32: 60 | 60 of 60 | 1.50×" in "\n".join(summaries)
    for table in (factors, summaries):
        assert len({line.count("|") for line in table}) == 1


def test_a_training_step_is_measured_beside_its_product(seed):
    class Session:
        calls = 0

        def time(self, call, buffers):
            found = call(*buffers)
            self.calls += 1
            return 4.0 if isinstance(found, tuple) else 2.0

    case = problems.Problem("train", 7, ((3, 4), (5, 2)), "fp64")
    row = training.measure(case, Session(), "cpu")
    assert row.ours == 4.0 and row.must == 2.0 * training.SHARE and row.error < 1e-14
    assert row.rivals and max(row.rival_errors.values()) < 1e-13
    alone = problems.Problem("named", 7, ((3, 4), (5, 2)), "fp64")
    assert case.floor()[0] > 2 * alone.floor()[0]

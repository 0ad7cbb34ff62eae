"""The benchmark of what is chosen: its calls, that all ways agree, and what counts as lost."""

import pytest
import torch

from benchmarks.auto import problems, run
from benchmarks.common.harness import Session
from kernlib.jit import tuning

CASES = problems.problems()
FAMILIES = ("pairwise", "kronecker_sparse", "kronecker_product", "sparse", "blocksparse")


def test_there_are_a_hundred_of_each_family():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names) and names == [each.name for each in problems.problems()]
    for family in FAMILIES:
        found = [case for case in CASES if case.family == family]
        assert len(found) > 50 if family == "kronecker_product" else len(found) > 95


def small(monkeypatch):
    """Sizes that a CPU computes at once."""
    monkeypatch.setattr(problems, "between", lambda source, low, high: round(low) + 7)
    monkeypatch.setattr(problems, "drawn_factors", lambda: [(5, ((3, 4), (2, 5)))])


@pytest.mark.parametrize("family", FAMILIES)
def test_all_ways_agree(family, monkeypatch, seed):
    small(monkeypatch)
    for problem in (each for each in problems.problems(3) if each.family == family):
        call = problem.make("cpu")
        found = call.auto.call(*call.auto.buffers).double()
        for name, way in call.others.items():
            other = way.call(*way.buffers).double()
            if other.shape != found.shape:  # of sdd the whole product
                continue
            assert (other - found).norm() <= 2e-3 * found.norm(), (problem.name, name)


class Clock:
    """A timer that takes the times from a list."""

    def __init__(self, times):
        self.times = iter(times)

    def swept(self, call, buffers):
        return next(self.times)

    def replayed(self, call, buffers, repetitions):
        return self.swept(call, buffers)


def test_a_row_may_take_five_percent_more_than_the_fastest(monkeypatch, seed):
    small(monkeypatch)
    (problem,) = (each for each in problems.problems(1) if each.family == "pairwise")
    row = run.measure(problem, Session(timer=Clock([2.0] * 20)), "cpu")
    assert row.rivals == {"torch": 2.0} and row.must == pytest.approx(2.1)


def test_a_choice_holds_inside_of_its_block_alone():
    before = tuning.choice
    with run.chosen({"kind": "modes", "tile": 64}):
        assert tuning.choice("family", (), b"") == {"kind": "modes", "tile": "64"}
    assert tuning.choice is before
    with pytest.raises(KeyError), run.chosen({}):
        raise KeyError
    assert tuning.choice is before and torch.is_grad_enabled()

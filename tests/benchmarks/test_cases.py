"""The cases of every family: which there are, and that each can be chosen alone."""

import pytest

from benchmarks.auto import problems as auto
from benchmarks.blocksparse import run as blocksparse
from benchmarks.common import harness
from benchmarks.common.harness import Case
from benchmarks.distributed import run as distributed
from benchmarks.kronecker_product import problems as products
from benchmarks.kronecker_product.run import HOT_NAME, hot_call
from benchmarks.kronecker_sparse import run as kronecker_sparse
from benchmarks.pairwise import run as pairwise
from benchmarks.programs import run as programs
from benchmarks.sparse import run as sparse
from tests.benchmarks.cases import committed


def named(problems):
    return [Case(problem.name, lambda session: None) for problem in problems]


CASES = {
    "auto": named(auto.problems()),
    "blocksparse": blocksparse.cases(False) + blocksparse.cases(True),
    "distributed": [Case(case.name.format(2), case.measure) for case in distributed.CASES],
    "kronecker_product": [*named(products.problems()), Case(HOT_NAME, hot_call)],
    "kronecker_sparse": [
        plan.case
        for section in kronecker_sparse.SECTIONS
        for plan in kronecker_sparse.planned(section)
    ],
    "pairwise": pairwise.cases() + pairwise.cases(portable=True),
    "programs": programs.cases(),
    "sparse": [case for section in sparse.SECTIONS for case in sparse.cases(section)],
}


@pytest.mark.parametrize("family", CASES)
def test_each_case_can_be_chosen_alone(family):
    for case in CASES[family]:
        assert harness.chosen(CASES[family], [case.name]) == [case]


GONE = {"kronecker_sparse hot call of 128 rows (1,768,192,2) fp16"}  # which has 256 by now


@pytest.mark.parametrize("family", CASES)
def test_cases_that_were_measured_are_there(family):
    """So that none is lost, or named anew beside its old results."""
    assert {*committed(family)} - GONE <= {case.name for case in CASES[family]}

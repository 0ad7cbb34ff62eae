"""Norms, kernel functions and sums on points where they go wrong, on the CPU."""

import pytest

from tests.families.pairwise.forwards import FORWARDS
from tests.support import hostile


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
def test_forwards_meet_the_bar_on_hostile_points(name, dtype):
    forward = FORWARDS[name]
    for case in hostile.cases(dtype):
        exact, terms = forward.exact(case)
        rival = forward.theirs(case)
        hostile.check(forward.ours(case), exact, terms, rival, f"{name}, {case.name}")

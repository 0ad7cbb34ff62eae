"""Norms, kernel functions and sums on points where they go wrong, on the CPU."""

import pytest
import torch

from tests.families.pairwise.forwards import FORWARDS
from tests.support import hostile

HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
def test_forwards_meet_the_bar_on_hostile_points(name, dtype):
    forward = FORWARDS[name]
    for case in hostile.cases(dtype):
        exact, terms = forward.exact(case)
        rival = forward.theirs(case)
        hostile.check(forward.ours(case), exact, terms, rival, f"{name}, {case.name}")


def test_the_cases_are_what_their_names_say():
    for dtype in hostile.DTYPES:
        for case in hostile.cases(dtype, rows=5, columns=6, features=7):
            assert (case.a.shape, case.b.shape, case.a.dtype) == ((5, 7), (6, 7), dtype)
            finite = bool(case.a.isfinite().all() and case.b.isfinite().all())
            assert finite == (case.name in hostile.FINITE), case.name
            same = hostile.case(case.name, dtype, rows=5, columns=6, features=7)
            assert torch.equal(same.a.nan_to_num(), case.a.nan_to_num())
    denormal = hostile.case("denormals").a.abs()
    assert 0 < denormal.max() < torch.finfo(torch.float32).tiny


def test_the_bar_tells_right_from_wrong():
    exact = torch.tensor([1.0, 0.0, torch.inf, torch.nan], dtype=torch.float64)
    hostile.check(exact.float(), exact)
    for place, wrong in ((0, 1 + 2e-6), (1, 1e-9), (2, 3e38), (2, torch.nan), (3, 0.0)):
        out = exact.float()
        out[place] = wrong
        with pytest.raises(AssertionError):
            hostile.check(out, exact)
        hostile.check(out, exact, rival=out)  # torch does no better

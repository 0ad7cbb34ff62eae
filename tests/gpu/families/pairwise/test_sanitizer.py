"""compute-sanitizer over small odd calls of every kernel of the family."""

import pytest

from tests.gpu import sanitizer

CALLS = (
    "sanitized_direct",
    "sanitized_few",
    "sanitized_formulas",
    "sanitized_double",
    "sanitized_small",
    "sanitized_products",
    "sanitized_columns",
    "sanitized_gradients",
    "sanitized_points",
    "sanitized_topk",
)


@sanitizer.needed
@pytest.mark.parametrize("tool", ("memcheck", "racecheck"))
@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.few(0)
def test_no_bad_access_and_no_race(calls, tool):
    assert sanitizer.launched(tool, f"tests.gpu.families.pairwise.{calls}", tool, timeout_s=580)

"""compute-sanitizer over small odd calls of each format."""

import pytest

from tests.gpu import sanitizer


@sanitizer.needed
@pytest.mark.parametrize("tool", ("memcheck", "racecheck"))
@pytest.mark.few(0)
def test_no_bad_access_and_no_race(tool):
    assert sanitizer.launched(tool, "tests.gpu.families.sparse.sanitized", tool)

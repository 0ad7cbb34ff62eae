"""compute-sanitizer over small odd calls."""

import pytest

from tests.gpu import sanitizer
from tests.gpu.families.kronecker_product.cases import SIDES


@sanitizer.needed
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_no_bad_access_and_no_race(tool, side):
    module = "tests.gpu.families.kronecker_product.sanitized"
    kinds = {"modes", "halves", "clear", "slabs", "half_slabs", "gradients", "sum"}
    assert sanitizer.launched(tool, module, side) >= kinds

"""compute-sanitizer over small odd calls."""

import pytest

from tests.gpu import sanitizer
from tests.gpu.families.kronecker_product.cases import SIDES, TYPES


@sanitizer.needed
@pytest.mark.parametrize("numbers", TYPES)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_no_bad_access_and_no_race(tool, side, numbers):
    module = "tests.gpu.families.kronecker_product.sanitized"
    kinds = {"modes", "clear", "gradients", "sum"}
    kinds |= {"halves", "half_slabs"} if TYPES[numbers].itemsize == 2 else {"slabs"}
    assert sanitizer.launched(tool, module, f"{side}-{numbers}") >= kinds

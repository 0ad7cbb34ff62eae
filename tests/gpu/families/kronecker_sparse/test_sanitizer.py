"""compute-sanitizer over small odd calls of each kind of kernel."""

import pytest
import torch

from tests.gpu import sanitizer

# What the calls must have launched, by the second word of their descriptions.
HOPPER = {"chain", "interleaved", "hopper", "gradient", "pack", "turn", "hidden", "deinterleave"}
LAUNCHED = {"portable": {"portable", "weights", "sum"}, "hopper": HOPPER, "engine": HOPPER}
PORTABLE_RUNS = [("memcheck", "portable"), ("racecheck", "portable")]
# Racecheck takes no mbarrier for what orders the copies of threads before another warp's reads: of
# the kernels that are built of those it sees the ones whose copies the copy engine makes.
HOPPER_RUNS = [("memcheck", "hopper"), ("racecheck", "engine")]
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@sanitizer.needed
@pytest.mark.parametrize(("tool", "kernels"), PORTABLE_RUNS + HOPPER_RUNS * ON_HOPPER)
@pytest.mark.few(0)
def test_no_bad_access_and_no_race(tool, kernels):
    ran = sanitizer.launched(tool, "tests.gpu.families.kronecker_sparse.sanitized", kernels)
    assert ran >= LAUNCHED[kernels]

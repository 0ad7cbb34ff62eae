"""The same call has the same bits, also under torch.use_deterministic_algorithms, on the CPU."""

import pytest

from tests.support import repeats

FAMILIES = ("pairwise", "kronecker_sparse", "compressed", "iterative", "direct")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_call_has_the_same_bits(family):
    repeats.same_bits(getattr(repeats, family), "cpu", rows=40)

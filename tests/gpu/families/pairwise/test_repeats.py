"""The same pairwise call has the same bits, also under torch.use_deterministic_algorithms."""

import pytest

from tests.support import repeats


@pytest.mark.parametrize("rows", (40, 3000))
def test_the_same_call_has_the_same_bits(rows):
    repeats.same_bits(repeats.pairwise, "cuda", rows)

"""The same pairwise call has the same bits, also under torch.use_deterministic_algorithms."""

import pytest

from tests.families.pairwise.repeats import calls
from tests.support.repeats import same_bits


@pytest.mark.few(1)
@pytest.mark.parametrize("rows", (40, 3000))
def test_the_same_call_has_the_same_bits(rows):
    same_bits(calls, "cuda", rows)

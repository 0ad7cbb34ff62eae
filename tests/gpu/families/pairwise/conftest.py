"""Calls by either of the kernels that take any term."""

import pytest

from tests.gpu.families.pairwise.cases import by


@pytest.fixture(params=("few", "direct"))
def either(request):
    """Small calls by the kernel of few pairs, then by tiles."""
    with by(request.param):
        yield

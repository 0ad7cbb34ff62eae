"""Calls by either of the kernels that take any term, and by blocks of either size."""

from contextlib import nullcontext

import pytest

from tests.gpu.families.pairwise.cases import by, whole_blocks


@pytest.fixture(params=("few", "direct"))
def either(request):
    """Small calls by the kernel of few pairs, then by tiles."""
    with by(request.param):
        yield


@pytest.fixture
def blocks(request):
    """Reductions of few features in "fitted" blocks, that fill the GPU, or in "whole" ones, those
    of large problems."""
    with nullcontext() if request.param == "fitted" else whole_blocks():
        yield

"""Calls by either of the kernels that take any term, by blocks of either size, and in a precision
that torch permits."""

from contextlib import nullcontext

import pytest
import torch

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


@pytest.fixture
def permitted():
    """Sets what torch permits the products of float32 tensors to be."""
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)

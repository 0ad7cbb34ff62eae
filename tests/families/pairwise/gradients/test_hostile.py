"""Gradients and second derivatives on hostile points, by torch's formula and float64."""

from __future__ import annotations

import pytest
import torch

from tests.families.pairwise.derivatives import FUNCTIONS, SQUARES, compare
from tests.support import hostile


@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients(name, dtype):
    for case in hostile.cases(dtype):
        compare(FUNCTIONS[name], case, along=False)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("name", SQUARES)
def test_second_derivatives(name, dtype):
    for case in hostile.cases(dtype):
        compare(FUNCTIONS[name], case, along=True)

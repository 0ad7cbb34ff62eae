"""Solvers on hostile systems on a GPU; conjugate gradients that repeat bit by bit."""

from __future__ import annotations

import pytest
import torch

from tests.linalg import hostile as systems
from tests.linalg.repeats import iterative
from tests.support.repeats import same_bits

DTYPES = pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)


@DTYPES
@pytest.mark.parametrize("name", systems.NAMES)
def test_backward_errors(name, dtype):
    for n in (*systems.SIZES, 600):
        systems.check(name, n, dtype, "cuda", rough=True)


@DTYPES
def test_what_is_not_finite_stays_in_its_system(dtype):
    systems.check_not_finite(dtype, "cuda")


@DTYPES
def test_conjugate_gradients(dtype):
    systems.check_conjugate_gradient(dtype, "cuda")


@DTYPES
def test_kernel_systems(dtype):
    systems.check_kernel_system(dtype, "cuda")


def test_the_same_call_has_the_same_bits():
    same_bits(iterative, "cuda", rows=500)

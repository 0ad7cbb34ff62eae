"""Solvers on hostile systems: backward errors, what is not finite, and exact zeros, on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.linalg import hostile as systems

DTYPES = pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)


@DTYPES
@pytest.mark.parametrize("name", systems.NAMES)
def test_backward_errors(name, dtype):
    for n in systems.SIZES:
        systems.check(name, n, dtype, "cpu")


@DTYPES
def test_what_is_not_finite_stays_in_its_system(dtype):
    systems.check_not_finite(dtype, "cpu")


@DTYPES
def test_conjugate_gradients(dtype):
    systems.check_conjugate_gradient(dtype, "cpu")


@DTYPES
def test_kernel_systems(dtype):
    systems.check_kernel_system(dtype, "cpu")

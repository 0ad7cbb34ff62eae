"""Reductions, array gradients and agop on hostile points, on the CPU."""

import pytest
import torch

from tests.families.pairwise import reduction_hostile as reductions


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("name", reductions.CHECKS)
def test_reductions_meet_the_bar_on_hostile_points(name, dtype):
    reductions.CHECKS[name](dtype, "cpu")


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("name", ("sums", "choices", "array gradients"))
def test_half_types_are_rounded_once(name, dtype):
    reductions.CHECKS[name](dtype, "cpu")


@pytest.mark.parametrize("name", ("bandwidths", "far points"))
def test_bandwidths_keep_their_digits_beside_points_of_bfloat16(name):
    reductions.CHECKS[name](torch.bfloat16, "cpu")

"""Reductions, array gradients and agop on hostile points, on a GPU."""

import pytest
import torch

from tests.families.pairwise import reduction_hostile as reductions

# Up to 16 features, of which threads keep rows, and more, which take tiles.
SIZES = ({"rows": 300, "columns": 500, "features": 3}, {"rows": 140, "columns": 260})


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("name", reductions.CHECKS)
def test_reductions_meet_the_bar_on_hostile_points(name, dtype):
    for sizes in SIZES if name != "agop" else ({},):
        reductions.CHECKS[name](dtype, "cuda", **sizes)


@pytest.mark.parametrize("name", ("bandwidths", "far points"))
def test_bandwidths_keep_their_digits_beside_points_of_bfloat16(name):
    reductions.CHECKS[name](torch.bfloat16, "cuda")


@pytest.mark.parametrize("features", (5, 40, 200))
def test_a_row_that_coincides_with_every_column(features):
    """Among so many that tensor cores compute the others."""
    reductions.check_coinciding_points(torch.float32, "cuda", rows=3000, features=features)

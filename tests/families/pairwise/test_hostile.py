"""Norms, kernel functions and sums on points where they go wrong, on the CPU."""

import pytest
import torch

import kernlib as kl
from tests.families.pairwise import magnitudes
from tests.families.pairwise.forwards import FORWARDS
from tests.support import hostile


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
def test_forwards_meet_the_bar_on_hostile_points(name, dtype):
    forward = FORWARDS[name]
    for case in hostile.cases(dtype):
        exact, terms = forward.exact(case)
        rival = forward.theirs(case)
        hostile.check(forward.ours(case), exact, terms, rival, f"{name}, {case.name}")


@pytest.mark.parametrize("p", magnitudes.EXPONENTS)
@pytest.mark.parametrize(("rows", "columns", "features"), [(9, 13, 3), (90, 110, 19)])
def test_results_of_any_magnitude_are_right_where_float32_has_them(p, rows, columns, features):
    for name, (a, b) in magnitudes.points(rows, columns, features, p):
        for root in (True, False):
            wanted, bar = magnitudes.exact(a, b, p, root), magnitudes.bar(p, root)
            found = kl.cdist(a, b, p=p, root=root)
            magnitudes.check(found, wanted, bar, f"{name}, root={root}")


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e20, 1e30])
@pytest.mark.parametrize("make", [kl.laplace_l2, kl.matern32, kl.matern52])
def test_kernels_of_distances_take_a_bandwidth_of_the_size_of_the_points(make, size):
    a, b = (torch.randn(40, 19, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    found = kl.run_kernel(make(), a * size, b * size, bandwidth=6 * size)
    wanted = kl.run_kernel(make(), a.double(), b.double(), bandwidth=6.0)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-6)

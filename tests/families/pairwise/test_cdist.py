"""kernlib.cdist on CPU tensors: torch.cdist's shapes and values, and power sums without a root."""

import math

import pytest
import torch

import kernlib as kl
from tests.families.pairwise.cases import points

M, N, K, L = 5, 7, 9, 3


PS = [0, 0.3, 0.5, 0.7, 1, 1 + 1e-7, 1.3, 1.5, 2, 2.5, 3, 4, 6, math.inf]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("p", PS)
def test_cdist_is_torchs(p, dtype):
    a, b = points(L, M, K, dtype=dtype), points(L, N, K, dtype=dtype)
    b[:, 2] = a[:, 3]  # coincident points
    expected = torch.cdist(a.double(), b.double(), p, "donot_use_mm_for_euclid_dist")
    tolerance = 2e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(kl.cdist(a, b, p).double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("p", [p for p in PS if 0 < p < math.inf])
def test_power_sums_are_the_power_of_the_distance(p):
    a, b = points(M, K, dtype=torch.float64), points(N, K, dtype=torch.float64)
    sums = kl.cdist(a, b, p, root=False)
    torch.testing.assert_close(sums, (b[None] - a[:, None]).abs().pow(p).sum(-1))
    torch.testing.assert_close(sums, kl.cdist(a, b, p) ** p)


BATCHES = [
    ((), ()),
    ((4,), ()),
    ((), (4,)),
    ((1,), (4,)),
    ((2, 1, 3), (4, 1)),
    ((0,), ()),
    ((2, 0), (1, 1)),
]


@pytest.mark.parametrize(("left", "right"), BATCHES)
def test_cdist_broadcasts_like_torch(left, right):
    a, b = points(*left, M, K), points(*right, N, K)
    expected = torch.cdist(a, b, 1.0)
    found = kl.cdist(a, b, 1.0)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    out = torch.full(expected.shape, -1.0)
    assert kl.cdist(a, b, 1.0, out=out) is out
    assert torch.equal(out, found)


@pytest.mark.parametrize("shape", [(2, 3, 0, K, N), (2, 3, M, K, 0), (2, 3, M, 0, N), (0, K, N)])
def test_cdist_of_empties_has_torchs_shape_and_takes_out(shape):
    *batch, m, k, n = shape
    a, b = torch.ones(*batch, m, k), torch.ones(*batch, n, k)
    expected = torch.cdist(a, b)
    assert torch.equal(kl.cdist(a, b), expected)
    assert torch.equal(kl.cdist(a, b, out=torch.ones_like(expected)), expected)


def test_the_maximum_the_count_and_the_refused_exponents():
    a, b = points(M, K), points(N, K)
    b[0] = a[0]
    difference = b[None] - a[:, None]
    assert torch.equal(kl.cdist(a, b, math.inf), difference.abs().amax(-1))
    assert torch.equal(kl.cdist(a, b, 0), (difference != 0).sum(-1).float())
    for p in (-1, -math.inf, math.nan):
        with pytest.raises(ValueError, match=f"p must be 0 or greater.*got {float(p)}"):
            kl.cdist(a, b, p)


MODES = [
    "use_mm_for_euclid_dist_if_necessary",
    "use_mm_for_euclid_dist",
    "donot_use_mm_for_euclid_dist",
]


@pytest.mark.parametrize("mode", MODES)
def test_torchs_modes_are_taken_and_none_loses_accuracy(mode):
    a = points(30, K) + 1000
    expected = torch.cdist(a.double(), a.double(), 2.0, "donot_use_mm_for_euclid_dist")
    found = kl.cdist(a, a, 2.0, mode)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    assert not found.diagonal().any()


def test_out_with_batches_that_are_no_single_view_is_refused():
    out = torch.empty(3, 2, M, N).transpose(0, 1)
    with pytest.raises(ValueError, match="batch dimensions of out"):
        kl.cdist(points(2, 3, M, K), points(N, K), out=out)


def test_p_may_widen_a_batch_of_one():
    x, y, p = torch.rand(1, 5, 3), torch.rand(4, 3), torch.tensor([1.0, 2.0])
    out = kl.cdist(x, y, p)
    assert out.shape == (2, 5, 4)
    for entry in range(2):
        assert torch.allclose(out[entry], torch.cdist(x[0], y, p=float(p[entry])))

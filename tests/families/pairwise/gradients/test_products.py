"""Pair gradients by matrix products, against their sums over differences."""

import pytest
import torch

from kernlib.families.pairwise.gradients import point_products as products

Q, T, K = 7, 9, 4


def points(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + shape[-1])
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("sets", [0, 1, 3])
@pytest.mark.parametrize("batch", [1, 2])
def test_squares(batch, sets, accumulate):
    x, z, weights = points(batch, Q, K), points(1, T, K, seed=1) + 50.0, points(batch, Q, T, seed=2)
    c = points(1, sets, T, seed=3) if sets else None
    before = points(batch, max(1, sets), Q, K, seed=4)
    target = before.clone()
    products.square(target, x, z, weights, c, -2.5, accumulate)
    each = torch.ones(1, 1, T, dtype=torch.float64) if c is None else c
    differences = x[:, :, None] - z[:, None]
    wanted = -2.5 * torch.einsum("lot,lqt,lqtk->loqk", each.expand(batch, -1, -1), weights,
                                 differences)  # fmt: skip
    torch.testing.assert_close(target, wanted + before if accumulate else wanted)


@pytest.mark.parametrize("turned", [False, True])
def test_weights_may_be_turned(turned):
    x, z, weights = points(Q, K), points(T, K, seed=1), points(Q, T, seed=2)
    given = weights.mT.contiguous().mT if turned else weights
    target = torch.full((1, 1, Q, K), float("nan"), dtype=torch.float64)
    products.square(target, x[None], z[None], given[None], None, 1.0, False)
    wanted = weights.sum(1, keepdim=True) * x - weights @ z
    torch.testing.assert_close(target[0, 0], wanted)

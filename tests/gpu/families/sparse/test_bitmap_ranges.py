"""Bitmap matrices of several ranges of columns on the GPU: CTAs that take all ranges of their
slabs, and those whose sums meet in the workspace, give the same bits."""

from __future__ import annotations

import pytest
import torch

from kernlib.families.sparse.kernels.bitmap import bitmap as lowering
from kernlib.runtime.plan import forget_plans
from kernlib.sparse import compress, matmul

# With one slab, fewer than multiprocessors, and several a CTA; rows of the last one are missing.
SHAPES = [(1, 4100), (37, 8193), (2113, 9001), (5003, 13_001), (70_001, 4200)]
BITS = {torch.float16: 11, torch.bfloat16: 8}


@pytest.fixture
def by(monkeypatch):
    """Products of which CTAs take all ranges, or none does, into memory full of NaNs."""
    rule = lowering.has_all_ranges

    def product(w, x, together):
        def chosen(problem, variant, ranges, *_):
            return together or ranges == 1

        monkeypatch.setattr(lowering, "has_all_ranges", chosen)
        forget_plans()
        return matmul(w, x, out=torch.full((len(x), w.shape[0]), torch.nan, device="cuda").to(x))

    yield product
    monkeypatch.setattr(lowering, "has_all_ranges", rule)
    forget_plans()


@pytest.mark.parametrize("frozen", (False, True))
@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_ranges_by_one_cta_and_by_several(by, shape, dtype, frozen, seed):
    dense = torch.randn(shape, device="cuda").to(dtype)
    dense.masked_fill_(torch.rand(shape, device="cuda") >= 0.4, 0)
    w = compress(dense, "bitmap")
    if frozen:
        w.freeze()
    for count in range(1, 9):
        x = torch.randn(count, shape[1], device="cuda").to(dtype)
        together, apart = by(w, x, True), by(w, x, False)
        assert torch.equal(together, apart) and torch.equal(together, by(w, x, True)), count
        exact = x.double() @ dense.double().T
        assert ((together - exact).norm() / exact.norm()).item() < 2.0 ** -BITS[dtype], count


@pytest.mark.parametrize("values", ("int8", "fp8", "int4"))
def test_of_codes(by, values, seed):
    dense = torch.randn(2113, 8000, device="cuda").half()
    w = compress(dense, "bitmap", values=values)
    for count in (1, 5, 16):
        x = torch.randn(count, 8000, device="cuda").half()
        together, apart = by(w, x, True), by(w, x, False)
        exact = x.double() @ w.to_dense().double().T
        assert torch.equal(together, apart), count
        assert ((together - exact).norm() / exact.norm()).item() < 1e-3, count

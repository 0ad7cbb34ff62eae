"""Products of float8 with scales, on the GPU against float64."""

from __future__ import annotations

import math

import pytest
import torch

import kernlib as kl
from kernlib.blocksparse import Layout, quantize, scaled_dds, scaled_dsd
from tests.gpu.families.blocksparse.cases import BF16, F16, check, layout_of
from tests.gpu.watched import capture
from tests.support.gpus import on_hopper

BLOCK = (128, 128)
GATES = {F16: 1e-3, BF16: 4e-3}  # of float32 sums that are rounded once, with wgmma's of 14 bits
every_dtype = pytest.mark.parametrize("dtype", GATES, ids=str)


def weight(layout: Layout, batch=()) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and their scales, NaN where there is no block."""
    made = torch.randn(*batch, layout.capacity, *layout.block, device="cuda")
    made = made * torch.exp2(torch.randint(-6, 3, (layout.capacity, 1, 1), device="cuda").float())
    values, scale = quantize(made)
    scale[..., layout.nnz :] = math.nan
    return values, scale


def dense(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(..., N, depth), and a scale for each of N."""
    made = torch.randn(*shape, device="cuda")
    return quantize(made * torch.exp2(torch.randint(-6, 3, (*shape[:-1], 1), device="cuda")), -1)


def exact(layout: Layout, values, scale, x, scale_of_x) -> torch.Tensor:
    """x times the transpose, in float64."""
    whole = layout.to_dense(values.double() * scale.double()[..., None, None])
    return (x.double() * scale_of_x.double()[..., None]) @ whole.mT


def test_scales_are_those_of_a_cpu(seed):
    x = torch.randn(500, 3)
    for found, wanted in zip(quantize(x.cuda(), -1), quantize(x, -1), strict=True):
        assert torch.equal(found.float().cpu(), wanted.float())


@every_dtype
@pytest.mark.parametrize("size", [1, 7, 64, 72, 200, 1000])
def test_layers(size, dtype, kinds, seed):
    layout = layout_of(BLOCK, grid=(9, 11))
    values, scale = weight(layout)
    x, own = dense(size, layout.shape[1])
    found = scaled_dds(x, values, layout, own, scale, transpose_b=True, out_dtype=dtype)
    assert found.dtype == dtype and found.is_contiguous()
    check(found, exact(layout, values, scale, x, own), GATES[dtype])
    assert not on_hopper() or "scaled" in kinds


@every_dtype
def test_values_times_columns(dtype, kinds, seed):
    """Of any strides: those along which nothing is summed are copied."""
    layout = layout_of(BLOCK, grid=(6, 5))
    values, scale = weight(layout)
    x, own = dense(264, layout.shape[1])
    wanted = exact(layout, values, scale, x, own).mT
    for b, turned in ((x.mT, False), (x, True), (x.mT.contiguous(), False)):
        given = values, b, layout, scale, own
        found = scaled_dsd(*given, transpose_b=turned, out_dtype=dtype)
        check(found, wanted, GATES[dtype])
    assert not on_hopper() or kinds.count("scaled") == 3
    one = own.mean()
    found = scaled_dsd(values, x, layout, scale, one, transpose_b=True, out_dtype=dtype)
    check(found, exact(layout, values, scale, x, one.expand(264)).mT, GATES[dtype])


def test_heads_and_batches(kinds, seed):
    for heads, batch in ((None, (3,)), (2, ()), (2, (3,))):
        layout = layout_of(BLOCK, grid=(4, 6), heads=heads)
        lead = (*batch, *(() if heads is None else (heads,)))
        x, own = dense(*lead, 72, layout.shape[1])
        for values, scale in (weight(layout), weight(layout, batch)):
            wanted = exact(layout, values, scale, x, own)
            found = scaled_dds(x, values, layout, own, scale, transpose_b=True)
            check(found, wanted, GATES[BF16])
            out = torch.full(wanted.mT.shape, math.nan, dtype=BF16, device="cuda").mT
            scaled_dds(x, values, layout, own, scale, transpose_b=True, out=out)
            assert torch.equal(out, found)
    assert not on_hopper() or kinds.count("scaled") == 12


def test_sums_along_columns_of_blocks_are_torch_s(seed):
    layout = layout_of(BLOCK, grid=(3, 4))
    values, scale = weight(layout)
    x, own = dense(40, layout.shape[0])
    whole = layout.to_dense(values.double() * scale.double()[..., None, None])
    wanted = (x.double() * own.double()[..., None]) @ whole
    check(scaled_dds(x, values, layout, own, scale), wanted, GATES[BF16])


def test_long_sums_of_positive_numbers_do_not_drift(seed):
    layout = Layout(torch.ones(1, 64, dtype=torch.bool), 128, device="cuda")
    values, scale = quantize(torch.rand(64, 128, 128, device="cuda"))
    x, own = quantize(torch.rand(40, layout.shape[1], device="cuda"), -1)
    found = scaled_dds(x, values, layout, own, scale, transpose_b=True, out_dtype=F16)
    check(found, exact(layout, values, scale, x, own), GATES[F16])


def test_scales_may_be_of_any_size(seed):
    """A block's neither disturbs another line nor overflows where the sum does not."""
    layout = layout_of(BLOCK, grid=(4, 4))
    values, scale = weight(layout)
    scale[: layout.nnz] = torch.exp2(torch.linspace(-60, 60, layout.nnz, device="cuda"))
    x, own = dense(40, layout.shape[1])
    own = own * 2.0**-70
    found = scaled_dds(x, values, layout, own, scale, transpose_b=True).double()
    wanted = exact(layout, values, scale, x, own)
    assert ((found - wanted).norm(dim=0) <= 8e-3 * wanted.norm(dim=0)).all()


def test_a_prepared_call_is_captured_and_follows_the_layout(seed):
    layout = layout_of(BLOCK, grid=(6, 5), room=30)
    values, scale = weight(layout)
    scale.nan_to_num_(1.0)
    x, own = dense(72, layout.shape[1])
    descriptor = kl.BlockSparseScaledMatmul("dds", transpose_b=True)
    kl.prepare(descriptor, layout, x, values, own, scale)
    mask = layout.mask()
    layout.update_(mask)
    with capture() as graph:
        layout.update_(mask)
        found = kl.run_kernel(descriptor, layout, x, values, own, scale)
    for _ in range(3):
        mask.copy_(torch.rand(mask.shape, device="cuda") < 0.5)
        scale.uniform_(0.5, 2.0)
        graph.replay()
        check(found, exact(layout, values, scale, x, own), GATES[BF16])


def test_compiled_calls(seed):
    layout = layout_of(BLOCK, grid=(3, 4))
    values, scale = weight(layout)
    x, own = dense(40, layout.shape[1])
    compiled = torch.compile(
        lambda *given: scaled_dds(*given, transpose_b=True) + 1, fullgraph=True
    )
    wanted = exact(layout, values, scale, x, own) + 1
    check(compiled(x, values, layout, own, scale), wanted, 8e-3)

"""Values on the GPU against float64."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

import kernlib as kl
from tests.gpu.families.kronecker_product import cases
from tests.gpu.families.kronecker_product.cases import (
    BF16,
    F32,
    GATES,
    SHAPES,
    SIDES,
    TYPES,
    check,
    exact,
    expected,
    operands,
    product,
)

ROWS = (1, 2, 7, 33, 1000)
every_side = pytest.mark.parametrize("side", SIDES)


@every_side
@pytest.mark.parametrize("numbers", TYPES)
@pytest.mark.parametrize("shapes", SHAPES, ids=lambda s: f"{len(s)}x{s[0][0]}x{s[0][1]}")
def test_products(shapes, numbers, side, seed):
    dtype, descriptor = TYPES[numbers], product(shapes, side)
    made = [operands(shapes, rows, side, dtype) for rows in ROWS]
    cases.build([(descriptor, tensors) for tensors in made])
    for x, *factors in made:
        out = torch.full_like(kl.run_kernel(descriptor, x, *factors), math.nan)
        kl.run_kernel(descriptor, x, *factors, out=out)
        wanted, magnitude = exact(x, factors, side), expected(x, factors, side)
        check(out, wanted, GATES[dtype], descriptor.axis, magnitude)


@every_side
def test_tf32_is_what_is_permitted(side, seed):
    shapes = ((64, 64), (16, 16))
    x, *factors = operands(shapes, 100, side, F32)
    wanted = exact(x, factors, side)
    for precision, gate in (("tf32", 2e-3), ("bf16", 2e-3), ("fp32", 1e-6)):
        check(kl.kron_matmul(x, factors, side=side, precision=precision), wanted, gate)


@every_side
def test_strides_batches_and_epilogues(side, seed):
    shapes = ((6, 5), (4, 8))
    epilogue = (kl.Scale("gain"), kl.Bias(), kl.Gelu())
    descriptor = product(shapes, side, epilogue=epilogue)
    for batch in ((), (3,), (2, 3)):
        x, *factors = operands(shapes, 9, side, F32, batch)
        bias = torch.randn(descriptor.out_features, device="cuda")
        gain = torch.tensor(1.5, device="cuda")
        wide = torch.randn(*x.shape[:-1], x.shape[-1] + 3, device="cuda")
        for given in (x, x.mT.contiguous().mT, wide[..., 1:-2], x.expand(2, *x.shape)):
            turned = [f.mT.contiguous().mT for f in factors]
            v = exact(given, turned, side) * 1.5
            v = v + (bias if side == "right" else bias[:, None]).double()
            found = kl.run_kernel(descriptor, given, *turned, bias=bias, gain=gain)
            wanted = torch.nn.functional.gelu(v)
            assert (found.double() - wanted).norm() <= 1e-6 * wanted.norm()


@every_side
def test_each_factor_has_its_batch(side, seed):
    shapes = ((3, 4), (5, 2), (4, 4))
    x, *factors = operands(shapes, 6, side, F32)
    x = x + torch.randn(5, 1, *x.shape, device="cuda")
    factors = [
        factors[0],
        factors[1] * torch.randn(3, 1, 1, device="cuda"),
        factors[2].expand(5, 1, 4, 4),
    ]
    check(kl.kron_matmul(x, factors, side=side), exact(x, factors, side), 1e-6)


@pytest.mark.parametrize("numbers", TYPES)
@every_side
def test_y_is_read_where_the_result_is_written(side, numbers, seed):
    """In one launch, of any strides and shape, out itself too; of a beta of 0 on the device it is
    not read."""
    dtype = TYPES[numbers]
    for shapes, rows in ((((16, 16), (8, 8)), 1000), (((6, 5), (4, 7)), 33), (((64, 64),) * 3, 40)):
        x, *factors = operands(shapes, rows, side, dtype)
        wanted = exact(x, factors, side)
        alpha, beta = (torch.tensor(n, device="cuda") for n in (3.0, -0.5))
        call = partial(kl.kron_matmul, x, factors, alpha=alpha, side=side)
        whole = torch.randn(wanted.shape, device="cuda").to(dtype)
        others = whole.mT.contiguous().mT, whole[:1], whole[0], whole[:, :1], whole[0, 0]
        for y in (whole, *others):
            check(call(beta=beta, y=y), 3 * wanted - y.double() / 2, 2 * GATES[dtype])
        apart = 3 * wanted - whole.double() / 2
        assert call(beta=beta, y=whole, out=whole) is whole
        check(whole, apart, 2 * GATES[dtype])
        nothing = torch.full_like(whole, math.nan)
        for zero in (0.0, torch.zeros((), device="cuda")):
            check(call(beta=zero, y=nothing), 3 * wanted, 2 * GATES[dtype])


def test_rows_are_independent(seed):
    """Their scales too: a NaN stays in its row, and its neighbours have the same bits."""
    shapes = ((8, 8), (16, 16), (3, 3))
    x, *factors = operands(shapes, 300, "right", F32)
    x *= torch.exp2(torch.randint(-60, 60, (300, 1), device="cuda").float())
    found = kl.kron_matmul(x, factors)
    check(found, exact(x, factors, "right"), 1e-6)
    for rows in (1, 2, 17, 299):
        assert torch.equal(kl.kron_matmul(x[:rows], factors), found[:rows])
    x[5, 3] = math.nan
    again = kl.kron_matmul(x, factors)
    kept = [index for index in range(300) if index != 5]
    assert torch.equal(again[kept], found[kept]) and again[5].isnan().any()


@every_side
@pytest.mark.parametrize("numbers", ["fp32", "fp16", "fp64"])
def test_rows_are_independent_in_slabs(numbers, side, seed):
    """Of many rows, which go from run to run by slabs, and of few."""
    shapes = ((16, 16),) * 4
    x, *factors = operands(shapes, 300, side, TYPES[numbers])
    axis = 0 if side == "right" else 1
    found = kl.kron_matmul(x, factors, side=side)
    check(found, exact(x, factors, side), GATES[TYPES[numbers]], 1 - axis)
    for rows in (1, 40, 299):
        some = kl.kron_matmul(x.narrow(axis, 0, rows), factors, side=side)
        assert torch.equal(some, found.narrow(axis, 0, rows))
    x.select(axis, 5)[3] = math.nan
    again = kl.kron_matmul(x, factors, side=side)
    kept = torch.tensor([index for index in range(300) if index != 5], device="cuda")
    assert torch.equal(again.index_select(axis, kept), found.index_select(axis, kept))
    assert again.select(axis, 5).isnan().any()


def test_slabs_on_streams_of_their_own(seed):
    """Each call has counters and slabs of its own."""
    x, *factors = operands(((8, 8),) * 6, 200, "right", F32)
    wanted = kl.kron_matmul(x, factors)
    streams, found = [torch.cuda.Stream() for _ in range(3)], []
    torch.cuda.synchronize()
    for stream in streams * 3:
        with torch.cuda.stream(stream):
            found.append(kl.kron_matmul(x, factors))
    torch.cuda.synchronize()
    assert all(torch.equal(each, wanted) for each in found)


def test_positive_sums_do_not_drift(seed):
    """A tensor core's additions truncate."""
    shapes = ((128, 128), (64, 64))
    x, *factors = (t.abs() for t in operands(shapes, 50, "right", F32))
    check(kl.kron_matmul(x, factors), exact(x, factors, "right"), 1e-6)


def test_intermediates_may_pass_what_half_types_hold(seed):
    shapes = ((8, 8), (8, 8))
    x, *factors = operands(shapes, 40, "right", torch.float16)
    factors = [factors[0] * 2**-10, factors[1] * 2**10]
    x = x * 2**8
    check(kl.kron_matmul(x, factors), exact(x, factors, "right"), 2e-3)


@pytest.mark.parametrize("rows", (0, 1))
@every_side
def test_empty_and_single(rows, side, seed):
    shapes = ((2, 3), (4, 5))
    x, *factors = operands(shapes, rows, side, BF16)
    found = kl.kron_matmul(x, factors, side=side)
    assert found.shape == exact(x, factors, side).shape
    vector = operands(shapes, 1, side, F32)
    flat = kl.kron_matmul(vector[0].flatten(), vector[1:], side=side)
    check(flat[None], exact(vector[0], vector[1:], side).reshape(1, -1), 1e-6)


def test_what_no_block_holds_is_torchs(seed):
    shapes = ((300, 290), (3, 3))
    x, *factors = operands(shapes, 20, "right", F32)
    check(kl.kron_matmul(x, factors), exact(x, factors, "right"), 1e-6)


def test_more_elements_than_31_bits_count(seed):
    rows = 2**31 // 4096 + 5
    x = torch.randn(rows, 4096, device="cuda", dtype=torch.float16)
    factors = operands(((64, 64), (64, 64)), 1, "right", torch.float16)[1:]
    found = kl.kron_matmul(x, factors)
    for part in (slice(0, 3), slice(rows - 3, rows)):
        check(found[part], exact(x[part], factors, "right"), 1e-3)

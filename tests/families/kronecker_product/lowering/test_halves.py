"""The kernels of half-precision tiles, and of pairs of these, run by threads of the host, from
run_kernel on."""

import math

import pytest
import torch

import kernlib as kl
from kernlib.families.kronecker_product import plans
from kernlib.families.kronecker_product.kernels import half_slabs, halves
from kernlib.families.kronecker_product.lowering import slabs
from tests.families.kronecker_product.cases import GATES, assert_near, product
from tests.families.kronecker_product.emulated import group, kinds, operands, run
from tests.support.speeds import slow_but

pytestmark = pytest.mark.emulated

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
# Factors, rows or columns, side, dtype.
CASES = {
    "one": (((8, 8),), 5, "right", F16),
    "small": (((8, 8), (8, 8)), 3, "right", F16),
    "merged": (((2, 2),) * 7, 3, "right", F16),
    "rectangular": (((8, 16), (24, 8)), 3, "right", F16),
    "columns": (((8, 8), (16, 16)), 11, "left", F16),
    "few columns": (((8, 24), (16, 8)), 3, "left", BF16),
    "tails": (((24, 24), (40, 40)), 2, "right", BF16),
    "large tails": (((8, 8), (72, 72)), 1, "right", F16),
    "large tails of columns": (((72, 72), (8, 8)), 8, "left", BF16),
    "large": (((128, 128), (8, 8)), 1, "right", BF16),
    "wide": (((136, 64), (8, 144)), 1, "right", F16),
    "three": (((32, 32), (8, 8), (8, 8)), 1, "right", F16),
    "wide tile": (((64, 64), (8, 8)), 9, "left", F16),
    "long row": (((8, 8), (24, 24), (24, 24)), 1, "right", F16),
    "one of pairs": (((8, 8),), 5, "right", F32),
    "small of pairs": (((8, 8), (8, 8)), 3, "right", F32),
    "merged of pairs": (((2, 2),) * 7, 3, "right", F32),
    "rectangular of pairs": (((8, 16), (24, 8)), 3, "right", F32),
    "columns of pairs": (((8, 8), (16, 16)), 11, "left", F32),
    "tails of pairs": (((24, 24), (40, 40)), 2, "right", F32),
    "tails of columns of pairs": (((72, 72), (8, 8)), 8, "left", F32),
    "large of pairs": (((128, 128), (8, 8)), 1, "right", F32),
    "wide of pairs": (((136, 64), (8, 144)), 1, "right", F32),
    "three of pairs": (((32, 32), (8, 8), (8, 8)), 1, "right", F32),
    "wide tile of pairs": (((64, 64), (8, 8)), 9, "left", F32),
}
KINDS = {F16: "halves", BF16: "halves", F32: "pairs"}
FAST = ("small", "rectangular", "columns", "small of pairs", "columns of pairs")


@pytest.mark.few(1)
@pytest.mark.parametrize("case", slow_but(FAST, CASES))
def test_products_are_right(case, gpus, seed):
    shapes, rows, side, dtype = CASES[case]
    x, *factors = operands(shapes, rows, side, dtype)
    descriptor = kl.KroneckerProduct(shapes, side=side)
    found = run(descriptor, x, *factors)
    wanted = product(x, factors, side)
    assert kinds(gpus) == [KINDS[dtype]] and found.dtype == dtype and found.is_contiguous()
    assert_near(found, wanted)


@pytest.mark.parametrize("dtype", (F16, F32), ids=str)
@pytest.mark.parametrize("side", slow_but(("right",), ("right", "left")))
def test_strides_batches_and_epilogues(side, dtype, gpus, seed):
    shapes = ((8, 16), (8, 8))
    x, *factors = operands(shapes, 5, side, dtype, (3,))
    x, factors[0] = x.mT.contiguous().mT, factors[0].mT.contiguous().mT
    descriptor = kl.KroneckerProduct(shapes, side=side, epilogue=(kl.Scale(), kl.Bias()))
    bias = torch.randn(descriptor.out_features).to(dtype)
    wanted = 1.5 * product(x, factors, side).double()
    wanted = wanted + (bias if side == "right" else bias[:, None])
    out = torch.full((*wanted.shape[:-1], wanted.shape[-1] + 3), 7.0, dtype=dtype)[..., 1:-2]
    run(descriptor, x, *factors, out=out, bias=bias, scale=1.5)
    assert_near(out, wanted)


@pytest.mark.parametrize("dtype", (F16, F32), ids=str)
@pytest.mark.parametrize("ahead", slow_but((64,), (64, 128, 10**6)))
def test_tiles_are_read_ahead(ahead, dtype, gpus, monkeypatch, seed):
    """By the only block there is, of a multiprocessor that holds one."""
    monkeypatch.setattr(plans, "lower_on", lambda lower, device: lower(1))
    monkeypatch.setattr(halves.Variant, "resident", lambda self, arch: 1)
    monkeypatch.setattr(halves, "columns_of", lambda *_: 4)
    monkeypatch.setattr(halves, "ahead_of", lambda made, arch: min(ahead, made.tile))
    x, *factors = operands(((8, 8), (8, 8)), 27, "right", dtype)
    found = run(kl.KroneckerProduct((8, 8)), x, *factors)
    wanted = product(x, factors, "right")
    assert gpus.specs[0].description.endswith("a")
    assert_near(found, wanted)


# Exponents of rows, those of three factors, and how near a row must be: what lies between factors
# would be infinite or zero in float16, and rows are as accurate as float32 arithmetic makes them.
FLOATS = {
    F16: (range(-10, 6, 2), ((9, -9, 0), (-9, 9, 0), (0, 9, -9)), 1.5e-3),
    F32: (
        (-120, -60, -20, 0, 20, 60, 90, 116),
        ((90, -90, 0), (-120, 60, 60), (60, 60, -120)),
        GATES[F32],
    ),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("side", slow_but(("right",), ("right", "left")))
def test_numbers_between_factors_may_be_any_floats(side, dtype, gpus, seed):
    """Rows of different scales, and factors whose product alone is of the size of a number."""
    exponents, powers, gate = FLOATS[dtype]
    x, *factors = operands(((8, 8), (16, 16), (8, 8)), 8, side, dtype)
    scales = torch.exp2(torch.tensor(list(exponents)).float()).to(dtype)
    x = x * (scales[:, None] if side == "right" else scales)
    descriptor = kl.KroneckerProduct((8, 16, 8), side=side)
    for each in powers:
        given = [f * 2.0**power for f, power in zip(factors, each, strict=True)]
        found = run(descriptor, x, *given)
        assert kinds(gpus)[-1] == KINDS[dtype]
        assert_near(found, product(x, given, side), gate, axis=-1 if side == "right" else 0)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", (F16, F32), ids=str)
def test_what_is_not_finite_stays_in_its_row(dtype, gpus, seed):
    x, *factors = operands(((8, 8), (8, 8)), 9, "right", dtype)
    x[4, 7], x[6, 3] = math.nan, math.inf
    found = run(kl.KroneckerProduct((8, 8)), x, *factors)
    rest = [index for index in range(9) if index not in (4, 6)]
    assert found[4].isnan().any() and not found[6].isfinite().all()
    assert found[rest].isfinite().all()


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", (F16, F32), ids=str)
def test_zeros_are_zeros(dtype, gpus):
    x, factor = torch.zeros(3, 64, dtype=dtype), torch.zeros(8, 8, dtype=dtype)
    assert not run(kl.KroneckerProduct((8, 8)), x, factor, factor).any()


RUNS = {
    "two": ("right", ((8, 8), (16, 8), (8, 8)), ((1, 3), (0, 1)), 5, F16, ()),
    "three": ("right", ((8, 8), (8, 16), (8, 8)), ((2, 3), (1, 2), (0, 1)), 4, F16, ()),
    "columns": ("left", ((8, 8), (8, 16), (8, 8)), ((2, 3), (1, 2), (0, 1)), 70, F16, ()),
    "few columns": ("left", ((8, 8), (16, 8)), ((1, 2), (0, 1)), 3, F16, ()),
    "bfloat16": ("right", ((8, 8), (16, 8), (8, 8)), ((2, 3), (0, 2)), 5, BF16, ()),
    "batch": ("right", ((8, 8), (8, 8)), ((1, 2), (0, 1)), 3, F16, (3,)),
    "pairs": ("right", ((8, 8), (8, 16), (8, 8)), ((2, 3), (1, 2), (0, 1)), 4, F32, ()),
    "columns of pairs": ("left", ((8, 8), (8, 16), (8, 8)), ((2, 3), (0, 2)), 70, F32, ()),
    "batch of pairs": ("right", ((8, 8), (8, 8)), ((1, 2), (0, 1)), 3, F32, (3,)),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("restaged", slow_but((False,), (False, True)))
@pytest.mark.parametrize("case", slow_but(("two", "pairs"), RUNS))
def test_slabs_pass_from_run_to_run(case, restaged, gpus, monkeypatch, seed):
    """With rows of any scale, and factors whose product alone is of the size of a number."""
    side, shapes, found, rows, dtype, batch = RUNS[case]
    group(monkeypatch, halves.HALVES, found)
    monkeypatch.setattr(slabs, "SLAB_BYTES", 1)
    monkeypatch.setattr(slabs, "RESTAGED_BYTES", 1)
    if restaged:
        variant = half_slabs.HalfSlabs.variant

        def restage(self, kind, groups, is_varied, arch):
            return variant(self, kind, groups, True, arch)

        monkeypatch.setattr(half_slabs.HalfSlabs, "variant", restage)
    monkeypatch.setattr(plans, "lower_on", lambda lower, device: lower(1))
    x, *factors = operands(shapes, rows, side, dtype, batch)
    padded = torch.zeros(*x.shape[:-1], x.shape[-1] + 1, dtype=dtype)  # rows that lie unaligned
    x = padded[..., :-1].copy_(x)
    if dtype != BF16:
        scales = torch.exp2(torch.randint(-9, 6, (rows,)).float()).to(dtype)
        scales[0] = 2.0**-14
        x *= scales[:, None] if side == "right" else scales
        if side == "right":  # zeros, which fit any power of two, beside small numbers
            x[..., : x.shape[-1] // 2] = 0
        factors[0], factors[-1] = factors[0] * 2**-9, factors[-1] * 2**9
    descriptor = kl.KroneckerProduct(shapes, side=side, epilogue=kl.Bias())
    bias = torch.zeros(descriptor.out_features).to(dtype)
    found = run(descriptor, x, *factors, bias=bias)
    assert kinds(gpus) == ["clear", "pair_slabs" if dtype == F32 else "half_slabs"]
    wanted = product(x, factors, side)
    assert_near(found, wanted, 1.5 * GATES[dtype], axis=-1 if side == "right" else -2)

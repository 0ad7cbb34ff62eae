"""The kernels that multiply by wgmma, run by threads of the host, from run_kernel on."""

import math

import pytest
import torch

import kernlib as kl
from kernlib import settings
from kernlib.families.kronecker_product import plans
from kernlib.families.kronecker_product.kernels import hopper, hopper_passes
from kernlib.families.kronecker_product.lowering import passes
from kernlib.families.kronecker_product.lowering.grouping import Group
from tests.families.kronecker_product.cases import GATES, assert_near, by_modes
from tests.families.kronecker_product.emulated import kinds, operands, run
from tests.support.speeds import slow_but

pytestmark = pytest.mark.emulated

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
ONE, SLABS = ["hopper"], ["clear", "hopper_slabs"]
BOUNDS = {F32: [], F16: ["clear", "largest"]}  # before several launches
BOUNDED = {"clear", "largest", "hopper"}
SIDES = ("right", "left")
# Factors, rows, dtype, kinds of the kernels.
CASES = {
    "two": ((64, 64), 5, F32, ONE),
    "two halves": ((64, 64), 5, F16, ONE),
    "two bfloat16": ((64, 64), 3, BF16, ONE),
    "merged": ((8,) * 4, 3, F32, ONE),
    "six": ((4,) * 6, 2, F32, ONE),
    "a copy each": ((16, 32, 16, 8), 2, F32, SLABS),
    "narrow columns": ((64, 64, 8), 2, F16, SLABS),
    "large": ((128, 128), 2, F32, ONE),
    "large halves": ((128, 128), 2, F16, ONE),
    "large lines": ((128, 64), 2, F32, ONE),
    "large columns": ((64, 128), 2, F32, ONE),
    "large columns of halves": ((64, 128), 2, F16, ONE),
    "of size 1": ((64, 1, 128), 2, F32, ONE),
    "small last": ((8,) * 5, 11, F32, SLABS),
    "small last halves": ((8,) * 5, 11, F16, SLABS),
    "copies": ((32,) * 3, 9, F32, SLABS),
    "copies of bfloat16": ((32,) * 3, 9, BF16, SLABS),
    "three": ((16,) * 3, 70, F32, SLABS),
    "four": ((16,) * 4, 5, F16, SLABS),
}
FAST = ("two", "two halves", "small last", "copies of bfloat16")


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """Also where others are faster."""
    monkeypatch.setattr(passes, "is_faster", lambda *_: True)


def square(sizes):
    return tuple((size, size) for size in sizes)


def exact(x, factors, side="right"):
    """In float64."""
    return by_modes(x, factors) if side == "right" else by_modes(x.mT, [f.mT for f in factors]).mT


def of_rows(found, wanted, x, side="right"):
    """The largest error of a row, or of a column: beside its norm, or what that of x leads to
    expect, where the terms of small factors cancel."""
    axis = -1 if side == "right" else -2
    size, given = wanted.norm(dim=axis), x.double().norm(dim=axis)
    size = torch.maximum(size, given * (size.norm() / given.norm()))
    return ((found.double() - wanted).norm(dim=axis) / size).max()


@pytest.mark.few(1)
@pytest.mark.parametrize("case", slow_but(FAST, CASES))
def test_products_are_right(case, gpus, seed):
    sizes, rows, dtype, wanted = CASES[case]
    x, *factors = operands(square(sizes), rows, "right", dtype)
    found = run(kl.KroneckerProduct(sizes), x, *factors)
    assert kinds(gpus) == wanted and found.dtype == dtype and found.is_contiguous()
    assert of_rows(found, by_modes(x, factors), x) <= GATES[dtype]


# Factors, columns, dtype.
COLUMNS = {
    "two": ((64, 64), 70, F32),
    "few": ((64, 64), 3, F32),
    "halves": ((64, 64), 65, F16),
    "bfloat16": ((64, 64), 130, BF16),
    "copies": ((16, 8, 32, 16), 5, F32),
    "copies of halves": ((16,) * 3, 72, F16),
    "large": ((128, 128), 4, F32),
    "large halves": ((128, 64), 9, F16),
    "merged": ((4,) * 6, 66, F32),
}


@pytest.mark.parametrize("case", slow_but(("few", "halves"), COLUMNS))
def test_columns_are_multiplied_too(case, gpus, seed):
    """A factor, or some that are merged, a pass: in the place of the result, or of a workspace."""
    sizes, columns, dtype = COLUMNS[case]
    x, *factors = operands(square(sizes), columns, "left", dtype)
    found = run(kl.KroneckerProduct(sizes, side="left"), x, *factors)
    assert set(kinds(gpus)) == (BOUNDED if dtype == F16 else {"hopper"})
    assert found.dtype == dtype and found.is_contiguous()
    assert of_rows(found, exact(x, factors, "left"), x, "left") <= GATES[dtype]


@pytest.mark.parametrize("dtype", slow_but((F32,), (F32, F16, BF16)), ids=str)
@pytest.mark.parametrize("columns", slow_but((1,), (70, 64, 1)))
def test_strides_and_epilogues_of_columns(columns, dtype, gpus, monkeypatch, seed):
    monkeypatch.setattr(hopper, "PART_BYTES", 1)
    x, *factors = operands(square((16,) * 3), columns, "left", dtype)
    factors[2] = factors[2].mT.contiguous().mT
    for epilogue in ((kl.Scale(), kl.Bias()), (kl.Scale(), kl.Bias(), kl.Add())):
        descriptor = kl.KroneckerProduct((16,) * 3, side="left", epilogue=epilogue)
        bias = torch.randn(descriptor.out_features).to(dtype)
        wide = torch.zeros(4096, columns + 3, dtype=dtype)[:, 1:-2]
        for given in (x, wide.copy_(x), x.mT.contiguous().mT):
            out = torch.randn(4096, columns + 8).to(dtype)[:, :columns]
            wanted = 1.5 * exact(x, factors, "left") + bias.double()[:, None]
            arguments = {"bias": bias, "scale": 1.5, "out": out}
            if len(epilogue) == 3:
                arguments |= {"y": out, "beta": -2.0}
                wanted -= 2 * out.double()
            run(descriptor, given, *factors, **arguments)
            assert_near(out, wanted)
    assert set(kinds(gpus)) == (BOUNDED if dtype == F16 else {"hopper"})


@pytest.mark.parametrize("dtype", slow_but((F32,), (F32, F16)), ids=str)
@pytest.mark.parametrize("sizes", slow_but(((64, 64),), ((64, 64), (16, 16, 16))), ids=str)
def test_strides_batches_and_epilogues(sizes, dtype, gpus, seed):
    """Of factors some are given as their transpose; out has rows apart, and is y itself."""
    x, *factors = operands(square(sizes), 3, "right", dtype, (2,))
    factors = [f[0] for f in factors]
    factors[0] = factors[0].mT.contiguous().mT
    wide = torch.zeros(2, 3, x.shape[-1] + 3, dtype=dtype)[..., 1:-2]
    apart = x.mT.contiguous().mT
    epilogue = (kl.Scale(), kl.Bias(), kl.Add())
    descriptor = kl.KroneckerProduct(sizes, epilogue=epilogue)
    bias = torch.randn(descriptor.out_features).to(dtype)
    for given in (x, wide.copy_(x), apart):
        for out in (torch.randn(x.shape).to(dtype), torch.randn(2, 3, x.shape[-1] + 1).to(dtype)):
            out = out[..., : x.shape[-1]]
            wanted = 1.5 * by_modes(x, factors) + bias.double() - 2 * out.double()
            run(descriptor, given, *factors, bias=bias, scale=1.5, y=out, beta=-2.0, out=out)
            assert_near(out, wanted)
    assert set(kinds(gpus)) <= {"hopper", "clear", "hopper_slabs"}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("dtype", (F32, F16), ids=str)
def test_numbers_may_be_of_any_size(dtype, side, gpus, seed):
    """Rows of different scales, and factors whose product alone is of the size of a number."""
    x, *factors = operands(square((64, 64)), 8, side, dtype)
    powers = [-120.0, -60, -20, 0, 20, 60, 90, 116] if dtype == F32 else range(-10, 6, 2)
    scales = torch.exp2(torch.tensor(list(powers)).float()).to(dtype)
    x = x * (scales[:, None] if side == "right" else scales)
    product = kl.KroneckerProduct((64, 64), side=side)
    most = 9 if dtype == F16 else 60 if side == "right" else 3  # float32 between two passes
    for power in (most, -most):
        given = [factors[0] * 2.0**power, factors[1] * 2.0**-power]
        found = run(product, x, *given)
        error = of_rows(found, exact(x, given, side), x, side)
        assert error <= (GATES[F32] if dtype == F32 else 1.5e-3)


@pytest.mark.parametrize("sizes", slow_but(((16,) * 3,), ((16,) * 3, (8,) * 5, (16,) * 4)), ids=str)
def test_halves_go_from_pass_to_pass_with_exponents(sizes, gpus, seed):
    """What lies between two passes would be infinite or zero in float16, of all of a row or of
    some of its features."""
    x, *factors = operands(square(sizes), 9, "right", F16)
    x = x * torch.exp2(torch.arange(-10, 8, 2).float())[:, None].to(F16)
    x[3, :4000], x[7, 17:] = 0, 0
    product = kl.KroneckerProduct(sizes)
    for first, last in ((9, -9), (-9, 9), (12, -10)):
        given = [factors[0] * 2.0**first, *factors[1:-1], factors[-1] * 2.0**last]
        found = run(product, x, *given)
        assert of_rows(found, by_modes(x, given), x) <= 1.5e-3
    assert set(kinds(gpus)) == set(SLABS)


@pytest.mark.few(1)
def test_a_tile_forgets_the_exponents_of_another(gpus, monkeypatch, seed):
    """Of which a group has had one of a first pass since."""
    monkeypatch.setattr(hopper_passes, "WORKERS", 128)
    monkeypatch.setattr(hopper, "SLAB_BYTES", 1)
    monkeypatch.setattr(plans, "lower_on", lambda lower, device: lower(1))
    x, *factors = operands(square((16,) * 3), 20, "right", F16)
    x = x * 2.0**-18
    x[0] *= 2.0**31
    product = kl.KroneckerProduct((16,) * 3)
    found = run(product, x, *factors)
    alone = run(product, x[1:], *factors)
    assert torch.equal(found[1:], alone)


# Exponents of x and of two matrices.
EXTREMES = {"a large matrix": (-100, 127, -40), "a large x": (126, -63, -75)}


@pytest.mark.few(1)
@pytest.mark.parametrize("case", EXTREMES)
def test_largest_numbers(case, gpus):
    """Which no power of two that is a number brings below 1."""
    powers = EXTREMES[case]
    shapes = (2, 4096), (64, 64), (64, 64)
    given = [
        torch.full(*each) for each in zip(shapes, (1.99 * 2.0**p for p in powers), strict=True)
    ]
    found = run(kl.KroneckerProduct((64, 64)), *given)
    wanted = by_modes(given[0], given[1:])
    assert_near(found, wanted)


@pytest.mark.parametrize("dtype", (F32, F16), ids=str)
def test_columns_of_a_matrix_may_be_small(dtype, gpus, seed):
    """Beside its others."""
    x, *factors = operands(square((64, 64)), 5, "right", dtype)
    for factor in factors:
        factor[:, 3] *= 2.0**-12
    found = run(kl.KroneckerProduct((64, 64)), x, *factors).double()
    wanted = by_modes(x, factors)
    found, wanted = (t.unflatten(-1, (64, 64))[:, 3, :3] for t in (found, wanted))
    assert (found - wanted).norm() <= (1e-4 if dtype == F32 else 2e-3) * wanted.norm()


@pytest.mark.parametrize("side", slow_but(("left",), SIDES))
@pytest.mark.parametrize("dtype", (F32, F16), ids=str)
def test_rows_are_independent(dtype, side, gpus, seed):
    """In their bits, and in what is not finite."""
    sizes, axis = (8,) * 5 if side == "right" else (8,) * 4, SIDES.index(side)
    x, *factors = operands(square(sizes), 9, side, dtype)
    product = kl.KroneckerProduct(sizes, side=side)

    def rows(x):
        made = run(product, x, *factors)
        return made if side == "right" else made.mT

    whole = rows(x)
    assert torch.equal(rows(x.narrow(axis, 0, 3)), whole[:3])
    x.select(axis, 4)[7], x.select(axis, 6)[3] = math.nan, math.inf
    found = rows(x)
    rest = [index for index in range(9) if index not in (4, 6)]
    assert found[4].isnan().all() and not found[6].isfinite().any()
    assert torch.equal(found[rest], whole[rest])


def test_zeros_are_zeros(gpus):
    x, factor = torch.zeros(3, 4096), torch.zeros(64, 64)
    assert not run(kl.KroneckerProduct((64, 64)), x, factor, factor).any()


@pytest.mark.few(1)
@pytest.mark.parametrize("place", ("result", "ring"))
@pytest.mark.parametrize("dtype", slow_but((F32,), (F32, F16, BF16)), ids=str)
@pytest.mark.parametrize("sizes", slow_but(((16,) * 3,), ((16,) * 3, (16,) * 4)), ids=str)
def test_slabs_follow_each_other(sizes, dtype, place, gpus, monkeypatch, seed):
    """Of three rows each, so that the last has fewer; in the place of the result, or in a ring,
    whose places are taken again, where its rows are not aligned."""
    features, rows = math.prod(sizes), 23
    monkeypatch.setattr(hopper, "SLAB_BYTES", 3 * features * dtype.itemsize)
    monkeypatch.setattr(hopper, "DISTANCE", 1)
    monkeypatch.setattr(plans, "lower_on", lambda lower, device: lower(1))
    x, *factors = operands(square(sizes), rows, "right", dtype)
    out = torch.full((rows, features + (place == "ring")), math.nan, dtype=dtype)[:, :features]
    run(kl.KroneckerProduct(sizes), x, *factors, out=out)
    assert kinds(gpus) == SLABS
    assert of_rows(out, by_modes(x, factors), x) <= GATES[dtype]


@pytest.mark.parametrize("dtype", slow_but((F32,), (F32, F16, BF16)), ids=str)
def test_tickets_of_several_tiles(dtype, gpus, monkeypatch, seed):
    """Of one row, where there are many rows."""
    monkeypatch.setattr(hopper, "LEAST_TICKETS", 0)
    monkeypatch.setattr(plans, "lower_on", lambda lower, device: lower(1))
    sizes = (8,) * 5
    x, *factors = operands(square(sizes), 7, "right", dtype)
    found = run(kl.KroneckerProduct(sizes), x, *factors)
    assert kinds(gpus) == SLABS
    assert of_rows(found, by_modes(x, factors), x) <= GATES[dtype]


@pytest.mark.parametrize("dtype", slow_but((F32,), (F32, F16)), ids=str)
def test_passes_may_be_launches_of_their_own(dtype, gpus, monkeypatch, seed):
    """Where no block has room for all matrices: as with 128 x 128 in float32."""
    monkeypatch.setattr(hopper_passes, "SLAB_STAGES", 9)
    monkeypatch.setattr(hopper, "PART_BYTES", 2 * 4096 * 4)
    x, *factors = operands(square((16,) * 3), 5, "right", dtype)
    descriptor = kl.KroneckerProduct((16,) * 3, epilogue=kl.Add())
    y = torch.randn(5, 4096).to(dtype)
    found = run(descriptor, x, *factors, y=y, beta=2.0)
    wanted = by_modes(x, factors) + 2 * y.double()
    # Of y parts of two rows of float32 and four of float16.
    assert kinds(gpus) == BOUNDS[dtype] + ["hopper"] * (4 if dtype == F16 else 6)
    assert_near(found, wanted)
    gpus.specs.clear()
    found = run(kl.KroneckerProduct((16,) * 3), x, *factors)
    assert kinds(gpus) == BOUNDS[dtype] + ["hopper"] * 2
    assert of_rows(found, by_modes(x, factors), x) <= GATES[dtype]


@pytest.mark.few(1)
@pytest.mark.parametrize("side", slow_but(("right",), SIDES))
def test_float16_does_not_overflow_between_launches(side, gpus, monkeypatch, seed):
    """Nor vanish: rows, or columns, are scaled each for itself, an infinite number apart."""
    monkeypatch.setattr(hopper_passes, "SLAB_STAGES", 9)
    x, *factors = operands(square((16,) * 3), 70, side, F16)
    sizes = torch.tensor([1e4, 1e-5, 1.0, 0.0]).repeat(18)[:70]
    x = (x.float() * (sizes[:, None] if side == "right" else sizes)).clamp(-6e4, 6e4).to(F16)
    factors = [
        (f.float() * size).to(F16) for f, size in zip(factors, (1e-3, 50.0, 2.0), strict=True)
    ]
    wanted = exact(x, factors, side)
    lines = (lambda t: t) if side == "right" else (lambda t: t.mT)
    found = lines(run(kl.KroneckerProduct((16,) * 3, side=side), x, *factors))
    assert kinds(gpus)[:2] == ["clear", "largest"]
    ends = lines(wanted)
    for size, gate in ((1e4, GATES[F16]), (1.0, GATES[F16]), (1e-5, 0.1)):
        one, other = found[sizes == size].double(), ends[sizes == size]
        assert (one - other).norm() <= gate * other.norm()
    assert not found[sizes == 0].any()
    lines(x)[3, 5] = math.inf
    again = lines(run(kl.KroneckerProduct((16,) * 3, side=side), x, *factors))
    others = torch.arange(70) != 3
    assert torch.equal(again[others], found[others]) and not again[3].isfinite().any()


@pytest.mark.few(1)
@pytest.mark.parametrize("side", slow_but(("right",), SIDES))
@pytest.mark.parametrize("case", ("identities", "one large number"))
def test_float16_is_kept_beside_larger_numbers(case, side, gpus, monkeypatch, seed):
    """What identities take over beside a large number of x, and results that a large entry of a
    factor has no part in, to the last bits of half precision."""
    monkeypatch.setattr(hopper_passes, "SLAB_STAGES", 9)
    size, count = 16, 4 if side == "left" else 3
    x, *factors = operands(square((size,) * count), 3, side, F16)
    if case == "identities":
        factors = [torch.eye(size, dtype=F16) for _ in factors]
        (x if side == "right" else x.mT)[:, 7] = 6e4
    else:
        for factor in factors:
            factor[0, 0] = 100.0  # beside the others' norm of 1
    wanted = exact(x, factors, side)
    found = run(kl.KroneckerProduct((size,) * count, side=side), x, *factors)
    found, wanted = (t if side == "right" else t.mT for t in (found.double(), wanted))
    found, wanted = (t.unflatten(-1, (size,) * count) for t in (found, wanted))
    others = (slice(None), *[slice(1, None)] * count)
    assert (found - wanted)[others].norm() <= GATES[F16] * wanted[others].norm()


def test_what_the_kernels_do_not_take_is_others(gpus, seed):
    """Short rows, factors that are not square or no power of two wide, batches of factors, and GPUs
    that have no wgmma."""

    def found(sizes, dtype="float32", arch="sm_90a"):
        sides = [Group(sizes, 1, dtype, "fp32", inside) for inside in (False, True)]
        return [kernel.variants_of(each, arch) for each in sides for kernel in kernels]

    kernels = hopper.Hopper(), hopper.HopperSlabs()

    none = [[]] * 4
    assert (
        found(square((8, 8, 8))) == found(((64, 64), (64, 32))) == found(square((48, 96))) == none
    )
    assert found(square((8, 16, 8, 16)))[:2] == found(square((8, 16, 16, 8)))[:2] == [[], []]
    assert found(square((64, 64)), "float64") == found(square((64, 64)), arch="sm_100") == none
    x, *factors = operands(square((64, 64)), 8, "right", F16, (2,))
    run(kl.KroneckerProduct((64, 64)), x, *factors)
    assert kinds(gpus) == ["halves"]


def test_portable_kernels_can_be_asked_for(gpus, seed):
    x, *factors = operands(square((64, 64)), 3, "right", F32)
    with settings.override(portable=True):
        found = run(kl.KroneckerProduct((64, 64)), x, *factors)
    assert kinds(gpus) == ["pairs"] and of_rows(found, by_modes(x, factors), x) <= GATES[F32]

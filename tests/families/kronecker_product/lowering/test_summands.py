"""alpha, beta and y inside of the kernel, whose text threads of the host run."""

import math

import pytest
import torch

import kernlib as kl
from kernlib import ahead
from kernlib.descriptors.epilogues import Add
from kernlib.families.kronecker_product import plans
from kernlib.families.kronecker_product.kernels import halves, modes
from kernlib.families.kronecker_product.lowering import grouping, slabs
from tests.families.kronecker_product.cases import GATES, assert_near, operands, product
from tests.families.kronecker_product.emulated import group, kinds
from tests.support.emulation.gpus import gpu, host
from tests.support.speeds import slow_but

pytestmark = pytest.mark.emulated

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
SHAPES = ((4, 3), (6, 5))  # of two factors, 24 features to 15
ROWS = 9
SIDES = ("right", "left")


def call(x, factors, **arguments):
    given = {k: gpu(v) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    return host(kl.kron_matmul(gpu(x), list(map(gpu, factors)), **given))


def check(found, wanted, dtype=F32):
    assert found.dtype == dtype
    assert_near(found, wanted)


LAYOUTS = {  # of y, by the result's shape
    "whole": lambda *shape: torch.randn(shape),
    "row": lambda *shape: torch.randn(1, shape[-1]),
    "vector": lambda *shape: torch.randn(shape[-1]),
    "column": lambda *shape: torch.randn(shape[-2], 1),
    "number": lambda *shape: torch.randn(()),
    "transposed": lambda *shape: torch.randn(shape).mT.contiguous().mT,
    "strided": lambda *shape: torch.randn([2 * size for size in shape])[
        tuple(slice(1, None, 2) for _ in shape)
    ],
    "negative": lambda *shape: torch._neg_view(torch.randn(shape)),
    "expanded": lambda *shape: torch.randn(1, 1).expand(shape[-2:]),
}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("layout", slow_but(("transposed", "row"), LAYOUTS))
def test_y_of_any_strides_and_shape_is_added(layout, side, gpus, seed):
    for dtype in (F32, F64) if layout == "transposed" else (F32,):
        x, factors = operands(SHAPES, ROWS, side, dtype)
        wanted = product(x, factors, side)
        y = LAYOUTS[layout](*wanted.shape).to(dtype)
        found = call(x, factors, alpha=3.0, beta=-0.5, y=y, side=side)
        check(found, 3 * wanted - 0.5 * y.double(), dtype)
    assert set(kinds(gpus)) == {"modes"} and "Add" in gpus.specs[0].description


@pytest.mark.parametrize("side", slow_but(("right",), SIDES))
def test_batches(side, gpus, seed):
    """Of y too, whether they lie as those of the result or not."""
    x, factors = operands(SHAPES, ROWS, side, F32)
    x = x + torch.randn(2, 3, *x.shape)
    for own in (factors, [factors[0] * torch.randn(3, 1, 1), factors[1]]):
        wanted = product(x, own, side)
        for shape in (wanted.shape, (3, *wanted.shape[-2:]), (2, 1, 1, 1), wanted.shape[-1:]):
            y = torch.randn(shape)
            found = call(x, own, alpha=0.5, beta=2.0, y=y, side=side)
            check(found, 0.5 * wanted + 2 * y.double())


@pytest.mark.parametrize("side", SIDES)
def test_a_vectors_y(side, gpus, seed):
    x, factors = operands(SHAPES, 1, side, F32)
    wanted = product(x, factors, side).flatten()
    for y in (torch.randn(wanted.shape), torch.randn(1), torch.randn(())):
        check(call(x.flatten(), factors, beta=2.0, y=y, side=side), wanted + 2 * y.double())
    out = torch.randn(wanted.shape)
    wanted = wanted + out.double()
    assert call(x.flatten(), factors, beta=1.0, y=out, out=out, side=side).equal(out)
    check(out, wanted)
    with pytest.raises(ValueError, match=r"y must broadcast to \(\d+,\), got \(1, "):
        call(x.flatten(), factors, beta=1.0, y=out[None], side=side)
    assert gpus.specs


@pytest.mark.few(1)
@pytest.mark.parametrize("side", slow_but(("right",), SIDES))
def test_y_may_be_out_itself(side, gpus, seed):
    x, factors = operands(SHAPES, ROWS, side, F32)
    wanted = product(x, factors, side)
    wide = torch.randn([2 * size for size in wanted.shape])
    outs = [wide[: wanted.shape[0], : wanted.shape[1]], wide[::2, ::2]]
    outs.append(torch.randn(wanted.shape).mT.contiguous().mT)
    for out in outs:
        whole = 2 * wanted + 0.5 * out.double()
        version = out._version
        call(x, factors, alpha=2.0, beta=0.5, y=out, out=out, side=side)
        check(out, whole)
        assert out._version > version
    assert gpus.specs


@pytest.mark.parametrize("beta", slow_but(("number",), ("number", "device")))
def test_of_a_beta_of_0_y_is_not_read(beta, gpus, seed):
    x, factors = operands(SHAPES, ROWS, "right", F32)
    wanted = product(x, factors)
    y = torch.full(wanted.shape, math.nan)
    for value in (0.0, 1.0):
        given = {"number": value, "device": gpu(torch.tensor(value))}
        found = kl.kron_matmul(gpu(x), [*map(gpu, factors)], beta=given[beta], y=gpu(y), alpha=2)
        if value:
            assert host(found).isnan().all()
        else:
            check(host(found), 2 * wanted)
    out = torch.full(wanted.shape, math.nan)
    call(x, factors, beta=0, y=out, out=out)
    check(out, wanted)
    assert len({spec.source for spec in gpus.specs}) == 1


@pytest.mark.parametrize("dtype", slow_but((F16,), (F16, BF16, F32, F64)))
def test_the_result_is_rounded_once(dtype, gpus, seed):
    """Of a product that no half type holds, y takes away what is too much."""
    factors = [torch.full((2, 2), 2.0**8).to(dtype), torch.full((2, 1), 2.0**7).to(dtype)]
    x = torch.ones(3, 4).to(dtype)
    alpha, beta = gpu(torch.tensor(0.75)), gpu(torch.tensor(-3, dtype=torch.int32))
    y = torch.full((3, 2), 2.0**15).to(dtype)
    found = call(x, factors, alpha=alpha, beta=beta, y=y)
    assert found.dtype == dtype and torch.equal(found, torch.zeros(3, 2).to(dtype))
    check(call(x, factors, alpha=2**-17 + 2**-28), torch.ones(3, 2) * (1 + 2**-11), dtype)
    assert kinds(gpus) == ["modes"] * 2


HALVES = {"right": (F16, ()), "left": (BF16, ()), "right of a batch": (BF16, (2,))}


@pytest.mark.parametrize("case", slow_but(("right",), HALVES))
def test_half_types_between_factors(case, gpus, seed):
    """y may be out there too: threads other than those that read it write it."""
    (dtype, batch), side = HALVES[case], case.split()[0]
    x, factors = operands(((8, 8), (16, 8)), 21, side, dtype)
    x = (x + torch.randn(*batch, 1, 1)).to(dtype)
    factors[0] = (factors[0] + torch.randn(*batch, 1, 1)).to(dtype)
    wanted = product(x, factors, side)
    for shape in (wanted.shape, wanted.shape[-1:], (wanted.shape[-2], 1)):
        y = torch.randn(shape).to(dtype)
        found = call(x, factors, alpha=0.5, beta=2.0, y=y, side=side)
        assert_near(found, 0.5 * wanted + 2 * y.double(), 4 * GATES[dtype])
    out = torch.randn(wanted.shape).to(dtype)
    exact = wanted - out.double()
    call(x, factors, beta=-1, y=out, out=out, side=side)
    assert_near(out, exact, 4 * GATES[dtype])
    assert set(kinds(gpus)) == {"halves"}


SLABS = {"rows": ("right", 7, F32), "columns": ("left", 131, F32), "halves": ("right", 7, F16)}
MANY = ((8, 8), (4, 6), (8, 7), (8, 8))


@pytest.mark.few(1)
@pytest.mark.parametrize("case", slow_but(("rows",), SLABS))
@pytest.mark.parametrize("batch", slow_but(((),), [(), (2,)]), ids=str)
def test_slabs_take_their_part_of_y(case, batch, gpus, monkeypatch, seed):
    side, rows, dtype = SLABS[case]
    monkeypatch.setattr(grouping, "room", lambda dtype, arch: 1200)
    monkeypatch.setattr(grouping, "most_features", lambda dtype: 512)
    monkeypatch.setattr(slabs, "SLAB_BYTES", 1)
    monkeypatch.setattr(slabs, "RESTAGED_BYTES", 1)
    monkeypatch.setattr(plans, "lower_on", lambda lower, device: lower(1))
    x, factors = operands(MANY, rows, side, F32)
    x = (x + torch.zeros(*batch, 1, 1)).to(dtype)
    factors = [factor.to(dtype) for factor in factors]
    wanted = product(x, factors, side)
    for y in (torch.randn(wanted.shape).to(dtype), torch.randn(wanted.shape[-2], 1).to(dtype)):
        found = call(x, factors, alpha=0.5, beta=2.0, y=y, side=side)
        check(found, 0.5 * wanted + 2 * y.double(), dtype)
    assert kinds(gpus) == ["clear", "slabs"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("side, rows", [("right", 5), ("left", 67)])
def test_slabs_of_half_types_do_so_too(side, rows, gpus, monkeypatch, seed):
    group(monkeypatch, halves.HALVES, ((1, 2), (0, 1)))
    monkeypatch.setattr(slabs, "SLAB_BYTES", 1)
    monkeypatch.setattr(slabs, "RESTAGED_BYTES", 1)
    monkeypatch.setattr(plans, "lower_on", lambda lower, device: lower(1))
    x, factors = operands(((8, 8), (8, 16)), rows, side, F16)
    wanted = product(x, factors, side)
    for y in (torch.randn(wanted.shape).half(), torch.randn(wanted.shape[-2], 1).half()):
        found = call(x, factors, alpha=0.5, beta=2.0, y=y, side=side)
        assert_near(found, 0.5 * wanted + 2 * y.double(), 4 * GATES[F16])
    assert kinds(gpus) == ["clear", "half_slabs"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("side", SIDES)
def test_the_last_of_several_launches_adds_y(side, gpus, monkeypatch, seed):
    monkeypatch.setattr(grouping, "room", lambda dtype, arch: 1200)
    monkeypatch.setattr(grouping, "most_features", lambda dtype: 512)
    monkeypatch.setattr(modes.Slabs, "takes", lambda *_: False)
    x, factors = operands(MANY, 3, side, F32)
    wanted = product(x, factors, side)
    y = torch.randn(wanted.shape).mT.contiguous().mT
    check(call(x, factors, alpha=-1.0, beta=2.0, y=y, side=side), 2 * y.double() - wanted)
    assert len(gpus.specs) > 1 and set(kinds(gpus)) == {"modes"}


def test_compiled_ahead_are_the_kernels_of_a_call(gpus, seed):
    x, factors = operands(SHAPES, ROWS, "right", F32)
    descriptor = kl.KroneckerProduct(SHAPES, epilogue=(kl.Scale("alpha"), Add()))
    y = torch.randn(1, 15)
    tensors = [*map(gpu, (x, *factors))]
    arguments = {"alpha": 1.0, "beta": 2.0, "y": gpu(y)}
    found = ahead.specs(descriptor, "sm_90a", tuple(tensors), arguments, 0)
    kl.prepare(descriptor, *tensors, **arguments)
    loaded = len(gpus.loads)
    check(call(x, factors, beta=2.0, y=y), product(x, factors) + 2 * y.double())
    assert len(gpus.loads) == loaded and gpus.specs == found
    assert set(found) <= set(ahead.variants(descriptor, "sm_90a", (F32,)))


def test_recorded_calls_are_torchs(gpus, monkeypatch, seed):
    """Of alpha, beta and y, the product itself a kernel's."""
    x, factors = operands(SHAPES, ROWS, "right", F32)
    y = gpu(torch.randn(15)).requires_grad_()
    found = kl.kron_matmul(gpu(x), [*map(gpu, factors)], alpha=2.0, beta=3.0, y=y)
    assert all("Add" not in spec.description for spec in gpus.specs) and gpus.specs
    (grad,) = torch.autograd.grad(found.sum(), y)
    assert torch.equal(host(grad), torch.full((15,), 3.0 * ROWS))
    check(host(found).detach(), 2 * product(x, factors) + 3 * host(y).detach().double())

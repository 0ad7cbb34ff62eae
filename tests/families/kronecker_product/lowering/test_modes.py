"""The kernel of modes of factors, run by threads of the host, from run_kernel on."""

import math

import pytest
import torch

import kernlib as kl
from kernlib.families.kronecker_product import plans
from kernlib.families.kronecker_product.kernels import modes
from kernlib.families.kronecker_product.lowering import by_torch, grouping, parameters, slabs
from kernlib.runtime import products
from tests.families.kronecker_product.cases import assert_near, product
from tests.families.kronecker_product.emulated import kinds, operands, run
from tests.support import fakes
from tests.support.emulation.gpus import gpu
from tests.support.speeds import slow_but

pytestmark = pytest.mark.emulated

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
# Factors, rows or columns, side, dtype.
CASES = {
    "one": (((3, 4),), 5, "right", F32),
    "in place": (((8, 8), (8, 8)), 9, "right", F32),
    "distinct": (((5, 3), (2, 7), (4, 4)), 7, "left", F32),
    "merged": (((2, 2),) * 5, 6, "right", F32),
    "wide": (((40, 24), (5, 33)), 3, "left", F64),
    "half": (((17, 9), (12, 31)), 3, "right", F16),
    "columns shared": (((64, 64), (8, 8)), 2, "right", F32),
    "one large": (((128, 128),), 3, "left", F32),
    "squares": (((16, 16), (16, 16)), 2, "left", BF16),
    "65": (((1, 1),) * 64 + ((2, 3),), 2, "right", F32),
    "short": (((1, 3), (5, 1)), 37, "left", F32),
    "long row": (((8, 8),) * 4, 1, "right", F32),
    "wide matrices": (((32, 32),) * 2, 2, "right", F32),
    "double": (((7, 100),), 33, "right", F64),
}
FAST = ("distinct",)


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """Where torch's products are estimated to be faster too, as they are of a few large factors."""
    monkeypatch.setattr(by_torch, "gains", lambda *_: False)


def check(descriptor, tensors, found, gate=None, bias=0.0, scale=1.0):
    wanted = scale * product(tensors[0], tensors[1:], descriptor.side)
    if isinstance(bias, torch.Tensor):
        wanted = wanted + (bias if descriptor.side == "right" else bias[:, None]).double()
    assert_near(found, wanted, gate)


@pytest.mark.few(1)
@pytest.mark.parametrize("case", slow_but(FAST, CASES))
def test_products_are_right(case, gpus, seed):
    shapes, rows, side, dtype = CASES[case]
    tensors = operands(shapes, rows, side, dtype)
    descriptor = kl.KroneckerProduct(shapes, side=side)
    found = run(descriptor, *tensors)
    assert found.dtype == dtype and found.is_contiguous() and gpus.specs
    check(descriptor, tensors, found)


LAYOUTS = {"rows": ("right", ()), "columns": ("left", ()), "rows of a batch": ("right", (2, 3))}
LAYOUTS["columns of a batch"] = ("left", (2, 3))


@pytest.mark.parametrize("layout", slow_but(("rows",), LAYOUTS))
def test_strides_batches_and_epilogues(layout, gpus, seed):
    """Of a transposed, a sliced and an expanded operand nothing is copied but what has no strides
    of its own."""
    shapes, (side, batch) = ((4, 3), (6, 5)), LAYOUTS[layout]
    tensors = operands(shapes, 5, side, F32, batch)
    x = tensors[0].mT.contiguous().mT
    first = tensors[1].mT.contiguous().mT
    padded = torch.zeros(*batch, 6, 9)
    padded[..., 1:6] = tensors[2]
    factors = [first, padded[..., 1:6]]
    epilogue = (kl.Scale("scale"), kl.Bias("bias"))
    descriptor = kl.KroneckerProduct(shapes, side=side, epilogue=epilogue)
    bias = torch.randn(descriptor.out_features)
    shape = (*batch, 5, descriptor.out_features)
    out = torch.full(shape[:-2] + (shape[-2:] if side == "right" else shape[:-3:-1]), 77.0)
    out = out.mT.contiguous().mT
    found = run(descriptor, x, *factors, out=out, bias=bias, scale=1.5)
    check(descriptor, tensors, found, bias=bias, scale=1.5)
    assert torch.equal(found, out)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["tf32", "fp32"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_several_launches(side, precision, gpus, monkeypatch, seed):
    """Of a block with little shared memory."""
    monkeypatch.setattr(grouping, "room", lambda dtype, arch: 1200)
    monkeypatch.setattr(grouping, "most_features", lambda dtype: 512)
    shapes = ((8, 8), (4, 6), (8, 7), (8, 8))
    tensors = operands(shapes, 3, side, F32)
    descriptor = kl.KroneckerProduct(shapes, side=side, epilogue=kl.Bias(), precision=precision)
    bias = torch.randn(descriptor.out_features)
    found = run(descriptor, *tensors, bias=bias)
    assert len(gpus.specs) > 1
    check(descriptor, tensors, found, 2e-3 if precision == "tf32" else None, bias=bias)


SLABS = {
    "rows": ("right", ((8, 8), (4, 6), (8, 7), (8, 8)), 7, F32, ()),
    "columns": ("left", ((8, 8), (4, 6), (8, 7), (8, 8)), 131, F32, ()),
    "doubles": ("right", ((6, 4), (5, 5), (3, 8)), 9, F64, ()),
    "rows of any stride": ("right", ((8, 8), (4, 6), (8, 7), (8, 8)), 7, F32, ()),
    "halves": ("right", ((8, 8), (4, 6), (8, 7), (8, 8)), 7, F16, ()),
    "batch": ("right", ((8, 8), (4, 6), (8, 7), (8, 8)), 2, F32, (3,)),
    "batch of columns": ("left", ((8, 8), (4, 6), (8, 7), (8, 8)), 67, F32, (2,)),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("restaged", [False, True])
@pytest.mark.parametrize("case", slow_but(("rows",), SLABS))
def test_slabs_pass_from_run_to_run_in_one_launch(case, restaged, gpus, monkeypatch, seed):
    side, shapes, rows, dtype, batch = SLABS[case]
    most = 1200 if dtype != F64 else 600
    monkeypatch.setattr(grouping, "room", lambda dtype, arch: most)
    monkeypatch.setattr(grouping, "most_features", lambda dtype: 512 if dtype != "float64" else 40)
    monkeypatch.setattr(slabs, "SLAB_BYTES", 1)
    monkeypatch.setattr(slabs, "RESTAGED_BYTES", 1)
    if restaged:
        variant = modes.Slabs.variant

        def restage(self, kind, groups, is_varied, arch):
            return variant(self, kind, groups, True, arch)

        monkeypatch.setattr(modes.Slabs, "variant", restage)
    monkeypatch.setattr(plans, "lower_on", lambda lower, device: lower(1))
    tensors = operands(shapes, rows, side, dtype, batch)
    if "stride" in case:
        x = tensors[0]
        tensors[0] = torch.zeros(rows, x.shape[1] + 1)[:, :-1].copy_(x)
    descriptor = kl.KroneckerProduct(shapes, side=side, epilogue=(kl.Bias(), kl.Scale()))
    bias = torch.randn(descriptor.out_features).to(dtype)
    found = run(descriptor, *tensors, bias=bias, scale=2.0)
    assert kinds(gpus) == ["clear", "slabs"]
    assert "restaged" in gpus.specs[1].description or not (restaged or batch)
    check(descriptor, tensors, found, bias=2 * bias, scale=2.0)


@pytest.mark.parametrize("shapes", slow_but((((4, 6), (8, 3)),), [((4, 6), (8, 3)), ((12, 12),)]))
@pytest.mark.parametrize("ahead", [32, 96, 10**6])
def test_tiles_are_read_ahead(shapes, ahead, gpus, monkeypatch, seed):
    """By the only block there is, of a multiprocessor that holds one."""
    monkeypatch.setattr(plans, "lower_on", lambda lower, device: lower(1))
    monkeypatch.setattr(modes.Variant, "resident", lambda self, arch: 1)
    monkeypatch.setattr(modes, "columns_of", lambda *_: 4)
    monkeypatch.setattr(modes, "ahead_of", lambda made, arch: min(ahead, made.tile))
    tensors = operands(shapes, 27, "right", F32)
    descriptor = kl.KroneckerProduct(shapes)
    found = run(descriptor, *tensors)
    assert gpus.specs[0].description.endswith("a")
    check(descriptor, tensors, found)


def test_what_kernels_do_not_hold_is_torchs(gpus):
    """Factors that no shared memory holds."""
    large = kl.KroneckerProduct((300,)), gpu(torch.ones(2, 300)), gpu(torch.ones(300, 300))
    kl.prepare(*large)
    assert kl.run_kernel(*large).numel() and not gpus.loads


def test_a_batch_may_be_larger_than_a_grid(gpus, monkeypatch, seed):
    monkeypatch.setattr(parameters, "GRID_BATCH", 3)
    tensors = operands(((3, 4), (2, 2)), 2, "left", F32, (7,))
    descriptor = kl.KroneckerProduct(((3, 4), (2, 2)), side="left")
    check(descriptor, tensors, run(descriptor, *tensors))


@pytest.mark.parametrize("side", slow_but(("right",), ("right", "left")))
def test_recorded_calls_and_their_gradients_are_kernels(side, gpus, monkeypatch, seed):
    """Plain CPU tensors taken for those of a GPU, so that autograd hands on what it has."""
    monkeypatch.setitem(fakes.MODELS, -1, fakes.MODELS[0])
    monkeypatch.setattr(products, "is_on_gpu", lambda device: True)
    shapes = ((4, 3), (2, 5))
    epilogue = (kl.Bias(), kl.Scale())
    descriptor = kl.KroneckerProduct(shapes, side=side, epilogue=epilogue)
    x, *factors = operands(shapes, 4, side, F64, (2,))
    leaves = [x, factors[0][:1], factors[1], torch.randn(descriptor.out_features, dtype=F64)]
    leaves = [t.detach().requires_grad_() for t in leaves]

    def found(*tensors):
        return kl.run_kernel(descriptor, *tensors[:3], bias=tensors[3], scale=1.5)

    def wanted(x, first, second, bias):
        y = product(x, (first, second), side)
        return 1.5 * (y + (bias if side == "right" else bias[:, None]))

    y, exact = found(*leaves), wanted(*leaves)
    assert len(gpus.specs) == 1
    torch.testing.assert_close(y, exact)
    grad = torch.randn(y.shape, dtype=F64)
    ours = torch.autograd.grad(y, leaves, grad, retain_graph=True)
    assert kinds(gpus) == ["modes", "gradients", "sum"]
    torch.testing.assert_close(ours, torch.autograd.grad(exact, leaves, grad, retain_graph=True))
    twice = [
        torch.autograd.grad(t.square().sum(), leaves, create_graph=True)[1].sum()
        for t in (y, exact)
    ]
    torch.testing.assert_close(*(torch.autograd.grad(t, leaves) for t in twice))


def test_a_nan_stays_in_its_row(gpus, seed):
    tensors = operands(((8, 8), (8, 8)), 9, "right", F32)
    tensors[0][4, 7] = math.nan
    found = run(kl.KroneckerProduct((8, 8)), *tensors)
    rest = [index for index in range(9) if index != 4]
    assert found[4].isnan().any() and found[rest].isfinite().all()

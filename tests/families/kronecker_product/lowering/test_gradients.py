"""The kernels of gradients by factors, run by threads of the host, from run_kernel on: plain CPU
tensors taken for those of a GPU, so that autograd hands on what it has."""

import pytest
import torch

import kernlib as kl
from kernlib import ahead
from kernlib.families.kronecker_product.kernels import gradients as kernels
from kernlib.families.kronecker_product.kernels import modes
from kernlib.families.kronecker_product.lowering import gradients
from kernlib.families.kronecker_product.lowering.problem import Layout
from kernlib.jit import compiler, targets
from kernlib.runtime import products
from tests.families.kronecker_product import emulated
from tests.families.kronecker_product.cases import assert_near, product
from tests.families.kronecker_product.lowering.test_choose import NUMBERS, SHAPES, problem
from tests.support import fakes
from tests.support.emulation.gpus import gpu
from tests.support.speeds import slow_but

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
# Beside those of products: terms of a gradient have all signs, and cancel.
GATES = {F64: 4e-13, F32: 4e-6, F16: 2e-3, BF16: 1.6e-2}


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """CPU tensors are those of a GPU."""
    monkeypatch.setitem(fakes.MODELS, -1, ((9, 0), "GPU", 3))
    monkeypatch.setattr(products, "is_on_gpu", lambda device: True)


def operands(*given):
    return [t.requires_grad_() for t in emulated.operands(*given)]


def check(descriptor, tensors, gate, kinds=None, gpus=None, grad=None) -> None:
    """Gradients by all tensors, against those in float64."""
    y = kl.run_kernel(descriptor, *tensors)
    if gpus is not None:
        gpus.specs.clear()
    grad = torch.randn(y.shape).to(y.dtype) if grad is None else grad(y)
    wanted = [t for t in tensors if t.requires_grad]
    found = torch.autograd.grad(y, wanted, grad)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    turned = [f.mT if flag else f for f, flag in zip(wide[1:], descriptor.transposed, strict=True)]
    exact = product(wide[0], turned, descriptor.side)
    of = [w for w, t in zip(wide, tensors, strict=True) if t.requires_grad]
    if kinds is not None:
        assert [spec.description.split()[1] for spec in gpus.specs] == kinds
    for one, other in zip(found, torch.autograd.grad(exact, of, grad.double()), strict=True):
        assert one.is_contiguous()
        assert_near(one, other, gate)


# Factors, rows or columns, side, dtype.
CASES = {
    "one": (((3, 4),), 5, "right", F32),
    "distinct": (((5, 3), (2, 7), (4, 4)), 7, "left", F32),
    "merged": (((2, 2),) * 5, 6, "right", F32),
    "merged left": (((2, 3), (3, 2), (5, 4)), 11, "left", F64),
    "in place": (((8, 8), (8, 8)), 9, "right", F32),
    "three": (((8, 8),) * 3, 5, "right", F32),
    "four": (((5, 7),) * 4, 2, "right", F32),
    "wide": (((40, 24), (5, 33)), 3, "left", F64),
    "half": (((17, 9), (12, 31)), 3, "right", F16),
    "places": (((64, 64), (8, 8)), 2, "right", F32),
    "one large": (((128, 128),), 33, "left", F32),
    "squares": (((16, 16), (16, 16)), 2, "left", BF16),
    "65": (((1, 1),) * 64 + ((2, 3),), 2, "right", F32),
    "short": (((1, 3), (5, 1)), 37, "left", F32),
    "long row": (((8, 8),) * 4, 3, "right", F32),
    "double": (((7, 100),), 33, "right", F64),
}


@pytest.mark.few(1)
@pytest.mark.emulated
@pytest.mark.parametrize("case", slow_but(("distinct", "merged"), CASES))
def test_gradients_are_right(case, gpus, seed):
    shapes, rows, side, dtype = CASES[case]
    descriptor = kl.KroneckerProduct(shapes, side=side)
    tensors, grad = operands(shapes, rows, side, dtype), None
    if len(shapes) == 65:  # a gradient is one sum of six terms, which cancel if they have signs
        tensors = [t.detach().abs().requires_grad_() for t in tensors]
        grad = torch.ones_like
    check(descriptor, tensors, GATES[dtype], ["gradients", "sum"], gpus, grad)


LAYOUTS = {
    "rows": ("right", (), ()),
    "columns": ("left", (), ()),
    "rows of a batch": ("right", (2, 3), ()),
    "columns of a batch": ("left", (2, 3), ()),
    "rows with a batch of factors": ("right", (2, 3), (3,)),
    "columns with a batch of factors": ("left", (2, 3), (2, 3)),
}


@pytest.mark.emulated
@pytest.mark.parametrize("layout", slow_but(("columns of a batch",), LAYOUTS))
def test_strides_and_batches(layout, gpus, seed):
    """Of x, of the gradient that is given and of factors, some given as their transpose."""
    shapes, (side, batch, own) = ((4, 3), (6, 5), (2, 2)), LAYOUTS[layout]
    x, *factors = operands(shapes, 5, side, F32, batch)
    x = x.detach().mT.contiguous().mT.requires_grad_()
    factors = [f.detach()[(0,) * len(batch)].expand(*own, -1, -1).clone() for f in factors]
    factors[0] = factors[0].mT.contiguous()
    factors[1] = torch.nn.functional.pad(factors[1], (1, 2))[..., 1:-2]
    factors[2] = factors[2][..., :1, :, :] if own else factors[2]
    tensors = [x, *(f.requires_grad_() for f in factors)]
    descriptor = kl.KroneckerProduct(shapes, side=side, transposed=(True, False, False))
    check(descriptor, tensors, GATES[F32], grad=lambda y: torch.randn(y.mT.shape).mT)
    assert len(gpus.specs) == 3  # of the product, and of gradients
    check(descriptor, tensors, GATES[F32], grad=lambda y: torch.randn(y.shape[-1]).expand_as(y))


SEVERAL = {
    "rows": ("right", (), F32, "fp32"),
    "columns": ("left", (), F32, "fp32"),
    "rows in TF32": ("right", (), F32, "tf32"),
    "halves": ("right", (), F16, "fp32"),
    "doubles of a batch": ("left", (2,), F64, "fp32"),
}


@pytest.mark.emulated
@pytest.mark.parametrize("case", slow_but(("rows",), SEVERAL))
def test_several_runs(case, gpus, monkeypatch, seed):
    """What is made of x again, and two runs whose gradients meet in the workspace."""
    side, batch, dtype, precision = SEVERAL[case]
    fits = kernels.fits

    def few(sizes, *rest):
        return len(sizes) < 3 and fits(sizes, *rest)

    monkeypatch.setattr(kernels, "fits", few)
    shapes = ((8, 8), (4, 6), (7, 8))
    tensors = operands(shapes, 5, side, dtype, batch)
    padded = torch.nn.functional.pad(tensors[0].detach(), (3, 2))[..., 3:-2]
    tensors[0] = padded.requires_grad_()
    descriptor = kl.KroneckerProduct(shapes, side=side, precision=precision)
    gate = 3e-3 if precision == "tf32" else GATES[dtype]
    check(descriptor, tensors, gate, ["modes", "gradients", "gradients", "sum"], gpus)


@pytest.mark.emulated
@pytest.mark.parametrize("side", slow_but(("right",), ("right", "left")))
def test_only_what_is_needed_is_computed(side, gpus, seed):
    """Without one by x nothing is written for it; without any by factors the product is enough."""
    shapes = ((4, 3), (5, 6))
    descriptor = kl.KroneckerProduct(shapes, side=side)
    tensors = operands(shapes, 6, side, F32)
    tensors[0].requires_grad_(False)
    tensors[1].requires_grad_(False)
    check(descriptor, tensors, GATES[F32], ["gradients", "sum"], gpus)
    assert "factors" in gpus.specs[0].description
    tensors[0].requires_grad_()
    tensors[2].requires_grad_(False)
    check(descriptor, tensors, GATES[F32], ["modes"], gpus)


@pytest.mark.few(1)
@pytest.mark.emulated
def test_blocks_take_tile_after_tile(gpus, monkeypatch, seed):
    monkeypatch.setattr(modes, "WIDEST_TILE", 2)
    shapes = ((4, 3), (5, 6))
    tensors = operands(shapes, 75, "right", F32)
    monkeypatch.setattr(kernels.Variant, "resident", lambda self, arch: 1)
    check(kl.KroneckerProduct(shapes), tensors, GATES[F32], ["gradients", "sum"], gpus)
    assert gpus.launches[-2].grid == (3, 1)


@pytest.mark.few(1)
@pytest.mark.emulated
def test_plans_are_kept(gpus, monkeypatch, seed):
    lowered, lower = [], gradients.lower
    monkeypatch.setattr(gradients, "lower", lambda *given: lowered.append(given) or lower(*given))
    shapes = ((2, 2), (3, 2))
    tensors = operands(shapes, 4, "right", F32)
    for _ in range(3):
        check(kl.KroneckerProduct(shapes), tensors, GATES[F32], ["gradients", "sum"], gpus)
    assert len(lowered) == 1 and len(gpus.loads) == 3


@pytest.mark.emulated
def test_what_kernels_do_not_hold_is_torchs(gpus, seed):
    """A factor whose gradient no registers hold, and an empty sum."""
    tensors = operands(((230, 230),), 2, "right", F16)
    check(kl.KroneckerProduct(((230, 230),)), tensors, GATES[F16], ["modes"], gpus)
    empty = operands(((2, 3),), 0, "right", F32)
    y = kl.run_kernel(kl.KroneckerProduct(((2, 3),)), *empty)
    found = torch.autograd.grad(y, empty, torch.ones_like(y))
    assert found[0].shape == (0, 2) and not found[1].any()


def test_prepare_loads_what_a_backward_pass_uses(gpus, seed):
    shapes = ((4, 3), (2, 5))
    descriptor = kl.KroneckerProduct(shapes)
    tensors = [gpu(t).requires_grad_() for t in operands(shapes, 4, "right", F32)]
    kl.prepare(descriptor, *tensors)
    kinds = [one.what.split()[1] for one in gpus.loads]
    assert kinds == ["modes", "gradients", "sum"]
    found = ahead.specs(descriptor, "sm_90a", tuple(tensors), {}, 0)
    assert [one.what for one in gpus.loads] == [spec.description for spec in found]


def given(shape, numbers, inside=False):
    """Gradients of contiguous tensors."""
    made = problem(*SHAPES[shape], numbers, inside)
    rows, wide = made.columns, made.in_features
    back = Layout(rows * wide, 0, *((1, rows) if inside else (wide, 1)))
    return gradients.Gradients(made, back, True, (False,) * len(made.factors), True)


@pytest.mark.parametrize("arch", targets.SHARED_BYTES)
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_launches_fit_every_gpu(shape, numbers, inside, arch):
    made = given(shape, numbers, inside)
    sizes = SHAPES[shape][1]
    if not gradients.takes(sizes, made.product.dtype, arch):
        assert max(sizes[0]) == 128
        return
    lowered = gradients.lower(made, arch, targets.MULTIPROCESSORS[arch][1])
    for step in lowered.steps:
        assert step.spec.shared_bytes <= targets.SHARED_BYTES[arch]
        assert 128 <= step.spec.threads <= 512 and step.grid[0] >= 1
    names = {name for step in lowered.steps for name, _ in step.pointers}
    factors = range(len(sizes))
    assert names == {
        *("x", "grad", "to_x", "workspace"),
        *(f"factor{index}" for index in factors),
        *(f"to_factor{index}" for index in factors),
    }


def test_rows_that_two_tiles_hold_take_one_pass():
    for shape, count in {"1024 64^2": 1, "1024 8^5": 2, "1024 16^4": 2, "1024 32^3": 2}.items():
        kinds = [step.spec.description.split()[1] for step in lowered(shape).steps]
        assert kinds == ["modes"] * (count - 1) + ["gradients"] * count + ["sum"]


def lowered(shape, numbers="fp32", inside=False):
    return gradients.lower(given(shape, numbers, inside), "sm_90a", 132)


CALLS = {
    f"{shape} {numbers} {side}": (shape, numbers, side == "left")
    for shape in SHAPES
    for numbers in NUMBERS
    for side in ("right", "left")
}


@pytest.mark.parametrize("call", slow_but(("mixed fp32 right",), CALLS))
def test_kernels_compile_without_spills(call):
    """Those of gradients: what makes x again is a product's."""
    for step in lowered(*CALLS[call]).steps:
        kind = step.spec.description.split()[1]
        if kind == "modes":
            continue
        made = compiler.compile_spec(step.spec, "sm_90a")
        # A sum's divisions of 64 bits are calls, which keep four registers.
        assert int(made.meta["spill_bytes"]) <= SPILLS.get(call, 16 if kind == "sum" else 0)


# Sums of gradients wait in registers while tiles of many results do.
SPILLS = {
    "1024 16^4 fp32 right": 56,
    "1024 16^4 fp64 right": 124,
    "1024 16^4 fp64 left": 224,
    "1024 32^3 fp32 right": 48,
    "1024 64^2 fp32 right": 48,
    "1024 64^2 fp32 left": 48,
    "1024 64^3 fp32 right": 48,
    "1024 128^2 fp64 right": 196,
    "1024 128^2 fp64 left": 196,
    "320 128^3 fp64 right": 196,
    "320 128^3 fp64 left": 196,
}

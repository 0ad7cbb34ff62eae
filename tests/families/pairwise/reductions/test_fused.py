"""What the kernel of gradients of reductions is given, and what becomes of its sums: launches are
carried out here in PyTorch, of a Gaussian, from the addresses and bytes of the parameter block."""

import ctypes
import struct
from types import SimpleNamespace

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise.lowering import backward as lowering
from kernlib.families.pairwise.reductions import arguments as checks
from kernlib.families.pairwise.reductions import fused, gradients
from kernlib.runtime.plan import forget_plans
from tests.support.kernels import only

GAUSSIAN = kl.gaussian()
BANDWIDTH = 2 * 5  # of the numbers


def view(address, size, strides):
    """The tensor at an address."""
    count = 1 + sum((n - 1) * s for n, s in zip(size, strides, strict=True))
    memory = (ctypes.c_float * count).from_address(address)
    return torch.frombuffer(memory, dtype=torch.float32).as_strided(size, strides)


class Launch:
    """A plan whose kernel is PyTorch."""

    made = ()

    def __init__(self, lowered, operands, device):
        step = only(lowered)
        assert [name for name, _ in step.pointers] == list(operands)
        values = struct.unpack(f"<{step.scalars}q12q4qd4i", step.fixed)
        self.strides, values = values[: step.scalars], values[step.scalars :]
        self.views, self.sizes, self.counts = values[:12], values[12:17], values[17:]
        self.grid, self.source = step.grid, step.spec.source
        self.splits, self.blocks = step.grid[0] // self.counts[0], step.grid[0]
        self.features = int(self.source.split("constexpr int K = ")[1].split(";")[0])
        Launch.made.append(self)

    def flag(self, name):
        return f"constexpr bool {name} = true;" in self.source

    def forward(self, second):
        """The sign of the rows' points in the difference that the factor is of."""
        return 1 if second else -1

    def launch(self, pointers, numbers):
        (m, n, batch, per_split, factor), k = self.sizes, self.features
        role = next(role for role in lowering.ROLES if f"Role::{role};" in self.source)
        second, both = role == "second", role == "both"
        rows_of_g, rows_of_v = (n, m) if second else (m, n)
        columns, weighted = self.counts[1], self.flag("WEIGHTED")
        shapes = (m, k), (n, k), (rows_of_g, columns), (rows_of_v, columns)
        a, b, g, v = (
            view(pointers[i], (batch, *shape), self.views[3 * i : 3 * i + 3])
            if i < 3 or weighted
            else torch.ones(batch, *shape)
            for i, shape in enumerate(shapes)
        )
        scale = torch.tensor(numbers[BANDWIDTH])
        if numbers[BANDWIDTH + 1]:
            scale = view(numbers[BANDWIDTH + 1], (batch,), (self.strides[5],))[:, None, None]
        difference = (a[:, :, None] - b[:, None]) * self.forward(second)
        squares = difference.square().sum(-1)
        matrix = torch.exp(-squares / (2 * scale**2))
        w = g @ v.mT
        worth = w.mT if second else w + w.mT if both else w
        slope = (-0.5 / scale**2 * matrix * worth)[..., None] * difference * factor
        parts = [slice(i * per_split, (i + 1) * per_split) for i in range(self.splits)]
        if self.flag("POINTS"):
            found = torch.stack([slope[:, :, part].sum(2) for part in parts])
            view(pointers[4], found.shape, found.stride()).copy_(found)
        if self.flag("VALUES"):
            found = torch.stack([matrix[..., part] @ g[:, part] for part in parts])
            view(pointers[5], found.shape, found.stride()).copy_(found)
        if "HYPER = 1;" in self.source:
            whole = (matrix * squares / scale**3 * w).sum((1, 2))
            found = whole.expand(self.blocks, batch) / self.blocks
            view(pointers[6], (self.blocks, batch), (batch, 1)).copy_(found)


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Launches that took place, of a GPU of 4 multiprocessors."""
    known = fused.takes

    def takes(request, shape):
        on_gpu = SimpleNamespace(
            device=SimpleNamespace(type="cuda"), dtype=request.a.dtype, v=request.v
        )
        return known(SimpleNamespace(a=on_gpu, v=request.v), shape)

    monkeypatch.setattr(fused, "takes", takes)
    monkeypatch.setattr(fused, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(fused.devices, "current_device", lambda: -1)  # as of CPU tensors
    monkeypatch.setattr(fused, "model", lambda device: SimpleNamespace(multiprocessors=4))
    monkeypatch.setattr(fused, "load_lowered", Launch)
    monkeypatch.setattr(fused, "build", lambda specs, device: None)
    forget_plans()
    monkeypatch.setattr(Launch, "made", [])
    yield Launch.made
    forget_plans()


def points(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed + shape[-2])
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def bandwidth(*values):
    return torch.tensor(values if len(values) > 1 else values[0], requires_grad=True)


def check(function, inputs, blocks, tolerance=1e-5):
    """That gradients are those by blocks of the matrix, in ``blocks``, a monkeypatch."""
    out = function(*inputs)
    along = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.dtype)
    found = torch.autograd.grad(out, inputs, along)
    with blocks.context() as patch:
        patch.setattr(fused, "takes", lambda request, shape: False)
        wanted = torch.autograd.grad(function(*inputs), inputs, along)
    for x, y in zip(found, wanted, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype and x.is_contiguous()
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance * 50)


def matmul(a, b, v, scale, **values):
    return kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=scale, **values)


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 11])
def test_two_launches_for_every_four_columns(columns, launches, monkeypatch):
    inputs = points(30, 3), points(700, 3), points(700, columns), bandwidth(1.5)
    check(matmul, inputs, monkeypatch)
    assert len(launches) == 2 * -(-columns // 4)
    assert launches[0].grid[0] > 1


@pytest.mark.parametrize("columns", [1, 6])
def test_one_x_takes_one_launch(columns, launches, monkeypatch):
    inputs = points(60, 3), points(60, columns), bandwidth(1.5)
    check(lambda x, v, scale: matmul(x, x, v, scale), inputs, monkeypatch)
    assert len(launches) == -(-columns // 4)
    assert all("Role::both;" in launch.source for launch in launches)


def test_a_symmetric_descriptor_is_one_x(launches, monkeypatch):
    made = kl.gaussian(symmetric=True)
    inputs = points(60, 3), points(60, 1), bandwidth(1.5)
    call = lambda x, v, scale: kl.kernel_matmul(made, x, None, v, bandwidth=scale)  # noqa: E731
    check(call, inputs, monkeypatch)
    assert len(launches) == 1


def test_two_leaves_of_one_memory_keep_gradients_of_their_own(launches, monkeypatch):
    x = points(60, 3)
    inputs = x, x.detach().requires_grad_(), points(60, 2), bandwidth(1.5)
    check(matmul, inputs, monkeypatch)
    assert len(launches) == 2


def check_some(wanted, features, scale, blocks):
    """That gradients of some tensors are right, by the launches that these take."""
    named = {"a": points(40, features), "b": points(50, features), "v": points(50, 2)}
    named["bandwidth"] = bandwidth(scale)
    leaves = wanted.split()
    fixed = {name: t.detach() for name, t in named.items() if name not in leaves}

    def call(*given):
        every = fixed | dict(zip(leaves, given, strict=True))
        return matmul(*(every[name] for name in named))

    check(call, [named[name] for name in leaves], blocks)
    assert len(Launch.made) == (1 if wanted in ("a", "b", "bandwidth", "b v") else 2)


SOME = pytest.mark.parametrize("wanted", ["a", "b", "bandwidth", "a v", "b v", "v bandwidth"])


@SOME
def test_what_is_not_wanted_is_not_computed(wanted, monkeypatch):
    check_some(wanted, 3, 2.0, monkeypatch)


def test_v_alone_is_a_product(launches, monkeypatch):
    a, b = points(40, 3).detach(), points(50, 3).detach()
    check(lambda v: matmul(a, b, v, 2.0), [points(50, 2)], monkeypatch)
    assert not launches


def check_sums(features, scale, blocks):
    """Of two sets of points, and of one."""
    a, b, scale = points(60, features), points(50, features), bandwidth(scale)
    check(lambda a, b, s: kl.kernel_sum(GAUSSIAN, a, b, bandwidth=s), (a, b, scale), blocks)
    assert len(Launch.made) == 2
    check(lambda x, s: kl.kernel_sum(GAUSSIAN, x, x, bandwidth=s), (a, scale), blocks)
    assert len(Launch.made) == 3


def test_sums(monkeypatch):
    check_sums(3, 1.5, monkeypatch)


BATCHES = [
    ((3, 30, 5), (40, 5), (40, 2), 1),
    ((3, 30, 5), (3, 40, 5), (3, 40, 2), 3),
    ((30, 5), (40, 5), (3, 40, 2), 1),
    ((30, 5), (1, 40, 5), (1, 40, 2), 3),
]


@pytest.mark.parametrize(("a", "b", "v", "scales"), BATCHES, ids=str)
def test_batches(a, b, v, scales, launches, monkeypatch):
    scale = bandwidth(*(1.0 + i for i in range(scales)))
    inputs = points(*a), points(*b, seed=1), points(*v, seed=2), scale
    check(matmul, inputs, monkeypatch)
    assert launches


@pytest.mark.parametrize("offsets", [(0, 0), (7, 2), (2, 7), (0, 900)])
def test_the_regularization_is_added_to_v_and_given_its_gradient(offsets, launches, monkeypatch):
    rows, columns = offsets

    def call(a, b, v, regularization):
        given = {"regularization": regularization, "row_offset": rows, "col_offset": columns}
        return matmul(a, b, v, 1.5, **given)

    check(call, (points(40, 3), points(50, 3), points(50, 2), bandwidth(0.5)), monkeypatch)
    assert len(launches) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_computed_in_float32(dtype, launches, monkeypatch):
    inputs = [points(*s, dtype=dtype) for s in ((40, 3), (50, 3), (50, 2))]
    bound = 4 * torch.finfo(dtype).eps
    check(lambda a, b, v: matmul(a, b, v, 1.5), inputs, monkeypatch, bound)
    assert len(launches) == 2


@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_bandwidths_whose_squares_leave_floats_range(scale, launches, monkeypatch):
    given = [(scale * points(*s)).detach().requires_grad_() for s in ((40, 3), (50, 3))]

    def call(a, b, v):
        return matmul(a, b, v, scale)

    inputs = (*given, points(50, 2))
    out = call(*inputs)
    found = torch.autograd.grad(out, inputs, torch.ones_like(out))
    wide = [t.detach().double().requires_grad_() for t in inputs]
    wanted = torch.autograd.grad(call(*wide), wide, torch.ones_like(out).double())
    assert launches
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.double() / y.abs().max(), y / y.abs().max(), rtol=0, atol=1e-5)


def test_gradients_of_gradients_are_recorded(launches):
    a, b, v = points(20, 3), points(25, 3), points(25, 1)
    out = matmul(a, b, v, 1.5)
    torch.autograd.grad(out.sum(), a, create_graph=True)[0].square().sum().backward()
    assert b.grad is not None and not launches


OTHERS = {
    "by the exponent": (kl.p_distance(), {"p": 1.5}, ["p"]),
    "largest difference": (kl.p_distance(), {"p": float("inf")}, ["a"]),
    "count": (kl.Pairwise(inner=kl.PowerLog()), {"p": 1.5}, ["a"]),
    "constant": (kl.l1_distance(epilogue=kl.Custom("0 * v + s", ("s",))), {"s": 1.0}, ["a"]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_the_kernel_does_not_know(name):
    descriptor, values, wanted = OTHERS[name]
    values = {k: torch.tensor(v) if k in wanted else v for k, v in values.items()}
    a, b = points(40, 3).detach(), points(50, 3).detach()
    request = checks.request_of(descriptor, a, b, None, 0, 0, values)
    shape = checks.shape_of(request)
    found = fused.gradients(request, shape, wanted, torch.ones(1, 40), False)
    assert found is None


def test_more_totals_than_shared_memory_holds_go_another_way():
    terms = [f"c{i}" for i in range(20)]
    text = " + ".join(f"{name} * v" for name in terms)
    descriptor = kl.dot_product(epilogue=kl.Custom(text, tuple(terms)))
    values = {name: torch.tensor(1.0) for name in terms}
    x, v = points(40, 16).detach(), points(40, 4).detach()
    request = checks.request_of(descriptor, x, x, v, 0, 0, values)
    wanted, shape = ["a", "b", "v", *terms], checks.shape_of(request)
    assert fused.gradients(request, shape, wanted, torch.ones(1, 40, 4), True) is None


def test_norms_leave_the_gradient_of_v_to_a_product(launches, monkeypatch):
    asked = []
    product = gradients.transposed_product
    monkeypatch.setattr(gradients, "transposed_product", lambda *a: asked.append(a) or product(*a))
    monkeypatch.setattr(Launch, "launch", lambda *a: None)
    a, b, v = points(40, 3), points(50, 3), points(50, 1)
    kl.kernel_matmul(kl.p_distance(), a, b, v, p=1.5).sum().backward()
    assert len(asked) == 1 and len(launches) == 2
    assert not any(launch.flag("VALUES") for launch in launches)

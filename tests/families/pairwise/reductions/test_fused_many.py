"""What the kernels of gradients of many features are given, and what becomes of their sums: as
test_fused.py has it of few, by the block that the launches of a call share."""

import struct

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise.kernels import points as kernels
from kernlib.families.pairwise.lowering import points as lowering
from kernlib.families.pairwise.reductions import arguments, fused
from kernlib.runtime.plan import forget_plans
from tests.families.pairwise.reductions.test_fused import (  # noqa: F401
    BATCHES,
    SOME,
    Launch,
    bandwidth,
    check,
    check_some,
    check_sums,
    launches,
    matmul,
    points,
)
from tests.support.kernels import stem

FEATURES = 20
FLAGS = {"POINTS": "WANTS_POINTS", "VALUES": "WANTS_VALUES"}


class Steps(Launch):
    """Launches behind one gate, the last of which is PyTorch here."""

    def __init__(self, lowered, operands, device):
        step = lowered.steps[-1]
        assert stem(step.spec) == "pairwise_points_direct"
        assert [name for name, _ in step.pointers[lowering.IN_WORKSPACE :]] == list(operands)
        values = struct.unpack(kernels.fields(step.scalars).format, step.fixed)
        self.strides, values = values[: step.scalars], values[step.scalars :]
        factor, self.features, columns, row_blocks, self.splits = values[22:]
        self.views, self.sizes = values[:12], (*values[12:16], factor)
        self.counts, self.grid = (row_blocks, columns), step.grid
        self.source, self.kinds = step.spec.source, [stem(each.spec) for each in lowered.steps]
        self.blocks = self.splits * self.sizes[0]
        Launch.made.append(self)

    def flag(self, name):
        return super().flag(FLAGS.get(name, name))

    def forward(self, second):
        return 1


@pytest.fixture(autouse=True)
def made(launches, monkeypatch):  # noqa: F811
    """Launches that took place, of kernels that pay."""
    monkeypatch.setattr(fused, "load_lowered", Steps)
    monkeypatch.setattr(lowering, "pays", lambda *given: True)
    return launches


@pytest.mark.parametrize(("columns", "passes"), [(1, 1), (4, 1), (6, 2)])
@pytest.mark.parametrize("features", [17, 64, 128])
def test_two_launches_for_some_columns(features, columns, passes, made, monkeypatch):
    inputs = points(30, features), points(700, features), points(700, columns), bandwidth(9.0)
    check(matmul, inputs, monkeypatch)
    assert len(made) == 2 * (passes if features < 128 else -(-columns // 2))
    assert made[0].splits > 1
    assert len(made[0].kinds) == 5


@pytest.mark.parametrize("columns", [1, 3])
def test_one_x_takes_one_launch(columns, made, monkeypatch):
    inputs = points(60, FEATURES), points(60, columns), bandwidth(4.0)
    check(lambda x, v, scale: matmul(x, x, v, scale), inputs, monkeypatch)
    assert len(made) == 1 and "Role::both;" in made[0].source


@SOME
def test_what_is_not_wanted_is_not_computed(wanted, made, monkeypatch):
    check_some(wanted, FEATURES, 4.0, monkeypatch)
    points_too = bool({"a", "b"} & {*wanted.split()})
    assert any(launch.flag("POINTS") for launch in made) == points_too


def test_sums(made, monkeypatch):
    check_sums(FEATURES, 4.0, monkeypatch)
    assert not any(launch.flag("WEIGHTED") for launch in made)


@pytest.mark.parametrize(("a", "b", "v", "scales"), BATCHES, ids=str)
def test_batches(a, b, v, scales, made, monkeypatch):
    a, b = ((*size[:-1], FEATURES) for size in (a, b))
    scale = bandwidth(*(3.0 + i for i in range(scales)))
    check(matmul, (points(*a), points(*b, seed=1), points(*v, seed=2), scale), monkeypatch)
    assert made


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_computed_in_float32(dtype, made, monkeypatch):
    inputs = [points(*s, dtype=dtype) for s in ((40, FEATURES), (50, FEATURES), (50, 2))]
    bound = 4 * torch.finfo(dtype).eps
    check(lambda a, b, v: matmul(a, b, v, 4.0), inputs, monkeypatch, bound)
    assert len(made) == 2


def test_gpus_without_these_products_take_one_launch(made, monkeypatch):
    monkeypatch.setattr(fused, "arch_of", lambda device: "sm_80")
    monkeypatch.setattr(fused.devices, "current_device", lambda: -1)  # as of CPU tensors
    inputs = points(60, FEATURES), points(70, FEATURES), points(70, 1), bandwidth(4.0)
    check(matmul, inputs, monkeypatch)
    assert [launch.kinds for launch in made] == [["pairwise_points_direct"]] * 2


def test_blocks_where_they_are_faster(made, monkeypatch):
    monkeypatch.setattr(lowering, "pays", lambda *given: False)
    forget_plans()
    inputs = points(60, FEATURES), points(70, FEATURES), points(70, 1), bandwidth(4.0)
    check(matmul, inputs, monkeypatch)
    assert not made


OTHERS = {
    "differences": (kl.laplace_l1(), {"bandwidth": 2.0}, ["a"]),
    "by the exponent": (kl.p_distance(), {"p": 2.0}, ["p"]),
    "another norm": (kl.p_distance(), {"p": 3.0}, ["a"]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_the_kernels_do_not_know(name):
    descriptor, values, wanted = OTHERS[name]
    values = {k: torch.tensor(v) if k in wanted else v for k, v in values.items()}
    a, b = points(40, FEATURES).detach(), points(50, FEATURES).detach()
    request = arguments.request_of(descriptor, a, b, None, 0, 0, values)
    shape = arguments.shape_of(request)
    assert fused.gradients(request, shape, wanted, torch.ones(1, 40), False) is None


def test_a_regularization_alone_takes_no_launch(made, monkeypatch):
    a, b, v = (points(*size).detach() for size in ((40, FEATURES), (50, FEATURES), (50, 2)))
    call = lambda given: matmul(a, b, v, 4.0, regularization=given)  # noqa: E731
    check(call, [bandwidth(0.5)], monkeypatch)
    assert not made

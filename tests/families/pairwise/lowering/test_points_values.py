"""Gradients of many features on the lanes, whose kernel threads of the host run, term by term in
float64."""

import ctypes
import math
import struct

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise.lowering.problem import Layout
from kernlib.lowering.steps import NUMBER
from tests.families.pairwise.lowering.test_points import lowered
from tests.support.emulation.emulator import Emulator, kernels_of
from tests.support.kernels import only

LANES = kl.gaussian(direct=True)
BANDWIDTH = 5  # its place among the scalars
BOUND = 3e-6  # of the sum of absolute terms

pytestmark = pytest.mark.emulated


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(kernels_of(tmp_path_factory))


def gradient(emulator, a, b, v, g, bandwidth: float) -> torch.Tensor:
    """That of ``g @ K(a, b) @ v`` by a."""
    (m, k), n = a.shape, b.shape[0]
    layouts = {"a": Layout(0, k, 1), "b": Layout(0, k, 1), "g": Layout(0, 1, 1)}
    found = lowered(LANES, "first", wanted=("a",), m=m, n=n, k=k, v=Layout(0, 1, 1), **layouts)
    step = only(found)
    out = torch.full((found.parts, m, k), math.nan)
    operands = {"a": a, "b": b, "v": v, "g": g, "points": out}
    addresses = [operands.get(name, out).data_ptr() for name, _ in step.pointers]
    scalars = [0.0] * step.scalars
    scalars[BANDWIDTH] = bandwidth
    block = struct.pack(f"<{len(addresses)}Q", *addresses)
    numbers = [part for value in scalars for part in (value, 0)]
    block += struct.pack("<" + NUMBER * step.scalars, *numbers) + step.fixed
    memory = ctypes.create_string_buffer(block, len(block))
    emulator.launch(step.spec, step.grid, ctypes.addressof(memory))
    return out.sum(0)


def exact(a, b, v, g, bandwidth: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in float64, and the sums of absolute terms, with what the rounding of exponents is
    allowed."""
    a, b, v, g = (t.double() for t in (a, b, v, g))
    differences = a[:, None] - b
    squares = differences.square().sum(-1)
    each = (g[:, None] * v * torch.exp(-squares / (2 * bandwidth**2)))[..., None] * differences
    each = each / -(bandwidth**2)
    allowed = 1 + squares / (16 * bandwidth**2)
    return each.sum(1), (each.abs() * allowed[..., None]).sum(1)


@pytest.mark.few(1)
@pytest.mark.parametrize(("m", "n", "k"), [(3, 5, 17), (70, 130, 20), (65, 64, 37), (20, 30, 128)])
def test_values(m, n, k, emulator):
    torch.manual_seed(k)
    given = torch.randn(m, k), torch.randn(n, k), torch.randn(n), torch.randn(m)
    found = gradient(emulator, *given, 4.0).double()
    wanted, whole = exact(*given, 4.0)
    assert ((found - wanted).abs() <= BOUND * whole).all()


@pytest.mark.few(1)
@pytest.mark.parametrize("where", ["first", "last"])
@pytest.mark.parametrize("k", [20, 64, 128])
def test_a_feature_that_outgrows_the_others(k, where, emulator):
    """The square of each of the others is near half an ulp of the sum, of exponents -40 to -10."""
    torch.manual_seed(k)
    a, b = torch.randn(192, k), torch.randn(4, k)
    large = 0 if where == "first" else k - 1
    a[:, large] = torch.linspace(6e3, 1.2e4, 192)
    b[:, large] = torch.tensor([0.0, 1.0, -2.0, 3.0])
    v, g, bandwidth = torch.randn(4), torch.randn(192), 1.34e3
    found = gradient(emulator, a, b, v, g, bandwidth).double()
    wanted, whole = exact(a, b, v, g, bandwidth)
    assert ((found - wanted).abs() <= BOUND * whole).all()


def test_an_infinite_distance_adds_nothing(emulator):
    """Chains of features hand on no NaN behind an infinity."""
    torch.manual_seed(3)
    a, b, v, g = torch.randn(70, 64), torch.randn(66, 64), torch.randn(66), torch.randn(70)
    a[7, 3], b[5, 60] = 1e25, -1e25
    found = gradient(emulator, a, b, v, g, 4.0).double()
    wanted, whole = exact(a, b, v, g, 4.0)
    assert (found[7] == 0).all() and ((found - wanted).abs() <= BOUND * whole).all()

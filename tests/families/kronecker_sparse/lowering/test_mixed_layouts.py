"""Hopper's kernels of operands of which one has the batch last: on the host, and for whom alone
there are such."""

import pytest
import torch

from kernlib.families.kronecker_sparse.kernels.factor.hopper import Hopper
from kernlib.families.kronecker_sparse.kernels.gradient.weight_gradient import WeightGradient
from kernlib.families.kronecker_sparse.lowering import chain_gradient
from kernlib.families.kronecker_sparse.lowering import choose as lowering
from kernlib.families.kronecker_sparse.lowering.problem import Layout, OutLayout, Problem
from kernlib.lowering.kernel import Gpu
from tests.families.kronecker_sparse.lowering.cases import ARCH, launch_all, relative_error
from tests.support.emulation.emulator import Emulator, kernels_of

pytestmark = pytest.mark.emulated
GPU = Gpu(ARCH, 132)
BARS = {"float16": 4e-4, "bfloat16": 3.2e-3}
SIDES = [(False, False), (False, True), (True, False), (True, True)]


def product(a, b, c, n, last, dtype="float16") -> Problem:
    """With x, and with the result, batch last or first."""
    of_x, of_y = last
    left = Layout(c * n, n, 1, n) if of_x else Layout(c, 1, a * c, 1)
    out = OutLayout(b * n, n, 1, n) if of_y else OutLayout(b, 1, a * b, 1)
    return Problem(a, 1, n, b, c, left, Layout(b * c, 1, c, 1), out, dtype)


def gradient(a, b, c, n, last, dtype="float16") -> Problem:
    """With the gradient of y, and with x, batch last or first."""
    left, right = (
        Layout(count * n, n, n, 1) if is_last else Layout(count, 1, 1, a * count)
        for count, is_last in zip((b, c), last, strict=True)
    )
    return Problem(a, 1, b, c, n, left, right, OutLayout(b * c, 1, c, 1), dtype)


def laid(t, is_last: bool) -> torch.Tensor:
    return t.t().contiguous() if is_last else t


@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("last", SIDES)
@pytest.mark.parametrize(("a", "b", "c", "n"), [(2, 72, 40, 136), (1, 200, 136, 264)])
def test_products(tmp_path_factory, a, b, c, n, last, dtype):
    problem, kind = product(a, b, c, n, last, dtype), getattr(torch, dtype)
    torch.manual_seed(n)
    x, weight = torch.randn(n, a * c).to(kind), (torch.randn(a, b, c) / c**0.5).to(kind)
    y = torch.full((a * b, n) if last[1] else (n, a * b), float("nan"), dtype=kind)
    assert Hopper().takes(problem, ARCH, mixed=True)
    (choice, *_) = Hopper().choices(problem, ARCH)
    steps = Hopper().launch((), problem, Gpu(ARCH, 3), choice)
    tensors = {"left": laid(x, last[0]), "right": weight, "out": y}
    launch_all(Emulator(kernels_of(tmp_path_factory)), steps, tensors)
    exact = torch.einsum("ajk,nak->naj", weight.double(), x.double().view(n, a, c))
    result = y.t() if last[1] else y
    assert relative_error(result, exact.reshape(n, -1)) < BARS[dtype]


@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("last", SIDES)
@pytest.mark.parametrize(("a", "b", "c"), [(2, 64, 64), (1, 72, 40)])
def test_gradients(tmp_path_factory, a, b, c, last, dtype):
    n, kind = 1032, getattr(torch, dtype)
    problem = gradient(a, b, c, n, last, dtype)
    torch.manual_seed(n)
    grad, x = torch.randn(n, a * b).to(kind), torch.randn(n, a * c).to(kind)
    out = torch.full((a, b, c), float("nan"), dtype=kind)
    assert WeightGradient().takes(problem, ARCH, mixed=True)
    (choice,) = WeightGradient().choices(problem, ARCH)
    steps = WeightGradient().launch((), problem, Gpu(ARCH, 3), choice)
    tensors = {"left": laid(grad, last[0]), "right": laid(x, last[1]), "out": out}
    launch_all(Emulator(kernels_of(tmp_path_factory)), steps, tensors)
    exact = torch.einsum("naj,nak->ajk", grad.double().view(n, a, b), x.double().view(n, a, c))
    assert relative_error(out, exact) < BARS[dtype]


@pytest.mark.parametrize("last", SIDES)
def test_others_have_none(last):
    alike, halves = last[0] == last[1], ("float16", "bfloat16")
    for dtype in halves:
        given = product(2, 72, 40, 136, last, dtype), gradient(2, 64, 64, 1032, last, dtype)
        for problem, kind in zip(given, ("hopper", "gradient"), strict=True):
            kinds = {choice["kind"] for choice in lowering.candidates(problem, ARCH)}
            assert (kind in kinds) == alike
    assert Hopper().takes(product(2, 72, 40, 136, last, "float32"), ARCH, True) == alike


@pytest.mark.parametrize("dtype", BARS)
def test_they_are_compiled_ahead_for_chains(dtype):
    specs = chain_gradient.variants(((16, 64, 64, 1), (1, 256, 64, 16)), ARCH, [dtype])
    wanting = [product(16, 64, 64, 8192, last, dtype) for last in ((False, True), (True, False))]
    for problem in wanting:
        for choice in Hopper().choices(problem, ARCH):
            assert {*Hopper().launch((), problem, GPU, choice).specs} <= {*specs}
    problem = gradient(16, 64, 64, 8192, (True, False), dtype)
    (choice,) = WeightGradient().choices(problem, ARCH)
    assert WeightGradient().launch((), problem, GPU, choice).steps[0].spec in specs

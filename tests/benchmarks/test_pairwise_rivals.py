"""Reductions without a matrix, ours and rivals: formulas by hand, and KeOps's with a LazyTensor of
the test's own that holds the matrix; times need a GPU."""

import importlib
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.common import timing
from benchmarks.common.harness import Session
from benchmarks.pairwise import by_hand, keops, matmul, matmul_gradient, nearest, problems
from kernlib.settings import current
from tests.benchmarks.cases import Clock

POINTS = 60
H100 = timing.Device(132, 1.98e9)
PRODUCTS = {p.name: p._replace(points=POINTS) for p in matmul.PROBLEMS}
TRAINING = {p.name: p._replace(points=POINTS) for p in matmul_gradient.PROBLEMS}
GAUSSIAN = matmul.PROBLEMS[0]
TF32 = 2e-3  # which the CPU does not use


class Lazy:
    """KeOps's LazyTensor as far as the formulas go, on (M, N, D) entries that are there."""

    def __init__(self, entries):
        self.entries = entries

    def __sub__(self, other):
        return Lazy(self.entries - other.entries)

    def __mul__(self, other):
        return Lazy(self.entries * other.entries)

    def __or__(self, other):
        return Lazy((self.entries * other.entries).sum(-1, keepdim=True))

    def __neg__(self):
        return Lazy(-self.entries)

    def abs(self):
        return Lazy(self.entries.abs())

    def exp(self):
        return Lazy(self.entries.exp())

    def sum(self, dim):
        return Lazy(self.entries.sum(dim, keepdim=True))

    def sqdist(self, other):
        return Lazy((self - other).entries.square().sum(-1, keepdim=True))

    def Kmin_argKmin(self, k, dim):
        return self.entries[..., 0].topk(k, dim, largest=False)

    def __matmul__(self, v):
        return self.entries[..., 0] @ v


@pytest.fixture(autouse=True)
def rivals(monkeypatch):
    """KeOps that is there, and torch.compile that compiles nothing."""
    monkeypatch.setattr(keops, "is_there", lambda: True)
    monkeypatch.setattr(keops, "lazy", lambda x: Lazy)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    for module in (by_hand, matmul):
        monkeypatch.setattr(module, "BLOCK_ENTRIES", 7 * POINTS)


def checked(found, wanted, bound=1e-5):
    """The names of calls whose results are the wanted ones."""
    for name, results in found.items():
        for result, exact in zip(results, wanted, strict=True):
            assert result.shape == exact.shape and timing.relative_error(result, exact) < bound, (
                name
            )
    return list(found)


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_agree_with_float64(name):
    problem = PRODUCTS[name]
    a, b, v, out = matmul.tensors(problem, "cpu")
    assert v.shape == out.shape == (POINTS, problem.columns)[: 1 + (problem.columns > 1)]
    exact = matmul.exact(problem, a, b, v, torch.arange(POINTS))
    calls = matmul.rivals(problem) | {"ours": matmul.kernel(problem)}
    found = {n: [call(a, b, v, torch.full_like(out, math.nan))] for n, call in calls.items()}
    names = checked(found, [exact], TF32 if "tf32" in name else 1e-5)
    assert ("addmm" in names) is (problem.kernel == "gaussian") and "torch.compile" in names
    assert ("keops" in names) is (problem.kind == "fp32")
    by_products = problem.kernel == "gaussian" and problem.features > 16
    assert ("keops products" in names) is (problem.kind == "fp32" and by_products)


@pytest.mark.parametrize("name", TRAINING)
def test_gradients_agree_with_float64(name, monkeypatch):
    problem = TRAINING[name]
    monkeypatch.setattr(matmul_gradient, "EXACT_ENTRIES", 7 * POINTS * problem.features)
    buffers = matmul_gradient.tensors(problem, "cpu")
    exact = matmul_gradient.exact(problem, *buffers[:4], torch.arange(POINTS))
    calls = matmul_gradient.rivals(problem) | {"ours": matmul_gradient.kernel(problem)}
    names = checked({n: call(*buffers) for n, call in calls.items()}, exact)
    assert {"torch", "torch.compile", "keops"} <= set(names)
    assert ("addmm" in names) is (problem.kernel == "gaussian")


def test_neighbours_agree_with_float64():
    problem = nearest.Problem(POINTS, 5)
    a, b, out = nearest.tensors(problem, "cpu")
    exact = nearest.exact(problem, a, b, torch.arange(POINTS))
    calls = nearest.rivals(problem) | {"ours": nearest.kernel(problem)}
    found = {n: call(a, b, out) for n, call in calls.items()}
    names = checked({n: [r[0]] for n, r in found.items()}, [exact])
    assert names == ["torch", "addmm", "keops", "ours"]
    assert all(torch.equal(r[1], found["torch"][1]) for r in found.values())


def test_blocks_are_of_one_size():
    assert by_hand.rows_at_once(60, 60) == 6 and by_hand.rows_at_once(60, 1000) == 1
    assert by_hand.rows_at_once(4, 60) == 4


def test_one_block_is_compiled_for_one_shape(monkeypatch):
    shapes = set()

    def compile(function, dynamic, fullgraph):
        return lambda some, *rest: shapes.add(some.shape) or function(some, *rest)

    monkeypatch.setattr(torch, "compile", compile)
    problem = PRODUCTS[GAUSSIAN.name]
    matmul.rivals(problem)["torch.compile"](*matmul.tensors(problem, "cpu"))
    assert shapes == {(6, problem.features)}


# Rows.


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.setattr(timing.Device, "current", classmethod(lambda cls: H100))
    clock = Clock(0.5, 0.25)
    return matmul.measure(PRODUCTS[GAUSSIAN.name], Session(timer=clock), "cpu"), clock


def test_no_graph_holds_keops(measured):
    row, clock = measured
    assert row.ours == 0.25 and clock.replays == 4
    assert row.rivals == {"torch": 0.25, "addmm": 0.25, "torch.compile": 0.25, "keops": 0.5}
    assert row.rival_errors.keys() == row.rivals.keys() and max(row.rival_errors.values()) < 1e-5


def test_keops_without_its_gpu_is_left_out(monkeypatch, capsys):
    monkeypatch.undo()
    modules = {"pykeops.config": SimpleNamespace(gpu_available=False)}
    monkeypatch.setattr(keops.importlib, "import_module", modules.__getitem__)
    with pytest.raises(RuntimeError, match="no GPU"):
        keops.lazy(SimpleNamespace(is_cuda=True))

    def broken(name):
        raise ImportError("no g++")

    monkeypatch.setattr(importlib, "import_module", broken)
    monkeypatch.setattr(keops, "is_there", lambda: True)
    monkeypatch.setattr(timing.Device, "current", classmethod(lambda cls: H100))
    row = nearest.measure(nearest.Problem(POINTS, 3), Session(timer=Clock()), "cpu")
    assert row.rivals.keys() == {"torch", "addmm"}
    assert "keops is left out (ImportError: no g++)" in capsys.readouterr().err


def test_beside_kernels_of_other_gpus_stands_torch_alone(monkeypatch):
    monkeypatch.setattr(problems, "current", lambda: replace(current(), portable=True))
    monkeypatch.setattr(timing.Device, "current", classmethod(lambda cls: H100))
    row = matmul.measure(PRODUCTS[GAUSSIAN.name], Session(timer=Clock()), "cpu")
    assert row.rivals.keys() == {"torch"}

"""Steps of conjugate gradients as a CUDA graph: what goes in and comes out, without a GPU."""

from typing import ClassVar

import pytest
import torch

import kernlib
from kernlib import linalg
from kernlib.errors import CaptureError
from kernlib.linalg import captured, iterative
from kernlib.linalg.kernel_systems import as_numbers


class Replayed:
    """Runs the step anew where a graph would replay it, on tensors that stay where they are."""

    made: ClassVar[list] = []

    def __init__(self, step, state):
        self.step, self.state, self.counts = step, tuple(t.clone() for t in state), []
        self.made.append(self)

    def run(self, state, count):
        for kept, given in zip(self.state, state, strict=True):
            kept.copy_(given)
        for _ in range(count):
            for kept, found in zip(self.state, self.step(*self.state), strict=True):
                kept.copy_(found)
        self.counts.append(count)
        return self.state


@pytest.fixture
def replayed(monkeypatch):
    monkeypatch.setattr(Replayed, "made", [])
    monkeypatch.setattr(iterative, "Captured", Replayed)
    monkeypatch.setattr(iterative, "is_capturable", lambda device: True)
    return Replayed.made


def system(columns=3):
    turn = torch.linalg.qr(torch.randn(120, 120))[0]
    a = (turn * torch.logspace(0, 4, 120)) @ turn.mT
    return a, torch.randn(120, columns)


def solved(a, b, capture, **limits):
    arguments = {"tol": 1e-6, "max_iter": 400, "check_every": 10} | limits
    return iterative.solve(a.__matmul__, b, None, None, **arguments, capture=capture)


@pytest.mark.parametrize("limits", [{}, {"check_every": 7}, {"max_iter": 23}, {"max_iter": 10}])
def test_a_graph_changes_no_bit(limits, replayed, seed):
    """In float32 of this condition columns start again, so the graph is given other states."""
    a, b = system()
    plain, captured = solved(a, b, False, **limits), solved(a, b, True, **limits)
    assert captured.iterations == plain.iterations
    assert torch.equal(captured.x, plain.x) and torch.equal(captured.residual, plain.residual)
    first = min(limits.get("check_every", 10), limits.get("max_iter", 400))
    replays = sum(sum(graph.counts) for graph in replayed)
    assert len(replayed) == (plain.iterations > first) and replays == plain.iterations - first


@pytest.mark.parametrize("limits", [{}, {"max_iter": 23}, {"max_iter": 10}, {"tol": 1.0}])
def test_a_graph_is_made_while_the_device_is_at_work(limits, replayed, monkeypatch, seed):
    """Before the host waits to learn whether a column goes on, but where no steps may follow."""
    a, b = system()
    plain = solved(a, b, False, **limits)
    asked = []

    def is_busy(device):
        asked.append(len(replayed))
        return True

    monkeypatch.setattr(iterative, "is_busy", is_busy)
    captured = solved(a, b, True, **limits)
    assert torch.equal(captured.x, plain.x) and captured.iterations == plain.iterations
    assert len(replayed) == (limits.get("max_iter") != 10)
    assert asked == [0] * len(replayed)
    assert sum(sum(graph.counts) for graph in replayed) == plain.iterations - 10


def test_a_step_that_cannot_be_captured_is_run(monkeypatch, seed):
    def refuse(step, state):
        raise CaptureError("a kernel is not loaded")

    monkeypatch.setattr(iterative, "Captured", refuse)
    monkeypatch.setattr(iterative, "is_capturable", lambda device: True)
    a, b = system()
    assert torch.equal(solved(a, b, True).x, solved(a, b, False).x)


def test_only_products_of_kernlib_are_captured(replayed, seed):
    x, y = torch.randn(80, 3), torch.randn(80)
    arguments = {"bandwidth": 1.0, "regularization": 0.1, "rank": 0, "check_every": 5}
    linalg.solve_kernel(kernlib.gaussian(), x, y, tol=1e-5, **arguments)
    assert len(replayed) == 1
    a, b = system()
    linalg.conjugate_gradient(a.__matmul__, b, max_iter=30, tol=0)
    assert len(replayed) == 1


def test_captures_one_after_the_other_share_a_stream(monkeypatch):
    """For each would have 32 MiB of cuBLAS's, which stay; those at a time have one each."""
    monkeypatch.setattr(captured, "idle_streams", {})
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: [device])
    first, second = (torch.device("cuda", index) for index in range(2))
    with captured.stream_apart(first) as one:
        pass
    with pytest.raises(CaptureError), captured.stream_apart(first) as again:
        raise CaptureError
    assert again is one
    with captured.stream_apart(first) as again, captured.stream_apart(first) as two:
        assert again is one and two is not one
        with captured.stream_apart(second) as other:
            assert other == [second]
    with captured.stream_apart(first) as again, captured.stream_apart(first) as last:
        assert {id(again), id(last)} == {id(one), id(two)}


def test_hyperparameters_in_host_memory_are_numbers_of_a_graph():
    lengths, on_device = torch.ones(3), torch.empty((), device="meta")
    given = {"bandwidth": torch.tensor([2.5]), "lengthscale": lengths, "scale": 3, "c": on_device}
    found = as_numbers(given)
    assert found == {**given, "bandwidth": 2.5} and type(found["bandwidth"]) is float
    assert found["lengthscale"] is lengths and type(given["bandwidth"]) is torch.Tensor
    for wrong, error in (
        (torch.tensor(True), TypeError),
        (torch.tensor(1j), TypeError),
        (torch.ones(1, 1), ValueError),
        (torch.ones(1).to_sparse(), TypeError),
    ):
        with pytest.raises(error, match="bandwidth must"):
            as_numbers({"bandwidth": wrong})

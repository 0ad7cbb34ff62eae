"""Whoever records calls sees operators: make_fx, modes of the dispatcher, torch.jit.trace."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.contract.library.calls import EXACT, along, close, same, targets
from tests.contract.library.cases import tuple_of
from tests.contract.library.operations import each, every, recordings

pytestmark = pytest.mark.few(by="operation")

MODES = ["real", "fake", "symbolic"]


def named(names) -> set[str]:
    return {f"kernlib.{name}.default" for name in names}


@pytest.mark.parametrize("tracing", MODES)
@recordings(lambda one: one.graphs, records="recorded", sweep=False)
def test_make_fx_records_the_operators(operation, case, recording, tracing):
    graph = operation.graphs[case]
    made = make_fx(graph.call.run, tracing_mode=tracing)(*graph.call.leaves(recording))
    assert named(graph.recorded if recording else graph.operators) <= {*targets(made)}
    other = [2 * t if t.is_floating_point() else t for t in graph.call.leaves()]
    near = operation.near.recorded if recording else operation.near.plain
    close(made(*other), graph.call.run(*other), near)


@pytest.mark.parametrize("tracing", MODES)
@every(lambda one: [name for name, graph in one.graphs.items() if graph.backward])
def test_make_fx_sees_forward_and_backward(operation, case, tracing):
    graph = operation.graphs[case]

    def both(direction, *tensors):
        leaves = [t for t in tensors if t.requires_grad]
        return torch.autograd.grad(graph.call.run(*tensors).sin(), leaves, direction)

    direction = along(graph.call.run(*graph.call.leaves()))
    made = make_fx(both, tracing_mode=tracing)(direction, *graph.call.leaves(True))
    assert named(graph.backward) <= {*targets(made)}
    found, wanted = (run(direction, *graph.call.leaves(True)) for run in (made, both))
    close(found, wanted, operation.near.slopes, operation.strides)


@each()
def test_functional_tensors_are_tensors(operation):
    call = operation.typical
    found = torch.func.functionalize(call.run)(*call.leaves())
    close(found, call.run(*call.leaves()), EXACT)


@pytest.mark.filterwarnings("ignore")  # that it is deprecated
@pytest.mark.parametrize("recording", [False, True])
@each()
def test_a_traced_call_is_recorded(operation, recording):
    call = operation.typical
    traced = torch.jit.trace(lambda *tensors: call.run(*tensors) + 1, tuple(call.leaves()))
    near = operation.near._replace(plain=EXACT)
    other = call._replace(operands=tuple(2 * t for t in call.operands), near=near)
    shifted = other._replace(run=lambda *tensors: tuple_of(call.run(*tensors))[0] + 1)
    same(operation, shifted, traced, recording)

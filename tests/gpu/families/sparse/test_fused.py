"""Layers that read one x as one product on the GPU: eager, captured, compiled with CUDA graphs."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kernlib.nn import SparseLinear, sparsify
from kernlib.sparse import magnitude

DEVICE, WIDTH = "cuda", 512
STEPS = 4  # with CUDA graphs the first runs eagerly, the second records, the others replay
QKV = ["q_proj", "k_proj", "v_proj"]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """The products of a transformer's layer, with something of each between them."""

    def __init__(self, bias: bool):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH, bias), nn.Linear(WIDTH, 128, bias)
        self.v_proj, self.o_proj = nn.Linear(WIDTH, 128, bias), nn.Linear(WIDTH, WIDTH, bias)
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, 640, bias), nn.Linear(WIDTH, 640, bias)
        self.down_proj = nn.Linear(640, WIDTH, bias)

    def forward(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        x = x + self.o_proj(q * torch.tanh(k + v).repeat(*[1] * (x.dim() - 1), 4))
        return x + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def pair(density: float, bias: bool = True, dtype=torch.float16) -> tuple[nn.Module, nn.Module]:
    """A model of fused layers, and one of the same weights that are dense."""
    dense = Block(bias).to(DEVICE, dtype).requires_grad_(False)
    for layer in dense.children():
        magnitude(layer.weight, density, inplace=True)
    fused = copy.deepcopy(dense)
    sparsify(fused, fuse=[QKV, ["gate_proj", "up_proj"]])
    return fused, dense


def inputs(*batch: int) -> torch.Tensor:
    return torch.randn(*batch, WIDTH, device=DEVICE).half()


def close(found: torch.Tensor, dense: nn.Module, x: torch.Tensor) -> None:
    wanted = copy.deepcopy(dense).double()(x.double())
    error = ((found.double() - wanted).norm() / wanted.norm()).item()
    assert found.shape == wanted.shape and error <= 4e-3, error


@pytest.mark.parametrize("density", (0.1, 0.5))
@pytest.mark.parametrize("bias", (False, True))
def test_eager_calls(density, bias, seed):
    fused, dense = pair(density, bias)
    assert {layer.joint.matrix.shape for layer in (fused.q_proj, fused.v_proj)} == {(768, WIDTH)}
    for name in QKV:
        assert torch.equal(fused.get_submodule(name).to_dense(), dense.get_submodule(name).weight)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            for batch in ((), (1,), (1, 1), (2, 5), (40,)):
                x = inputs(*batch)
                close(fused(x), dense, x)


def test_a_capture_computes_what_an_eager_call_left_and_replays_alone(seed):
    """Rows that were computed outside of a capture, or in another one, are not taken inside."""
    fused, dense = pair(0.5)
    x = inputs(1)
    with torch.no_grad():
        stream, graphs, results = torch.cuda.Stream(), [], []
        for layer in (fused.q_proj, fused.k_proj):
            layer(x)  # loads kernels
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            fused.q_proj(x)  # whose rows the other two have not taken
            for name in ("k_proj", "v_proj"):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    results.append(fused.get_submodule(name)(x))
                graphs.append(graph)
        torch.cuda.synchronize()
        for _ in range(3):
            x.copy_(inputs(1))
            for name, graph, result in zip(("k_proj", "v_proj"), graphs, results, strict=True):
                result.zero_()
                graph.replay()
                torch.cuda.synchronize()
                expected = dense.get_submodule(name)(x)
                torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)


def test_a_captured_step(seed):
    fused, dense = pair(0.1)
    x, stream = inputs(1), torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        fused(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = fused(x)
        for _ in range(3):
            x.copy_(inputs(1))
            graph.replay()
            torch.cuda.synchronize()
            close(y, dense, x)


def test_rows_computed_on_another_stream_are_not_taken(seed):
    fused, dense = pair(0.5)
    x, stream = inputs(1), torch.cuda.Stream()
    with torch.no_grad():
        fused.k_proj(x)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            y = fused.v_proj(x)
        stream.synchronize()
    torch.testing.assert_close(y, dense.v_proj(x), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("density", (0.1, 0.5))
@pytest.mark.parametrize("bias", (False, True))
def test_replays_of_a_compiled_step(density, bias, seed):
    fused, dense = pair(density, bias)
    for layer in fused.children():
        if isinstance(layer, SparseLinear):
            layer.freeze()
    compiled = torch.compile(fused, fullgraph=True, mode="reduce-overhead")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for _ in range(STEPS):
                x = inputs(1, 1)
                torch.compiler.cudagraph_mark_step_begin()
                close(compiled(x).clone(), dense, x)


def test_gradients_eager_and_compiled(seed):
    fused, dense = pair(0.5, dtype=torch.float32)
    for layer in (fused.q_proj, fused.gate_proj):
        layer.joint.matrix.transpose()
    expected = None
    for call in (dense, fused, torch.compile(fused, fullgraph=True)):
        x = inputs(4).float().fill_(0.5).requires_grad_()
        (grad,) = torch.autograd.grad(call(x).square().sum(), x)
        expected = grad if expected is None else expected
        assert ((grad - expected).norm() / expected.norm()).item() <= 1e-3


def test_a_group_moves_and_is_saved(seed):
    fused, _ = pair(0.5)
    moved = copy.deepcopy(fused).cpu().to(DEVICE)
    other = copy.deepcopy(fused)
    other.load_state_dict(moved.state_dict())
    x = inputs(2)
    with torch.no_grad():
        for model in (moved, other):
            assert torch.equal(model(x), fused(x))

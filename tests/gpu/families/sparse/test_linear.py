"""SparseLinear on the GPU: torch.compile with CUDA graphs, captures, gradients, a swapped model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kernlib.nn import SparseLinear, sparsify
from kernlib.sparse import magnitude
from tests.families.sparse.cases import FORMATS
from tests.nn import layer_writes

DEVICE = "cuda"
STEPS = 4  # with CUDA graphs the first runs eagerly, the second records, the others replay
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 2e-6}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def linear(dtype=torch.float16, density: float = 0.4, rows: int = 520, cols: int = 1032):
    made = nn.Linear(cols, rows, device=DEVICE, dtype=dtype)
    magnitude(made.weight, density, inplace=True)
    return made


def exact(plain: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    bias = None if plain.bias is None else plain.bias.double()
    return F.linear(x.double(), plain.weight.double(), bias)


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    wanted = wanted.double()
    error = ((found.double() - wanted).norm() / wanted.norm()).item()
    assert found.shape == wanted.shape and error <= tolerance, error


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_is_the_linear_that_it_was_made_of(format, dtype, seed):
    plain = linear(dtype)
    layer = SparseLinear.from_linear(plain, format=format, activation="silu")
    assert torch.equal(layer.to_dense(), plain.weight)
    with torch.no_grad():
        for batch in ((), (1,), (8,), (3, 5), (40,)):
            x = torch.randn(*batch, 1032, device=DEVICE, dtype=dtype)
            close(layer(x), F.silu(exact(plain, x)), 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("batch", (1, 8))
def test_replays_of_a_compiled_layer(batch, seed):
    """Its weights are where they were: none is copied, and what is written there is seen."""
    plain = linear()
    layer = SparseLinear.from_linear(plain, format="bitmap", activation="gelu")
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for step in range(STEPS):
            if step == STEPS - 1:
                layer.bias.mul_(-1)
            x = torch.randn(batch, 1032, device=DEVICE).half()
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(compiled(x).clone(), layer(x))


def test_a_compiled_layer_trains_what_lies_before_it(seed):
    first, layer = nn.Linear(64, 1032, device=DEVICE), SparseLinear.from_linear(
        linear(torch.float32), format="bitmap"
    )  # fmt: skip
    layer.matrix.transpose()
    model = nn.Sequential(first, layer)
    compiled = torch.compile(model, fullgraph=True)
    x, gradients = torch.randn(4, 64, device=DEVICE), []
    for call in (model, compiled):
        loss = call(x).square().sum()
        gradients.append(torch.autograd.grad(loss, [*model.parameters()]))
    for eager, ours in zip(*gradients, strict=True):
        close(ours, eager, 1e-5)


@pytest.mark.parametrize("format", ["bitmap", "u8"])
def test_compiled_transforms_and_the_dense_matrix(format, seed):
    layer = SparseLinear.from_linear(linear(torch.float32), format=format)
    x = torch.randn(4, 1032, device=DEVICE)
    slope = torch.func.grad(lambda v: layer(v).square().sum())
    for run in (slope, torch.vmap(layer), lambda v: v @ layer.to_dense().mT):
        close(torch.compile(run, fullgraph=True)(x), run(x), 1e-5)


def test_a_swapped_model(seed):
    mlp = nn.Sequential(nn.Linear(512, 2048), nn.SiLU(), nn.Linear(2048, 512), nn.Linear(512, 16))
    mlp = mlp.to(DEVICE).bfloat16().eval()
    for index in (0, 2):
        magnitude(mlp[index].weight, 0.3, inplace=True)
    dense = copy.deepcopy(mlp)
    before = torch.cuda.memory_allocated()
    swapped = sparsify(mlp, match="^[02]$")
    assert list(swapped) == ["0", "2"] and torch.cuda.memory_allocated() < before
    x = torch.randn(8, 512, device=DEVICE).bfloat16()
    with torch.no_grad():
        close(mlp(x), dense.double()(x.double()), 2e-2)
    other = copy.deepcopy(mlp)
    other.load_state_dict(mlp.state_dict())
    moved = copy.deepcopy(mlp).cpu().to(DEVICE)
    with torch.no_grad():
        assert torch.equal(other(x), mlp(x)) and torch.equal(moved(x), mlp(x))


@pytest.mark.parametrize("kind", layer_writes.KINDS)
def test_layers_are_saved_and_filled_on_the_gpu(kind, seed):
    """By name, as transformers and accelerate fill a model on meta for a device; by a state of
    another device; and into a layer of bfloat16."""
    wanted, x = layer_writes.layer(kind, DEVICE, seed=5), layer_writes.inputs(kind, DEVICE)
    state = wanted.state_dict()
    assert {t.device.type for t in state.values()} == {"cuda"}
    y = wanted(x)
    for place in ("meta", DEVICE, "cpu"):
        for source in (state, {name: t.cpu() for name, t in state.items()}):
            module = layer_writes.empty(kind, place)
            module.load_state_dict(source, assign=place == "meta")
            assert torch.equal(module.to(DEVICE)(x), y)
    module = layer_writes.empty(kind, "meta")
    for name, tensor in state.items():
        if name in module._buffers:
            module._buffers[name] = tensor.clone()
        else:
            setattr(module, name, nn.Parameter(tensor.clone()))
    assert torch.equal(module(x), y) and torch.equal(copy.deepcopy(module)(x), y)
    if kind in FORMATS:
        half = x.bfloat16()
        assert torch.equal(wanted(half), wanted(half.float()).bfloat16())


def test_pruning_makes_the_choice_of_the_cpu(seed):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        weight = torch.randn(300, 517).to(dtype)
        weight[::7] = weight[0].clone()  # many are equal
        for density in (0.0, 0.1, 0.5, 1.0):
            for per in ("matrix", "row"):
                found = magnitude(weight.to(DEVICE), density, per)
                assert torch.equal(found.cpu(), magnitude(weight, density, per))

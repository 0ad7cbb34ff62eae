"""Pruning on a GPU beside the same on a CPU: the same entries stay by magnitude and by patterns,
nearly the same by inputs, whose sums round otherwise; and the memory that it takes."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from kernlib.errors import CaptureError
from kernlib.families.sparse.prune import PIECE, largest, prune_together
from kernlib.sparse import magnitude, prune
from tests.gpu.watched import capture, nothing_waits, peak

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = (F16, BF16, F32)
SHAPES = ((37, 53), (129, 257), (1, 300), (300, 1), (0, 8), (8, 0), (2, 3, 40))
PATTERNS = ((2, 4), (1, 2), (0, 4), (4, 4), (3, 8))
DENSITIES = (0, 0.01, 1 / 3, 0.5, 1)
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
METHODS = {"wanda": prune.wanda, "sparsegpt": prune.sparsegpt}
AGREEMENT, ERROR = 0.99, 1.02  # of masks, and of the relative error of outputs by a CPU's

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_method = pytest.mark.parametrize("method", METHODS)


def hostile(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """On a CPU: many equal magnitudes, NaN and infinities of both signs, zeros of both signs."""
    weight = torch.randint(-9, 10, shape).to(dtype) / 8
    special = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, -0.0], dtype=dtype)
    places = torch.randperm(weight.numel())[: weight.numel() // 8]
    weight.view(-1)[places] = special[torch.randint(5, places.shape)]
    return weight


def same(gpu: torch.Tensor, cpu: torch.Tensor) -> bool:
    """Bit for bit."""
    bits = BITS[cpu.element_size()]
    return gpu.is_cuda and torch.equal(gpu.detach().cpu().view(bits), cpu.detach().view(bits))


def net(dtype: torch.dtype) -> nn.Sequential:
    """Layers of odd sizes, on a CPU, with hostile weights, one of them without any."""
    layers = [nn.Linear(53, 37), nn.Linear(260, 129), nn.Linear(8, 0), nn.Linear(64, 5)]
    for layer in layers:
        layer.weight.data = hostile(*layer.weight.shape, dtype=dtype)
    return nn.Sequential(*layers)


def check_as_on_a_cpu(model: nn.Module, prune_by) -> None:
    """``prune_by(model)`` of a copy on the GPU returns the same and writes the same bits."""
    gpu = copy.deepcopy(model).cuda()
    assert prune_by(gpu) == prune_by(model)
    for (name, one), other in zip(gpu.named_parameters(), model.parameters(), strict=True):
        assert same(one, other), name


# By magnitude.


@every_dtype
def test_the_same_entries_stay_in_tensors(dtype, seed):
    for shape in SHAPES:
        for weight in (hostile(*shape, dtype=dtype), torch.randn(shape).to(dtype)):
            for per in ("matrix", "row"):
                for density in DENSITIES:
                    gpu, cpu = (magnitude(w, density, per) for w in (weight.cuda(), weight))
                    assert same(gpu, cpu), (shape, per, density)
            turned = weight.mT.contiguous().cuda().mT  # the same values by other strides
            assert torch.equal(largest(turned, 0.3).cpu(), largest(weight, 0.3)), shape


@every_dtype
def test_the_same_entries_stay_in_models(dtype, seed):
    for share in (
        {"density": 0.3},
        {"density": 0},
        {"density": 1},
        {"density": 0.3, "per": "row"},
        {"density": 0.3, "per": "model"},
        {"density": {"^0$": 0.25, "": 0.6}},
        {"density": lambda name, layer: 0.25 if layer.in_features == 53 else 0.75},
    ):
        check_as_on_a_cpu(net(dtype), lambda model, share=share: prune.magnitude(model, **share))


@every_dtype
def test_patterns_are_those_of_a_cpu(dtype, seed):
    for n, m in PATTERNS:
        for shape in ((37, 7 * m), (129, 33 * m), (2, 3, 5 * m), (0, m), (4, 0)):
            weight = hostile(*shape, dtype=dtype)
            assert torch.equal(prune.n_m(weight.cuda(), n, m).cpu(), prune.n_m(weight, n, m))
    model = net(dtype)
    check_as_on_a_cpu(model, lambda m: prune.magnitude(m, pattern=(2, 4), match="[123]"))


@pytest.mark.parametrize("dtypes", [(F16,) * 4, (F32,) * 4, (F16, BF16, F32, F16), (BF16, F64) * 2],
                         ids=str)  # fmt: skip
def test_weights_together_of_more_than_a_piece(dtypes, seed):
    """The histograms of a GPU have other digits and pieces than those of a CPU."""
    shapes = ((37, 53), (2049, PIECE // 2048), (0, 8), (129, 257))
    cpu = [hostile(*shape, dtype=d) for shape, d in zip(shapes, dtypes, strict=True)]
    cpu[1] = torch.randn(shapes[1]).to(dtypes[1])
    entries = sum(weight.numel() for weight in cpu)
    gpu = [weight.cuda() for weight in cpu]
    for density in (0.6, 0.01, 0):  # of what the former left
        count = round(density * entries)
        counts = prune_together(gpu, count)
        assert counts == prune_together(cpu, count) and sum(counts) == count
        assert all(same(one, other) for one, other in zip(gpu, cpu, strict=True)), density


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_layers_on_two_gpus_are_pruned_together(seed):
    model = net(F16)
    spread = copy.deepcopy(model).cuda()
    spread[1].to("cuda:1")
    assert prune.magnitude(spread, density=0.4, per="model") == prune.magnitude(
        model, density=0.4, per="model"
    )
    for one, other in zip(spread.parameters(), model.parameters(), strict=True):
        assert same(one, other)


def test_tensors_are_pruned_without_waits_and_in_graphs(seed):
    weight = torch.randn(129, 260, device="cuda", dtype=F16)
    calls = (
        lambda: magnitude(weight, 0.3),
        lambda: magnitude(weight, 0.3, "row"),
        lambda: prune.n_m(weight),
    )
    with nothing_waits():
        for call in calls:
            call()
    with capture() as graph:
        results = [call() for call in calls]
    weight.normal_()
    graph.replay()
    assert all(torch.equal(one, call()) for one, call in zip(results, calls, strict=True))


# By inputs.


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(260), nn.Linear(260, 129), nn.Linear(129, 260)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Chain(nn.Module):
    """Two blocks and a head, whose sizes are odd but for inputs of whole groups of four."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(260, 37)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def samples() -> list[torch.Tensor]:
    """Correlated inputs of several scales, one of which is always 0."""
    mix = torch.randn(260, 260) * torch.rand(260).exp()
    batches = [torch.randn(3, 50 + i, 260) @ mix / 16 for i in range(6)]
    for batch in batches:
        batch[..., 7] = 0
    return batches


SHARES = (
    {"density": 0.5},
    {"density": {"up": 0.3, "": 0.6}},
    {"pattern": (2, 4), "match": "up|head"},
)


@every_dtype
@every_method
def test_calibrated_layers_are_those_of_a_cpu(method, dtype, seed):
    """Of the same inputs, so that sums alone round otherwise."""
    dense = nn.Sequential(nn.Linear(260, 129)).to(dtype)
    batches = [x.to(dtype) for x in samples()]
    for share in ({"density": 0.5}, {"density": 0.3}, {"pattern": (2, 4)}, {"pattern": (1, 2)}):
        assert agreement(METHODS[method], dense, batches, share) > AGREEMENT, share


@every_dtype
@every_method
def test_calibrated_chains_are_those_of_a_cpu(method, dtype, seed):
    """In half types the last bit of an activation may swap entries, and by SparseGPT each of them
    others behind it: outputs are as good, the masks may be others."""
    dense, batches = Chain().to(dtype), [x.to(dtype) for x in samples()]
    for share in SHARES:
        agrees = agreement(METHODS[method], dense, batches, share)
        assert agrees > AGREEMENT or (dtype != F32 and method == "sparsegpt"), share


def agreement(prune_by, dense: nn.Module, batches: list[torch.Tensor], share: dict) -> float:
    """The part of the entries of which a GPU and a CPU say the same. Densities and errors of
    outputs must be the same, too."""
    cpu, gpu = copy.deepcopy(dense), copy.deepcopy(dense).cuda()
    densities = prune_by(cpu, batches, progress=False, **share)
    # An iterator, which is gone through once.
    assert prune_by(gpu, (x.cuda() for x in batches), progress=False, **share) == pytest.approx(
        densities, abs=2e-3
    )
    same_entries, entries = 0, 0
    for name in densities:
        one, other = (m.get_submodule(name).weight.detach().cpu() for m in (gpu, cpu))
        assert one.dtype == other.dtype
        same_entries += int(((one != 0) == (other != 0)).sum())
        entries += one.numel()
    assert error_of(gpu.cpu(), dense, batches) <= ERROR * error_of(cpu, dense, batches), share
    return same_entries / entries


@torch.no_grad()
def error_of(pruned: nn.Module, dense: nn.Module, batches: list[torch.Tensor]) -> float:
    """Relative, of outputs in float64."""
    models = [copy.deepcopy(model).double() for model in (pruned, dense)]
    y, exact = (torch.cat([m(x.double()).flatten() for x in batches]) for m in models)
    return ((y - exact).norm() / exact.norm()).item()


@every_method
def test_counts_are_exact_and_dead_or_nan_entries_are_as_on_a_cpu(method, seed):
    x = torch.randn(400, 257) * torch.rand(257).exp()
    x[:, ::5] = 0
    weight = torch.randn(37, 257)
    if method == "wanda":  # SparseGPT would spread it over its row
        weight[3, 4] = math.nan
    for density in (0, 0.2, 1):
        layers = [nn.Linear(257, 37), nn.Linear(257, 37, device="cuda")]
        for layer in layers:
            layer.weight.data.copy_(weight)
            METHODS[method](nn.Sequential(layer), [x.to(layer.weight.device)], density=density)
        cpu, gpu = (layer.weight.detach().cpu() for layer in layers)
        counts = (gpu != 0).sum(1)
        assert torch.equal(gpu[:, ::5] != 0, cpu[:, ::5] != 0)
        assert torch.equal(gpu.isnan(), cpu.isnan())
        if method == "wanda":
            assert counts.eq(round(density * 257)).all()
        elif density < 1:
            assert counts.sum() == round(density * 37 * 257)


@every_method
def test_batches_lie_on_the_model_s_device(method, seed):
    layer = nn.Linear(64, 32, device="cuda")
    before = layer.weight.detach().clone()
    with pytest.raises(ValueError, match=r"batches\[1\]: .* does not take it"):
        METHODS[method](nn.Sequential(layer), [torch.ones(3, 64).cuda(), torch.ones(3, 64)])
    assert torch.equal(layer.weight, before)


@every_method
def test_another_stream(method, seed):
    """Behind work on it that has not ended."""
    expected, batches, stream = Chain().cuda(), [x.cuda() for x in samples()], torch.cuda.Stream()
    model = copy.deepcopy(expected)
    densities = METHODS[method](expected, batches)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**7)
        assert METHODS[method](model, batches) == densities
    stream.synchronize()
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-5)


def test_models_are_not_pruned_in_captures(seed):
    model, x = Chain().cuda(), [torch.ones(3, 260, device="cuda")]
    before = copy.deepcopy(model.state_dict())
    for call in (
        lambda: prune.magnitude(model),
        lambda: prune.magnitude(model, per="model"),
        lambda: prune.wanda(model, x),
        lambda: prune.sparsegpt(model, x),
    ):
        with pytest.raises(CaptureError, match="prune before the capture"), capture():
            call()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# Memory.


def test_memory_is_that_of_pieces_and_hessians(seed):
    """Of two layers of 64 MiB each, beside what was there before."""
    rows, columns, batch = 8192, 4096, 256
    layers = [nn.Linear(columns, rows, False, "cuda", F16), nn.Linear(rows, columns, False, "cuda",
              F16)]  # fmt: skip
    model, layer = nn.Sequential(*layers), 2 * rows * columns
    x = [torch.randn(batch, columns, device="cuda", dtype=F16) for _ in range(2)]
    prune.sparsegpt(nn.Sequential(nn.Linear(64, 64, device="cuda")), [x[0][:, :64].float()])
    for call in (
        lambda: prune.magnitude(model, density=0.9),
        lambda: prune.magnitude(model, density=0.8, per="row"),
        lambda: prune.magnitude(model, density=0.7, per="model"),
        lambda: prune.magnitude(model, pattern=(2, 4)),
    ):
        assert peak(call)[1] < layer
    # Activations of a batch in float32 and their squares, and scores of a piece.
    activations = 2 * 4 * batch * rows
    assert peak(lambda: prune.wanda(model, x, density=0.4))[1] < 2 * layer + activations
    # Two Hessians, of the larger one two factors more; the weight in float32.
    hessians = 4 * (rows**2 + columns**2)
    most = hessians + 2 * 4 * rows**2 + 2 * layer + activations + (64 << 20)
    assert peak(lambda: prune.sparsegpt(model, x, density=0.3, dampening=0.1))[1] < most

"""Wanda and SparseGPT of models, beside references of one weight in float64."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from kernlib import KernlibWarning
from kernlib.sparse import prune
from tests.nn.pruning.models import Decoder, Skips, Twice, Writes, batches, decoder, inputs_of
from tests.nn.pruning.references import PRUNED

METHODS = {"wanda": prune.wanda, "sparsegpt": prune.sparsegpt}
SHARES = ({"density": 0.5}, {"density": 0.3}, {"pattern": (2, 4)}, {"pattern": (1, 2)})
OF_BLOCK = ("up", "down")


def amount(share: dict) -> tuple:
    return share.get("density", 0.5), share.get("pattern")


def prune_stage(method: str, model: nn.Module, names: list[str], samples, share: dict) -> None:
    """Prune some layers by what they read while all of them are as they were."""
    pruned = {}
    for name in names:
        weight = model.get_submodule(name).weight.detach()
        pruned[name] = PRUNED[method](weight, inputs_of(model, name, samples), *amount(share))
    with torch.no_grad():
        for name, weight in pruned.items():
            model.get_submodule(name).weight.copy_(weight)


@pytest.mark.parametrize("share", SHARES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_each_block_sees_what_the_pruned_ones_in_front_return(method, share):
    model, samples = decoder(), batches()
    expected = copy.deepcopy(model)
    for block in range(3):
        names = [f"blocks.{block}.{name}" for name in OF_BLOCK]
        prune_stage(method, expected, names, samples, share)
    prune_stage(method, expected, ["head"], samples, share)
    densities = METHODS[method](model, iter(samples), **share)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, msg=name)
    assert [*densities] == [f"blocks.{i}.{name}" for i in range(3) for name in OF_BLOCK] + ["head"]
    assert model.training and all(part.training for part in model.modules())


@pytest.mark.parametrize("kind", [Skips, Writes, Twice])
@pytest.mark.parametrize("method", METHODS)
def test_blocks_that_are_no_chain_are_pruned_by_the_dense_model(method, kind):
    model, samples = decoder(kind), batches()
    expected = copy.deepcopy(model)
    names = [f"blocks.{i}.{name}" for i in range(3) for name in OF_BLOCK]
    prune_stage(method, expected, [*names, "head"], samples, {})
    METHODS[method](model, samples)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, msg=name)


@pytest.mark.parametrize("method", METHODS)
def test_models_without_blocks(method, seed):
    samples = [torch.randn(20, 300) @ torch.randn(300, 300) for _ in range(20)]
    model = nn.Sequential(nn.Linear(300, 40), nn.ReLU(), nn.Linear(40, 8)).double()
    samples = [x.double() for x in samples]
    expected = copy.deepcopy(model)
    prune_stage(method, expected, ["0", "2"], samples, {})
    densities = METHODS[method](model, samples)
    torch.testing.assert_close(model.state_dict(), expected.state_dict())
    assert densities == {"0": 0.5, "2": 0.5}
    one = nn.Linear(300, 40).double()
    assert METHODS[method](one, samples, density=0.25) == {"": 0.25}


@pytest.mark.parametrize("method", METHODS)
def test_counts_are_exact_and_repeat(method, seed):
    def pruned(**share) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(301, 37), nn.Linear(37, 13))
        samples = [torch.randn(50, 301) for _ in range(12)]
        METHODS[method](model, samples, **share)
        return model

    for density in (0, 0.1, 1 / 3, 0.7, 1):
        first, second = pruned(density=density), pruned(density=density)
        for one, other in zip(first.parameters(), second.parameters(), strict=True):
            assert torch.equal(one, other)
        for layer in first:
            rows, columns = layer.weight.shape
            counts = torch.count_nonzero(layer.weight, 1)
            if method == "wanda":
                assert counts.tolist() == [round(density * columns)] * rows
            assert counts.sum() == (
                rows * round(density * columns) if method == "wanda"
                else round(density * rows * columns)
            )  # fmt: skip


@pytest.mark.parametrize("pattern", [(2, 4), (1, 4), (4, 8)])
@pytest.mark.parametrize("method", METHODS)
def test_each_group_keeps_n(method, pattern, seed):
    layer = nn.Linear(256, 24)
    METHODS[method](nn.Sequential(layer), [torch.randn(400, 256)], pattern=pattern)
    n, m = pattern
    assert (layer.weight.unflatten(1, (-1, m)) != 0).sum(-1).eq(n).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("method", METHODS)
def test_half_types_are_computed_in_float32(method, dtype, seed):
    layer, x = nn.Linear(64, 32), torch.randn(300, 64) * torch.rand(64).exp()
    layer, x = layer.to(dtype), x.to(dtype)
    expected = PRUNED[method](layer.weight.detach(), x, 0.5)
    METHODS[method](nn.Sequential(layer), [x])
    assert layer.weight.dtype == dtype and isinstance(layer.weight, nn.Parameter)
    apart = ((layer.weight.double() - expected).norm() / expected.norm()).item()
    # A rounded score that comes to lie behind its neighbour swaps two entries.
    assert apart < {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 1e-3}[dtype]


def test_dead_inputs_are_dropped_first(seed):
    layer, x = nn.Linear(32, 8, dtype=torch.float64), torch.randn(100, 32, dtype=torch.float64)
    x[:, ::4] = 0
    expected = PRUNED["sparsegpt"](layer.weight.detach(), x, 0.5)
    for density in (0.5, 1):
        model = nn.Sequential(copy.deepcopy(layer))
        prune.sparsegpt(model, [x], density=density)
        assert not model[0].weight[:, ::4].any()
        if density == 0.5:
            torch.testing.assert_close(model[0].weight.detach(), expected)
    model = nn.Sequential(copy.deepcopy(layer))
    assert prune.wanda(model, [x]) == {"0": 0.5} and not model[0].weight[:, ::4].any()


def test_compensation_is_nearer_than_masks_alone(seed):
    x = torch.randn(500, 40) @ torch.randn(40, 128)
    layer = nn.Linear(128, 64)
    y, errors = layer(x), {}
    for name, call in {**METHODS, "magnitude": lambda m, _: prune.magnitude(m)}.items():
        model = nn.Sequential(copy.deepcopy(layer))
        call(model, [x])
        errors[name] = ((model(x) - y).norm() / y.norm()).item()
    assert errors["sparsegpt"] < errors["wanda"] < 1.05 * errors["magnitude"]


def test_inputs_of_any_form():
    model, tokens = decoder(), batches()
    expected = copy.deepcopy(model)
    prune.wanda(expected, [(each, 1.0) for each in tokens])
    for form in (tokens, tuple(tokens), iter([{"tokens": each} for each in tokens])):
        again = decoder()
        prune.wanda(again, form)
        torch.testing.assert_close(again.state_dict(), expected.state_dict())


def test_a_layer_in_two_places_is_pruned_once_by_all_its_inputs(seed):
    layer = nn.Linear(12, 12, dtype=torch.float64)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    x = torch.randn(40, 12, dtype=torch.float64)
    reads = torch.cat((x, layer(x).relu())).detach()
    expected = PRUNED["wanda"](layer.weight.detach(), reads, 0.5)
    assert prune.wanda(model, [x]) == {"0": 0.5}
    torch.testing.assert_close(layer.weight.detach(), expected)
    model = decoder()
    model.blocks[2].up = model.blocks[0].up  # pruned last, as blocks share it
    assert prune.wanda(model, batches(), match="blocks")["blocks.0.up"] == 0.5


def test_layers_that_no_batch_reaches_stay_and_are_named():
    model = decoder()
    model.unused = nn.Linear(16, 16)
    before = model.unused.weight.detach().clone()
    with pytest.warns(KernlibWarning, match="leaves 1 of 8 layers as they are.*'unused'"):
        prune.sparsegpt(model, batches())
    assert torch.equal(model.unused.weight, before)


def test_the_last_block_and_the_head_run_densely_for_one_batch_alone():
    model = decoder()
    prune.wanda(model, batches(5), match="blocks")
    assert model.runs == 1


def test_autocast_and_inference_mode_change_nothing(seed):
    samples = batches()
    expected = decoder(dtype=torch.float32)
    prune.sparsegpt(expected, samples)
    model = decoder(dtype=torch.float32)
    with torch.inference_mode():
        prune.sparsegpt(model, samples)
    torch.testing.assert_close(model.state_dict(), expected.state_dict())
    layer = nn.Linear(64, 32)
    other, x = copy.deepcopy(layer), torch.randn(200, 64)
    prune.sparsegpt(layer, [x])
    with torch.autocast("cpu", torch.bfloat16):
        prune.sparsegpt(other, [x])
    torch.testing.assert_close(layer.weight, other.weight)


@pytest.mark.parametrize("encoder", [True, False])
def test_layers_of_torchs_encoders_are_called(encoder, seed):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2) if encoder else layer
    with warnings.catch_warnings():
        warnings.simplefilter("error", KernlibWarning)
        result = prune.wanda(model.eval(), [torch.randn(3, 5, 16)], match="linear")
    assert set(result.values()) == {0.5} and torch.backends.mha.get_fastpath_enabled()


class Gate(nn.Module):
    def forward(self, x):
        return x / 0


REFUSED = {
    "none": (lambda m: (m, []), ValueError, "batches is empty"),
    "one tensor": (lambda m: (m, batches()[0]), TypeError, r"one batch: pass \[batches\]"),
    "one dict": (lambda m: (m, {"tokens": batches()[0]}), TypeError, "one batch"),
    "a number": (lambda m: (m, 3), TypeError, "batches must be an iterable .* got 3"),
    "numbers": (lambda m: (m, [3]), TypeError, r"batches\[0\] must be a tensor, .* got 3"),
    "refused": (
        lambda m: (m, [*batches(), (1, 2, 3, 4)]), ValueError, r"batches\[3\]: Decoder does not"
    ),
    "unknown name": (
        lambda m: (m, [{"ids": batches()[0]}]), ValueError, r"batches\[0\]: .*TypeError.*'ids'"
    ),
    "not finite": (
        lambda m: (nn.Sequential(Gate(), nn.Linear(3, 3)), [torch.ones(2, 3)]), ValueError,
        "1: its inputs over batches must be finite",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("method", METHODS)
def test_batches_that_are_refused(method, case):
    arguments, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        METHODS[method](*arguments(decoder()))


def test_a_hessian_that_is_not_positive_definite_says_what_helps():
    x = torch.tensor([[2.0, 2.0], [0.0, 0.0]])  # two inputs that are the same, 2 X^T X / 2 exact
    message = r"^0: the Hessian .* dampening = 0: dampening must be higher"
    with pytest.raises(torch.linalg.LinAlgError, match=message):
        prune.sparsegpt(nn.Sequential(nn.Linear(2, 4)), [x], dampening=0)
    for wrong, kind in ((-1, ValueError), (float("inf"), ValueError), ("x", TypeError)):
        with pytest.raises(kind, match="dampening must be"):
            prune.sparsegpt(decoder(), batches(), dampening=wrong)
    for wrong, kind in ((0, ValueError), (1.5, TypeError)):
        with pytest.raises(kind, match="block_size must be"):
            prune.sparsegpt(decoder(), batches(), block_size=wrong)
    with pytest.raises(ValueError, match="block_size must be a multiple of m = 4"):
        prune.sparsegpt(decoder(), batches(), block_size=30, pattern=(2, 4))


def test_progress_is_shown_to_who_asks(capsys):
    for progress in (None, False, True):
        prune.wanda(decoder(), batches(), progress=progress)
        assert ("wanda 4/4" in capsys.readouterr().err) is (progress is True)
    with pytest.raises(TypeError, match="progress must be"):
        prune.wanda(Decoder(), batches(), progress="yes")

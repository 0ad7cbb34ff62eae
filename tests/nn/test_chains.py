"""Which chains of factors are proposed for a model, and what they are estimated to take."""

from __future__ import annotations

import json
import math
import re
import warnings

import pytest
import torch
from rich.console import Console
from torch import nn

from kernlib.errors import KernlibWarning
from kernlib.nn import VIT_B16, VIT_S16, KSLinear, replace_linear, suggest_chains
from tests.support.paths import ROOT

ROWS, FEW_ROWS = 25088, 256  # of which a chain is two launches, and dense layers are faster
RESULTS = ROOT / "benchmarks" / "results" / "h200" / "kronecker_sparse.json"
PROGRAMS = RESULTS.with_name("programs.json")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
BOUND = 1.5  # times, of a single estimate


def layer(patterns, dtype=torch.float16, **options) -> KSLinear:
    return KSLinear(patterns, dtype=dtype, device="meta", **options)


def model(dtype=torch.float16) -> nn.Module:
    sizes = (384, 1536), (1536, 384), (384, 384), (384, 384)
    return nn.Sequential(*(nn.Linear(*one, dtype=dtype, device="meta") for one in sizes))


def measured():
    """Layers of one factor with their and the dense layer's microseconds, by case."""
    name = re.compile(r"kronecker_sparse (?:grid )?\(([\d,]+)\) (first|last) (\w+)")
    for row in json.loads(RESULTS.read_text())["rows"]:
        found = name.fullmatch(row["case"])
        if found and found[3] in DTYPES:
            pattern = tuple(int(size) for size in found[1].split(","))
            options = {"bs_last": found[2] == "last", "precision": "fp32"}
            times = [1e3 * time for time in (row["ours"], row["rivals"].get("dense", 0)) if time]
            yield row["case"], layer([pattern], DTYPES[found[3]], **options), times


def test_estimates_are_near_what_was_measured():
    """Of committed rows: each within BOUND, and half of them within an eighth."""
    errors = []
    for case, one, times in measured():
        for estimate, time in zip(one.estimate(ROWS), times, strict=False):
            errors.append(abs(math.log(estimate / time)))
            assert errors[-1] <= math.log(BOUND), (case, estimate, time)
    assert len(errors) > 300 and sorted(errors)[len(errors) // 2] <= math.log(1.125)


def test_an_estimate_says_both_times():
    estimate = layer(VIT_S16[384, 384]).estimate(FEW_ROWS)
    assert estimate.speedup == estimate.dense_us / estimate.layer_us < 1
    assert str(estimate) == (
        f"{estimate.layer_us:.1f} us, dense {estimate.dense_us:.1f} us: {estimate.speedup:.2f} x "
        "as fast"
    )
    wide = layer([(64, 64, 64, 1), (1, 256, 64, 64)], torch.bfloat16)
    assert wide.estimate(8192).speedup > 3


@pytest.mark.parametrize("name", ["chain 384-1536", "chain 384-384", "chain 1536-384"])
def test_estimates_of_chains_are_near_what_was_measured(name):
    """Of committed rows, as one kernel: within a third."""
    rows = {row["case"]: row for row in json.loads(PROGRAMS.read_text())["rows"]}
    inner, outer = map(int, name.split()[1].split("-"))
    time = 1e3 * rows[f"ks {name} {ROWS} rows inference fp16"]["ours"]
    estimate = layer(VIT_S16[inner, outer]).estimate(ROWS)
    gelu = 1.4 if outer > inner else 1.0  # which takes as long as the rest of a wide result
    assert abs(math.log(estimate.layer_us * gelu / time)) <= math.log(4 / 3)


def test_the_precision_of_float32_decides():
    fp32, tf32 = (layer(VIT_S16[1536, 384], torch.float32, precision=p) for p in ("fp32", "tf32"))
    assert fp32.estimate(ROWS).dense_us > 2 * tf32.estimate(ROWS).dense_us
    assert fp32.estimate(ROWS).layer_us > tf32.estimate(ROWS).layer_us


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="rows must be 1 or more, below"):
        layer([(1, 8, 8, 1)]).estimate(0)
    with pytest.raises(ValueError, match="rows must be 1 or more"):
        layer([(1, 8, 8, 1)]).estimate(10**300)
    with pytest.raises(TypeError, match="rows must be an int"):
        layer([(1, 8, 8, 1)]).estimate(2.5)
    with pytest.raises(TypeError, match="dtype must be float16"):
        layer([(1, 8, 8, 1)], torch.float64).estimate(3)
    with pytest.raises(TypeError, match="dtype must be float16"):
        suggest_chains(model(), 8, torch.int8)
    with pytest.raises(ValueError, match="count must be 1 or more"):
        suggest_chains(model(), 8, count=0)
    with pytest.raises(TypeError, match="put it in an"):
        suggest_chains(nn.Linear(3, 4), 8)


def test_chains_fit_and_are_ordered():
    suggestions = suggest_chains(model(), ROWS, count=4)
    assert list(suggestions) == [(384, 1536), (1536, 384), (384, 384)] and len(suggestions) == 3
    for (cols, out), every in suggestions.items():
        assert len(every) <= 4
        for one in every:
            module = layer(one.chain)
            assert (module.in_features, module.out_features) == (cols, out)
            assert one.parameters == sum(math.prod(pattern) for pattern in one.chain) < cols * out
            assert one.operations == 2 * ROWS * one.parameters
            assert one.estimate == module.estimate(ROWS) and one.estimate.speedup > 1
        parameters = [one.parameters for one in every]
        times = [one.estimate.layer_us for one in every]
        assert parameters == sorted(parameters, reverse=True)
        assert times == sorted(times, reverse=True)


def test_every_output_of_a_chain_reads_every_input():
    sizes = nn.Sequential(nn.Linear(48, 96), nn.Linear(96, 64)).float()
    suggestions = suggest_chains(sizes, 1 << 20, torch.float32, count=100)
    assert any(suggestions.values())
    for every in suggestions.values():
        for one in every:
            ones = [torch.ones(pattern) for pattern in one.chain]
            assert bool((KSLinear(one.chain, ones).to_dense() > 0).all())


def test_suggestions_are_what_replace_linear_takes():
    net = nn.Sequential(nn.Linear(384, 1536), nn.GELU(), nn.Linear(1536, 384)).half()
    suggestions = suggest_chains(net, ROWS)
    patterns = suggestions.patterns(1.2)
    assert patterns.keys() == {(384, 1536), (1536, 384)}
    for sizes, chain in patterns.items():
        fast = [one for one in suggestions[sizes] if one.estimate.speedup >= 1.2]
        assert chain == max(fast, key=lambda one: one.parameters).chain
    assert suggestions.patterns(1000) == {} and suggestions.patterns(0) == suggestions.patterns()
    for speedup, error in (("2", TypeError), (None, TypeError), (math.nan, ValueError)):
        with pytest.raises(error, match="speedup must be"):
            suggestions.patterns(speedup)
    with warnings.catch_warnings():
        warnings.simplefilter("error", KernlibWarning)
        replaced = replace_linear(net, patterns, rows=ROWS)
    assert list(replaced) == ["0", "2"]


def test_a_table_shows_them():
    suggestions = suggest_chains(model(), ROWS)
    text = repr(suggestions)
    assert "Chains for 25088 rows in float16" in text and "1536 to 384" in text
    assert "none is faster" in repr(suggest_chains(model(), FEW_ROWS))
    console = Console(width=140)
    with console.capture() as capture:
        console.print(suggestions)
    assert "speed-up" in capture.get()


def test_match_dtype_and_shared_layers():
    net = model(torch.float32)
    net.append(net[0])
    assert list(suggest_chains(net, ROWS, match="^[23]$")) == [(384, 384)]
    assert suggest_chains(net, ROWS).dtype == torch.float32
    assert suggest_chains(net, ROWS, torch.bfloat16).dtype == torch.bfloat16
    assert dict(suggest_chains(nn.Sequential(nn.ReLU()), 5)) == {}


def test_replace_linear_warns_of_layers_that_are_slower():
    net = nn.Sequential(*(nn.Linear(384, 384).half() for _ in range(3)))
    with pytest.warns(KernlibWarning, match=r"'0' and 2 more with .*dense \d") as caught:
        replaced = replace_linear(net, VIT_S16, rows=FEW_ROWS)
    assert len(replaced) == 3 and len(caught) == 1
    assert "suggest_chains(model, 256)" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error", KernlibWarning)
        replace_linear(nn.Sequential(nn.Linear(384, 384).half()), VIT_S16)
        replace_linear(nn.Sequential(nn.Linear(384, 384).half()), VIT_S16, rows=ROWS)
        replace_linear(nn.Sequential(nn.Linear(384, 384)), VIT_S16, rows=ROWS)  # float32 gains
        replace_linear(nn.Sequential(nn.Linear(384, 384).double()), VIT_S16, rows=ROWS)
    net = nn.Sequential(nn.Linear(384, 384))
    with pytest.raises(ValueError, match="rows must be 1 or more, below"):
        replace_linear(net, VIT_S16, rows=0)
    assert type(net[0]) is nn.Linear


@pytest.mark.parametrize(("sizes", "chain"), VIT_B16.items(), ids=str)
def test_the_chains_of_vit_b16(sizes, chain):
    one = layer(chain)
    assert (one.in_features, one.out_features) == sizes
    assert sum(map(math.prod, chain)) < 0.6 * math.prod(sizes)


def test_factors_on_several_devices_are_named(seed):
    one = KSLinear([(2, 8, 8, 1), (1, 16, 16, 1)], algo="einsum")
    one.factors[1] = nn.Parameter(one.factors[1].detach().to("meta"))
    with pytest.raises(
        ValueError, match=r"factors\[1\] must be on cpu as factors\[0\] is, got meta"
    ):
        one(torch.randn(3, 16))

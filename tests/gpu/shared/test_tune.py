"""Tuning and preparing on a real GPU: what is timed, kept and found again, and graphs after it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
import torch

import kernlib as kl
from kernlib import ahead, tuner
from kernlib.jit import tuning
from kernlib.runtime import devices
from kernlib.runtime.plan import forget_plans
from tests.gpu.families.pairwise.cases import points, relative_error
from tests.gpu.watched import capture, heard

M, N, K = 1100, 1000, 64  # 72 tiles of 128 and 288 of 64: both can be chosen on every GPU
GRIDS = {128: "72x1", 64: "288x1"}

CHOOSE_OR_CALL = """
import json, sys, torch
import kernlib as kl
from kernlib import tuner
a, b = torch.randn(1100, 64, device="cuda"), torch.randn(1000, 64, device="cuda")
if sys.argv[1] != "call":
    wins = int(sys.argv[1])
    tuner.measure = lambda launches, names, progress: [1.0, 2.0][::wins]
    found = kl.tune(kl.matern32(direct=True), a, b, bandwidth=2.0)
    assert found.kept, found
seen = []
kl.events.subscribe(lambda event: seen.append([event.name, event.fields.get("grid")]))
out = kl.run_kernel(kl.matern32(direct=True), a, b, bandwidth=2.0)
scaled = torch.cdist(a.double(), b.double()) * 3**0.5 / 2
assert (out - (1 + scaled) * torch.exp(-scaled)).abs().max() < 1e-5
print(json.dumps(seen))
"""

PREPARE_FIRST = """
import torch, kernlib as kl
x = torch.empty(70, 12, device="meta")
kl.prepare(kl.l1_distance(), x, x)
names = []
kl.events.subscribe(lambda event: names.append(event.name))
a = torch.randn(70, 12, device="cuda")
out = kl.run_kernel(kl.l1_distance(), a, a)
assert (out - torch.cdist(a.double(), a.double(), p=1)).abs().max() < 1e-5
assert names == ["launch"], names
"""


@pytest.fixture(autouse=True)
def fresh_plans():
    """Plans that other tests made would hide what a choice changes."""
    forget_plans()


@pytest.fixture
def seen():
    """The events of a test."""
    with heard() as found:
        yield found


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return points(M, K), points(N, K)


def fresh(factor: float) -> kl.Pairwise:
    """The l1 distance times a factor that no other test uses: a kernel that is not loaded."""
    return kl.l1_distance(epilogue=kl.Custom(f"v * {factor}"))


def wanted(a: torch.Tensor, b: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    return torch.cdist(a.double(), b.double(), p=1) * factor


def in_a_process(tmp_path, code: str, *arguments: str, **environment: str) -> str:
    env = {**os.environ, "KERNLIB_CACHE_DIR": str(tmp_path), **environment}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout


# tune.


def test_the_winner_is_kept_and_runs_from_then_on(seed, seen):
    a, b = inputs()
    descriptor = fresh(1.0625)
    found = kl.tune(descriptor, a, b)
    assert found.kept and len(found.timings) == 2
    assert all(0 < timing.milliseconds < 50 for timing in found.timings)
    assert all(timing.registers and timing.blocks for timing in found.timings)
    fastest = min(found.timings, key=lambda timing: timing.milliseconds)
    assert found.winner == fastest.choice
    seen.clear()
    out = kl.run_kernel(descriptor, a, b)
    assert [event.name for event in seen] == ["launch"]
    assert seen[0].fields["grid"] == GRIDS[found.winner["tile"]]
    assert relative_error(out, wanted(a, b, 1.0625)) <= 2e-6


@pytest.mark.parametrize("tile", GRIDS)
def test_whichever_is_kept_gives_the_right_values(seed, seen, monkeypatch, tile):
    a, b = inputs()
    descriptor = kl.l1_distance(epilogue=(kl.Laplace(), kl.Custom("v * 1.125")))
    order = [1.0, 2.0] if tile == 128 else [2.0, 1.0]
    monkeypatch.setattr(tuner, "measure", lambda *given: order)
    kl.run_kernel(descriptor, a, b, bandwidth=9.0)  # a plan to drop
    assert kl.tune(descriptor, a, b, bandwidth=9.0).winner == {"tile": tile}
    seen.clear()
    out = kl.run_kernel(descriptor, a, b, bandwidth=11.0)
    assert seen[-1].fields["grid"] == GRIDS[tile]
    assert relative_error(out, torch.exp(-wanted(a, b) / 11.0) * 1.125) <= 1e-5


def test_a_record_that_means_nothing_is_passed_over(seed, seen):
    a, b = inputs()
    descriptor = fresh(1.1875)
    found = ahead.candidates(descriptor, a, b)
    kl.run_kernel(descriptor, a, b)
    untuned = seen[-1].fields["grid"]
    for choice in ({"tile": 96}, {"tile": 64, "shape": 3}, {}):
        assert tuning.keep("pairwise", devices.model(found.device), found.signature, choice)
        forget_plans()
        out = kl.run_kernel(descriptor, a, b)
        assert seen[-1].fields["grid"] == untuned
        assert relative_error(out, wanted(a, b, 1.1875)) <= 2e-6


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_callers_output_is_left_alone(seed, accumulate, transposed):
    a, b = inputs()
    out = torch.full((N, M), 7.0, device="cuda").T if transposed else torch.full((M, N), 7.0).cuda()
    width = torch.tensor(9.0)
    kl.tune(kl.laplace_l1(), a, b, out=out, accumulate=accumulate, bandwidth=width)
    assert torch.equal(out, torch.full_like(out, 7.0))
    kl.run_kernel(kl.laplace_l1(), a, b, out=out, accumulate=accumulate, bandwidth=width)
    before = 7.0 if accumulate else 0.0
    assert relative_error(out, torch.exp(-wanted(a, b) / 9.0) + before) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_are_tuned(seed, dtype):
    a, b = points(M, K, dtype=dtype), points(N, K, dtype=dtype)
    out = torch.empty(M, N, device="cuda", dtype=torch.promote_types(dtype, torch.float32))
    found = kl.tune(kl.l1_distance(), a, b, out=out)
    assert found.kept == (dtype == torch.float16)
    assert relative_error(kl.run_kernel(kl.l1_distance(), a, b, out=out), wanted(a, b)) <= 2e-6


def test_the_current_stream_is_timed(seed):
    a, b = inputs()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = kl.tune(fresh(1.3125), a, b)
        out = kl.run_kernel(fresh(1.3125), a, b)
    stream.synchronize()
    assert found.kept
    assert relative_error(out, wanted(a, b, 1.3125)) <= 2e-6


def test_an_empty_output_and_a_single_candidate(seed):
    a, b = inputs()
    assert kl.tune(kl.l1_distance(), a[:0], b).timings == ()
    found = kl.tune(kl.l1_distance(), a.double(), b.double())  # too many pairs for patches
    assert len(found.timings) == 1 and not found.kept


def test_nothing_is_tuned_inside_a_capture(seed):
    a, b = inputs()
    with pytest.raises(kl.CaptureError, match="before the capture"), capture():
        kl.tune(kl.l1_distance(), a, b)
    torch.cuda.synchronize()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_tensors_device_is_tuned(seed):
    a, b = (x.to("cuda:1") for x in inputs())
    found = kl.tune(fresh(1.4375), a, b)
    out = kl.run_kernel(fresh(1.4375), a, b)
    assert found.gpu == torch.cuda.get_device_name(1) and torch.cuda.current_device() == 0
    assert relative_error(out, wanted(a, b, 1.4375)) <= 2e-6


@pytest.mark.parametrize("first, tile", [("1", 128), ("-1", 64)])
def test_a_second_process_finds_the_choice(tmp_path, first, tile):
    chosen = json.loads(in_a_process(tmp_path, CHOOSE_OR_CALL, first).splitlines()[-1])
    assert chosen == [["launch", GRIDS[tile]]]
    again = in_a_process(tmp_path, CHOOSE_OR_CALL, "call", KERNLIB_ASSERT_CACHED="1")
    names, grids = zip(*json.loads(again.splitlines()[-1]), strict=True)
    assert names == ("lookup", "hit", "load", "launch") and grids[-1] == GRIDS[tile]


# prepare.


def test_meta_tensors_prepare_a_capture(seed, seen):
    a, b = inputs()
    descriptor = fresh(1.5625)
    out = torch.full((M, N), math.nan, device="cuda")
    kl.prepare(descriptor, *(torch.empty_like(x, device="meta") for x in (a, b)))
    assert [event.name for event in seen][-1] == "load"
    seen.clear()
    with capture() as graph:
        kl.run_kernel(descriptor, a, b, out=out)
    assert [event.name for event in seen] == ["launch"]
    graph.replay()
    assert relative_error(out, wanted(a, b, 1.5625)) <= 2e-6


def test_meta_tensors_prepare_the_tuned_kernel(seed, seen, monkeypatch):
    a, b = inputs()
    descriptor = fresh(1.6875)
    meta = [torch.empty_like(x, device="meta") for x in (a, b)]
    default = ahead.specs(descriptor, devices.arch_of(0), meta, {}, 0)
    big = "tile=128 " in default[0].description
    monkeypatch.setattr(tuner, "measure", lambda *given: [2.0, 1.0] if big else [1.0, 2.0])
    kl.tune(descriptor, a, b)
    kl.prepare(descriptor, *meta)
    seen.clear()
    kl.run_kernel(descriptor, a, b)
    assert [event.name for event in seen] == ["launch"]
    assert seen[0].fields["grid"] == GRIDS[64 if big else 128]


def test_the_first_thing_a_process_does_may_be_to_prepare(tmp_path):
    in_a_process(tmp_path, PREPARE_FIRST)


def test_several_descriptors_are_prepared_by_workers(seed, seen):
    a, b = inputs()
    factors = (1.75, 1.8125, 1.875, 1.9375)
    kl.prepare([fresh(factor) for factor in factors], a, b, workers=3)
    names = [event.name for event in seen]
    assert names.count("load") == len(factors)
    assert names.count("compile") in (0, len(factors))  # 0: of a bundle
    assert "launch" not in names
    seen.clear()
    for factor in factors:
        out = kl.run_kernel(fresh(factor), a, b)
        assert relative_error(out, wanted(a, b, factor)) <= 2e-6
    assert [event.name for event in seen] == ["launch"] * len(factors)


def test_nothing_is_compiled_for_a_list_inside_a_capture(seed, seen):
    a, b = inputs()
    loaded, missing = fresh(2.0625), fresh(2.1875)
    kl.prepare(loaded, a, b)
    seen.clear()
    with pytest.raises(kl.CaptureError, match=r"kernlib\.prepare"), capture():
        kl.prepare([loaded, missing], a, b)
    torch.cuda.synchronize()
    assert seen == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_of_another_device_are_prepared_there(seed, seen):
    a, b = (x.to("cuda:1") for x in inputs())
    kl.prepare([fresh(2.3125), fresh(2.4375)], a, b, workers=2)
    assert {event.fields["device"] for event in seen if event.name == "load"} == {1}
    assert torch.cuda.current_device() == 0
    seen.clear()
    out = kl.run_kernel(fresh(2.3125), a, b)
    assert [event.name for event in seen] == ["launch"]
    assert relative_error(out, wanted(a, b, 2.3125)) <= 2e-6

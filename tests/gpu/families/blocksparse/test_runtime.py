"""Streams, graphs, devices, layouts that change: what surrounds the kernels."""

from __future__ import annotations

import pytest
import torch

import kernlib as kl
from kernlib.blocksparse import Layout, dds, dsd, top_k
from kernlib.families.blocksparse.layout import NAMES
from tests.families.blocksparse.repeats import calls
from tests.gpu.families.blocksparse.cases import (
    BLOCKS,
    F16,
    F32,
    check,
    exact,
    layout_of,
    operands,
    product,
)
from tests.gpu.watched import capture, nothing_waits
from tests.support import repeats

CASES = {"wide": ((64, 64), F16), "narrow": ((16, 16), F16), "portable": ((32, 32), F32)}
every_call = pytest.mark.parametrize("case", CASES)


@every_call
def test_a_prepared_call_is_captured_and_replayed(case, seed):
    """With a layout whose contents change between replays."""
    block, dtype = CASES[case]
    layout = layout_of(block, room=60)
    values, b = operands("dsd", layout, 72, dtype)
    values = values.nan_to_num(0.0)
    descriptor = product("dsd")
    kl.prepare(descriptor, layout, values, b)
    mask = layout.mask()
    layout.update_(mask)
    with capture() as graph:
        layout.update_(mask)
        found = kl.run_kernel(descriptor, layout, values, b)
    for _ in range(3):
        mask.copy_(torch.rand(mask.shape, device="cuda") < 0.4)
        values.normal_()
        b.normal_()
        graph.replay()
        check(found, exact("dsd", layout, values, b), 1e-3)
        layout.check()


def test_a_capture_compiles_nothing(seed):
    layout = layout_of((32, 128))
    values, b = operands("dsd", layout, 72, F16)
    with pytest.raises(kl.CaptureError, match="prepare"), capture():
        dsd(values, b, layout)


@every_call
def test_side_streams_and_the_same_bits(case, seed):
    block, dtype = CASES[case]
    layout = layout_of(block)
    values, b = operands("dsd", layout, 264, dtype)
    wanted = dsd(values, b, layout)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    found = []
    for index in range(16):
        with torch.cuda.stream(streams[index % 4]):
            found.append(dsd(values, b, layout))
    torch.cuda.synchronize()
    assert all(torch.equal(each, wanted) for each in found)


@every_call
def test_nobody_waits_for_the_device(case, seed):
    block, dtype = CASES[case]
    layout = layout_of(block)
    values, b = operands("dsd", layout, 72, dtype)
    dsd(values, b, layout)
    mask = layout.mask()
    layout.update_(mask)
    with nothing_waits():
        layout.update_(mask)
        dsd(values, b, layout)
        Layout(mask, block, capacity=35)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@every_call
def test_another_device(case, seed):
    block, dtype = CASES[case]
    layout = layout_of(block).to("cuda:1")
    values, b = (t.to("cuda:1") for t in operands("dsd", layout_of(block), 72, dtype))
    values = torch.randn(layout.capacity, *block, device="cuda:1").to(dtype)
    found = dsd(values, b, layout)
    assert found.device == values.device and torch.cuda.current_device() == 0
    check(found, exact("dsd", layout, values, b), 1e-3)


def test_compiled_calls(seed):
    layout = layout_of((64, 64))
    x = torch.randn(40, layout.shape[1], device="cuda").half()
    weight = torch.randn(layout.capacity, 64, 64, device="cuda").half()
    compiled = torch.compile(lambda x, w: dds(x, w, layout, transpose_b=True) + 1, fullgraph=True)
    check(compiled(x, weight), exact("dds", layout, x, weight, False, True) + 1, 1e-3)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compiled_calls_make_their_layouts(mode, seed):
    """Of every grid by two programs, and with blocks that are selected anew in each replay."""

    def call(x, b, scores):
        layout = top_k(scores, 64, 2)
        return dsd(layout.to_blocks(x), b, layout) + 1

    run = torch.compile(call, fullgraph=True, mode=mode)
    for size in (3, 40, 5):
        x = torch.randn(64 * size, 64 * size, device="cuda").half()
        b = torch.randn(64 * size, 32, device="cuda").half()
        for _ in range(4):
            scores = torch.randn(size, size, device="cuda")
            torch.compiler.cudagraph_mark_step_begin()
            check(run(x, b, scores), call(x.double(), b.double(), scores), 1e-3)


# Layouts.


@pytest.mark.parametrize("columns", [10, 5000])
def test_a_score_of_nan_is_the_highest_with_a_sign_too(columns, seed):
    """Long rows torch sorts otherwise. A GPU's negation would clear the sign: bits set it."""
    scores = torch.randn(3, columns, device="cuda")
    scores[:, 7] = torch.full((3,), -0x400000, dtype=torch.int32).view(torch.float32).cuda()
    assert scores[:, 7].signbit().all()
    for kind in (torch.float32, F16, torch.float64):
        assert top_k(scores.to(kind), 16, 2).mask()[:, 7].all()


@pytest.mark.parametrize("block", BLOCKS[:4], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (33, 65), (64, 64), (3, 40, 31), (2, 300, 129)])
def test_layouts_are_those_of_the_cpu(shape, block, seed):
    for density in (0.0, 0.02, 0.5, 1.0):
        mask = torch.rand(shape) < density
        for capacity in (int(mask.sum()), int(mask.sum()) + 3, int(mask.sum()) // 2):
            made = Layout(mask.cuda(), block, capacity=capacity)
            live = mask.flatten().nonzero()[:capacity].flatten()
            kept = torch.zeros_like(mask).flatten().index_fill(0, live, True).view(shape)
            wanted = Layout(kept, block, capacity=capacity)
            pairs = list(zip(NAMES, made.tensors, wanted.tensors, strict=True))
            for name, ours, theirs in pairs[:-1]:  # counts tell of what was dropped
                assert torch.equal(ours.cpu(), theirs), name
            if capacity < int(mask.sum()):
                with pytest.raises(ValueError):
                    made.check()
            else:
                made.check()


def test_layouts_of_indices(seed):
    mask = torch.rand(40, 33) < 0.3
    rows, cols = mask.nonzero().T
    order = torch.randperm(rows.numel())
    made = Layout.from_indices(rows[order].cuda(), cols[order].cuda(), (40, 33), 16)
    assert torch.equal(made.mask().cpu(), mask)
    made.check()
    wrong = torch.tensor([0, 0, 41, 3]).cuda(), torch.tensor([1, 1, 2, -1]).cuda()
    bad = Layout.from_indices(*wrong, (40, 33), 16)
    assert int(bad.mask().sum()) == 1
    with pytest.raises(ValueError):
        bad.check()


def test_calls_and_their_gradients_have_the_same_bits_each_time():
    """In every dtype, also by torch, and under torch.use_deterministic_algorithms."""
    repeats.same_bits(calls, "cuda", rows=300)

"""Streams, graphs, threads, devices, memory, tuning: what surrounds a kernel."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

import kernlib as kl
from kernlib import ahead
from kernlib.families.kronecker_sparse import operation as primitives
from tests.gpu.families.kronecker_sparse import cases as ks
from tests.gpu.watched import capture, heard, launches, nothing_waits, peak

# Pattern, numbers, batch_last and batch of calls that go to each kind of kernel, with the weight as
# it is and with one that a launch before packs.
CALLS = {
    "lanes": (ks.LANES, "fp16", False, 1000),
    "lanes of fp32": (ks.LANES, "fp32", False, 1000),
    "blocks": (ks.BLOCKS, "fp16", False, 1000),
    "blocks of fp32": (ks.BLOCKS, "fp32", False, 1000),
    "batch last": (ks.LANES, "bf16", True, 1000),
    "portable": (ks.ODD, "fp16", False, 101),
    "portable, packed": (ks.ODD, "fp32", False, 1100),
}
every_call = pytest.mark.parametrize("case", CALLS)


def call_of(case: str, epilogue=()) -> tuple:
    """A descriptor, x and weight."""
    pattern, numbers, last, batch = CALLS[case]
    return ks.product(pattern, numbers, last, epilogue), *ks.operands(pattern, batch, numbers, last)


def tolerance(case: str) -> float:
    return ks.TOLERANCE[CALLS[case][1]]


@pytest.fixture(scope="module", autouse=True)
def built():
    """The kernels of most tests here, compiled side by side."""
    specs = []
    for pattern, numbers, last, batch in CALLS.values():
        for epilogue in ((), (kl.Bias(), kl.Scale()), (kl.Bias(), kl.Relu()), (kl.Scale(),)):
            descriptor = ks.product(pattern, numbers, last, epilogue)
            specs += ks.specs_of_step(descriptor, batch, numbers)
    ks.build(specs)


@pytest.fixture
def no_synchronisation():
    with nothing_waits():
        yield


# Streams.


@every_call
def test_a_call_never_waits_for_the_device(case, seed, no_synchronisation):
    descriptor, x, weight = call_of(case, (kl.Bias(), kl.Scale()))
    bias = torch.zeros(descriptor.out_features, dtype=x.dtype, device=ks.DEVICE)
    for scale in (2.0, torch.ones((), device=ks.DEVICE), torch.tensor(2.0)):
        for _ in range(2):
            y = kl.run_kernel(descriptor, x, weight, bias=bias, scale=scale)
    for _ in range(2):
        primitives.weight_gradient(y, x, descriptor.pattern, descriptor.batch_last)
    given = [t.clone().requires_grad_() for t in (x, weight, bias)]
    y = kl.run_kernel(descriptor, *given[:2], bias=given[2], scale=2.0)
    torch.autograd.grad(y, given, y.detach())


@every_call
def test_the_current_stream_is_used(case, seed):
    """By what packs the weight, by the product and by its gradients."""
    descriptor, x, weight = call_of(case)

    def run(x, weight) -> tuple[torch.Tensor, ...]:
        given = [t.detach().requires_grad_() for t in (x, weight)]
        y = kl.run_kernel(descriptor, *given)
        return y.detach(), *torch.autograd.grad(y, given, y.detach())

    wanted = run(x, weight)
    stream = torch.cuda.Stream()
    given = [torch.full_like(t, math.nan) for t in (x, weight)]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for to, value in zip(given, (x, weight), strict=True):
            to.copy_(value)
        found = run(*given)
    stream.synchronize()
    assert all(map(torch.equal, found, wanted))


@every_call
def test_calls_one_behind_the_other_share_no_scratch(case, seed):
    descriptor, x, weight = call_of(case)
    weights = [weight, *(torch.randn_like(weight) for _ in range(3))]
    wanted = [kl.run_kernel(descriptor, x, each) for each in weights]
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)  # so that they wait for each other
    found = [[kl.run_kernel(descriptor, x, each) for each in weights] for _ in range(20)]
    assert all(map(torch.equal, (y for many in found for y in many), 20 * wanted))


@every_call
def test_operands_and_results_that_move(case, seed):
    """To more places than a plan keeps tensor maps for, and back."""
    descriptor, x, weight = call_of(case)
    xs = [torch.randn_like(x) for _ in range(40)]
    outs = [torch.empty_like(kl.run_kernel(descriptor, x, weight)) for _ in range(7)]
    wanted = [kl.run_kernel(descriptor, each, weight) for each in xs]
    for _ in range(2):
        for index, each in enumerate(xs):
            out = outs[index % 7].fill_(math.nan)
            kl.run_kernel(descriptor, each, weight, out=out)
            assert torch.equal(out, wanted[index])


# CUDA graphs.


@every_call
def test_a_graph_follows_what_is_changed_in_place(case, seed):
    """x, the weight, also where it is packed, and the epilogue's parameters."""
    end = (kl.Bias(), kl.Scale())
    descriptor, x, weight = call_of(case, end)
    bias = ks.random(descriptor.out_features, dtype=x.dtype)
    scale = torch.ones((), device=ks.DEVICE)
    out = torch.empty_like(kl.run_kernel(descriptor.replace(epilogue=()), x, weight))
    given = {"bias": bias, "scale": scale, "out": out}
    kl.prepare(descriptor, x, weight, **given)
    with capture() as graph:
        kl.run_kernel(descriptor, x, weight, **given)
    for step in range(4):
        changed = (x, weight.data, bias, scale)[: step + 1]  # one more at each step
        for tensor in changed:
            tensor.copy_(torch.randn_like(tensor))
        out.fill_(math.nan)
        graph.replay()
        product = ks.exact(x, weight, descriptor.batch_last)
        wanted = (product + ks.lay(bias, descriptor.batch_last)) * scale.double()
        assert ks.relative_error(out, wanted) <= tolerance(case), step


@every_call
def test_a_weight_that_was_written_shows_at_the_next_call(case, seed):
    """By all ways of writing, those that pass the version counter by included."""
    descriptor, x, weight = call_of(case)
    view, memory = weight.detach(), weight.view(-1)
    writes = (
        lambda new: weight.copy_(new),
        lambda new: weight.data.copy_(new),
        lambda new: view.copy_(new),
        lambda new: memory.copy_(new.reshape(-1)),
        lambda new: weight.set_(new.clone()),
    )
    for write in writes:
        kl.run_kernel(descriptor, x, weight)
        write(torch.randn_like(weight))
        found = kl.run_kernel(descriptor, x, weight)
        wanted = ks.exact(x, weight, descriptor.batch_last)
        assert ks.relative_error(found, wanted) <= tolerance(case)


def test_a_capture_needs_prepare(seed):
    for number, case in enumerate(CALLS):
        descriptor, x, weight = call_of(case, kl.Custom(f"v * 1.25 + {number}"))  # not loaded yet
        out = torch.empty_like(kl.run_kernel(descriptor.replace(epilogue=()), x, weight))
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(kl.CaptureError, match=r"kernlib\.prepare"), torch.cuda.graph(graph):
            kl.run_kernel(descriptor, x, weight, out=out)
        torch.cuda.synchronize()
        kl.prepare(descriptor, x, weight, out=out)
        graph = torch.cuda.CUDAGraph()  # which ends the other: within a capture, that would fail
        with torch.cuda.graph(graph):
            kl.run_kernel(descriptor, x, weight, out=out)
        out.fill_(math.nan)
        graph.replay()
        wanted = ks.exact(x, weight, descriptor.batch_last) * 1.25 + number
        assert ks.relative_error(out, wanted) <= tolerance(case)


@every_call
def test_a_graph_of_a_step_of_training(case, seed):
    """Forward and backward, prepared by tensors that require gradients."""
    descriptor, x, weight = call_of(case, (kl.Bias(), kl.Relu()))
    bias = ks.random(descriptor.out_features, dtype=x.dtype)
    given = [t.requires_grad_() for t in (x, weight, bias)]
    grad = torch.randn_like(ks.exact(x, weight, descriptor.batch_last)).to(x.dtype)
    torch.autograd.grad((2 * x).sum(), x)  # the thread of gradients exists
    kl.prepare(descriptor, x, weight, bias=bias)
    with capture() as graph:
        y = kl.run_kernel(descriptor, x, weight, bias=bias)
        found = torch.autograd.grad(y, given, grad)
    for _ in range(2):
        for tensor in (*given, grad):
            tensor.data.copy_(torch.randn_like(tensor))
        graph.replay()
        again = kl.run_kernel(descriptor, x, weight, bias=bias)
        wanted = torch.autograd.grad(again, given, grad)
        assert torch.equal(y, again) and all(map(torch.equal, found, wanted))


# Threads and devices.


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@every_call
def test_the_tensors_device_decides(case, seed):
    descriptor, x, weight = call_of(case)
    results = []
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        given = [t.detach().to(device).requires_grad_() for t in (x, weight)]
        y = kl.run_kernel(descriptor, *given)
        found = (y.detach(), *torch.autograd.grad(y, given, y.detach()))
        assert all(t.device == torch.device(device) for t in found)
        assert torch.cuda.current_device() == 0
        results.append([t.cpu() for t in found])
    assert all(all(map(torch.equal, results[0], other)) for other in results[1:])
    with pytest.raises(ValueError, match="one device"):
        kl.run_kernel(descriptor, x, weight.to("cuda:1"))


# Preparing, tuning, memory.


@pytest.fixture
def events():
    with heard() as found:
        yield found


@pytest.mark.parametrize("meta", (False, True), ids=("tensors", "meta tensors"))
@every_call
def test_prepare_leaves_nothing_to_do(case, meta, seed, events):
    descriptor, x, weight = call_of(case, kl.Custom(f"v * 0.875 - {1 + meta}"))
    assert not ahead.prepared(descriptor, x, weight)
    kl.prepare(
        descriptor, *(torch.empty_like(t, device="meta") if meta else t for t in (x, weight))
    )
    assert ahead.prepared(descriptor, x, weight) is not meta
    assert "launch" not in [event.name for event in events]
    events.clear()
    found = kl.run_kernel(descriptor, x, weight)
    assert {event.name for event in events} == {"launch"}
    wanted = ks.exact(x, weight, descriptor.batch_last) * 0.875 - (1 + meta)
    assert ks.relative_error(found, wanted) <= tolerance(case)


@every_call
def test_a_new_batch_builds_nothing(case, seed, events):
    """Nor does a new pattern with blocks of the same kind: between the smallest and the largest of
    both, which may go to different tiles."""
    pattern, numbers, last, first = CALLS[case]
    batches = (first, 2 * first + 8, first + 8, first + 80, first + 96)
    patterns = [(blocks * pattern[0], *pattern[1:]) for blocks in (1, 5, 2, 3)]

    def run(pattern, batch: int) -> None:
        x, weight = ks.operands(pattern, batch, numbers, last)
        found = kl.run_kernel(ks.product(pattern, numbers, last), x, weight)
        assert ks.relative_error(found, ks.exact(x, weight, last)) <= tolerance(case)

    for other in patterns[:2]:
        for batch in batches[:2]:
            run(other, batch)
    events.clear()
    for other in patterns:
        for batch in batches:
            run(other, batch)
    assert {event.name for event in events} == {"launch"}


@every_call
def test_tuning_keeps_the_fastest(case, seed):
    pattern, numbers, last, batch = CALLS[case]
    x, weight = ks.operands(pattern, batch + 304, numbers, last)  # a batch that no other test has
    descriptor = ks.product(pattern, numbers, last)
    problem = ks.problem_of(descriptor, x, weight)
    found = kl.tune(descriptor, x, weight)
    assert [timing.choice for timing in found.timings] == ks.candidates(problem)
    assert found.kept == (len(found.timings) > 1)
    assert all(timing.milliseconds > 0 for timing in found.timings)
    with launches() as launched:
        y = kl.run_kernel(descriptor, x, weight)
    steps = ks.lowered((), problem, found.winner).steps
    assert launched == [step.spec.description for step in steps]
    assert ks.relative_error(y, ks.exact(x, weight, last)) <= tolerance(case)


@ks.both_layouts
@pytest.mark.parametrize("numbers", ("fp32", "fp16"))
@ks.few_patterns
def test_memory_of_a_step(pattern, numbers, batch_last, seed):
    """A product allocates its result; gradients allocate themselves and, batch first with d > 1,
    what turns both operands; nothing but the operands is saved for them."""
    batch = 1_000_000 if pattern == ks.ODD else 25_088
    small = 16 << 20  # packed weights, sums of parts
    x, weight = ks.operands(pattern, batch, numbers, batch_last)
    descriptor = ks.product(pattern, numbers, batch_last)
    kl.run_kernel(descriptor, x, weight)
    y, most = peak(partial(kl.run_kernel, descriptor, x, weight))
    sizes = [t.numel() * t.element_size() for t in (x, y)]
    assert sizes[1] <= most <= sizes[1] + small
    del y
    turned = sum(sizes) if not batch_last and pattern[3] > 1 else 0
    grad = torch.randn((sizes[1] // x.element_size(),), device=ks.DEVICE, dtype=x.dtype)
    for of_x, of_weight in ((True, True), (False, True), (True, False)):
        given = x.detach().requires_grad_(of_x), weight.detach().requires_grad_(of_weight)
        before = torch.cuda.memory_allocated()
        y = kl.run_kernel(descriptor, *given)
        assert torch.cuda.memory_allocated() - before <= sizes[1] + small
        inputs = [t for t in given if t.requires_grad]
        call = partial(torch.autograd.grad, y, inputs, grad.view(y.shape), retain_graph=True)
        call()
        bound = sizes[0] * of_x + turned * of_weight
        assert peak(call)[1] <= bound + small

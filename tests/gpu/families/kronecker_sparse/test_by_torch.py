"""Products with d = 1 that torch computes on the GPU where that was measured to be faster, else by
the portable kernel."""

from __future__ import annotations

import math
import threading

import pytest
import torch

import kernlib as kl
from kernlib.families.kronecker_sparse import operation as primitives
from kernlib.families.kronecker_sparse import reference
from kernlib.families.kronecker_sparse.lowering import by_torch
from kernlib.runtime.devices import arch_of, model
from tests.gpu.families.kronecker_sparse import cases as ks
from tests.gpu.watched import capture, launches, nothing_waits, peak

# Patterns and rows: sums in parts, few rows, few columns, one block and several, odd sizes.
CALLS = (
    ((1, 4, 491, 1), 170),
    ((1, 7, 265, 1), 6),
    ((1, 166, 61, 1), 4),
    ((1, 266, 183, 1), 3966),
    ((50, 5, 4, 1), 3994),
    ((22, 6, 103, 1), 459),
    ((2, 33, 65, 1), 1100),
    ((5, 85, 33, 1), 2433),
)
every_call = pytest.mark.parametrize("case", CALLS, ids=str)
BOUND = 2e-6  # of rows: float32 adds up to 491 terms one after the other


def call_of(case: tuple, precision: str | None = None) -> tuple:
    """A descriptor, x and weight."""
    pattern, rows = case
    return kl.KroneckerSparse(*pattern, precision=precision), *ks.operands(pattern, rows)


def is_measured() -> bool:
    return (arch_of(ks.index()), model(ks.index()).multiprocessors) == by_torch.GPU


def check(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bound=BOUND) -> None:
    wanted = ks.exact(x, weight)
    assert found.shape == wanted.shape and found.dtype == x.dtype
    error = ks.row_error(found, wanted, ks.row_norms(wanted, x, weight, False), False)
    assert error <= bound, f"error {error:.2e} of a row > {bound:.0e}"


@pytest.fixture
def heard():
    """Names of the events of a call."""
    found: list[str] = []
    stop = kl.events.subscribe(lambda event: found.append(event.name))
    yield found
    stop()


@every_call
def test_values(case, heard, seed):
    """Of torch and of every kernel, into outputs full of NaN."""
    descriptor, x, weight = call_of(case, "fp32")
    found = kl.run_kernel(descriptor, x, weight)
    assert ("torch" in heard) == is_measured()
    check(found, x, weight)
    ks.check(descriptor, x, weight, "fp32", tolerance=BOUND, every=True)


@every_call
def test_rows_that_lie_apart_are_read_and_written_where_they_are(case, heard, seed):
    descriptor, x, weight = call_of(case)
    inside = torch.full((len(x), x.shape[1] + 3), math.nan, device=ks.DEVICE)[:, 2:-1].copy_(x)
    whole = torch.full((len(x) + 2, descriptor.out_features + 5), math.nan, device=ks.DEVICE)
    out = whole[1:-1, 3:-2]
    kl.prepare(descriptor, inside, weight, out=out)
    assert whole.isnan().all()
    heard.clear()
    version = out._version
    assert kl.run_kernel(descriptor, inside, weight, out=out) is out
    assert (set(heard) == {"torch"}) == is_measured() and out._version > version
    check(out, x, weight)
    assert whole.isnan().sum() == whole.numel() - out.numel()


def test_further_dimensions(seed):
    descriptor, _, weight = call_of(CALLS[1])
    for batch in ((), (1,), (2, 3), (2, 1, 3), (1, 1)):
        x, _ = ks.operands(descriptor.pattern, batch)
        found = kl.run_kernel(descriptor, x, weight)
        assert found.is_contiguous() and found.shape == (*batch, descriptor.out_features)
        check(found.view(-1, descriptor.out_features), x.view(-1, descriptor.in_features), weight)


@every_call
def test_tf32_is_what_is_permitted(case, seed):
    """Whatever was permitted when the same call was made before, by either of torch's settings."""
    made, x, weight = call_of(case)
    exact = made.replace(precision="fp32")
    try:
        for setting in ("highest", "high", "highest"):
            torch.set_float32_matmul_precision(setting)
            check(kl.run_kernel(exact, x, weight), x, weight)
            bound = BOUND if setting == "highest" else 2e-3
            check(kl.run_kernel(made, x, weight), x, weight, bound)
        torch.backends.cuda.matmul.allow_tf32 = True
        check(kl.run_kernel(exact, x, weight), x, weight)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.set_float32_matmul_precision("highest")


@every_call
@pytest.mark.parametrize("bad", (math.nan, math.inf))
def test_what_is_not_finite_stays_in_its_row_and_block(case, bad, seed):
    descriptor, x, weight = call_of(case)
    clean, spoilt = kl.run_kernel(descriptor, x, weight), x.clone()
    touched = torch.zeros_like(clean, dtype=torch.bool)
    for row, feature in ((0, 0), (len(x) - 1, descriptor.in_features - 1)):
        spoilt[row, feature] = bad
        touched[row] |= ks.matrix(weight)[:, feature] != 0
    found = kl.run_kernel(descriptor, spoilt, weight)
    assert torch.equal(~found.isfinite(), touched)
    assert torch.equal(found[~touched], clean[~touched])


@every_call
def test_a_graph_follows_what_is_changed_in_place(case, heard, seed):
    descriptor, x, weight = call_of(case)
    out = torch.empty(len(x), descriptor.out_features, device=ks.DEVICE)
    kl.prepare(descriptor, x, weight, out=out)
    heard.clear()
    with capture() as graph:
        kl.run_kernel(descriptor, x, weight, out=out)
    assert (set(heard) == {"torch"}) == is_measured()
    for _ in range(2):
        for tensor in (x, weight):
            tensor.copy_(torch.randn_like(tensor))
        out.fill_(math.nan)
        graph.replay()
        check(out, x, weight)
        assert torch.equal(out, kl.run_kernel(descriptor, x, weight))


@every_call
def test_a_capture_without_a_plan_of_its_thread_is_kernels(case, seed):
    """Prepared by stand-ins, or on another thread."""
    descriptor, x, weight = call_of(case)
    out = torch.full((len(x), descriptor.out_features), math.nan, device=ks.DEVICE)
    kl.prepare(descriptor, *ks.meta(descriptor.pattern, len(x)))
    kl.prepare(descriptor, x, weight, out=out)
    failures: list[Exception] = []

    def body() -> None:
        try:
            with capture() as graph, launches() as launched:
                kl.run_kernel(descriptor, x, weight, out=out)
            assert launched
            graph.replay()
            torch.cuda.synchronize()
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert not failures, failures
    check(out, x, weight)


@every_call
def test_a_call_never_waits_for_the_device_and_uses_the_current_stream(case, seed):
    descriptor, x, weight = call_of(case)
    wanted = kl.run_kernel(descriptor, x, weight)
    given = [torch.full_like(t, math.nan) for t in (x, weight)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        kl.run_kernel(descriptor, x, weight)  # what cuBLAS wants of a stream
    with nothing_waits(), torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for to, value in zip(given, (x, weight), strict=True):
            to.copy_(value)
        found = kl.run_kernel(descriptor, *given)
    stream.synchronize()
    assert torch.equal(found, wanted)


@every_call
def test_a_call_allocates_its_result_alone(case, seed):
    """And cuBLAS's workspace, which torch keeps for a stream."""
    descriptor, x, weight = call_of(case)
    y = kl.run_kernel(descriptor, x, weight)
    again, most = peak(lambda: kl.run_kernel(descriptor, x, weight))
    packed = weight.numel() * weight.element_size() * (not is_measured())
    assert torch.equal(again, y) and most <= y.numel() * y.element_size() + 2 * packed + 4096


@every_call
def test_gradients(case, seed):
    descriptor, x, weight = call_of(case)
    given = [t.clone().requires_grad_() for t in (x, weight)]
    y = kl.run_kernel(descriptor, *given)
    y.mul_(2)  # no view
    grad = torch.randn_like(y)
    found = torch.autograd.grad(y, given, grad)
    leaves = [t.double().requires_grad_() for t in (x, weight)]
    exact = 2 * reference.kronecker_sparse(descriptor, *leaves)
    wanted = torch.autograd.grad(exact, leaves, grad.double())
    for ours, theirs in zip((y.detach(), *found), (exact.detach(), *wanted), strict=True):
        assert ks.relative_error(ours, theirs) <= BOUND


@pytest.mark.parametrize("mode", ("default", "reduce-overhead"))
def test_compiled_calls(mode, seed):
    """With CUDA graphs too: the first runs eagerly, the second records, others replay."""
    torch._dynamo.reset()
    descriptor, _, weight = call_of(CALLS[1])

    def call(x, weight):
        return 2 * kl.run_kernel(descriptor, x, weight)

    compiled = torch.compile(call, fullgraph=True, mode=mode)
    for _ in range(4):
        x, _ = ks.operands(*CALLS[1])
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            check(compiled(x, weight).clone() / 2, x, weight)
    torch._dynamo.reset()


def test_a_gradient_by_x_of_a_turned_weight(heard, seed):
    """Whose transpose is contiguous, as that product's weight has to be."""
    grad, turned = ks.operands((1, 7, 265, 1), 6)
    weight = turned.transpose(1, 2)
    x = torch.zeros(6, 7, device=ks.DEVICE, requires_grad=True)
    y = kl.run_kernel(kl.KroneckerSparse(1, 265, 7, 1), x, weight)
    heard.clear()
    (found,) = torch.autograd.grad(y, x, grad)
    assert ("torch" in heard) == is_measured()
    check(found, grad, turned)


@every_call
def test_autocast_and_deterministic_algorithms(case, heard, seed):
    """The first casts operands, the second want no cuBLAS: kernels compute both."""
    descriptor, x, weight = call_of(case)
    with torch.autocast(ks.DEVICE, torch.bfloat16):
        found = kl.run_kernel(descriptor, x, weight)
        exact = primitives.calls.execute(descriptor, (x, weight), None, {})
    assert found.dtype == torch.bfloat16
    check(exact, x, weight)
    heard.clear()
    torch.use_deterministic_algorithms(True)
    try:
        found = kl.run_kernel(descriptor, x, weight)
    finally:
        torch.use_deterministic_algorithms(False)
    check(found, x, weight)
    assert "torch" not in heard


@every_call
def test_a_tuned_kernel_goes_first(case, heard, seed):
    pattern, rows = case
    x, weight = ks.operands(pattern, rows + 1)  # a batch that no other test has
    descriptor = kl.KroneckerSparse(*pattern)
    found = kl.tune(descriptor, x, weight)
    assert [t.choice for t in found.timings] == ks.candidates(ks.problem_of(descriptor, x, weight))
    heard.clear()
    check(kl.run_kernel(descriptor, x, weight), x, weight)
    assert not found.kept or "torch" not in heard

"""torch.compile with and without CUDA graphs, export and recorders: all give the eager result."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import kernlib as kl
from tests.gpu.families.pairwise.cases import POISON, points

M, N, K, L = 141, 77, 24, 3
LAPLACE, SYMMETRIC, NORM = kl.laplace_l1(), kl.gaussian(symmetric=True), kl.p_distance()
CUSTOM = kl.l1_distance(epilogue=kl.Custom("tanh(gain * v) + shift", ("gain", "shift")))
MODES = [None, "reduce-overhead"]
STEPS = 5  # with CUDA graphs the first runs eagerly, the second records, the others replay


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, mode=None, **options):
    """``function`` compiled whole; what it returns is safe from the next replay."""
    inner = torch.compile(function, fullgraph=True, mode=mode, **options)

    def run(*arguments):
        torch.compiler.cudagraph_mark_step_begin()
        found = inner(*arguments)
        return found.clone() if isinstance(found, torch.Tensor) else found

    return run


def close(found, wanted) -> None:
    """Equal but for what Inductor fuses around the operator."""
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def value(number: float, kind: str):
    return {
        "float": lambda: number,
        "0-d": lambda: torch.tensor(number, device="cuda"),
        "(L,)": lambda: number + torch.arange(L, device="cuda", dtype=torch.float32),
        "host": lambda: torch.tensor(number),
    }[kind]()


@pytest.mark.few(0)
@pytest.mark.parametrize("kind", ["float", "0-d", "(L,)", "host"])
@pytest.mark.parametrize("mode", MODES)
def test_inputs_and_bandwidths_that_change(seed, mode, kind):
    def call(x, y, width):
        return 2 * kl.run_kernel(LAPLACE, x + 1, y, bandwidth=width, regularization=0.5)

    run = compiled(call, mode)
    for step in range(STEPS):
        x, y, width = points(L, M, K), points(N, K), value(10.0 + step, kind)
        close(run(x, y, width), call(x, y, width))


@pytest.mark.parametrize("mode", MODES)
def test_a_device_value_is_read_at_every_replay(seed, mode):
    run = compiled(lambda x, y, p: kl.run_kernel(NORM, x, y, p=p), mode)
    x, y, p = points(M, K), points(N, K), torch.tensor(1.5, device="cuda")
    for number in (1.5, 1.5, 1.5, 2.0, 3.0, 1.0):
        p.fill_(number)
        wanted = torch.cdist(x.double(), y.double(), number).float()
        torch.testing.assert_close(run(x, y, p), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_exponents_that_change_choose_their_own_code(seed, mode):
    run = compiled(lambda x, y, p: kl.cdist(x, y, p), mode)
    x, y = points(L, M, K), points(N, K)
    for p in (2.0, 1.5, 1.0, math.inf, 0.7):
        for _ in range(2):
            assert torch.equal(run(x, y, p), kl.cdist(x, y, p)), p


CASES = {
    "symmetric": lambda x, y: kl.run_kernel(SYMMETRIC, x, bandwidth=9.0),
    "custom": lambda x, y: kl.run_kernel(CUSTOM, x, y, gain=0.1, shift=x[0, 0, :1] * 0 + 1),
    "half": lambda x, y: kl.run_kernel(LAPLACE, x.half(), y.half(), bandwidth=9.0),
    "inside": lambda x, y: kl.run_kernel(kl.matern52(), x, y, bandwidth=9.0),
    "transposed": lambda x, y: kl.run_kernel(LAPLACE, x.mT.contiguous().mT, y, bandwidth=9.0),
    "batches": lambda x, y: kl.cdist(x[:, None], y.expand(2, -1, -1), p=1),
    "debug": lambda x, y: kl.run_kernel(LAPLACE, x, y, bandwidth=9.0, debug=True),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_a_compiled_call_is_the_eager_one(seed, case, mode):
    run = compiled(CASES[case], mode)
    for _ in range(STEPS):
        x, y = points(L, M, K), points(N, K)
        close(run(x, y), CASES[case](x, y))


@pytest.mark.parametrize("warm", ["prepare", "call"])
def test_a_prepared_kernel_is_the_one_that_runs(seed, warm):
    descriptor = kl.l1_distance(epilogue=kl.Custom(f"v * {2 if warm == 'call' else 3} + 1"))
    x, y = points(M, K), points(N, K)
    (kl.prepare if warm == "prepare" else kl.run_kernel)(descriptor, x, y)
    run = compiled(lambda x, y: kl.run_kernel(descriptor, x, y), "reduce-overhead")
    for _ in range(STEPS):
        x = points(M, K)
        assert torch.equal(run(x, y), kl.run_kernel(descriptor, x, y))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("accumulate", [False, True])
def test_out_is_written_in_place_and_nowhere_else(seed, mode, accumulate):
    def call(x, y, out):
        return kl.run_kernel(LAPLACE, x, y, out=out, accumulate=accumulate, bandwidth=9.0)

    run = torch.compile(call, fullgraph=True, mode=mode)
    for _ in range(STEPS):
        x, y = points(M, K), points(N, K)
        memory = torch.full((M + 2, N + 3), POISON, device="cuda")
        memory[1:-1, 2:-1] = 2.0
        wanted = memory.clone()
        found = run(x, y, memory[1:-1, 2:-1])
        call(x, y, wanted[1:-1, 2:-1])
        assert found.data_ptr() == memory[1:-1, 2:-1].data_ptr()
        assert torch.equal(memory.nan_to_num(-1.0), wanted.nan_to_num(-1.0))


@pytest.mark.parametrize("mode", MODES)
def test_an_out_of_the_function_itself(seed, mode):
    def call(x, y, width):
        out = torch.zeros(x.shape[0], y.shape[0], device=x.device)
        for part in (x, x + 1, 2 * x):
            kl.run_kernel(LAPLACE, part, y, out=out, accumulate=True, bandwidth=width)
        return out

    run, width = compiled(call, mode), torch.tensor(9.0, device="cuda")
    for _ in range(STEPS):
        x, y = points(M, K), points(N, K)
        width.add_(1)
        close(run(x, y, width), call(x, y, width))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("marked", [True, False])
def test_sizes_may_be_dynamic(seed, marked, mode):
    def call(x, y, width):
        return kl.run_kernel(LAPLACE, x, y, bandwidth=width) + 1

    run = compiled(call, mode, dynamic=None if marked else True)
    for batch, m, n in ((4, 60, 50), (7, 200, 80), (2, 90, 130), (4, 60, 50), (3, 17, 33)):
        x, y = points(batch, m, K), points(batch, n, K)
        width = torch.full((batch,), 9.0, device="cuda")
        if marked:
            for tensor in (x, y):
                torch._dynamo.mark_dynamic(tensor, 1)
        close(run(x, y, width), call(x, y, width))


def test_gradients_flow_around_a_call_under_no_grad(seed):
    def call(x, y, weight):
        with torch.no_grad():
            kernel = kl.run_kernel(LAPLACE, x, y, bandwidth=9.0)
        return (kernel @ weight).sum()

    x, y = points(M, K).requires_grad_(), points(N, K)
    weight = torch.ones(N, device="cuda", requires_grad=True)
    torch.compile(call, fullgraph=True)(x, y, weight).backward()
    close(weight.grad, kl.run_kernel(LAPLACE, x.detach(), y, bandwidth=9.0).sum(0))
    assert torch.compile(lambda x, y: kl.cdist(x, y), fullgraph=True)(x, y).requires_grad


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_is_the_eager_one(seed, strict):
    class Kernel(torch.nn.Module):
        def forward(self, x, y, width):
            out = kl.run_kernel(LAPLACE, x, y, bandwidth=width)
            return kl.run_kernel(LAPLACE, x, y, out=out, accumulate=True, bandwidth=4.0)

    width = torch.tensor(9.0, device="cuda")
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(
        Kernel(),
        (points(M, K), points(N, K), width),
        dynamic_shapes=({0: rows}, None, None),
        strict=strict,
    )
    for m in (M, 30):
        x, y = points(m, K), points(N, K)
        assert torch.equal(program.module()(x, y, width), Kernel()(x, y, width))


@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
def test_make_fx_records_a_call_that_is_already_planned(seed, tracing):
    def call(x, y):
        return kl.run_kernel(LAPLACE, x, y, bandwidth=9.0) + 1

    call(points(M, K), points(N, K))
    recorded = make_fx(call, tracing_mode=tracing)(points(M, K), points(N, K))
    x, y = points(M, K), points(N, K)
    assert torch.equal(recorded(x, y), call(x, y))


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("inside", [True, False])
def test_a_fake_tensor_never_finds_the_plan_of_a_real_one(seed, inside):
    x, y = points(M, K), points(N, K)
    out = torch.empty(M, N, device="cuda")
    kl.run_kernel(LAPLACE, x, y, bandwidth=9.0)
    kl.run_kernel(LAPLACE, x, y, out=out, bandwidth=9.0)
    mode = FakeTensorMode()
    x, y, out = (mode.from_tensor(tensor) for tensor in (x, y, out))
    if inside:
        with mode:
            found = kl.run_kernel(LAPLACE, x, y, bandwidth=9.0)
    else:
        found = kl.run_kernel(LAPLACE, x, y, bandwidth=9.0)
    assert found.fake_mode is mode and found.device == x.device
    assert kl.run_kernel(LAPLACE, x, y, out=out, bandwidth=9.0) is out
    torch.cuda.synchronize()


@pytest.mark.parametrize("place", range(3))
def test_vmap_behind_a_plan_is_a_batch(seed, place):
    given = [points(M, K), points(N, K), torch.tensor(9.0, device="cuda")]
    dims = [None] * 3
    alone = kl.run_kernel(LAPLACE, *given[:2], bandwidth=given[2])
    given[place], dims[place] = torch.stack([given[place]] * 2), 0

    def call(x, y, width):
        return kl.run_kernel(LAPLACE, x, y, bandwidth=width)

    found = torch.vmap(call, in_dims=tuple(dims))(*given)
    assert found.shape == (2, M, N)
    torch.testing.assert_close(found, alone.expand(2, M, N), rtol=1e-5, atol=1e-6)

"""Products with compressed matrices on a GPU: values, layouts, gradients, and what surrounds a
kernel."""

from __future__ import annotations

import copy
import gc
import math

import pytest
import torch
import torch.nn.functional as F

import kernlib as kl
from kernlib import ahead
from kernlib.ahead import build_all
from kernlib.families.sparse.descriptor import SparseMatmul
from kernlib.runtime import devices, expressions
from kernlib.sparse import SparseMatrix, compress, matmul
from tests.families.sparse.cases import BIASED, DTYPES, EPILOGUES, FORMATS, made, random, values_of
from tests.gpu.watched import capture, nothing_waits

DEVICE = "cuda"
TOLERANCE = {"fp16": 2.5e-4, "bf16": 2e-3, "fp32": 1e-6}
COLUMNS = (1, 2, 7, 8, 16, 17, 32, 33, 256)
DENSITY = {"bitmap": 0.5, "u8": 0.08, "u4": 0.3, "u2": 0.6, "macko": 0.2, "dense": 1.0}
PLAIN = SparseMatmul()
GELU = SparseMatmul(EPILOGUES["gelu"])
SCALARS = SparseMatmul(EPILOGUES["scalars"])
every_format = pytest.mark.parametrize("format", FORMATS)


@pytest.fixture(scope="module", autouse=True)
def built():
    """The kernels of most tests here, compiled side by side."""
    device = torch.cuda.current_device()
    arch, specs = devices.arch_of(device), []
    for format in FORMATS:
        for dtype in DTYPES.values():
            _, w, many = case(format, columns=16, dtype=dtype)
            for descriptor in (PLAIN, BIASED, GELU, SCALARS):
                if dtype != torch.float16 and descriptor is not PLAIN:
                    continue
                values = values_of(descriptor, 500, dtype, DEVICE)
                for columns in (1, 2, 7, 8, 16):
                    specs += ahead.specs(descriptor, arch, (w, many[:columns]), values, device)
    build_all([(spec, arch) for spec in dict.fromkeys(specs)], None, False)


def case(format: str, rows=500, cols=1000, columns=1, dtype=torch.float16, density=None):
    """The dense matrix, the compressed one, and x."""
    density = DENSITY[format] if density is None else density
    dense, w = made(rows, cols, format, density=density, dtype=dtype, device=DEVICE)
    return dense, w, torch.randn(columns, cols, device=DEVICE).to(dtype)


def relative_error(found, wanted) -> float:
    return float((found.double() - wanted).norm() / wanted.norm().clamp(min=1e-30))


def exact(dense, x, epilogue=(), values=None):
    y = x.double() @ dense.double().t()
    wide = {k: v.double() if torch.is_tensor(v) else v for k, v in (values or {}).items()}
    return expressions.apply(epilogue, y, wide)


def tolerance(found, numbers="fp16") -> float:
    """Of a whole result; the rounding of few values may be that of half a unit in the last place
    for all of them."""
    return TOLERANCE[numbers] * (1 if found.numel() >= 4096 else 1.96)


def bound(found, wanted, dense, x, bias=None, numbers="fp16") -> float:
    """The tolerance, or cuBLAS's own error where that computes: it may round sums in between, and
    chooses its kernel by the layout of its operands."""
    theirs = relative_error(F.linear(x, dense, bias), wanted)
    return max(tolerance(found, numbers), 1.2 * theirs)


def check(found, dense, x, numbers="fp16"):
    assert torch.count_nonzero(found), "all zeros"
    wanted = exact(dense, x)
    error, most = relative_error(found, wanted), bound(found, wanted, dense, x, numbers=numbers)
    assert error <= most, f"{tuple(x.shape)}: error {error:.2e}"


# Values.


@every_format
@pytest.mark.parametrize("numbers", DTYPES)
def test_values(numbers, format, seed):
    dtype = DTYPES[numbers]
    for rows, cols in ((1024, 2048), (500, 1003)):
        dense, w, _ = case(format, rows, cols, dtype=dtype)
        for columns in COLUMNS:
            x = torch.randn(columns, cols, device=DEVICE).to(dtype)
            check(matmul(w, x), dense, x, numbers)
        check(matmul(w, x[0]), dense, x[0], numbers)


@every_format
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_epilogues(epilogue, format, seed):
    descriptor = SparseMatmul(EPILOGUES[epilogue])
    for columns in (1, 8, 19, 33):
        dense, w, x = case(format, columns=columns)
        values = values_of(descriptor, 500, torch.float16, DEVICE)
        wanted = exact(dense, x, descriptor.epilogue, values)
        found = kl.run_kernel(descriptor, w, x, **values)
        # From 17 vectors on epilogues follow on the rounded product.
        assert relative_error(found, wanted) <= tolerance(found) * (2 if columns > 16 else 1)
        if epilogue == "scalars":
            there = {"scale": torch.tensor(0.75, device=DEVICE), "gain": torch.tensor(0.75)}
            again = kl.run_kernel(descriptor, w, x, **{**values, **there})
            assert relative_error(again, wanted) <= 2 * tolerance(again)


# Layouts.


def spread(x):
    """The same values in other memory, NaN around them."""
    columns, cols = x.shape
    yield "turned", x.t().contiguous().t()
    for front, behind in ((0, 24), (1, 3), (8, 8), (4, 0)):
        whole = x.new_full((columns + 1, front + cols + behind), math.nan)
        yield f"{front} and {behind} around", whole[1:, front : front + cols].copy_(x)
    whole = x.new_full((columns, 2 * cols), math.nan)
    yield "every other", whole[:, ::2].copy_(x)
    whole = x.new_full((x.numel() + 1,), math.nan)
    yield "unaligned", whole[1:].view(x.shape).copy_(x)
    yield "expanded", x[:1].expand(columns, cols)


@every_format
@pytest.mark.parametrize("columns", [1, 8, 33])
def test_operands_of_any_strides(columns, format, seed):
    for cols in (1000, 1003):
        dense, w, x = case(format, cols=cols, columns=columns)
        for name, other in spread(x):
            found = matmul(w, other)
            assert torch.isfinite(found).all(), name
            check(found, dense, other)


@every_format
@pytest.mark.parametrize("leading", [(), (1,), (2, 3), (2, 1, 4), (0,), (3, 0), (2, 20)])
def test_leading_dimensions(leading, format, seed):
    dense, w, _ = case(format)
    x, bias = (torch.randn(*sizes, device=DEVICE).half() for sizes in ((*leading, 1000), (500,)))
    y = matmul(w, x, bias)
    assert y.shape == (*leading, 500) and y.is_contiguous()
    if y.numel():
        wanted = exact(dense, x) + bias.double()
        assert relative_error(y, wanted) <= bound(y, wanted, dense, x, bias)
    if len(leading) > 1:
        part = torch.randn(*leading, 1008, device=DEVICE).half()[..., :1000].transpose(0, 1)
        torch.testing.assert_close(matmul(w, part), matmul(w, part.contiguous()))


@every_format
@pytest.mark.parametrize("columns", [1, 6, 34])
def test_results_of_any_strides(columns, format, seed):
    dense, w, x = case(format, columns=columns)
    x = x.view(-1, 2, 1000) if columns > 1 else x
    wanted = matmul(w, x)
    shape = wanted.shape
    outs = [
        torch.empty(shape[::-1], device=DEVICE).half().permute(*reversed(range(len(shape)))),
        torch.empty(*shape[:-1], 1000, device=DEVICE).half()[..., ::2],
        torch.empty(*shape[:-1], 503, device=DEVICE).half()[..., 3:],
        torch.empty(shape[0] + 1, *shape[1:], device=DEVICE).half()[1:],
    ]
    for out in outs:
        assert matmul(w, x, out=out.fill_(math.nan)) is out
        assert torch.equal(out, wanted)
    check(wanted, dense, x)


# Gradients.


@every_format
@pytest.mark.parametrize("columns", [1, 8, 33])
def test_gradients(columns, format, seed):
    dense, w, x = case(format, columns=columns)
    bias = torch.randn(500, device=DEVICE).half()
    x.requires_grad_(), bias.requires_grad_()
    grad = torch.randn(columns, 500, device=DEVICE).half()
    for descriptor in (BIASED, GELU):
        y = kl.run_kernel(descriptor, w, x, bias=bias)
        found = torch.autograd.grad(y, (x, bias), grad)
        wide = [t.detach().double().requires_grad_() for t in (x, bias)]
        z = F.linear(wide[0], dense.double(), wide[1])
        wanted = torch.autograd.grad(z if descriptor is BIASED else F.gelu(z), wide, grad.double())
        for ours, theirs in zip(found, wanted, strict=True):
            assert relative_error(ours, theirs) <= 1e-3
    assert (w.known_transpose() is None) == (columns > 16 or format == "dense")
    given = grad.requires_grad_()
    (first,) = torch.autograd.grad(matmul(w, x), x, given, create_graph=True)
    (second,) = torch.autograd.grad(first, given, x.detach())
    check(second, dense, x.detach())


@every_format
def test_transforms_of_torch_func(format, seed):
    dense, w, x = case(format, columns=5)
    bias = torch.randn(500, device=DEVICE).half()
    wanted = exact(dense, x) + bias.double()
    assert relative_error(torch.vmap(lambda x: matmul(w, x, bias))(x), wanted) <= 4.9e-4
    assert relative_error(torch.vmap(lambda b: matmul(w, x[0], b))(bias[None]), wanted[:1]) <= 1e-3
    found = torch.func.grad(lambda x: matmul(w, x).float().sum())(x)
    theirs = dense.double().sum(0).expand(5, 1000)
    assert relative_error(found, theirs) <= 1e-3
    tangent = torch.func.jvp(lambda x: matmul(w, x), (x,), (x,))[1]
    assert relative_error(tangent, exact(dense, x)) <= 5e-4


# What surrounds a kernel.


@every_format
def test_a_call_never_waits_for_the_device(format, seed):
    _, w, x = case(format, columns=8)
    bias = torch.randn(500, device=DEVICE).half()
    there, here = torch.tensor(2.0, device=DEVICE), torch.tensor(2.0)
    w.transpose().transpose()
    scaled = SparseMatmul((kl.Bias(), kl.Scale()))
    with nothing_waits():
        for scale in (2.0, there, here):
            for given in (x, x[0], x.repeat(4, 1), x.t().contiguous().t()):
                for _ in range(2):
                    kl.run_kernel(scaled, w, given, bias=bias, scale=scale)
        recorded = x.clone().requires_grad_()
        matmul(w, recorded, bias).backward(torch.ones(8, 500, device=DEVICE).half())


@every_format
def test_the_current_stream_is_used(format, seed):
    _, w, x = case(format, columns=8)
    wanted, stream = matmul(w, x), torch.cuda.Stream()
    for columns in (8, 32):
        late = torch.full((columns, 1000), math.nan, device=DEVICE).half()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            late.copy_(x.repeat(columns // 8, 1))
            found = matmul(w, late)
        stream.synchronize()
        if columns == 8:
            assert torch.equal(found, wanted)
        else:
            # cuBLAS may round partial sums to float16, by 2^-7 where they pass 16.
            torch.testing.assert_close(found[:8], wanted, rtol=1e-2, atol=5e-2)


@every_format
@pytest.mark.parametrize("columns", [1, 8, 33])
def test_graphs_follow_what_is_changed_in_place(columns, format, seed):
    dense, w, x = case(format, columns=columns)
    bias = torch.randn(500, device=DEVICE).half()
    out = torch.empty(columns, 500, device=DEVICE).half()
    kl.prepare(BIASED, w, x, bias=bias, out=out)
    if columns > 16 or format == "dense":
        matmul(w, x, bias, out=out)  # cuBLAS takes its workspace
    with capture() as graph:
        matmul(w, x, bias, out=out)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        bias.copy_(torch.randn_like(bias))
        out.fill_(math.nan)
        graph.replay()
        wanted = exact(dense, x) + bias.double()
        assert relative_error(out, wanted) <= bound(out, wanted, dense, x, bias)
        first = out.clone()
        graph.replay()
        assert torch.equal(out, first)


@pytest.mark.parametrize("format", [f for f in FORMATS if f != "dense"])
def test_a_capture_needs_prepare(format, seed):
    _, w, x = case(format)
    descriptor = SparseMatmul(kl.Custom(f"v * 1.{FORMATS.index(format)}375"))  # not loaded yet
    out = torch.empty(1, 500, device=DEVICE).half()
    with pytest.raises(kl.CaptureError, match=r"kernlib\.prepare"), capture():
        kl.run_kernel(descriptor, w, x, out=out)
    torch.cuda.synchronize()
    kl.prepare(descriptor, w, x, out=out)
    assert ahead.prepared(descriptor, w, x, out=out)
    with capture() as graph:
        kl.run_kernel(descriptor, w, x, out=out)
    graph.replay()
    torch.testing.assert_close(out, kl.run_kernel(descriptor, w, x))


@every_format
def test_compiled_calls(format, seed):
    dense, w, x = case(format, columns=4)
    bias = torch.randn(500, device=DEVICE).half()
    w.transpose()

    def call(x, bias):
        return matmul(w, x, bias, kl.Gelu())

    run = torch.compile(call, fullgraph=True, mode="reduce-overhead")
    try:
        for _ in range(4):
            given = torch.randn_like(x)
            wanted = exact(dense, given, GELU.epilogue, {"bias": bias})
            with torch.no_grad():
                found = run(given, bias).clone()
                assert relative_error(found, wanted) <= tolerance(found)
        recorded = x.clone().requires_grad_()
        found = torch.autograd.grad(run(recorded, bias).float().sum(), recorded)[0]
        wanted = torch.autograd.grad(call(recorded, bias).float().sum(), recorded)[0]
        assert relative_error(found, wanted.double()) <= 2e-3
    finally:
        torch._dynamo.reset()


def test_a_matrix_moves_and_saves(seed, tmp_path):
    dense, w, x = case("bitmap", columns=2)
    wanted = matmul(w, x)
    header, tensors = w.state()
    torch.save((header, tensors), tmp_path / "w.pt")
    again = SparseMatrix.from_state(*torch.load(tmp_path / "w.pt"))
    for other in (w.cpu().cuda(), copy.deepcopy(w), again, w.to(0)):
        assert torch.equal(matmul(other, x), wanted)
    assert torch.equal(w.cpu().to_dense(), dense.cpu())
    assert torch.equal(w.transpose().to_dense(), dense.t())
    with pytest.raises(ValueError, match="x and w must be on one device, got cuda:0 and cpu"):
        matmul(w.cpu(), x)
    with pytest.raises(ValueError, match="x and w must be on one device, got cpu and cuda:0"):
        matmul(w, x.cpu())


# Sizes, devices, memory, values that are not finite.


@every_format
def test_rows_of_any_number(format, seed):
    for rows in (1, 15, 17, 31, 33, 129):
        dense, w, x = case(format, rows=rows, cols=520, columns=3)
        whole = torch.full((3, rows + 64), 77.0, device=DEVICE).half()
        matmul(w, x, out=whole[:, 32 : 32 + rows])
        assert relative_error(whole[:, 32 : 32 + rows], exact(dense, x)) <= 6e-4
        assert bool((whole[:, :32] == 77).all()) and bool((whole[:, 32 + rows :] == 77).all())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@every_format
def test_the_device_of_the_matrix(format, seed):
    dense = random(500, 1000, DENSITY[format], torch.float16, "cuda:1")
    w = compress(dense, format)
    x = torch.randn(3, 1000, device="cuda:1").half()
    for given in (x, x.repeat(20, 1)):
        y = matmul(w, given)
        assert y.device == w.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
        check(y, dense, given)
    with pytest.raises(ValueError, match="x and w must be on one device"):
        matmul(w, x.to("cuda:0"))


def test_more_than_2_to_the_31_positions(seed):
    rows, cols = 65536 + 16, 32768
    if torch.cuda.mem_get_info()[0] < 30 << 30:
        pytest.skip("needs 30 GiB of free memory")
    dense = torch.zeros(rows, cols, dtype=torch.float16, device=DEVICE)
    for first in (0, rows - 16):
        dense[first : first + 16] = random(16, cols, 0.3, torch.float16, DEVICE)
    w = compress(dense, "bitmap")
    x = torch.randn(2, cols, device=DEVICE).half()
    y = matmul(w, x)
    for part in (slice(0, 16), slice(rows - 16, rows)):
        assert relative_error(y[:, part], exact(dense[part], x)) <= TOLERANCE["fp16"] * 1.4
    assert not y[:, 16 : rows - 16].any()
    assert torch.equal(w.to_dense()[-16:], dense[-16:])


@every_format
def test_memory_does_not_grow(format, seed):
    dense, w, x = case(format, columns=8)
    for _ in range(3):
        compress(dense, format), matmul(w, x), matmul(w, x.repeat(4, 1))
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        compress(dense, format).transpose(), matmul(w, x), matmul(w, x.repeat(4, 1))
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@every_format
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_values_that_are_not_finite(value, format, seed):
    dense, w, x = case(format, rows=64, cols=1003, columns=4)
    dense[:, 77] = 0
    dense[5, 77] = 1
    w = compress(dense, format)
    x[2, 77] = value
    y = matmul(w, x)
    skips = format in ("u8", "u4", "u2", "macko")
    others = torch.tensor([0, 1, 3], device=DEVICE)
    check(y[others], dense, x[others])  # of other vectors nothing is seen
    assert not math.isfinite(y[2, 5])
    rest = torch.cat((y[2, :5], y[2, 6:]))
    assert bool(torch.isfinite(rest).all()) if skips else bool(rest.isnan().all())
    if not math.isnan(value):
        assert y[2, 5] == value
    one = matmul(w, x[2])
    assert torch.equal(one.isnan(), y[2].isnan())


@every_format
def test_empty_full_and_narrow_matrices(format, seed):
    for rows, cols in [(1, 1), (1, 999), (999, 1), (0, 7), (7, 0), (0, 0), (33, 257)]:
        for density in (0, 0.5, 1):
            dense, w, _ = case(format, rows, cols, density=density)
            bias = torch.randn(rows, device=DEVICE).half()
            for columns in (1, 5, 40):
                x = torch.randn(columns, cols, device=DEVICE).half()
                y, wanted = matmul(w, x, bias), exact(dense, x) + bias.double()
                torch.testing.assert_close(y.double(), wanted, rtol=2e-3, atol=2e-3)
    dense, w, x = case(format, columns=3)
    dense[::3] = 0
    assert not matmul(compress(dense, format), x)[:, ::3].any()
    dense.zero_()[77] = 0.5  # one row among empty ones
    dense[77, 1] = 0
    check(matmul(compress(dense, format), x), dense, x)


@every_format
def test_the_same_bits_each_time(format, seed):
    _, w, x = case(format, 2000, 4096, columns=8)
    for given in (x, x[0]):
        first = matmul(w, given)
        streams = [torch.cuda.Stream() for _ in range(4)]
        torch.cuda.synchronize()
        found = []
        for stream in streams:
            with torch.cuda.stream(stream):
                found += [matmul(w, given) for _ in range(10)]
        torch.cuda.synchronize()
        assert all(torch.equal(y, first) for y in found)

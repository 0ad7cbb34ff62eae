"""Reductions of kernel matrices on the GPU against the matrix itself in float64."""

from __future__ import annotations

import math

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise.kernels import double
from kernlib.families.pairwise.reductions import kernels
from kernlib.families.pairwise.reductions.arguments import request_of, shape_of
from tests.gpu.families.pairwise.cases import points, reference, relative_error
from tests.gpu.watched import capture, nothing_waits, peak

GAUSSIAN = kl.gaussian()
DESCRIPTORS = {
    "gaussian": (GAUSSIAN, {"bandwidth": 2.0}),
    "laplace l1": (kl.laplace_l1(), {"bandwidth": 3.0}),
    "laplace l2": (kl.laplace_l2(), {"bandwidth": 2.0}),
    "matern52": (kl.matern52(), {"bandwidth": 2.0}),
    "rational quadratic": (kl.rational_quadratic(), {"bandwidth": 2.0, "alpha": 1.5}),
    "pq": (kl.laplace_pq(), {"bandwidth": 3.0, "p": 1.3, "q": 0.9}),
    "maximum": (kl.p_distance(), {"p": math.inf}),
    "expadd": (kl.exp_power_sum(), {"p": 1, "inner_scale": -0.5}),
    "signed": (
        kl.Pairwise(inner=kl.Identity(), epilogue=kl.Custom("tanh(v / s)", ("s",))),
        {"s": 3.0},
    ),
    "regularized": (
        GAUSSIAN,
        {"bandwidth": 2.0, "regularization": 0.7, "row_offset": 90, "col_offset": 2},
    ),
    "epsilon": (kl.laplace_l1(), {"bandwidth": 3.0, "epsilon": 1e-3}),
    "tiny bandwidth": (GAUSSIAN, {"bandwidth": 1e-20}),
}
ERROR = 2e-6


def poison(*counts: int) -> None:
    """NaN in the memory that the next allocations of these sizes get."""
    made = [torch.full((count,), math.nan, device="cuda") for count in counts]
    del made


def by_kernels(reduction, descriptor, a, b, v=None, **values) -> bool:
    offsets = (values.pop(name, 0) for name in ("row_offset", "col_offset"))
    request = request_of(descriptor, a, b, v, *offsets, values)
    return kernels.plan(reduction, request, shape_of(request, reduction)) is not None


@pytest.mark.parametrize(
    "k, blocks", [(3, "fitted"), (3, "whole"), (21, "fitted")], indirect=["blocks"]
)
@pytest.mark.parametrize("name", DESCRIPTORS)
def test_reductions_of_every_descriptor(name, k, blocks, seed):
    descriptor, values = DESCRIPTORS[name]
    a, b, v = points(301, k), points(777, k), points(777, 3)
    b[5] = a[3]
    matrix = reference(descriptor, a, b, **values)
    poison(301 * 3, 301 * 12, 301)
    found = kl.kernel_matmul(descriptor, a, b, v, **values).cpu()
    scale = (matrix.abs() @ v.cpu().double().abs()).norm()
    assert ((found - matrix @ v.cpu().double()).norm() / scale).item() <= ERROR
    sums, logs = (f(descriptor, a, b, **values) for f in (kl.kernel_sum, kl.kernel_logsumexp))
    assert ((sums.cpu() - matrix.sum(1)).norm() / matrix.abs().sum(1).norm()).item() <= ERROR
    assert relative_error(logs, matrix.logsumexp(1)) <= ERROR
    low, places = kl.kernel_min(descriptor, a, b, **values)
    chosen = matrix.gather(1, places.cpu()[:, None])[:, 0]
    margin = ERROR * matrix.abs().max()
    assert (low.cpu() - matrix.amin(1)).abs().max() <= margin
    assert (chosen - matrix.amin(1)).abs().max() <= margin
    near, places = kl.kernel_topk(descriptor, a, b, 5, **values)
    assert (near.cpu() - matrix.topk(5, largest=False).values).abs().max() <= margin
    assert (matrix.gather(1, places.cpu()) - near.cpu()).abs().max() <= margin


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 8, 9, 16, 17, 64, 65, 200])
@pytest.mark.parametrize("k", [1, 4, 16, 17, 130])
@pytest.mark.parametrize("blocks", ["whole"], indirect=True)
def test_features_and_columns_select_code(k, columns, blocks, seed):
    a, b, v = points(333, k), points(500, k), points(500, columns)
    bandwidth = math.sqrt(k)
    wanted = reference(GAUSSIAN, a, b, bandwidth=bandwidth) @ v.cpu().double()
    poison(333 * columns, 2 * 333 * columns)
    assert relative_error(kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=bandwidth), wanted) <= ERROR


@pytest.mark.parametrize(
    "size", [(1, 1), (1, 100_003), (100_003, 1), (5, 70_000), (2049, 257)], ids=str
)
@pytest.mark.parametrize("k", [3, 20])
def test_sizes(size, k, seed):
    a, b, v = points(size[0], k), points(size[1], k), points(size[1])
    matrix = reference(GAUSSIAN, a, b, bandwidth=3.0)
    weights = v.cpu().double()
    found = kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=3.0).cpu()
    scale = (matrix @ weights.abs()).norm()
    assert ((found - matrix @ weights).norm() / scale).item() <= ERROR
    assert torch.equal(
        kl.kernel_argmin(kl.l1_distance(), a, b), kl.kernel_min(kl.l1_distance(), a, b)[1]
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("k", [3, 33])
@pytest.mark.parametrize("blocks", ["fitted", "whole"], indirect=True)
def test_dtypes(dtype, k, blocks, seed):
    a, b, v = (points(*s, dtype=dtype) for s in ((300, k), (400, k), (400, 2)))
    assert by_kernels("matmul", GAUSSIAN, a, b, v, bandwidth=2.0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    out = torch.full((300, 2), math.nan, dtype=wide, device="cuda")
    kl.kernel_matmul(GAUSSIAN, a, b, v, out=out, bandwidth=4.0)
    wanted = reference(GAUSSIAN, a, b, bandwidth=4.0) @ v.cpu().double()
    assert relative_error(out, wanted) <= (1e-13 if dtype == torch.float64 else ERROR)
    assert kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=4.0).dtype == dtype


def test_batches_and_strides(seed):
    a, b, v = points(3, 200, 5), points(300, 5), points(3, 300, 2)
    bandwidth = torch.tensor([1.0, 2.0, 3.0], device="cuda")
    cases = [
        (a, b, v, bandwidth), (a, b, v[0], 2.0), (a[0], b, v, 2.0), (a[0], b, v[0], bandwidth),
        (a[:1].expand(3, -1, -1), b, v, bandwidth), (a, b[None], v[:1], bandwidth[:1]),
        (a.mT.contiguous().mT, points(300, 40)[:, ::8], v.flip(0)[..., 1:], 2.0),
    ]  # fmt: skip
    for x, y, w, value in cases:
        wanted = reference(GAUSSIAN, x, y, bandwidth=value) @ w.cpu().double()
        assert relative_error(kl.kernel_matmul(GAUSSIAN, x, y, w, bandwidth=value), wanted) <= ERROR
    assert torch.equal(
        kl.kernel_sum(GAUSSIAN, a, b, bandwidth=bandwidth)[1],
        kl.kernel_sum(GAUSSIAN, a[1], b, bandwidth=2.0),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("k", [3, 40])
def test_the_first_of_equal_values_and_nan(k, dtype):
    a, b = (
        f(n, k, device="cuda", dtype=dtype) for f, n in ((torch.zeros, 300), (torch.ones, 5000))
    )
    b[4500:] = b[333:400] = 0.5
    assert kl.kernel_argmin(kl.l1_distance(), a, b).eq(333).all()
    b[4400] = b[700] = math.nan
    low, places = kl.kernel_min(kl.l1_distance(), a, b)
    assert low.isnan().all() and places.eq(700).all()
    b[:] = math.inf
    assert kl.kernel_argmin(kl.l1_distance(), a, b).eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("k", [1, 33])
def test_log_sums_of_infinite_values(k, dtype):
    large = 1e30 if dtype == torch.float32 else 1e200  # whose square is infinite
    a, b = torch.zeros(3, k, dtype=dtype), torch.zeros(3, k, dtype=dtype)
    a[:, 0] = torch.tensor([large, -large, 1.0], dtype=dtype)
    b[:, 0] = torch.tensor([large, 2.0, 3.0], dtype=dtype)
    found = kl.kernel_logsumexp(kl.dot_product(), a.cuda(), b.cuda())
    wanted = kl.run_kernel(kl.dot_product(), a, b).logsumexp(1)
    torch.testing.assert_close(found.cpu(), wanted)


DOUBLE_ERROR = 1e-13


@pytest.mark.parametrize("size", [(1, 1), (301, 777), (5, 70_000), (2049, 257)], ids=str)
@pytest.mark.parametrize(
    "k, blocks", [(1, "fitted"), (3, "whole"), (10, "fitted"), (11, "fitted")], indirect=["blocks"]
)
@pytest.mark.parametrize("name", ["gaussian", "laplace l1", "regularized", "epsilon", "signed"])
def test_log_sums_and_minima_of_float64(name, k, size, blocks, seed):
    descriptor, values = DESCRIPTORS[name]
    a, b = (points(count, k, dtype=torch.float64) for count in size)
    taken = k <= double.SMALL_FEATURES
    assert by_kernels("logsumexp", descriptor, a, b, **values) is taken
    assert by_kernels("min", descriptor, a, b, **values) is taken
    matrix = reference(descriptor, a, b, **values)
    poison(2 * len(a), 8 * len(a))
    logs = kl.kernel_logsumexp(descriptor, a, b, **values)
    assert logs.dtype == torch.float64
    assert relative_error(logs, matrix.logsumexp(1)) <= DOUBLE_ERROR
    low, places = (t.cpu() for t in kl.kernel_min(descriptor, a, b, **values))
    margin = DOUBLE_ERROR * matrix.abs().max()
    assert (low - matrix.amin(1)).abs().max() <= margin
    assert (matrix.gather(1, places[:, None])[:, 0] - matrix.amin(1)).abs().max() <= margin
    assert torch.equal(kl.kernel_argmin(descriptor, a, b, **values).cpu(), places)
    assert torch.equal(kl.kernel_logsumexp(descriptor, a, b, **values), logs)


@pytest.mark.parametrize("k", [3, 10])
def test_batches_and_strides_of_float64(k, seed):
    a, b = points(3, 200, k, dtype=torch.float64), points(300, k, dtype=torch.float64)
    widths = torch.tensor([1.0, 2.0, 3.0], device="cuda", dtype=torch.float64)
    wide = points(300, 8 * k, dtype=torch.float64)[:, ::8].flip(0)
    for x, y, value in ((a, b, widths), (a[0], b[None], widths), (a.mT.contiguous().mT, wide, 2.0)):
        matrix = reference(GAUSSIAN, x, y, bandwidth=value)
        logs = kl.kernel_logsumexp(GAUSSIAN, x, y, bandwidth=value)
        assert relative_error(logs, matrix.logsumexp(-1)) <= DOUBLE_ERROR
        low, _ = kl.kernel_min(GAUSSIAN, x, y, bandwidth=value)
        assert relative_error(low, matrix.amin(-1)) <= DOUBLE_ERROR


@pytest.mark.parametrize("reduction", [kl.kernel_logsumexp, lambda *t, **n: kl.kernel_min(*t)[0]])
def test_gradients_of_log_sums_and_minima_of_float64(reduction, seed):
    inputs = [points(s, 3, dtype=torch.float64).requires_grad_() for s in (300, 400)]
    wide = [t.detach().cpu().requires_grad_() for t in inputs]
    made = (reduction(kl.squared_distance(), *t).square().sum() for t in (inputs, wide))
    found, wanted = (torch.autograd.grad(t, of) for t, of in zip(made, (inputs, wide), strict=True))
    for x, y in zip(found, wanted, strict=True):
        assert relative_error(x, y) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("k", [3, 64])
def test_the_same_bits_each_time_in_any_memory(k, dtype, seed):
    a, b, v = (points(*s, dtype=dtype) for s in ((3000, k), (20_000, k), (20_000, 4)))
    b[:50] = a[:50]
    first = kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=3.0)
    out = torch.full_like(first, math.nan)
    for _ in range(10):
        kl.kernel_matmul(GAUSSIAN, a, b, v, out=out, bandwidth=3.0)
        assert torch.equal(out, first)


REDUCTIONS = {
    "one column": lambda a, b: kl.kernel_matmul(GAUSSIAN, a, b, b[:, 0], bandwidth=3.0),
    "100 columns": lambda a, b: kl.kernel_matmul(
        GAUSSIAN, a, b, b[:, :1].repeat(1, 100), bandwidth=3.0
    ),
    "logsumexp": lambda a, b: kl.kernel_logsumexp(GAUSSIAN, a, b, bandwidth=3.0),
    "min": lambda a, b: kl.kernel_min(GAUSSIAN, a, b, bandwidth=3.0),
    "topk": lambda a, b: kl.kernel_topk(GAUSSIAN, a, b, 10, bandwidth=3.0),
}
CONSTANT_BYTES = 320 << 20  # a block, what sorts it, partial results


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("k", [3, 64])
def test_memory_does_not_grow_with_the_matrix(name, k, seed):
    count = 40_000  # whose matrix takes 6.4 GB
    a, b = points(count, k), points(count, k)
    REDUCTIONS[name](a, b)
    torch.cuda.empty_cache()
    _, most = peak(lambda: REDUCTIONS[name](a, b))
    assert most <= CONSTANT_BYTES + 8 * count * 4 * 128


def test_a_call_never_waits_for_the_device(seed):
    a, b, v = points(300, 3), points(500, 3), points(500, 2)
    bandwidth = torch.tensor(2.0, device="cuda")
    calls = [
        lambda: kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=bandwidth),
        lambda: kl.kernel_matmul(GAUSSIAN, a, b, v.repeat(1, 100), bandwidth=2.0),
        lambda: kl.kernel_logsumexp(GAUSSIAN, a, b, bandwidth=2.0),
        lambda: kl.kernel_min(GAUSSIAN, a, b, bandwidth=2.0),
        lambda: kl.kernel_topk(GAUSSIAN, a, b, 5, bandwidth=2.0),
    ]
    for call in calls:
        call()
    with nothing_waits():
        for call in calls:
            call()


@pytest.mark.parametrize("k, dtype", [(3, torch.float32), (20, torch.float64)], ids=str)
def test_a_captured_call_reads_numbers_again(k, dtype, seed):
    a, b, v = (points(*s, dtype=dtype) for s in ((300, k), (500, k), (500, 2)))
    bandwidth = torch.tensor(2.0, device="cuda", dtype=dtype)
    kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=bandwidth)
    with capture() as graph:
        out = kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=bandwidth)
    for value in (1.0, 3.0):
        bandwidth.fill_(value)
        graph.replay()
        assert torch.equal(out, kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=value))


# Many columns, precision, maps of features, compiled calls.


@pytest.mark.parametrize("columns", [1, 40, 300])
@pytest.mark.parametrize("asked", [None, "fp32", "tf32"])
@pytest.mark.parametrize("setting", ["highest", "high"])
def test_products_are_as_accurate_as_is_asked_for(setting, asked, columns, permitted, seed):
    permitted(setting)
    exact = asked == "fp32" or (asked is None and setting == "highest")
    descriptor = kl.gaussian(precision=asked)
    inputs = [points(*s).requires_grad_() for s in ((2048, 200), (4096, 200), (4096, columns))]
    bandwidth = math.sqrt(200)
    out = kl.kernel_matmul(descriptor, *inputs, bandwidth=bandwidth)
    along = points(2048, columns)
    found = torch.autograd.grad(out, inputs, along)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    squares = (wide[0] ** 2).sum(1)[:, None] + (wide[1] ** 2).sum(1) - 2 * wide[0] @ wide[1].T
    matrix = (-squares / (2 * bandwidth**2)).exp()
    whole = matrix @ wide[2]
    wanted = torch.autograd.grad(whole, wide, along.double())
    # All entries of the matrix are near 0.37, so the norm of the product follows the sum of the one
    # column, which may come out at a tenth of what it is expected to be: this is the expected norm.
    scale = (matrix.square() @ wide[2].square()).sum().sqrt()
    assert (out - whole).norm() / scale <= (ERROR if exact else 2e-3)
    for x, y in zip(found, wanted, strict=True):
        assert relative_error(x, y) <= (1e-5 if exact else 5e-3)


@pytest.mark.parametrize("shape", [(5,), (5, 3)], ids=str)
def test_features_are_mapped_first(shape, seed):
    a, b, v, f = points(300, 5), points(400, 5), points(400, 2), points(*shape)
    x, y = (a * f, b * f) if len(shape) == 1 else (a @ f, b @ f)
    options = {"bandwidth": 2.0, "feature_map": f}
    found = kl.kernel_matmul(GAUSSIAN, a, b, v, **options)
    torch.testing.assert_close(found, kl.kernel_matmul(GAUSSIAN, x, y, v, bandwidth=2.0))
    assert torch.equal(
        kl.kernel_argmin(kl.l1_distance(), a, b, feature_map=f),
        kl.kernel_argmin(kl.l1_distance(), x, y),
    )


@pytest.mark.parametrize("n", [400, 100_000])
def test_out_is_written_in_place(n, seed):
    a, b, v = points(300, 3), points(n, 3), points(n, 2)
    for dtype in (torch.float32, torch.float16):
        x, y, w = (t.to(dtype) for t in (a, b, v))
        wanted = kl.kernel_matmul(GAUSSIAN, x, y, w, bandwidth=2.0)
        for out in (torch.full((300, 2), math.nan), torch.full((2, 300), math.nan).T):
            out = out.cuda()
            version = out._version
            assert kl.kernel_matmul(GAUSSIAN, x, y, w, out=out, bandwidth=2.0) is out
            assert torch.equal(out.to(dtype), wanted) and out._version > version


@pytest.mark.parametrize("k", [3, 40])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_calls_and_their_gradients(k, backend, seed):
    def function(a, b, v, w):
        sums = kl.kernel_logsumexp(GAUSSIAN, a, b, bandwidth=w)
        nearest = kl.kernel_topk(kl.squared_distance(), a, b, 4)[0]
        return kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=w).sin() + sums[:, None] + nearest

    inputs = [points(*s).requires_grad_() for s in ((300, k), (500, k), (500, 4))]
    inputs.append(torch.tensor(math.sqrt(k), device="cuda", requires_grad=True))
    along = points(300, 4)
    run = torch.compile(function, backend=backend, fullgraph=True)
    found, wanted = run(*inputs), function(*inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    slopes = (torch.autograd.grad(out, inputs, along) for out in (found, wanted))
    for x, y in zip(*slopes, strict=True):
        assert relative_error(x, y.double()) <= 1e-5


LOG_GAUSSIAN = kl.squared_distance(epilogue=kl.Custom("-s * v", ("s",)))


@pytest.mark.parametrize(
    "m, n, k, dtype",
    [
        (301, 777, 3, torch.float32), (20000, 9001, 3, torch.float32),
        (5000, 4001, 64, torch.float32), (5000, 4001, 64, torch.float16),
        (5000, 4001, 256, torch.float32), (301, 777, 64, torch.float32),
        (301, 777, 3, torch.float64), (301, 777, 64, torch.float64),
    ],
)  # fmt: skip
def test_potentials(m, n, k, dtype, seed):
    a, b = points(m, k).to(dtype), points(n, k).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    f, g = 5 * points(m, 1)[:, 0].to(wide), 5 * points(n, 1)[:, 0].to(wide)
    g[3], g[11], g[-1] = -1e4, -math.inf, 30.0
    b[5] = a[3]
    matrix = reference(LOG_GAUSSIAN, a, b, s=1 / k)
    poison(m, 2 * m, 4 * m, 8 * m)
    found = kl.kernel_logsumexp(LOG_GAUSSIAN, a, b, s=1 / k, row_potential=f, col_potential=g)
    wanted = f.cpu().double() + (matrix + g.cpu().double()).logsumexp(1)
    assert found.dtype == wide and relative_error(found, wanted) <= ERROR
    assert torch.equal(
        found, kl.kernel_logsumexp(LOG_GAUSSIAN, a, b, s=1 / k, row_potential=f, col_potential=g)
    )
    by_kernel = dtype != torch.float64 or k == 3
    assert by_kernels("logsumexp", LOG_GAUSSIAN, a, b, g[:, None], s=1 / k) is by_kernel
    nothing = torch.full_like(g, -math.inf)
    left_out = kl.kernel_logsumexp(LOG_GAUSSIAN, a, b, s=1 / k, col_potential=nothing)
    assert left_out.eq(-math.inf).all()


@pytest.mark.parametrize("k", [3, 64, 256])
def test_gradients_of_potentials(k, seed):
    made = points(1001, k), points(803, k), points(1001, 1)[:, 0], points(803, 1)[:, 0]
    grads = []
    for place in (torch.Tensor.cuda, lambda t: t.cpu().double()):
        a, b, f, g = (place(t.detach()).requires_grad_() for t in made)
        if a.is_cuda:
            y = kl.kernel_logsumexp(LOG_GAUSSIAN, a, b, s=1 / k, row_potential=f, col_potential=g)
        else:
            y = f + (g - torch.cdist(a, b).square() / k).logsumexp(1)
        grads.append(torch.autograd.grad(y.square().sum(), (a, b, f, g)))
    for ours, theirs in zip(*grads, strict=True):
        assert relative_error(ours, theirs) <= 1e-5


def test_a_batch_of_potentials(seed):
    a, b, g = points(301, 3), points(777, 3), points(4, 777)
    found = kl.kernel_logsumexp(LOG_GAUSSIAN, a, b, s=0.5, col_potential=g)
    matrix = reference(LOG_GAUSSIAN, a, b, s=0.5)
    assert relative_error(found, (matrix + g.cpu().double()[:, None]).logsumexp(-1)) <= ERROR

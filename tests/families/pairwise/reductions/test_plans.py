"""Known calls of reductions, and the products inside of them, on CPU tensors."""

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise.gradients import products
from kernlib.families.pairwise.lowering.problem import Call
from kernlib.families.pairwise.matrix import precision
from kernlib.families.pairwise.reductions import arguments as checks
from kernlib.families.pairwise.reductions import blocks as by_blocks
from kernlib.families.pairwise.reductions import kernels
from kernlib.families.pairwise.reductions.arguments import Request, Shape
from kernlib.runtime.plan import forget_plans
from tests.families.pairwise.cases import draw
from tests.support.fakes import on_gpu

M, N, K, L = 11, 13, 3, 2
GAUSSIAN = kl.gaussian()


@pytest.fixture(autouse=True)
def no_plans(monkeypatch):
    monkeypatch.setattr(by_blocks, "CPU_BLOCK_BYTES", 8 * 40)
    forget_plans()
    yield
    forget_plans()


A, B, V = draw(M, K), draw(N, K, seed=1), draw(N, 2, seed=2)
SYMMETRIC = kl.gaussian(symmetric=True)
CALLS = {
    "matmul": lambda: kl.kernel_matmul(GAUSSIAN, A, B, V, bandwidth=1.5),
    "vector": lambda: kl.kernel_matmul(GAUSSIAN, A, B, V[:, 0], bandwidth=1.5),
    "batch of v": lambda: kl.kernel_matmul(GAUSSIAN, A, B, V.expand(L, N, 2), bandwidth=1.5),
    "symmetric": lambda: kl.kernel_matmul(SYMMETRIC, A, None, A, bandwidth=1.5, regularization=0.5),
    "a twice": lambda: kl.kernel_sum(SYMMETRIC, A, A, bandwidth=1.5),
    "sum": lambda: kl.kernel_sum(GAUSSIAN, A, B, bandwidth=1.5),
    "logsumexp": lambda: kl.kernel_logsumexp(GAUSSIAN, A, B, bandwidth=1.5),
    "min": lambda: kl.kernel_min(GAUSSIAN, A, B, bandwidth=1.5)[1],
    "argmin": lambda: kl.kernel_argmin(GAUSSIAN, A, B, bandwidth=1.5),
    "half": lambda: kl.kernel_matmul(GAUSSIAN, A.half(), B.half(), V.half(), bandwidth=1.5),
    "device number": lambda: kl.kernel_sum(GAUSSIAN, A, B, bandwidth=torch.tensor(1.5)),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_known_call_is_not_checked_again(case, monkeypatch):
    first = CALLS[case]()
    monkeypatch.setattr(checks, "request_of", None)
    monkeypatch.setattr(checks, "shape_of", None)
    again = CALLS[case]()
    assert torch.equal(first, again) and first.stride() == again.stride()


def test_what_differs_has_a_plan_of_its_own():
    symmetric = {"bandwidth": 1.0, "regularization": 0.5}
    kl.kernel_sum(SYMMETRIC, A, **symmetric)
    with pytest.raises(ValueError, match="symmetric=True reduces"):
        kl.kernel_sum(SYMMETRIC, A, A.clone(), **symmetric)
    made = [
        kl.kernel_matmul(GAUSSIAN, A, B, V, bandwidth=1.0, regularization=0.5, row_offset=offset)
        for offset in (0, 3, 0)
    ]
    assert torch.equal(made[0], made[2]) and not torch.equal(made[0], made[1])
    square = kl.p_distance()
    for p in (1, 2.0, 1.5, torch.tensor(1.5)):
        torch.testing.assert_close(
            kl.kernel_sum(square, A, B, p=p), kl.run_kernel(square, A, B, p=p).sum(1)
        )


def test_numbers_and_out_are_checked_though_the_plan_is_there():
    v, out = draw(M, 2), torch.empty(M, 2, dtype=torch.float64)
    kl.kernel_matmul(GAUSSIAN, A, A, v, out=out, bandwidth=1.0)
    with pytest.raises(ValueError, match="bandwidth must be greater than 0"):
        kl.kernel_matmul(GAUSSIAN, A, A, v, out=out, bandwidth=-1.0)
    with pytest.raises(ValueError, match="out shares memory with v"):
        kl.kernel_matmul(GAUSSIAN, A, A, out, out=out, bandwidth=1.0)
    bandwidth = torch.ones(M, 1, dtype=torch.float64)
    sums = draw(M, 1, seed=4)
    kl.kernel_matmul(GAUSSIAN, A, A, sums, out=torch.empty_like(sums), bandwidth=bandwidth[0, 0])
    with pytest.raises(ValueError, match="out shares memory with bandwidth"):
        kl.kernel_matmul(GAUSSIAN, A, A, sums, out=bandwidth, bandwidth=bandwidth[0, 0])


def test_empty_calls_look_at_numbers_each_time():
    for _ in range(2):
        kl.kernel_sum(GAUSSIAN, A[:0], B, bandwidth=1.0)
        with pytest.raises(ValueError, match="bandwidth must be greater"):
            kl.kernel_sum(GAUSSIAN, A[:0], B, bandwidth=0.0)


def test_views_that_memory_does_not_hold():
    a, v = (torch.complex(0 * x, x).conj().imag for x in (A, V))
    assert a.is_neg() and v.is_neg()
    zero = torch._efficientzerotensor((N, K), dtype=torch.float64)
    for b in (B, zero):
        wanted = kl.run_kernel(GAUSSIAN, -A, b + 0, bandwidth=1.5)
        for _ in range(2):
            found = kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=1.5)
            torch.testing.assert_close(found, wanted @ -V)
            found = kl.kernel_matmul(GAUSSIAN, a, b, v[:, 0], bandwidth=1.5)
            torch.testing.assert_close(found, wanted @ -V[:, 0])


def test_transforms_of_torch_func_are_refused():
    call = lambda a: kl.kernel_sum(GAUSSIAN, a, B, bandwidth=1.0)  # noqa: E731
    for run in (torch.func.grad(lambda a: call(a).sum()), torch.func.jacfwd(call)):
        with pytest.raises(RuntimeError, match=r"a is inside a transform of torch\.func"):
            run(A)


# Maps of features.


MAPPED = {
    "matmul": lambda a, b, f: kl.kernel_matmul(GAUSSIAN, a, b, V, bandwidth=1.5, feature_map=f),
    "sum": lambda a, b, f: kl.kernel_sum(GAUSSIAN, a, b, bandwidth=1.5, feature_map=f),
    "logsumexp": lambda a, b, f: kl.kernel_logsumexp(GAUSSIAN, a, b, bandwidth=1.5, feature_map=f),
    "min": lambda a, b, f: kl.kernel_min(GAUSSIAN, a, b, bandwidth=1.5, feature_map=f)[0],
    "topk": lambda a, b, f: kl.kernel_topk(GAUSSIAN, a, b, 3, bandwidth=1.5, feature_map=f)[0],
}


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", [(K,), (K, 2)], ids=str)
@pytest.mark.parametrize("name", MAPPED)
def test_features_are_mapped_first(name, shape):
    f = draw(*shape, seed=5)
    x, y = (A * f, B * f) if f.dim() == 1 else (A @ f, B @ f)
    ones = torch.ones(x.shape[1], dtype=torch.float64)
    torch.testing.assert_close(MAPPED[name](A, B, f), MAPPED[name](x, y, ones))
    places = kl.kernel_argmin(GAUSSIAN, A, B, bandwidth=1.5, feature_map=f)
    assert torch.equal(places, kl.kernel_argmin(GAUSSIAN, x, y, bandwidth=1.5))
    inputs = tuple(t.clone().requires_grad_() for t in (A, B, f))
    assert torch.autograd.gradcheck(MAPPED[name], inputs)


def test_a_symmetric_call_maps_its_points_once():
    f = draw(K, seed=5)
    found = kl.kernel_sum(SYMMETRIC, A, feature_map=f, bandwidth=1.5)
    torch.testing.assert_close(found, kl.kernel_sum(GAUSSIAN, A * f, A * f, bandwidth=1.5))
    with pytest.raises(ValueError, match="feature_map must be"):
        kl.kernel_sum(GAUSSIAN, A, B, feature_map=draw(K + 1), bandwidth=1.5)


# Products of blocks.


@pytest.mark.parametrize(("setting", "asked", "columns", "torchs"), [
    ("highest", None, 1, True), ("highest", None, 200, False), ("highest", "fp32", 64, True),
    ("highest", "tf32", 64, True), ("highest", "tf32", 200, False), ("high", None, 200, True),
    ("high", "fp32", 1, False), ("high", "fp32", 200, False), ("high", "bf16", 200, True),
])  # fmt: skip
def test_who_computes_a_product_of_a_block(setting, asked, columns, torchs):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        assert products.is_torchs(asked, on_gpu(1, 300, 4096), columns) == torchs
        assert products.is_torchs(asked, on_gpu(1, 3, 4, dtype=torch.float64), columns)
        assert products.is_torchs(asked, torch.zeros(1, 3, 4), columns)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("batch", "parts"), [(1, 1), (1, 5), (3, 1)])
def test_products_by_kernels_are_those_of_torch(batch, parts, monkeypatch):
    monkeypatch.setattr(products, "is_torchs", lambda *arguments: False)
    fits = lambda left, right: parts if left.shape[-1] % parts == 0 else 1  # noqa: E731
    monkeypatch.setattr(products, "parts_of", fits)
    left, right = draw(batch, 7, 50).mT.contiguous().mT, draw(1, 50, 2, seed=1)
    inputs = left.requires_grad_(), right.requires_grad_()
    torch.testing.assert_close(products.multiplied(None, *inputs), left @ right)
    assert torch.autograd.gradcheck(lambda *x: products.multiplied(None, *x), inputs)
    v = V.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda v: kl.kernel_matmul(GAUSSIAN, A, B, v, bandwidth=1.5), (v,)
    )


# Who computes a call.


@pytest.mark.parametrize(("m", "k", "columns", "descriptor", "by"), [
    (30_000, 784, 1, kl.gaussian(), True), (100_000, 64, 16, kl.gaussian(), True),
    (100_000, 64, 17, kl.gaussian(), False), (100_000, 64, 1, kl.laplace_l1(), False),
    (100_000, 64, 1, kl.gaussian(direct=True), False), (100_000, 3, 1, kl.gaussian(), False),
    (1000, 64, 1, kl.gaussian(), False), (100_000, 64, 1, kl.polynomial(3), True),
])  # fmt: skip
def test_large_products_go_to_tensor_cores(m, k, columns, descriptor, by):
    a, v = torch.empty(m, k, device="meta"), torch.empty(m, columns, device="meta")
    numbers = dict.fromkeys(descriptor.parameters, 1.0)
    request = Request(descriptor, a, a, v, 0, 0, numbers)
    shape = Shape(m, m, k, 1, columns, False, 1)
    for arch, wanted in (("sm_90a", by), ("sm_80", False)):
        problem = kernels.problem_of("matmul", request, shape)
        call = Call(descriptor, problem, (), precision(descriptor))
        among = kernels.kernels_of(call, arch)
        names = [kind.name for kind in among if kind.takes(call, arch)]
        assert ("split reduce" in names) == wanted

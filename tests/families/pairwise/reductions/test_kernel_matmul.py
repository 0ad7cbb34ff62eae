"""Reductions of kernel matrices on CPU tensors, against the matrix itself."""

import math

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise.gradients import backward
from kernlib.families.pairwise.reductions import blocks as by_blocks
from kernlib.families.pairwise.reductions import gradients
from tests.families.pairwise.cases import draw

M, N, K, L = 11, 13, 3, 2
GAUSSIAN = kl.gaussian()
LOG_GAUSSIAN = kl.squared_distance(epilogue=kl.Custom("-v * s", ("s",)))
SIGNED = kl.Pairwise(inner=kl.Identity(), epilogue=kl.Custom("tanh(v / bandwidth)", ("bandwidth",)))
CASES = {
    "gaussian": (GAUSSIAN, {"bandwidth": 1.5}),
    "laplace": (kl.laplace_l1(), {"bandwidth": 2.0}),
    "matern": (kl.matern52(), {"bandwidth": 1.1}),
    "pq": (kl.laplace_pq(), {"bandwidth": 2.0, "p": 1.3, "q": 0.9}),
    "polynomial": (kl.polynomial(2), {"gamma": 0.5, "offset": 1.0}),
    "distance": (kl.l1_distance(), {}),
    "signed": (SIGNED, {"bandwidth": 2.0}),
    "regularized": (
        GAUSSIAN,
        {"bandwidth": 1.5, "regularization": 0.3, "row_offset": 4, "col_offset": 1},
    ),
    "epsilon": (GAUSSIAN, {"bandwidth": 1.5, "epsilon": 0.5}),
}
each_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of a few entries, so that every call takes several."""
    monkeypatch.setattr(by_blocks, "CPU_BLOCK_BYTES", 8 * 40)
    monkeypatch.setattr(by_blocks, "MOST_ROWS", 7)


def close(found, wanted, tolerance=1e-12):
    assert found.shape == wanted.shape
    torch.testing.assert_close(found.double(), wanted.double(), rtol=tolerance, atol=tolerance)


@each_case
@pytest.mark.parametrize("columns", [(), (1,), (5,)], ids=str)
def test_the_product_is_that_of_the_matrix(name, columns):
    descriptor, values = CASES[name]
    a, b, v = draw(M, K), draw(N, K, seed=1), draw(N, *columns, seed=2)
    close(kl.kernel_matmul(descriptor, a, b, v, **values),
          kl.run_kernel(descriptor, a, b, **values) @ v)  # fmt: skip


@each_case
def test_sums_and_log_sums_and_minima_are_those_of_the_matrix(name):
    descriptor, values = CASES[name]
    a, b = draw(M, K), draw(N, K, seed=1)
    matrix = kl.run_kernel(descriptor, a, b, **values)
    close(kl.kernel_sum(descriptor, a, b, **values), matrix.sum(1))
    close(kl.kernel_logsumexp(descriptor, a, b, **values), matrix.logsumexp(1))
    found, places = kl.kernel_min(descriptor, a, b, **values)
    close(found, matrix.amin(1))
    assert torch.equal(places, matrix.argmin(1)) and places.dtype == torch.int64
    assert torch.equal(kl.kernel_argmin(descriptor, a, b, **values), places)


@each_case
@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("k", [1, 4, N])
def test_the_nearest_are_those_of_topk(name, largest, k):
    descriptor, values = CASES[name]
    a, b = draw(M, K), draw(N, K, seed=1)
    matrix = kl.run_kernel(descriptor, a, b, **values)
    found, places = kl.kernel_topk(descriptor, a, b, k, largest, **values)
    close(found, matrix.topk(k, largest=largest).values)
    close(matrix.gather(1, places), found)


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("entries", [1, 40, 10_000])
def test_the_first_of_equal_neighbours(dtype, largest, entries, monkeypatch):
    """Of blocks of every size: a stable sort's places, NaN larger than any number."""
    monkeypatch.setattr(by_blocks, "entries_of", lambda *_: entries)
    generator = torch.Generator().manual_seed(3)
    a = torch.randint(0, 3, (2, 9, 2), generator=generator).to(dtype)
    b = torch.randint(0, 3, (2, 50, 2), generator=generator).to(dtype)
    b[0, ::6], b[1, 5::7], b[1, :4] = math.nan, math.inf, math.nan
    matrix = kl.run_kernel(kl.l1_distance(), a, b)
    wanted, order = matrix.sort(dim=-1, descending=largest, stable=True)
    for k in (1, 3, 12, 49, 50):
        found, places = kl.kernel_topk(kl.l1_distance(), a, b, k, largest)
        assert torch.equal(places, order[..., :k])
        torch.testing.assert_close(found, wanted[..., :k], rtol=0, atol=0, equal_nan=True)


BATCHES = [  # shapes of a, b, v, and of the product
    ((L, M, K), (N, K), (N, 4), (L, M, 4)),
    ((M, K), (L, N, K), (N,), (L, M)),
    ((L, M, K), (L, N, K), (L, N, 4), (L, M, 4)),
    ((M, K), (N, K), (L, N, 4), (L, M, 4)),
    ((1, M, K), (N, K), (1, N, 4), (1, M, 4)),
    ((L, M, K), (1, N, K), (1, N, 4), (L, M, 4)),
]


@pytest.mark.parametrize(("a", "b", "v", "wanted"), BATCHES, ids=str)
def test_batches_broadcast(a, b, v, wanted):
    a, b, v = draw(*a), draw(*b, seed=1), draw(*v, seed=2)
    found = kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=1.5)
    matrix = kl.run_kernel(GAUSSIAN, a, b, bandwidth=1.5)
    assert tuple(found.shape) == wanted
    close(found, matrix @ v)


def test_hyperparameters_of_a_batch():
    a, b, v = draw(M, K), draw(N, K, seed=1), draw(N, 2, seed=2)
    bandwidth = torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64)
    found = kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=bandwidth)
    close(found, torch.stack([kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=x) for x in bandwidth]))
    close(kl.kernel_sum(GAUSSIAN, a, b, bandwidth=bandwidth[:1]).squeeze(0),
          kl.kernel_sum(GAUSSIAN, a, b, bandwidth=0.5))  # fmt: skip


def test_a_symmetric_descriptor_needs_no_second_points():
    a, v = draw(M, K), draw(M, 2, seed=2)
    symmetric = kl.gaussian(symmetric=True)
    wanted = kl.kernel_matmul(GAUSSIAN, a, a, v, bandwidth=1.0, regularization=0.1)
    close(kl.kernel_matmul(symmetric, a, None, v, bandwidth=1.0, regularization=0.1), wanted)
    close(kl.kernel_sum(symmetric, a, bandwidth=1.0), kl.kernel_sum(GAUSSIAN, a, a, bandwidth=1.0))
    with pytest.raises(ValueError, match="symmetric=True"):
        kl.kernel_sum(symmetric, a, draw(N, K), bandwidth=1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_narrow_types_are_summed_in_float32(dtype):
    a, b, v = draw(M, K, dtype=dtype), draw(N, K, seed=1, dtype=dtype), draw(N, 2, seed=2)
    found = kl.kernel_matmul(GAUSSIAN, a, b, v.to(dtype), bandwidth=1.5)
    out = torch.empty(M, 2)
    kl.kernel_matmul(GAUSSIAN, a, b, v.to(dtype), out=out, bandwidth=1.5)
    wanted = kl.kernel_matmul(GAUSSIAN, a.double(), b.double(), v.to(dtype).double(), bandwidth=1.5)
    assert found.dtype == dtype
    close(out, wanted, 1e-5)
    close(found, wanted.to(dtype), 2e-2 if dtype != torch.float32 else 1e-5)


def test_empty_sizes():
    a, b, v = draw(M, K), draw(N, K, seed=1), draw(N, 2, seed=2)
    none = b[:0]
    assert torch.equal(kl.kernel_matmul(GAUSSIAN, a, none, v[:0], bandwidth=1.0), 0 * draw(M, 2))
    assert kl.kernel_sum(GAUSSIAN, a, none, bandwidth=1.0).eq(0).all()
    assert kl.kernel_logsumexp(GAUSSIAN, a, none, bandwidth=1.0).eq(-math.inf).all()
    assert kl.kernel_matmul(GAUSSIAN, a[:0], b, v, bandwidth=1.0).shape == (0, 2)
    assert kl.kernel_matmul(GAUSSIAN, a, b, v[:, :0], bandwidth=1.0).shape == (M, 0)
    close(kl.kernel_sum(GAUSSIAN, a[:, :0], b[:, :0], bandwidth=1.0), torch.full((M,), float(N)))
    for choose in (kl.kernel_min, kl.kernel_argmin):
        with pytest.raises(ValueError, match="at least one point"):
            choose(GAUSSIAN, a, none, bandwidth=1.0)
    with pytest.raises(ValueError, match="k must be from 1 to the 0 points"):
        kl.kernel_topk(GAUSSIAN, a, none, bandwidth=1.0)
    with pytest.raises(ValueError):
        kl.kernel_topk(GAUSSIAN, a[:, 0], b[:, 0], bandwidth=1.0)


def test_the_first_of_equal_values_and_nan():
    a, b = torch.zeros(2, 1), torch.tensor([[3.0], [1.0], [1.0], [-1.0]])
    assert kl.kernel_argmin(kl.l1_distance(), a, b).tolist() == [1, 1]
    b[2] = math.nan
    values, places = kl.kernel_min(kl.l1_distance(), a, b)
    assert values.isnan().all() and places.tolist() == [2, 2]


def test_log_sums_of_infinite_values():
    descriptor = kl.dot_product()
    a = torch.tensor([[1e30], [-1e30], [1.0]], dtype=torch.float32)
    b = torch.tensor([[1e30], [2.0], [3.0]], dtype=torch.float32)
    matrix = kl.run_kernel(descriptor, a, b)
    found = kl.kernel_logsumexp(descriptor, a, b)
    torch.testing.assert_close(found, matrix.logsumexp(1))


# Gradients.

SMOOTH = ["gaussian", "matern", "polynomial", "signed", "regularized"]


def arguments(name):
    """Points, v, and hyperparameters as tensors, all of which require gradients."""
    descriptor, values = CASES[name]
    offsets = {key: values[key] for key in ("row_offset", "col_offset") if key in values}
    tensors = {
        key: torch.tensor(value, dtype=torch.float64, requires_grad=True)
        for key, value in values.items()
        if key not in (*offsets, "epsilon")
    }
    inputs = [draw(6, K), draw(5, K, seed=1), draw(5, 2, seed=2)]
    return descriptor, [t.requires_grad_() for t in inputs], tensors, offsets


def is_differentiable(name, reduce, check=torch.autograd.gradcheck) -> bool:
    """By points, by v if ``reduce`` takes it, and by hyperparameters."""
    descriptor, inputs, tensors, offsets = arguments(name)
    count = 3 if reduce is kl.kernel_matmul else 2

    def function(*given):
        named = dict(zip(tensors, given[count:], strict=True))
        return reduce(descriptor, *given[:count], **named, **offsets)

    return check(function, (*inputs[:count], *tensors.values()))


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("epsilon", "pq")])
def test_gradients_of_the_product(name):
    assert is_differentiable(name, kl.kernel_matmul)


@pytest.mark.parametrize("reduction", [kl.kernel_sum, kl.kernel_logsumexp])
@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_of_sums(name, reduction):
    assert is_differentiable(name, reduction)


@pytest.mark.parametrize("name", ["gaussian", "regularized", "laplace"])
def test_gradients_of_minima(name):
    assert is_differentiable(name, lambda *given, **named: kl.kernel_min(*given, **named)[0])
    assert is_differentiable(name, lambda *given, **named: kl.kernel_topk(*given, 2, **named)[0])


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["gaussian", "polynomial"])
def test_gradients_of_gradients(name):
    assert is_differentiable(name, kl.kernel_matmul, torch.autograd.gradgradcheck)


def same_gradients(out, whole, inputs):
    """Those of a reduction and of one of the whole matrix."""
    weights = draw(*out.shape, seed=3)
    found = torch.autograd.grad((out * weights).sum(), inputs)
    for x, y in zip(found, torch.autograd.grad((whole * weights).sum(), inputs), strict=True):
        close(x, y)


@pytest.mark.parametrize("wanted", ["a", "b", "v", "av"])
@pytest.mark.parametrize("name", ["gaussian", "signed", "regularized"])
def test_gradients_of_some_tensors_alone(name, wanted):
    descriptor, tensors, values = CASES[name][0], {}, dict(CASES[name][1])
    tensors = {"a": draw(M, K), "b": draw(N, K, seed=1), "v": draw(N, 2, seed=2)}
    for key in wanted:
        tensors[key].requires_grad_()
    out = kl.kernel_matmul(descriptor, *tensors.values(), **values)
    whole = kl.run_kernel(descriptor, tensors["a"], tensors["b"], **values) @ tensors["v"]
    same_gradients(out, whole, [tensors[key] for key in wanted])


@pytest.mark.parametrize(("a", "b", "v", "wanted"), BATCHES, ids=str)
def test_gradients_of_batches(a, b, v, wanted):
    inputs = [draw(*a), draw(*b, seed=1), draw(*v, seed=2)]
    inputs = [t.requires_grad_() for t in inputs]
    bandwidth = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    out = kl.kernel_matmul(GAUSSIAN, *inputs, bandwidth=bandwidth)
    assert tuple(out.shape) == wanted
    whole = kl.run_kernel(GAUSSIAN, *inputs[:2], bandwidth=bandwidth) @ inputs[2]
    same_gradients(out, whole, [*inputs, bandwidth])


REDUCTIONS = {
    "matmul": lambda *t, **w: kl.kernel_matmul(GAUSSIAN, *t, **w),
    "sum": lambda a, b, v, **w: kl.kernel_sum(GAUSSIAN, a, b, **w),
    "logsumexp": lambda a, b, v, **w: kl.kernel_logsumexp(GAUSSIAN, a, b, **w),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradients_of_narrow_types_are_summed_in_float32(reduction, dtype):
    """Those of a number too, whatever its own dtype and shape."""
    function = REDUCTIONS[reduction]
    inputs = [draw(M, K, dtype=dtype), draw(N, K, seed=1, dtype=dtype),
              draw(N, 2, seed=2, dtype=dtype), torch.tensor([1.5], dtype=dtype)]  # fmt: skip
    inputs = [t.requires_grad_() for t in inputs if reduction == "matmul" or t.shape[-1:] != (2,)]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    slopes = []
    for given in (inputs, wide):
        a, b, *v, bandwidth = given
        out = function(a, b, v[0] if v else None, bandwidth=bandwidth)
        slopes.append(torch.autograd.grad(out, given, torch.ones_like(out)))
    for x, y in zip(*slopes, strict=True):
        assert x.dtype == dtype and x.shape == y.shape
        close(x, y.to(dtype), 2e-5 if dtype == torch.float32 else torch.finfo(dtype).eps)


@pytest.mark.parametrize("rows", [1, 3, 256])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_gradient_takes_each_entry_once_and_few_at_a_time(reduction, rows, monkeypatch):
    seen, compute = [], backward.gradients

    def watched(call, needs, saved, weights):
        seen.append(weights.numel())
        return compute(call, needs, saved, weights)

    monkeypatch.setattr(backward, "gradients", watched)
    monkeypatch.setattr(gradients, "FEWEST_ROWS", rows)
    inputs = [draw(M, K), draw(N, K, seed=1), draw(N, 2, seed=2)]
    inputs = [t.requires_grad_() for t in inputs[: 3 if reduction == "matmul" else 2]]
    v = inputs[2] if reduction == "matmul" else None
    out = REDUCTIONS[reduction](*inputs[:2], v, bandwidth=1.5)
    found = torch.autograd.grad(out.square().sum(), inputs)
    assert sum(seen) == M * N and max(seen) <= 40 // gradients.PARTS
    matrix = kl.run_kernel(GAUSSIAN, *inputs[:2], bandwidth=1.5)
    whole = {"matmul": lambda: matrix @ v, "sum": lambda: matrix.sum(1),
             "logsumexp": lambda: matrix.logsumexp(1)}[reduction]()  # fmt: skip
    for x, y in zip(found, torch.autograd.grad(whole.square().sum(), inputs), strict=True):
        close(x, y)


def test_gradients_of_log_sums_of_nothing_but_minus_infinity():
    descriptor = kl.dot_product(epilogue=kl.Custom("v * s", ("s",)))
    a = torch.tensor([[-1e30], [1.0]], requires_grad=True)
    b = torch.tensor([[1e30], [1e30]])
    (found,) = torch.autograd.grad(kl.kernel_logsumexp(descriptor, a, b, s=1e-30).sum(), a)
    torch.testing.assert_close(found, torch.tensor([[0.0], [1.0]]))


def test_gradients_of_gradients_of_log_sums():
    a, b = draw(4, K).requires_grad_(), draw(5, K, seed=1).requires_grad_()
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(
        lambda a, b, s: kl.kernel_logsumexp(LOG_GAUSSIAN, a, b, s=s), (a, b, scale)
    )


# Arguments.


def test_out_is_written_in_place():
    a, b, v = draw(M, K), draw(N, K, seed=1), draw(N, 2, seed=2)
    out = torch.full((2, M), math.nan, dtype=torch.float64).T
    assert kl.kernel_matmul(GAUSSIAN, a, b, v, out=out, bandwidth=1.5) is out
    close(out, kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=1.5))


def test_out_takes_no_gradient_and_does_not_overlap():
    a, b, v = draw(M, K).requires_grad_(), draw(N, K), draw(N, 2)
    out = torch.empty(M, 2, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="out takes no gradient"):
        kl.kernel_matmul(GAUSSIAN, a, b, v, out=out, bandwidth=1.0)
    with torch.no_grad():
        kl.kernel_matmul(GAUSSIAN, a, b, v, out=out, bandwidth=1.0)
        with pytest.raises(ValueError, match="overlaps itself"):
            kl.kernel_matmul(GAUSSIAN, a, b, v, out=out[:1].expand(M, 2), bandwidth=1.0)


def test_gradients_of_gradients_by_v_alone(seed):
    """Each block is kept for the second, although a signed descriptor's share their memory."""
    descriptor = kl.Pairwise(inner=kl.Identity(), epilogue=kl.Custom("exp(-v * v * s)", ("s",)))
    x, z = torch.randn(30, 2, dtype=torch.float64), torch.randn(50, 2, dtype=torch.float64)
    v = torch.randn(50, 1, dtype=torch.float64, requires_grad=True)
    k = kl.run_kernel(descriptor, x, z, s=1.0)
    loss = kl.kernel_matmul(descriptor, x, z, v, s=1.0).square().sum()
    (first,) = torch.autograd.grad(loss, v, create_graph=True)
    torch.testing.assert_close(first, 2 * k.mT @ (k @ v))
    (second,) = torch.autograd.grad(first.sum(), v)
    torch.testing.assert_close(second, 2 * k.mT @ (k @ torch.ones_like(v)))

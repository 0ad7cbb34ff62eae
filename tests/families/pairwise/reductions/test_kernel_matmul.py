"""Reductions of kernel matrices on CPU tensors, against the matrix itself."""

import math

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise.gradients import eager as autograd
from kernlib.families.pairwise.reductions import blocks as by_blocks
from kernlib.families.pairwise.reductions import gradients
from kernlib.families.pairwise.reductions.arguments import Shape

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


def points(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed + 100 * len(shape) + shape[0])
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def close(found, wanted, tolerance=1e-12):
    assert found.shape == wanted.shape
    torch.testing.assert_close(found.double(), wanted.double(), rtol=tolerance, atol=tolerance)


@each_case
@pytest.mark.parametrize("columns", [(), (1,), (5,)], ids=str)
def test_the_product_is_that_of_the_matrix(name, columns):
    descriptor, values = CASES[name]
    a, b, v = points(M, K), points(N, K, seed=1), points(N, *columns, seed=2)
    close(kl.kernel_matmul(descriptor, a, b, v, **values),
          kl.run_kernel(descriptor, a, b, **values) @ v)  # fmt: skip


@each_case
def test_sums_and_log_sums_and_minima_are_those_of_the_matrix(name):
    descriptor, values = CASES[name]
    a, b = points(M, K), points(N, K, seed=1)
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
    a, b = points(M, K), points(N, K, seed=1)
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
    a, b, v = points(*a), points(*b, seed=1), points(*v, seed=2)
    found = kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=1.5)
    matrix = kl.run_kernel(GAUSSIAN, a, b, bandwidth=1.5)
    assert tuple(found.shape) == wanted
    close(found, matrix @ v)


def test_hyperparameters_of_a_batch():
    a, b, v = points(M, K), points(N, K, seed=1), points(N, 2, seed=2)
    bandwidth = torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64)
    found = kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=bandwidth)
    close(found, torch.stack([kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=x) for x in bandwidth]))
    close(kl.kernel_sum(GAUSSIAN, a, b, bandwidth=bandwidth[:1]).squeeze(0),
          kl.kernel_sum(GAUSSIAN, a, b, bandwidth=0.5))  # fmt: skip


def test_a_symmetric_descriptor_needs_no_second_points():
    a, v = points(M, K), points(M, 2, seed=2)
    symmetric = kl.gaussian(symmetric=True)
    wanted = kl.kernel_matmul(GAUSSIAN, a, a, v, bandwidth=1.0, regularization=0.1)
    close(kl.kernel_matmul(symmetric, a, None, v, bandwidth=1.0, regularization=0.1), wanted)
    close(kl.kernel_sum(symmetric, a, bandwidth=1.0), kl.kernel_sum(GAUSSIAN, a, a, bandwidth=1.0))
    with pytest.raises(ValueError, match="symmetric=True"):
        kl.kernel_sum(symmetric, a, points(N, K), bandwidth=1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_narrow_types_are_summed_in_float32(dtype):
    a, b, v = points(M, K, dtype=dtype), points(N, K, seed=1, dtype=dtype), points(N, 2, seed=2)
    found = kl.kernel_matmul(GAUSSIAN, a, b, v.to(dtype), bandwidth=1.5)
    out = torch.empty(M, 2)
    kl.kernel_matmul(GAUSSIAN, a, b, v.to(dtype), out=out, bandwidth=1.5)
    wanted = kl.kernel_matmul(GAUSSIAN, a.double(), b.double(), v.to(dtype).double(), bandwidth=1.5)
    assert found.dtype == dtype
    close(out, wanted, 1e-5)
    close(found, wanted.to(dtype), 2e-2 if dtype != torch.float32 else 1e-5)


def test_empty_sizes():
    a, b, v = points(M, K), points(N, K, seed=1), points(N, 2, seed=2)
    none = b[:0]
    assert torch.equal(kl.kernel_matmul(GAUSSIAN, a, none, v[:0], bandwidth=1.0), 0 * points(M, 2))
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
    inputs = [points(6, K), points(5, K, seed=1), points(5, 2, seed=2)]
    return descriptor, [t.requires_grad_() for t in inputs], tensors, offsets


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("epsilon", "pq")])
def test_gradients_of_the_product(name):
    descriptor, (a, b, v), tensors, offsets = arguments(name)

    def function(a, b, v, *values):
        named = dict(zip(tensors, values, strict=True))
        return kl.kernel_matmul(descriptor, a, b, v, **named, **offsets)

    assert torch.autograd.gradcheck(function, (a, b, v, *tensors.values()))


@pytest.mark.parametrize("reduction", [kl.kernel_sum, kl.kernel_logsumexp])
@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_of_sums(name, reduction):
    descriptor, (a, b, _), tensors, offsets = arguments(name)

    def function(a, b, *values):
        named = dict(zip(tensors, values, strict=True))
        return reduction(descriptor, a, b, **named, **offsets)

    assert torch.autograd.gradcheck(function, (a, b, *tensors.values()))


@pytest.mark.parametrize("name", ["gaussian", "regularized", "laplace"])
def test_gradients_of_minima(name):
    descriptor, (a, b, _), tensors, offsets = arguments(name)

    def function(a, b, *values):
        named = dict(zip(tensors, values, strict=True))
        nearest = kl.kernel_topk(descriptor, a, b, 2, **named, **offsets)[0]
        return kl.kernel_min(descriptor, a, b, **named, **offsets)[0], nearest

    assert torch.autograd.gradcheck(function, (a, b, *tensors.values()))


@pytest.mark.parametrize("wanted", ["a", "b", "v", "av"])
@pytest.mark.parametrize("name", ["gaussian", "signed", "regularized"])
def test_gradients_of_some_tensors_alone(name, wanted):
    descriptor, tensors, values = CASES[name][0], {}, dict(CASES[name][1])
    tensors = {"a": points(M, K), "b": points(N, K, seed=1), "v": points(N, 2, seed=2)}
    for key in wanted:
        tensors[key].requires_grad_()
    weights = points(M, 2, seed=3)
    inputs = [tensors[key] for key in wanted]
    out = kl.kernel_matmul(descriptor, *tensors.values(), **values)
    found = torch.autograd.grad((out * weights).sum(), inputs)
    whole = kl.run_kernel(descriptor, tensors["a"], tensors["b"], **values) @ tensors["v"]
    for x, y in zip(found, torch.autograd.grad((whole * weights).sum(), inputs), strict=True):
        close(x, y)


@pytest.mark.parametrize(("a", "b", "v", "wanted"), BATCHES, ids=str)
def test_gradients_of_batches(a, b, v, wanted):
    inputs = [points(*a), points(*b, seed=1), points(*v, seed=2)]
    inputs = [t.requires_grad_() for t in inputs]
    bandwidth = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    weights = points(*wanted, seed=3)
    inputs.append(bandwidth)
    out = kl.kernel_matmul(GAUSSIAN, *inputs[:3], bandwidth=bandwidth)
    whole = kl.run_kernel(GAUSSIAN, *inputs[:2], bandwidth=bandwidth) @ inputs[2]
    found = torch.autograd.grad((out * weights).sum(), inputs)
    for x, y in zip(found, torch.autograd.grad((whole * weights).sum(), inputs), strict=True):
        close(x, y)


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
    inputs = [points(M, K, dtype=dtype), points(N, K, seed=1, dtype=dtype),
              points(N, 2, seed=2, dtype=dtype), torch.tensor([1.5], dtype=dtype)]  # fmt: skip
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
    seen, compute = [], autograd.gradients

    def watched(call, needs, saved, weights):
        seen.append(weights.numel())
        return compute(call, needs, saved, weights)

    monkeypatch.setattr(autograd, "gradients", watched)
    monkeypatch.setattr(gradients, "FEWEST_ROWS", rows)
    inputs = [points(M, K), points(N, K, seed=1), points(N, 2, seed=2)]
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


@pytest.mark.parametrize("name", ["gaussian", "polynomial"])
def test_gradients_of_gradients(name):
    descriptor, (a, b, v), tensors, offsets = arguments(name)

    def function(a, b, v, *values):
        named = dict(zip(tensors, values, strict=True))
        return kl.kernel_matmul(descriptor, a, b, v, **named, **offsets)

    assert torch.autograd.gradgradcheck(function, (a, b, v, *tensors.values()))


def test_gradients_of_gradients_of_log_sums():
    a, b = points(4, K).requires_grad_(), points(5, K, seed=1).requires_grad_()
    scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(
        lambda a, b, s: kl.kernel_logsumexp(LOG_GAUSSIAN, a, b, s=s), (a, b, scale)
    )


# Arguments.


def test_out_is_written_in_place():
    a, b, v = points(M, K), points(N, K, seed=1), points(N, 2, seed=2)
    out = torch.full((2, M), math.nan, dtype=torch.float64).T
    assert kl.kernel_matmul(GAUSSIAN, a, b, v, out=out, bandwidth=1.5) is out
    close(out, kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=1.5))


def wrong(**changes):
    given = {"a": points(M, K), "b": points(N, K), "v": points(N, 2), "bandwidth": 1.0} | changes
    return kl.kernel_matmul(GAUSSIAN, given.pop("a"), given.pop("b"), given.pop("v"), **given)


ERRORS = [
    ({"v": None}, TypeError, "v must be a tensor"),
    ({"v": points(N + 1, 2)}, ValueError, "v must have a row for each of the 13 points"),
    ({"v": points(1, 1, N, 2)}, ValueError, r"v must be \(N,\), \(N, C\) or \(L, N, C\)"),
    ({"v": points(N, 2).float()}, TypeError, "v must be torch.float64"),
    ({"v": points(N, 2).to_sparse()}, TypeError, "v must be a dense tensor"),
    ({"b": None}, ValueError, "b is missing"),
    ({"b": points(N, K + 1)}, ValueError, "same number of features"),
    ({"a": points(3, M, K), "v": points(2, N, 2)}, ValueError, "batches must be 1 or equal"),
    ({"bandwidth": 0.0}, ValueError, "bandwidth must be greater than 0"),
    ({"sigma": 1.0}, TypeError, "sigma is no argument"),
    ({"v": "ones"}, TypeError, "v must be a tensor, got str"),
    ({"out": "zeros"}, TypeError, "out must be a tensor, got str"),
    ({"row_offset": 1.5}, TypeError, "row_offset must be an int"),
    ({"out": torch.empty(M, 3, dtype=torch.float64)}, ValueError, "out must have shape"),
    ({"out": torch.empty(M, 2)}, TypeError, "out must be torch.float64"),
    ({"out": torch.empty(1, 2, dtype=torch.float64).expand(M, 2)}, ValueError, "overlaps itself"),
]


@pytest.mark.parametrize(("changes", "error", "message"), ERRORS, ids=range(len(ERRORS)))
def test_bad_arguments_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        wrong(**changes)


def test_out_must_not_share_memory_with_an_input():
    v = points(N, 2)
    with pytest.raises(ValueError, match="out shares memory with v"):
        kl.kernel_matmul(GAUSSIAN, points(N, K), points(N, K), v, out=v, bandwidth=1.0)


def test_out_takes_no_gradient():
    a = points(M, K).requires_grad_()
    out = torch.empty(M, 2, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="out takes no gradient"):
        wrong(a=a, out=out)
    with torch.no_grad():
        wrong(a=a, out=out)


@pytest.mark.parametrize(("k", "error"), [(0, ValueError), (N + 1, ValueError), (1.0, TypeError)])
def test_counts_of_neighbours(k, error):
    with pytest.raises(error, match="k must be"):
        kl.kernel_topk(GAUSSIAN, points(M, K), points(N, K), k, bandwidth=1.0)


def test_the_descriptor_is_a_pairwise_one():
    a = points(M, K)
    for b in (a, points(N, K)):
        with pytest.raises(TypeError, match="descriptor must be"):
            kl.kernel_sum("gaussian", a, b)
    with pytest.raises(TypeError, match="descriptor must be a Pairwise descriptor"):
        kl.kernel_sum(kl.KroneckerSparse(1, 2, 2, 1), points(M, K), points(N, K))


# Blocks.


@pytest.mark.parametrize("size", [(1, 7, 5), (3, 7, 5), (2, 1, 100), (2, 100, 1), (4, 33, 29)])
@pytest.mark.parametrize("entries", [1, 6, 40, 10**6])
@pytest.mark.parametrize("fewest_rows", [1, 7])
def test_blocks_cover_each_entry_once(size, entries, fewest_rows):
    marks = torch.zeros(size, dtype=torch.int64)
    shape = Shape(size[1], size[2], K, size[0], 0, True, size[0])
    for l, m, n in by_blocks.blocks(shape, entries, fewest_rows):
        part = marks[l, m, n]
        assert 0 < part.numel() <= entries
        rows = min(size[1], fewest_rows)
        assert entries < rows * size[2] or part.shape[2] == size[2]
        part += 1
    assert marks.eq(1).all()


@pytest.mark.parametrize("size", [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_nothing_has_no_blocks(size):
    shape = Shape(size[1], size[2], K, size[0], 0, True, size[0])
    assert not list(by_blocks.blocks(shape, 100, 7))


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

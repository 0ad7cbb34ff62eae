"""Weights and matrices that map features ahead of a pairwise kernel."""

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise.feature_map import apply
from tests.families.pairwise.cases import draw

M, N, K, K2, L = 5, 6, 4, 3, 2


A, B = draw(M, K), draw(N, K, seed=1)


def test_weights_of_each_feature():
    w = draw(K, seed=2)
    a, b = apply(w, A, B)
    assert torch.equal(a, A * w) and torch.equal(b, B * w)


@pytest.mark.parametrize("shape", [(L, K), (L, 1, K)])
def test_weights_of_each_entry_of_a_batch(shape):
    w, b = draw(*shape, seed=2), draw(L, N, K, seed=1)
    mapped, other = apply(w, A, b)
    assert mapped.shape == (L, M, K) and other.shape == (L, N, K)
    for l in range(L):
        assert torch.equal(mapped[l], A * w[l]) and torch.equal(other[l], b[l] * w[l])


@pytest.mark.parametrize("columns", [K, K2, 1])
def test_a_matrix_makes_a_mahalanobis_distance(columns):
    matrix = draw(K, columns, seed=2)
    found = kl.cdist(*apply(matrix, A, B))
    v = A[:, None] - B
    expected = torch.einsum("mnk,kl,mnl->mn", v, matrix @ matrix.T, v).sqrt()
    torch.testing.assert_close(found, expected)


def test_matrices_of_each_entry_of_a_batch():
    matrix = draw(L, K, K2, seed=2)
    a, b = apply(matrix, A, B[None])
    assert a.shape == (L, M, K2) and b.shape == (L, N, K2)
    torch.testing.assert_close(a, torch.stack([A @ one for one in matrix]))


def test_a_square_map_is_a_matrix_unless_the_batch_is_as_long():
    square = draw(K, K, seed=2)
    torch.testing.assert_close(apply(square, A, None)[0], A @ square)
    with pytest.raises(ValueError, match="a matrix or 4 entries of weights"):
        apply(square, draw(K, M, K), None)
    torch.testing.assert_close(apply(square[:, None], draw(K, M, K), None)[0],
                               draw(K, M, K) * square[:, None])  # fmt: skip
    torch.testing.assert_close(apply(square[None], draw(K, M, K), None)[0], draw(K, M, K) @ square)


def test_no_second_points_and_the_same_ones_are_mapped_once():
    w = draw(K, seed=2)
    assert apply(w, A, None)[1] is None
    a, b = apply(w, A, A)
    assert a is b


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_inputs_take_a_map_of_either_dtype(dtype):
    a, w = A.to(dtype), draw(K, seed=2, dtype=torch.float32)
    found = apply(w, a, None)[0]
    assert found.dtype == dtype and torch.equal(found, (a.float() * w).to(dtype))
    assert apply(w.to(dtype), a, None)[0].dtype == dtype


@pytest.mark.parametrize("shape", [(K,), (L, 1, K), (K, K2), (L, K, K2)])
def test_gradients_reach_points_and_map(shape):
    w = draw(*shape, seed=2).requires_grad_()
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda *given: apply(*given), (w, a, b))


def test_batches_are_one_or_equal():
    with pytest.raises(ValueError, match="batches must be 1 or equal, got feature_map: 2, b: 3"):
        apply(draw(L, 1, K), A, draw(3, N, K))


def test_a_call_maps_its_points_first():
    a, b, weights = torch.randn(5, 3), torch.randn(4, 3), torch.rand(3)
    wanted = kl.run_kernel(kl.gaussian(), a * weights, b * weights, bandwidth=2.0)
    found = kl.run_kernel(kl.gaussian(), a, b, bandwidth=2.0, feature_map=weights)
    torch.testing.assert_close(found, wanted)
    compiled = torch.compile(
        lambda a, b: kl.run_kernel(kl.gaussian(), a, b, bandwidth=2.0, feature_map=weights),
        backend="aot_eager", fullgraph=True,
    )  # fmt: skip
    torch.testing.assert_close(compiled(a, b), wanted)
    kl.prepare(kl.gaussian(), a, b, bandwidth=2.0, feature_map=weights)


@pytest.mark.parametrize("shape", [(K,), (K, K2)])
@pytest.mark.parametrize("function", [kl.run_kernel, kl.kernel_sum])
def test_points_that_do_not_fit_are_named(function, shape):
    w = draw(*shape)
    cases = {
        "1-D": (A[0], B, ValueError, r"a must be \(N, K\) or \(L, N, K\), got shape"),
        "no dimension": (A[0, 0], B, ValueError, r"a must be \(N, K\)"),
        "4-D": (A, B[None, None], ValueError, r"b must be \(N, K\)"),
        "features": (A, B[:, :-1], ValueError, "a and b must have the same number of features"),
        "one feature": (A, B[:, :1], ValueError, "a and b must have the same number of features"),
        "device": (A, B.to("meta"), ValueError, "a and b must be on one device"),
        "a list": (A, [1.0], TypeError, "b must be a tensor, got list"),
        "integers": (A.long(), B.long(), TypeError, "a must have a floating dtype"),
    }
    for a, b, error, message in cases.values():
        with pytest.raises(error, match=message):
            function(kl.gaussian(), a, b, bandwidth=1.0, feature_map=w)


LENGTHS = draw(K, seed=5).abs() + 0.5


def wanted_of_lengthscales(a, b, lengths, bandwidth=1.0):
    squares = ((a[:, None] - b) / lengths).square().sum(-1)
    return torch.exp(-squares / (2 * bandwidth**2))


def test_a_lengthscale_of_each_feature_divides_the_points():
    found = kl.run_kernel(kl.gaussian(), A, B, lengthscale=LENGTHS)
    torch.testing.assert_close(found, wanted_of_lengthscales(A, B, LENGTHS))
    found = kl.run_kernel(kl.gaussian(), A, B, lengthscale=LENGTHS, bandwidth=2.0)
    torch.testing.assert_close(found, wanted_of_lengthscales(A, B, LENGTHS, 2.0))
    distances = kl.run_kernel(kl.l2_distance(symmetric=True), A, lengthscale=LENGTHS)
    torch.testing.assert_close(distances, torch.cdist(A / LENGTHS, A / LENGTHS))


def test_a_lengthscale_stands_beside_a_batch():
    widths = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    found = kl.run_kernel(kl.gaussian(), A, B, lengthscale=LENGTHS, bandwidth=widths)
    expected = [wanted_of_lengthscales(A, B, LENGTHS, float(width)) for width in widths]
    torch.testing.assert_close(found, torch.stack(expected))
    batch = torch.stack([LENGTHS, 2 * LENGTHS])[:, None]
    found = kl.run_kernel(kl.gaussian(), A, B, lengthscale=batch)
    expected = [wanted_of_lengthscales(A, B, lengths[0]) for lengths in batch]
    torch.testing.assert_close(found, torch.stack(expected))


# Shapes of GPyTorch's parameters, and the shape of the values that they stand for.
OF_GPYTORCH = {(1, 1): (), (1, K): (K,), (2, 1, 1): (2,), (2, 1, K): (2, 1, K)}


@pytest.mark.parametrize("shape", OF_GPYTORCH, ids=str)
def test_lengthscales_and_bandwidths_have_the_shapes_of_gpytorch(shape):
    x = draw(*shape, seed=5).abs() + 0.5
    v = draw(N, 2, seed=3)
    calls = [
        lambda **given: kl.run_kernel(kl.gaussian(), A, B, **given),
        lambda **given: kl.run_kernel(kl.gaussian(symmetric=True), A, **given),
        lambda **given: kl.kernel_matmul(kl.gaussian(), A, B, v, **given),
        lambda **given: kl.kernel_logsumexp(kl.gaussian(), A, B, **given),
        lambda **given: kl.kernel_topk(kl.gaussian(), A, B, k=2, **given)[0],
    ]
    if len(shape) == 2:
        calls.append(
            lambda **given: (
                kl.linalg.solve_kernel(kl.gaussian(), A, A, regularization=1.0, **given).x
            )
        )
    for call in calls:
        wide = x.expand(*shape[:-1], K)
        wanted = call(lengthscale=wide if x.dim() == 3 else wide[0])
        torch.testing.assert_close(call(lengthscale=x), wanted)
        if shape[-1] == 1:
            torch.testing.assert_close(
                call(bandwidth=x), call(bandwidth=x.reshape(OF_GPYTORCH[shape]))
            )
            torch.testing.assert_close(call(bandwidth=x), wanted)
        else:
            with pytest.raises(
                ValueError, match=r"bandwidth must .*(a lengthscale|one number here)"
            ):
                call(bandwidth=x)
    leaf = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(calls[0](lengthscale=leaf).square().sum(), leaf)
    flat = x.reshape(-1, shape[-1]).clone().requires_grad_()
    batch = [calls[0](lengthscale=row.expand(K)) for row in flat]
    (wanted,) = torch.autograd.grad(torch.stack(batch).square().sum(), flat)
    torch.testing.assert_close(found.reshape(wanted.shape), wanted)


@pytest.mark.parametrize("shape", [(), (2,), (2, K), (1, 2), (2, 2, 1), (1, 1, 1, 1)], ids=str)
def test_a_lengthscale_of_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match=r"lengthscale must be \(K,\) or \(1, K\), with K = "):
        kl.run_kernel(kl.gaussian(), A, B, lengthscale=torch.ones(shape, dtype=A.dtype))


def test_reductions_and_solvers_take_a_lengthscale():
    v = draw(N, 2, seed=3)
    expected = wanted_of_lengthscales(A, B, LENGTHS)
    found = kl.kernel_matmul(kl.gaussian(), A, B, v, lengthscale=LENGTHS)
    torch.testing.assert_close(found, expected @ v)
    for reduction in (kl.kernel_sum, lambda *a, **v: kl.kernel_topk(*a, k=N, **v)[0].sum(-1)):
        found = reduction(kl.gaussian(), A, B, lengthscale=LENGTHS)
        torch.testing.assert_close(found, expected.sum(-1))
    a, lengths = A.float(), LENGTHS.float()
    made = kl.linalg.solve_kernel(kl.gaussian(), a, a, regularization=1.0, lengthscale=lengths)
    dense = wanted_of_lengthscales(a, a, lengths) + torch.eye(M)
    torch.testing.assert_close(made.x, torch.linalg.solve(dense, a), rtol=1e-3, atol=1e-4)


def test_gradients_reach_a_lengthscale():
    def call(a, b, lengths):
        return kl.run_kernel(kl.gaussian(), a, b, lengthscale=lengths)

    tensors = [t.clone().requires_grad_() for t in (A, B, LENGTHS)]
    assert torch.autograd.gradcheck(call, tensors)


def test_a_compiled_call_takes_a_lengthscale():
    def call(a, b, lengths):
        return kl.run_kernel(kl.gaussian(), a, b, lengthscale=lengths)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(A, B, LENGTHS), call(A, B, LENGTHS))


def test_what_only_prepares_takes_a_lengthscale():
    kl.prepare(kl.gaussian(), A, B, lengthscale=LENGTHS)
    with pytest.raises(ValueError, match=r"lengthscale must be \(K,\)"):
        kl.prepare(kl.gaussian(), A, B, lengthscale=LENGTHS[:2])

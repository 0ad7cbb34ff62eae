"""Hyperparameters of one dimension: a batch, or a value for each point."""

from __future__ import annotations

import pytest
import torch

import kernlib as kl
from kernlib import linalg

DOUBLE = torch.float64
A, B = torch.randn(5, 3, dtype=DOUBLE), torch.randn(4, 3, dtype=DOUBLE)
V, W = torch.randn(5, 2, dtype=DOUBLE), torch.rand(5, dtype=DOUBLE) + 0.5
GAUSSIAN, SHIFTED = kl.gaussian(), kl.l1_distance(epilogue=kl.Custom("v + g", ("g",)))
MATRIX = kl.run_kernel(GAUSSIAN, A, A, bandwidth=1.3)
CALLS = {
    "bandwidth": lambda w: kl.run_kernel(GAUSSIAN, A, B, bandwidth=w),
    "a parameter": lambda w: kl.run_kernel(SHIFTED, A, B, g=w),
    "p": lambda w: kl.cdist(A, B, p=w),
    "scale": lambda w: kl.cdist_expadd(A, B, scale=w),
    "regularization": lambda w: kl.run_kernel(GAUSSIAN, A, B, bandwidth=1.3, regularization=w),
    "kernel_matmul": lambda w: kl.kernel_matmul(GAUSSIAN, B, A, V, bandwidth=w),
    "kernel_sum": lambda w: kl.kernel_sum(GAUSSIAN, A, B, bandwidth=w),
    "kernel_min": lambda w: kl.kernel_min(GAUSSIAN, A, B, bandwidth=w)[0],
    "agop": lambda w: kl.agop(GAUSSIAN, A, B, V.T[:, :4], bandwidth=w),
    "kernel_topk": lambda w: kl.kernel_topk(GAUSSIAN, A, B, 2, bandwidth=w)[0],
}


@pytest.mark.few(20)
@pytest.mark.parametrize("grad", (False, True))
@pytest.mark.parametrize("name", CALLS)
def test_values_of_as_many_as_points_are_refused_and_of_a_batch_are_one(name, grad):
    call = CALLS[name]
    grad = grad and name != "agop"  # which records none
    for count in (5, 4):
        given = W[:count].clone().requires_grad_(grad)
        with pytest.raises(ValueError, match=rf"\({count},\).*pass shape \({count}, 1, 1\)"):
            call(given)
        batch = W[:count, None, None].clone().requires_grad_(grad)
        result = call(batch)
        torch.testing.assert_close(result, torch.stack([call(float(w)) for w in W[:count]]))
        assert call(batch[:1]).shape == result[:1].shape
        if grad:
            assert torch.autograd.grad(result.sum(), batch)[0].shape == batch.shape
    assert call(torch.cat((W, W[:1]))).shape[0] == 6  # of neither count


def test_vmap_over_as_many_values_as_points_is_a_batch():
    torch.testing.assert_close(
        torch.vmap(CALLS["bandwidth"])(W), CALLS["bandwidth"](W.view(5, 1, 1))
    )
    each = torch.vmap(CALLS["kernel_sum"])(W)
    torch.testing.assert_close(each, CALLS["kernel_sum"](W.view(5, 1, 1)))


DIAGONALS = {
    "matrix": (lambda **k: kl.run_kernel(GAUSSIAN, A, A, **k), lambda k: k),
    "symmetric": (lambda **k: kl.run_kernel(GAUSSIAN.replace(symmetric=True), A, **k), lambda k: k),
    "product": (lambda **k: kl.kernel_matmul(GAUSSIAN, A, A, V, **k), lambda k: k @ V),
    "vector": (lambda **k: kl.kernel_matmul(GAUSSIAN, A, A, V[:, 0], **k), lambda k: k @ V[:, 0]),
    "sums": (lambda **k: kl.kernel_sum(GAUSSIAN, A, A, **k), lambda k: k.sum(-1)),
    "systems": (
        lambda **k: linalg.solve_kernel(GAUSSIAN, A, V, tol=1e-10, rank=2, **k).x,
        lambda k: torch.linalg.solve(k, V),
    ),
    "stored systems": (
        lambda **k: linalg.solve_kernel(GAUSSIAN, A, V, **k).x,
        lambda k: torch.linalg.solve(k, V),
    ),
}


@pytest.mark.few(10)
@pytest.mark.parametrize("name", DIAGONALS)
def test_a_regularization_of_each_point_is_the_diagonal(name):
    call, of = DIAGONALS[name]
    wanted = of(MATRIX + torch.diag(W))
    torch.testing.assert_close(call(bandwidth=1.3, regularization=W), wanted)
    if "systems" in name:
        return
    given = W.clone().requires_grad_()
    (grad,) = torch.autograd.grad(call(bandwidth=1.3, regularization=given).sum(), given)
    by_torch = W.clone().requires_grad_()
    (same,) = torch.autograd.grad(of(MATRIX + torch.diag(by_torch)).sum(), by_torch)
    torch.testing.assert_close(grad, same)


@pytest.mark.parametrize("dtype", (torch.float16, torch.float64), ids=str)
def test_a_diagonal_is_added_to_out_and_rounded_once(dtype):
    a, out = A.to(dtype), torch.full((5, 5), 0.25, dtype=dtype)
    values = {"bandwidth": 1.3, "regularization": W}
    once = kl.run_kernel(GAUSSIAN, a, a, **values)
    kl.run_kernel(GAUSSIAN, a, a, out=out, accumulate=True, **values)
    wide = kl.run_kernel(GAUSSIAN, a.double(), a.double(), bandwidth=1.3) + torch.diag(W)
    bound = torch.finfo(dtype).eps * 0.51 + 1e-15
    assert ((once.double() - wide) / wide).abs().max() <= bound
    assert ((out.double() - wide - 0.25) / (wide + 0.25)).abs().max() <= bound


def test_a_diagonal_is_that_of_a_whole_square_matrix():
    with pytest.raises(ValueError, match="row_offset == col_offset"):
        kl.run_kernel(GAUSSIAN, A, A, bandwidth=1.3, regularization=W, row_offset=5)
    with pytest.raises(ValueError, match="kernel_logsumexp must be one value"):
        kl.kernel_logsumexp(GAUSSIAN, A, A, bandwidth=1.3, regularization=W)
    batch = kl.run_kernel(GAUSSIAN, A, A, bandwidth=W[:2], regularization=W)
    matrices = kl.run_kernel(GAUSSIAN, A, A, bandwidth=W[:2])
    torch.testing.assert_close(batch, matrices + torch.diag(W))
    entries = kl.run_kernel(GAUSSIAN, A[None], A, bandwidth=1.3, regularization=W)
    torch.testing.assert_close(entries, MATRIX + W[:, None, None] * torch.eye(5, dtype=DOUBLE))
    compiled = torch.compile(DIAGONALS["matrix"][0], fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(bandwidth=1.3, regularization=W), MATRIX + torch.diag(W))


def test_a_noise_of_each_row_of_a_kronecker_system_is_refused():
    factors = [torch.eye(n, dtype=DOUBLE) for n in (2, 3)]
    noise, b = torch.rand(6, dtype=DOUBLE) + 0.5, torch.ones(6, 1, dtype=DOUBLE)
    rows = torch.arange(4)
    entries = [factors[0][None], factors[1]]
    calls = {
        6: (linalg.kron_logdet, lambda f, noise: linalg.kron_solve(f, b, noise=noise)),
        4: (lambda f, noise: linalg.masked_kron_solve(f, b[:4], rows, noise=noise).x,),
    }
    for count, functions in calls.items():
        for function in functions:
            with pytest.raises(ValueError, match=r"noise of shape .* factors of shape \(1, n, n\)"):
                function(factors, noise=noise[:count])
            assert function(entries, noise=noise[:count]).shape[0] == count

"""Eigenbases of Kronecker products, and the gradients of what is computed in them.

A derivative of a solution or of a determinant has no difference of eigenvalues as a divisor, where
one taken through the eigenvectors has; so these are written down by their formulas.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.autograd import Function

from kernlib.families.kronecker_product.matmul import kron_matmul
from kernlib.linalg import dense
from kernlib.linalg.checks import raise_for_info
from kernlib.runtime.precision import without_autocast

NOT_CONVERGED = "its eigenvalues did not converge (info {info}), as with NaN in {what}"


class LowerTriangle(Function):
    """The symmetric matrices of which factors (..., N, N) hold the lower triangle, whatever is in
    the other. Their gradient is symmetric, as those of torch.linalg.cholesky and eigh are: a step
    along it leaves a symmetric factor symmetric."""

    @staticmethod
    def forward(ctx, factor):
        return factor.tril() + factor.tril(-1).mT

    @staticmethod
    def backward(ctx, grad):
        return _symmetric(grad)


def _symmetric(grad: torch.Tensor) -> torch.Tensor:
    return (grad + grad.mT) / 2


def symmetric(factor: torch.Tensor) -> torch.Tensor:
    return LowerTriangle.apply(factor)


def outer(vectors) -> torch.Tensor:
    """``v1 ⊗ ... ⊗ vN`` of (..., n_i); 1 of none."""
    result = vectors[0]
    for vector in vectors[1:]:
        result = (result[..., :, None] * vector[..., None, :]).flatten(-2)
    return result


def product(x: torch.Tensor, factors) -> torch.Tensor:
    """``(K1 ⊗ ... ⊗ KN) x`` of (..., n, C): TF32 has too few digits for a solution."""
    with without_autocast(x.device):
        return kron_matmul(x, factors, side="left", precision="fp32")


class Eigh(Function):
    """:func:`kernlib.linalg.eigh` of symmetric matrices, with gradients of any order."""

    @staticmethod
    def forward(ctx, a):
        ctx.set_materialize_grads(False)
        w, v, info = dense.eigh(a)
        ctx.save_for_backward(w, v)
        ctx.mark_non_differentiable(info)
        return w, v, info

    @staticmethod
    def backward(ctx, of_w, of_v, _):
        w, v = ctx.saved_tensors
        inner = None if of_w is None else torch.diag_embed(of_w)
        if of_v is not None:
            gaps = w[..., None, :] - w[..., :, None]
            same = torch.eye(w.shape[-1], dtype=torch.bool, device=w.device)
            turn = _times(v.mT, of_v) / gaps.masked_fill(same, math.inf)
            inner = turn if inner is None else inner + turn
        return None if inner is None else _times(_times(v, inner), v.mT)


class ImplicitSolve(Function):
    """``x = A^-1 b`` of a symmetric A of the noise and the factors, by a ``system`` that solves and
    multiplies; its gradient by b is another solution y, ``A^-1`` of the gradient by x, and by all
    else that of ``-<y, A x>`` with x and y held."""

    @staticmethod
    def forward(ctx, system, b, noise, *factors):
        x = system.solve(b, noise, factors)
        ctx.system, ctx.shape = system, b.shape
        ctx.save_for_backward(x, noise, *factors)
        return x

    @staticmethod
    def backward(ctx, of_x):
        x, noise, *factors = ctx.saved_tensors
        _, needs_b, needs_noise, *needs = ctx.needs_input_grad
        y = ctx.system.solve_again(of_x, noise, factors)
        of_b = y.sum_to_size(ctx.shape) if needs_b else None
        of_noise = None
        if needs_noise:
            of_noise = -(y * x).sum((-2, -1)).sum_to_size(noise.shape)
        with without_autocast(x.device):
            of_factors = _of_factors(ctx.system, x, -y, factors, needs)
        return None, of_b, of_noise, *of_factors


def _of_factors(system, x: torch.Tensor, y: torch.Tensor, factors, needs) -> list:
    """Gradients of ``<y, K x>`` by the factors alone, though x and y may come of them."""
    if not any(needs):
        return [None] * len(needs)
    recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        if recorded:
            leaves = [f.view_as(f) for f in factors]
        else:
            x, leaves = x.detach(), [f.detach().requires_grad_() for f in factors]
        inputs = [f for f, need in zip(leaves, needs, strict=True) if need]
        image = system.product(x, leaves)
        grads = iter(torch.autograd.grad(image, inputs, y, create_graph=recorded))
    return [next(grads) if need else None for need in needs]


class Eigenbasis(NamedTuple):
    """Eigenvalues and eigenvectors of factors, held as they are found."""

    values: list[torch.Tensor]
    vectors: list[torch.Tensor]

    def shifted(self, noise: torch.Tensor) -> torch.Tensor:
        """The eigenvalues of the sum with ``noise I``, (..., n)."""
        return outer(self.values) + noise[..., None]

    def solve(self, b: torch.Tensor, noise: torch.Tensor, factors) -> torch.Tensor:
        turned = product(b, [v.mT for v in self.vectors])
        return product(turned / self.shifted(noise)[..., None], self.vectors)

    def solve_again(self, b: torch.Tensor, noise: torch.Tensor, factors) -> torch.Tensor:
        return ImplicitSolve.apply(self, b, noise, *factors)

    def product(self, x: torch.Tensor, factors) -> torch.Tensor:
        return product(x, factors)


def eigenbasis(task: str, factors, check_errors: bool) -> Eigenbasis:
    results = [dense.eigh(factor.detach()) for factor in factors]
    if check_errors:
        for index, (_, _, info) in enumerate(results):
            raise_for_info(info, f"{task}: factors[{index}]", NOT_CONVERGED)
    return Eigenbasis([w for w, _, _ in results], [v for _, v, _ in results])


class LogDet(Function):
    """``sum_j log(w_j + noise)``."""

    @staticmethod
    def forward(ctx, basis, noise, *factors):
        ctx.basis = basis
        ctx.save_for_backward(noise, *factors)
        return basis.shifted(noise).log().sum(-1)

    @staticmethod
    def backward(ctx, weight):
        return None, *_Traces.apply(ctx.basis, weight, *ctx.saved_tensors)


class _Traces(Function):
    """The gradient of ``sum(weight * logdet)``, traces of ``A^-1 dA``: by the noise the sum of
    ``1 / d``, with d the eigenvalues of A, and by a factor ``V_i diag(g_i) V_i^T``, where g_i sums
    ``prod_(m != i) w_m / d`` over the other factors' eigenvalues."""

    @staticmethod
    def forward(ctx, basis, weight, noise, *factors):
        ctx.basis = basis
        ctx.save_for_backward(weight, noise, *factors)
        inverse = weight[..., None] / basis.shifted(noise)
        sums = _sums_but_one(inverse, basis.values)
        diagonals = [s.sum_to_size(w.shape) for s, w in zip(sums, basis.values, strict=True)]
        by_factor = [_spectral(v, d) for v, d in zip(basis.vectors, diagonals, strict=True)]
        return inverse.sum(-1).sum_to_size(noise.shape), *by_factor

    @staticmethod
    def backward(ctx, *changes):
        with torch.no_grad():
            derivatives = _second_derivatives(ctx.basis, *changes, *ctx.saved_tensors[:2])
        return None, *_Last.apply(len(derivatives), *derivatives, *changes, *ctx.saved_tensors)


class _Last(Function):
    """The first ``count`` tensors, as functions of all others that cannot be differentiated."""

    @staticmethod
    def forward(ctx, count, *tensors):
        return tensors[:count]

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            "kron_logdet with noise has no third derivatives: differentiate its gradient once"
        )


def _second_derivatives(basis: Eigenbasis, of_noise, *rest) -> tuple[torch.Tensor, ...]:
    """The gradient by weight, noise and factors of a sum of :class:`_Traces`, each times a number:
    ``rest`` holds those of the factors, the weight and the noise.

    In the eigenbasis, values on the diagonal change eigenvalues alone; the others change g_i as a
    function of the matrix, by its divided differences.
    """
    *of_factors, weight, noise = rest
    values, vectors = basis
    pairs = zip(vectors, of_factors, strict=True)
    turned = [_times(_times(v.mT, _symmetric(g)), v) for v, g in pairs]
    diagonals = [t.diagonal(dim1=-2, dim2=-1) for t in turned]
    by_weight, by_noise, *by_value = _second(weight, noise, values, of_noise, diagonals)
    by_factor = []
    for index, (turn, vector) in enumerate(zip(turned, vectors, strict=True)):
        inner = turn * _divided(basis, index, weight, noise).sum_to_size(turn.shape)
        inner.diagonal(dim1=-2, dim2=-1).copy_(by_value[index])
        by_factor.append(_times(_times(vector, inner), vector.mT))
    return by_weight, by_noise, *by_factor


def _second(weight, noise, values, of_noise, of_values) -> tuple[torch.Tensor, ...]:
    """Gradients of ``sum(weight * rate / d)``, ``rate / d`` being the derivative of the logarithm
    of d in the given direction, by weight, noise and each factor's eigenvalues."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (weight, noise, *values)]
        weight, noise, *values = leaves
        rate = of_noise[..., None]
        for index, change in enumerate(of_values):
            rate = rate + outer([*values[:index], change, *values[index + 1 :]])
        total = (weight * (rate / (outer(values) + noise[..., None])).sum(-1)).sum()
        return torch.autograd.grad(total, leaves)


def _divided(basis: Eigenbasis, index: int, weight, noise) -> torch.Tensor:
    """``(g_i(a) - g_i(b)) / (a - b) = -sum prod_(m != i) w_m^2 / (d_a d_b)`` at all pairs of
    eigenvalues of factor i, (..., n_i, n_i)."""
    values = basis.values
    order = values[index].shape[-1]
    rest = outer([*values[:index], torch.ones_like(values[index]), *values[index + 1 :]])
    terms = rest / basis.shifted(noise)
    left = math.prod(w.shape[-1] for w in values[:index])
    terms = terms.reshape(*terms.shape[:-1], left, order, -1).movedim(-2, -3).flatten(-2)
    return -_times(weight[..., None, None] * terms, terms.mT)


def _sums_but_one(t: torch.Tensor, values) -> list[torch.Tensor]:
    """For each factor, ``sum t prod_(m != i) w_m`` over the others: (..., n_i) of t (..., n)."""
    sums = []
    for index, value in enumerate(values):
        rows = [w[..., None, :] for w in values]
        rows[index] = torch.eye(value.shape[-1], dtype=value.dtype, device=value.device)
        sums.append(product(t[..., None], rows).squeeze(-1))
    return sums


def _spectral(vectors: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return _times(vectors * values[..., None, :], vectors.mT)


def _times(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A product of two matrices, not in TF32."""
    return product(b, [a])

"""Kronecker products of square matrices: factorisations, solutions and determinants.

Each works on the factors alone, in ``O(sum_i n_i^3)`` operations and those of a product, while the
matrix itself would take ``O(prod_i n_i^3)``. With a multiple of the identity added the factors' own
eigenbases diagonalise the sum, and gradients follow formulas in which no difference of eigenvalues
is a divisor: factors with repeated eigenvalues have them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernlib.debug import eager_only
from kernlib.families.kronecker_product.matmul import as_factors
from kernlib.linalg.checks import (
    DTYPES,
    NOT_POSITIVE,
    SINGULAR,
    check_flags,
    cholesky_info,
    holds_nan,
    lu_info,
    raise_for_info,
    refuse_meta,
)
from kernlib.linalg.kronecker_gradients import (
    NOT_CONVERGED,
    Eigh,
    ImplicitSolve,
    LogDet,
    eigenbasis,
    outer,
    symmetric,
)
from kernlib.linalg.layouts import by_parts
from kernlib.runtime.arguments import check_same_kind
from kernlib.runtime.numbers import extremes, host_value, on_device
from kernlib.runtime.precision import rounds_gradients, without_autocast
from kernlib.runtime.tensors import (
    broadcast_shapes,
    check_dense,
    check_layout,
    refuse_distributed,
    refuse_transforms,
    stand_ins,
)

_NO_TRANSFORMS = "kernlib.linalg does not support; give it a batch of matrices instead"


class KronEigh(NamedTuple):
    """What :func:`kron_eigh` returns: ``K_i = V_i diag(w_i) V_i^T``.

    - ``values``: w_i (..., n_i), ascending, a tensor a factor.
    - ``vectors``: V_i (..., n_i, n_i), with eigenvectors as columns.

    Example:
        >>> found = kl.linalg.kron_eigh([torch.diag(torch.tensor([1.0, 2.0])), torch.eye(2)])
        >>> found.eigenvalues()
        tensor([1., 1., 2., 2.])
    """

    values: list[torch.Tensor]  # w_i (..., n_i), ascending
    vectors: list[torch.Tensor]  # V_i (..., n_i, n_i), as columns

    def eigenvalues(self) -> torch.Tensor:
        """All of ``K1 ⊗ ... ⊗ KN``, (..., prod n_i): the products of one of each factor, in the
        order of the columns of ``V1 ⊗ ... ⊗ VN``, which is not ascending."""
        return outer(self.values)


# Public functions.


@eager_only
def kron_cholesky(
    factors: Sequence[torch.Tensor], *, check_errors: bool = False, debug: bool = False
) -> list[torch.Tensor]:
    """Lower triangular ``L_i`` with ``K_i = L_i L_i^T``, so that ``L1 ⊗ ... ⊗ LN`` is the Cholesky
    factor of ``K1 ⊗ ... ⊗ KN``.

    - ``factors``: positive definite (..., n_i, n_i), float32 or float64, one dtype, any strides; a
      batch of each is its own. Of them the lower triangle is read, as torch.linalg.cholesky has it,
      and gradients are symmetric.
    - ``check_errors``: whether to wait for the device and raise for a factor that is not positive
      definite, which else makes NaN of its ``L_i`` without a wait. Two negative definite factors
      are refused too: their product has a factorization, but not by factors.
    - ``debug``: True writes the call's events to stderr.

    Gradients are recorded, and those of the gradients. See Van Loan, "The ubiquitous Kronecker
    product" (2000).

    Raises ValueError for shapes and devices that do not fit, TypeError for other dtypes and what is
    no tensor, RuntimeError inside transforms of torch.func, and with ``check_errors``
    torch.linalg.LinAlgError, which names factor and batch entry.

    Example:
        >>> a, b = torch.tensor([[4.0, 2.0], [2.0, 5.0]]), torch.tensor([[9.0]])
        >>> kl.linalg.kron_cholesky([a, b])
        [tensor([[2., 0.],
                [1., 2.]]), tensor([[3.]])]
    """
    factors = as_square(factors, check_errors=check_errors)
    results = [_cholesky(factor) for factor in factors]
    return _unless_failed("kron_cholesky", results, NOT_POSITIVE, check_errors)


@eager_only
def kron_inverse(
    factors: Sequence[torch.Tensor], *, check_errors: bool = False, debug: bool = False
) -> list[torch.Tensor]:
    """The inverses of the factors, whose Kronecker product is the inverse of theirs.

    - ``factors``: any square (..., n_i, n_i). One with a pivot that is exactly zero makes NaN of
      its inverse.
    - ``check_errors``, ``debug``: as those of :func:`kron_cholesky`, of singular factors.

    Solutions with :func:`kron_solve` have smaller residuals than products with inverses, which
    :func:`kernlib.kron_matmul` makes faster. Gradients are recorded.

    Raises what :func:`kron_cholesky` does: ValueError, TypeError and RuntimeError for arguments,
    and with ``check_errors`` torch.linalg.LinAlgError for a singular factor.

    Example:
        >>> kl.linalg.kron_inverse([torch.tensor([[2.0, 0.0], [0.0, 4.0]]), torch.tensor([[5.0]])])
        [tensor([[0.5000, 0.0000],
                [0.0000, 0.2500]]), tensor([[0.2000]])]
    """
    factors = as_square(factors, check_errors=check_errors)
    results = []
    for factor in factors:
        inverse, info = by_parts(torch.linalg.inv_ex, _exact(factor))
        info = lu_info(info, holds_nan(factor), factor.shape[-1])
        results.append((inverse.to(factor.dtype), info))
    return _unless_failed("kron_inverse", results, SINGULAR, check_errors)


@eager_only
def kron_eigh(
    factors: Sequence[torch.Tensor], *, check_errors: bool = False, debug: bool = False
) -> KronEigh:
    """Eigenvalues and eigenvectors of symmetric factors, ``K_i = V_i diag(w_i) V_i^T``, from which
    those of ``K1 ⊗ ... ⊗ KN`` follow:

        ``K1 ⊗ ... ⊗ KN = (V1 ⊗ ... ⊗ VN) diag(w1 ⊗ ... ⊗ wN) (V1 ⊗ ... ⊗ VN)^T``

    - ``factors``: symmetric (..., n_i, n_i), of which the lower triangle is read, by
      :func:`kernlib.linalg.eigh`.
    - ``check_errors``, ``debug``: as those of :func:`kron_cholesky`.

    The result's ``eigenvalues()`` forms the vector ``w1 ⊗ ... ⊗ wN`` when it is called.

    Gradients of the values are those of torch.linalg.eigh; those of the vectors, and second
    derivatives of the values, have the factor's differences of eigenvalues as divisors, and are not
    finite where two are equal. :func:`kron_solve` and :func:`kron_logdet` have no such divisors.

    Raises what :func:`kron_cholesky` does: ValueError, TypeError and RuntimeError for arguments,
    and with ``check_errors`` torch.linalg.LinAlgError for eigenvalues that did not converge.

    Example:
        >>> a, b = torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.diag(torch.tensor([1.0, 10.0]))
        >>> kl.linalg.kron_eigh([a, b]).eigenvalues().round(decimals=4)
        tensor([ 1., 10.,  3., 30.])
    """
    factors = as_square(factors, check_errors=check_errors)
    results = [Eigh.apply(symmetric(factor)) for factor in factors]
    if check_errors:
        for index, (_, _, info) in enumerate(results):
            raise_for_info(info, f"kron_eigh: factors[{index}]", NOT_CONVERGED)
    return KronEigh([w for w, _, _ in results], [v for _, v, _ in results])


@eager_only
def kron_solve(
    factors: Sequence[torch.Tensor],
    b: torch.Tensor,
    *,
    noise: float | torch.Tensor | None = None,
    cholesky: bool = False,
    check_errors: bool = False,
    debug: bool = False,
) -> torch.Tensor:
    """``x = (K1 ⊗ ... ⊗ KN)^-1 b``, or ``x = (K1 ⊗ ... ⊗ KN + noise I)^-1 b``.

    - ``factors``: square (..., n_i, n_i), in any number. Without ``noise`` each is factored once,
      by ``P L U``, or if ``cholesky=True`` says that they are positive definite by ``L L^T``, and
      solves its dimension of b. With ``noise`` they must be symmetric, and x is
      ``V (w + noise)^-1 V^T b`` in the eigenbasis of :func:`kron_eigh`.
    - ``b``: (n,) or (..., n, C), n being ``prod n_i``; (..., n) with the batch of the matrix is one
      vector, as for torch.linalg.solve. C and batches may be 0.
    - ``noise``: 0 or greater, a number, or a tensor of shape () or of a batch; one of as many
      values as the system has rows is refused beside factors without a batch.
    - ``check_errors``: whether to wait for the device and raise for a factor that could not be
      factored, of which x else is NaN. ``debug``: True writes the call's events to stderr.
    - Batches of all of them broadcast. float32 or float64, the same for all tensors.

    With ``cholesky`` and with ``noise`` the lower triangle of a factor is read, as torch reads that
    of a symmetric matrix, and its gradient is symmetric. With ``noise`` an eigenvalue of the sum
    that is exactly 0 is not looked for.

    Gradients of all tensors are recorded, and those of the gradients; with ``noise`` they are
    further solutions in the same eigenbasis, which is all that is kept besides x and the factors.

    In float32 the error ``|x - x'| / |x|`` stays below 1e-7 times the condition number, with
    ``noise`` below 5e-7 times that, and the backward error ``|A x - b| / (|A| |x| + |b|)`` below
    1e-7 and 1e-6, in 2-norms (measured for sizes to 64, n to 2560, conditions from 10 to 1e6 and
    normal b).

    The operations are those of KroneckerProductLinearOperator and
    KroneckerProductAddedDiagLinearOperator of the linear_operator project.

    Raises ValueError for shapes and devices that do not fit, a negative ``noise`` and ``cholesky``
    with ``noise``, TypeError for other dtypes, RuntimeError inside transforms of torch.func, and
    with ``check_errors`` torch.linalg.LinAlgError, which names factor and batch entry.

    Example:
        >>> a, b = torch.tensor([[2.0, 0.0], [0.0, 4.0]]), torch.tensor([[5.0]])
        >>> kl.linalg.kron_solve([a, b], torch.tensor([10.0, 20.0]))
        tensor([1., 1.])
        >>> kl.linalg.kron_solve([a, b], torch.tensor([11.0, 21.0]), noise=1.0)
        tensor([1., 1.])
    """
    check_flags(cholesky=cholesky)
    factors = as_square(factors, check_errors=check_errors)
    if noise is None:
        batch = broadcast_batches(factors)
        columns, vector = as_columns(b, "b", factors, batch, features(factors))
        exact = _exact(columns)
        with without_autocast(b.device):
            x = _solve_modes(factors, exact, cholesky, check_errors).to(b.dtype)
        return x.squeeze(-1) if vector else x
    if cholesky:
        raise ValueError("cholesky=True solves without noise; with noise eigenvalues do, omit it")
    noise = as_noise(noise, factors)
    batch = broadcast_batches(factors, noise)
    columns, vector = as_columns(b, "b", factors, batch, features(factors))
    factors = [symmetric(factor) for factor in factors]
    basis = eigenbasis("kron_solve", factors, check_errors)
    x = ImplicitSolve.apply(basis, columns, noise, *factors)
    return x.squeeze(-1) if vector else x


@eager_only
def kron_logdet(
    factors: Sequence[torch.Tensor],
    *,
    noise: float | torch.Tensor | None = None,
    check_errors: bool = False,
    debug: bool = False,
) -> torch.Tensor:
    """``log det(K1 ⊗ ... ⊗ KN) = sum_i (n / n_i) log det K_i``, or with ``noise``
    ``log det(K1 ⊗ ... ⊗ KN + noise I) = sum_j log(w_j + noise)``.

    - ``factors``, ``noise``, ``debug``: as those of :func:`kron_solve`.
    - ``check_errors``: whether to wait for the device and raise for eigenvalues that did not
      converge and for factors that are singular.

    Without ``noise`` the factors are any square matrices, and as for torch.logdet a determinant of
    0 gives -inf, a negative one NaN. With it they are symmetric, as :func:`kron_solve` has them,
    and the result is NaN where ``w_j + noise`` is negative for some eigenvalue w_j of the product,
    as rounding errors of one near 0 can be where ``noise`` is below them. The result has the shape
    of the batch, which is that of the factors and of ``noise``, broadcast.

    Gradients are recorded, and those of the gradients; with ``noise`` none beyond, and those of a
    factor are ``V_i diag(.) V_i^T``, without a divisor but ``w_j + noise``.

    In float32 the error relative to ``sum_j |log(w_j + noise)|`` is below 1e-6 for condition
    numbers to 100, and grows with them: 4e-6 at 1e4, 3e-4 at 1e6, where eigenvalues near 0 have few
    digits.

    Raises what :func:`kron_solve` does: ValueError, TypeError and RuntimeError for arguments, and
    with ``check_errors`` torch.linalg.LinAlgError.

    Example:
        >>> a, b = torch.tensor([[2.0, 0.0], [0.0, 4.0]]), torch.tensor([[5.0]])
        >>> kl.linalg.kron_logdet([a, b]).exp().round()  # of diag(10, 20)
        tensor(200.)
    """
    factors = as_square(factors, check_errors=check_errors)
    if noise is None:
        return _logdet_of_factors(factors, check_errors)
    noise = as_noise(noise, factors)
    broadcast_batches(factors, noise)
    factors = [symmetric(factor) for factor in factors]
    basis = eigenbasis("kron_logdet", factors, check_errors)
    return LogDet.apply(basis, noise, *factors)


# Checks.


def as_square(factors, *, check_errors: bool = False) -> Sequence[torch.Tensor]:
    """Square matrices of one dtype and device, whose batches broadcast. Raises ValueError,
    TypeError and RuntimeError."""
    check_flags(check_errors=check_errors)
    factors = as_factors(factors)
    for index, factor in enumerate(factors):
        name = f"factors[{index}]"
        refuse_transforms(_NO_TRANSFORMS, **{name: factor})
        refuse_distributed(**{name: factor})
        check_same_kind("factors[0]", factors[0], name, factor, DTYPES)
        shape = tuple(factor.shape)
        if len(shape) < 2 or shape[-1] != shape[-2]:
            raise ValueError(f"{name} must be square, (..., N, N), got shape {shape}")
        if not shape[-1]:
            raise ValueError(f"{name} must have sizes above 0, got shape {shape}")
        if check_errors:
            refuse_meta(f"{name}, of which check_errors=True reads the outcome,", factor)
    broadcast_batches(factors)
    return factors


def as_noise(noise, factors, rows: int | None = None) -> torch.Tensor:
    """A tensor of the factors' dtype and device. Raises ValueError and TypeError, also beside
    factors without a batch for a value of each of the system's ``rows``, all by default."""
    like, number = factors[0], host_value("noise", noise)
    if number is not None:
        _check_shift(number)
        if number > torch.finfo(like.dtype).max:
            raise ValueError(f"noise must fit {like.dtype}, which factors[0] is, got {number}")
        return torch.full((), number, dtype=like.dtype, device=like.device)
    check_layout("noise", noise)
    refuse_transforms(_NO_TRANSFORMS, noise=noise)
    if noise.dtype != like.dtype:
        raise TypeError(f"noise must be {like.dtype} as factors[0] is, got {noise.dtype}")
    for value in () if stand_ins(noise) else extremes(noise):
        _check_shift(value)
    if noise.dim() and noise.device != like.device:
        raise ValueError(f"noise must be on factors[0]'s device {like.device}, got {noise.device}")
    rows = features(factors) if rows is None else rows
    if noise.dim() == 1 and rows == noise.shape[0] > 1 and all(f.dim() == 2 for f in factors):
        raise ValueError(
            f"noise of shape ({rows},) may be a value for each of {rows} systems or for each row "
            "of one: pass factors of shape (1, n, n) for a batch; one value for each row is not "
            "supported yet"
        )
    return on_device("noise", noise, like.device, like.dtype)


def as_columns(b, name: str, factors, batch: torch.Size, size: int) -> tuple[torch.Tensor, bool]:
    """b as (..., size, C), and whether it was one vector for each matrix of the batch. Raises
    ValueError and TypeError."""
    check_dense((name,), **{name: b})
    refuse_transforms(_NO_TRANSFORMS, **{name: b})
    check_same_kind("factors[0]", factors[0], name, b, DTYPES)
    vector = b.dim() == 1 or b.shape == (*batch, size)
    columns = b.unsqueeze(-1) if vector else b
    if columns.dim() < 2 or columns.shape[-2] != size:
        single = f"({size},), {(*batch, size)}" if batch else f"({size},)"
        raise ValueError(
            f"{name} must be {single} or (..., {size}, C) for these factors, got shape "
            f"{tuple(b.shape)}"
        )
    try:
        broadcast_shapes(columns.shape[:-2], batch)
    except RuntimeError:
        raise ValueError(
            f"{name} of shape {tuple(b.shape)} does not broadcast to the batch {tuple(batch)} of "
            "factors and noise"
        ) from None
    return columns, vector


def broadcast_batches(factors, noise: torch.Tensor | None = None) -> torch.Size:
    """The batch of the matrix. Raises ValueError."""
    batches = [factor.shape[:-2] for factor in factors]
    shift = () if noise is None else noise.shape
    try:
        return broadcast_shapes(*batches, shift)
    except RuntimeError:
        shown = ", ".join(str(tuple(batch)) for batch in batches)
        also = f" and noise {tuple(shift)}" if shift else ""
        raise ValueError(f"the batches of factors {shown}{also} do not broadcast") from None


def _check_shift(value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"noise must be 0 or greater and finite, got {value}")


# Factors one by one.


def features(factors) -> int:
    """Rows of the product of square factors."""
    return math.prod(factor.shape[-1] for factor in factors)


def _unless_failed(task: str, pairs: list, failure: str, check_errors: bool) -> list:
    """Results of torch's functions that return an info too, NaN where that is not 0."""
    for index, (result, info) in enumerate(pairs if check_errors else ()):
        where, order = f"{task}: factors[{index}]", result.shape[-1]
        raise_for_info(info, where, failure, order=order)
    return [result * _nan_where(info != 0, result)[..., None, None] for result, info in pairs]


def _cholesky(factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    root, info = by_parts(torch.linalg.cholesky_ex, _exact(factor))
    return root.to(factor.dtype), cholesky_info(info, root)


def _exact(t: torch.Tensor) -> torch.Tensor:
    """A tensor with which torch's linear algebra and its gradients use neither TF32 nor autocast's
    dtype, which have too few digits: float64 where torch might use them."""
    return t.double() if rounds_gradients(t) else t


def _nan_where(failed: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A factor of 1 or NaN, which spreads to gradients as a filled value would not."""
    return torch.zeros_like(failed, dtype=like.dtype).masked_fill(failed, math.nan) + 1


def _solve_modes(factors, b: torch.Tensor, cholesky: bool, check_errors: bool) -> torch.Tensor:
    """A dimension of b at a time: b (..., n, C)."""
    rank = max(b.dim(), *(factor.dim() for factor in factors)) - 2
    size, columns, left = b.shape[-2], b.shape[-1], 1
    x = b.reshape((1,) * (rank + 2 - b.dim()) + tuple(b.shape))
    failed = None
    for index, factor in enumerate(factors):
        order = factor.shape[-1]
        right = size // (left * order) * columns
        x = x.reshape(*x.shape[:rank], left, order, right)
        x, info = _solve_along(factor.to(x.dtype), x, cholesky)
        if check_errors:
            failure = NOT_POSITIVE if cholesky else SINGULAR
            by_batch, where = info.view(factor.shape[:-2]), f"kron_solve: factors[{index}]"
            raise_for_info(by_batch, where, failure, order=order)
        failed = info != 0 if failed is None else failed | (info != 0)
        left *= order
    x = x.reshape(*x.shape[:rank], size, columns)
    return x * _nan_where(failed, x)[..., None, None]


def _solve_along(factor: torch.Tensor, x: torch.Tensor, cholesky: bool):
    """``factor^-1`` along the last but one dimension of x (*batch, left, n, right), and the info.
    Dimensions of the batch that the factor has not are columns, lest it be factored for each."""
    rank, size = x.dim() - 3, factor.shape[-1]
    lead = (1,) * (rank + 2 - factor.dim()) + tuple(factor.shape[:-2])
    x = x.expand(*broadcast_shapes(x.shape[:rank], lead), *x.shape[rank:])
    shared = [d for d in range(rank) if lead[d] != 1]
    order = [*shared, rank + 1, *(d for d in range(rank) if lead[d] == 1), rank, rank + 2]
    turned = x.permute(order)
    matrix = factor.reshape(*(lead[d] for d in shared), size, size)
    columns = turned.flatten(len(shared) + 1)
    if cholesky:
        root, info = _cholesky(matrix)
        solution = by_parts(torch.cholesky_solve, columns, root)
    else:
        solution, info = by_parts(torch.linalg.solve_ex, matrix, columns)
        info = lu_info(info, holds_nan(matrix), size)
    back = sorted(range(len(order)), key=order.__getitem__)
    return solution.reshape(turned.shape).permute(back), info.view(lead)


def _logdet_of_factors(factors, check_errors: bool) -> torch.Tensor:
    size, batch = features(factors), broadcast_batches(factors)
    total = _exact(factors[0].new_zeros(batch))
    negative = torch.zeros(batch, dtype=torch.bool, device=total.device)
    singular = negative
    for index, factor in enumerate(factors):
        sign, logarithm = by_parts(torch.linalg.slogdet, _exact(factor))
        zero, spoilt, order = sign == 0, holds_nan(factor), factor.shape[-1]
        singular = singular | zero
        if check_errors:
            info, where = lu_info(zero.int(), spoilt, order), f"kron_logdet: factors[{index}]"
            raise_for_info(info, where, "its determinant is 0", order=order)
        times = size // order
        total = total + float(times) * logarithm * _nan_where(spoilt, logarithm)
        if times % 2:
            negative = negative ^ (sign < 0)
    return total.to(factors[0].dtype).masked_fill(negative & ~singular, math.nan)

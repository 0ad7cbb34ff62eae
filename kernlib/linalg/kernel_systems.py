"""Kernel systems without the kernel matrix: conjugate gradients over products made on the fly. Of
few points on a CPU, by the matrix: its Cholesky factor is there before the first products are."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch

from kernlib.debug import eager_only
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.reductions.arguments import refuse_own_names
from kernlib.linalg import native
from kernlib.linalg.checks import refuse_not_finite
from kernlib.linalg.iterative import CGResult, check_limits, solve, warn_unless_converged
from kernlib.linalg.nystrom import (
    OF_FEATURES,
    check_one_matrix,
    check_points,
    checked_rank,
    checked_rest,
    nystrom,
)
from kernlib.linalg.systems import Request, default_rank, shifted, widened
from kernlib.run import run_kernel
from kernlib.runtime.numbers import check_kind
from kernlib.runtime.precision import without_autocast
from kernlib.runtime.tensors import check_dense, is_wrapped

if TYPE_CHECKING:
    from kernlib.distributed.communicator import Group

# Up to so many points a CPU stores the matrix and its factor: 200 MB each in float64.
MOST_STORED = 5000
# Corrections of a solution, of two products with a triangle each, where rounding leaves more than
# is asked for.
_CORRECTIONS = 3
# Arguments besides a kernel's.
_OWN = "y", "rank", "tol", "max_iter", "check_every", "generator", "group", "checkpoint"


@eager_only
def solve_kernel(
    descriptor: Pairwise,
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    regularization: float | torch.Tensor,
    rank: int | None = None,
    tol: float = 1e-6,
    max_iter: int = 1000,
    check_every: int = 10,
    generator: torch.Generator | None = None,
    group: Group = None,
    checkpoint: str | None = None,
    debug: bool = False,
    **hyperparameters: float | torch.Tensor,
) -> CGResult:
    """Solve ``(K(x, x) + regularization I) w = y`` by :func:`conjugate_gradient`, of kernel ridge
    regression and Gaussian processes. Predictions are
    ``kernel_matmul(descriptor, points, x, w, **hyperparameters)``.

    - ``descriptor``: a positive semidefinite kernel, and ``hyperparameters`` its arguments for
      :func:`kernlib.run_kernel`, such as ``bandwidth``.
    - ``x`` (N, D) and ``y`` (N,) or (N, C): float32 or float64, one dtype and device.
    - ``regularization``: a number greater than 0, or (N,), one for each point, whose diagonal
      matrix then takes the place of ``regularization I``.
    - ``rank``: of the :func:`nystrom` preconditioner, about ``2 sqrt(N)`` by default; 0 is none.
    - ``tol``, ``max_iter``, ``check_every``: as those of :func:`conjugate_gradient`.
    - ``generator``: draws the points of the preconditioner, as for :func:`nystrom`.
    - ``group``: of processes that hold a part of the points each, any number of them: x, y and the
      result's x are the rows of this one. As that of :func:`kernlib.distributed.kernel_matmul`, but
      None for a call of this process alone. An iteration gathers a vector of N rows, and sums up
      ``2 rank + 4`` numbers for each column, over the processes.
    - ``checkpoint``: with a group, a folder that all processes see. The state is written there
      every ``check_every`` iterations, and a call with the same arguments goes on from it.
    - ``debug``: True writes the call's events to stderr.

    K is never stored: products are :func:`kernlib.kernel_matmul`, and memory is that of the
    preconditioner, N * ``rank`` numbers. Without a ``rank`` K is stored after all on a CPU, for at
    most 5000 points: a Cholesky factor in float64, 400 MB with K, gives the result of 0 iterations.

    The result is a :class:`CGResult` of w, whose residual is
    ``||y - (K + regularization I) w|| / ||y||`` with K made anew in float64, also for float32,
    whose products cannot tell small residuals of large w. One above ``tol`` warns with a
    :class:`kernlib.ConvergenceWarning`.

    Raises ValueError for shapes that do not fit, NaN or infinity in x or y and numbers out of
    range, TypeError for other dtypes, descriptors and hyperparameters, RuntimeError for tensors
    that require a gradient while gradients are recorded.

    Example:
        >>> x = torch.linspace(0.0, 3.0, 20)[:, None]
        >>> w = kl.linalg.solve_kernel(
        ...     kl.gaussian(), x, x[:, 0].sin(), regularization=1e-3, bandwidth=1.0).x
        >>> kl.kernel_matmul(kl.gaussian(), torch.tensor([[1.57]]), x, w[:, None], bandwidth=1.0)
        tensor([[0.99...]])
    """

    def checked() -> Request:
        limits = tol, max_iter, check_every
        return _checked(descriptor, x, y, regularization, rank, limits, generator, hyperparameters)

    if group is None:
        if checkpoint is not None:
            raise ValueError("checkpoint needs a group: pass kernlib.distributed.Communicator()")
        request = checked()
        result = _alone(request)
    else:
        from kernlib.linalg import spread  # which loads torch.distributed

        request, result = spread.solve(group, checked, checkpoint)
    return _answer(result, y, request.limits[0])


def _checked(
    descriptor, x, y, regularization, rank, limits: tuple, generator, hyperparameters: dict
) -> Request:
    """Raises ValueError, TypeError and RuntimeError that name the argument."""
    diagonal = _diagonal(regularization, x)
    # Of no points it is of no account, as those of other processes have one.
    number = regularization if diagonal is None else float(diagonal.double().mean())
    mean = check_points(descriptor, x, 1.0 if math.isnan(number) and not len(x) else number)
    mu = mean if diagonal is None else diagonal
    refuse_own_names("solve_kernel", descriptor, _OWN)
    _check_targets(x, y)
    named = {"x": x, "y": y, "regularization": regularization}
    hyperparameters = checked_rest("solve_kernel", generator, named, hyperparameters)
    limits = check_limits(*limits)
    refuse_not_finite("y", y)
    if x.is_cuda:
        hyperparameters = as_numbers(hyperparameters)
    plain = dataclasses.replace(descriptor, symmetric=False)
    columns = y[:, None] if y.dim() == 1 else y
    return Request(plain, x, columns, mu, mean, rank, limits, generator, hyperparameters)


def _alone(request: Request) -> CGResult:
    """The solution by this process, whose points are all there are."""
    import kernlib

    plain, x, y, mu, mean, rank, limits, generator, hyperparameters = request
    preconditioner, count = None, x.shape[0]
    if rank is None and x.device.type == "cpu" and count <= MOST_STORED:
        stored = _stored(plain, x, y, mu, limits[0], hyperparameters)
        if stored is not None:
            return stored
    rank = checked_rank(default_rank(count) if rank is None else rank, count, least=0)
    if rank:
        preconditioner = nystrom(
            plain, x, rank, regularization=mean, generator=generator, **hyperparameters
        )

    def product(v: torch.Tensor) -> torch.Tensor:
        return shifted(kernlib.kernel_matmul(plain, x, x, v, **hyperparameters), v, mu)

    cg = solve(product, y, preconditioner, None, *limits, capture=True)
    if x.dtype is not torch.float64:
        cg = cg._replace(residual=_residual(plain, x, y, cg.x, mu, hyperparameters))
    return cg


def as_numbers(hyperparameters: dict) -> dict:
    """The hyperparameters, those in host memory as numbers: a CUDA graph could not read their
    tensors, and each product would copy them anew. Raises ValueError and TypeError for tensors that
    are no numbers."""
    numbers = dict(hyperparameters)
    for name, value in hyperparameters.items():
        if name in OF_FEATURES or not isinstance(value, torch.Tensor) or is_wrapped(value):
            continue
        if value.device.type == "cpu":
            check_kind(name, value)
            numbers[name] = float(value.detach())
    return numbers


def _answer(result: CGResult, y: torch.Tensor, tol: float) -> CGResult:
    """In y's shape, with a warning where the residual says so."""
    if y.dim() == 1:
        result = result._replace(x=result.x[:, 0], residual=result.residual[0])
    warn_unless_converged("solve_kernel", result, tol)
    return result


def _stored(descriptor: Pairwise, x, y, mu, tol: float, values: dict) -> CGResult | None:
    """The solution by the matrix and its Cholesky factor, in float64; None where the matrix has no
    factor: the preconditioner then says more of it."""
    with torch.no_grad(), without_autocast(x.device):
        run_kernel(descriptor, x[:0], x[:0], **values)  # which refuses what no other call takes
        wide = x.double()
        k = run_kernel(descriptor, wide, wide, **widened(values))
        check_one_matrix(k)
        k.diagonal().add_(mu)
        native.load(k.device)
        root, info = torch.linalg.cholesky_ex(k)
        if info:
            return None
        y = y.double()
        norm = torch.linalg.vector_norm(y, dim=0)
        norm = torch.where(norm > 0, norm, 1)
        w = torch.cholesky_solve(y, root)
        for _ in range(_CORRECTIONS):
            remainder = y - k @ w
            if not (torch.linalg.vector_norm(remainder, dim=0) > tol * norm).any():
                break
            w += torch.cholesky_solve(remainder, root)
        rounded = w.to(x.dtype)
        remainder = torch.linalg.vector_norm(y - k @ rounded.double(), dim=0)
        residual = remainder / norm
        return CGResult(rounded, residual, 0) if residual.isfinite().all() else None


def _residual(descriptor: Pairwise, x, y, w, mu, values: dict) -> torch.Tensor:
    """``||y - (K + mu I) w|| / ||y||`` of each column, in float64."""
    import kernlib

    values = widened(values)
    with torch.no_grad():
        x, y, w = x.double(), y.double(), w.double()
        remainder = y - shifted(kernlib.kernel_matmul(descriptor, x, x, w, **values), w, mu)
        norm = torch.linalg.vector_norm(y, dim=0)
        return torch.linalg.vector_norm(remainder, dim=0) / torch.where(norm > 0, norm, 1)


def _diagonal(regularization, x) -> torch.Tensor | None:
    """A regularization of each point, None for a number. Raises ValueError and TypeError that name
    the argument."""
    if not isinstance(regularization, torch.Tensor) or not regularization.dim():
        return None
    check_dense(("x",), x=x, regularization=regularization)
    shape = tuple(regularization.shape)
    if len(shape) != 1 or x.dim() != 2 or shape != (x.shape[0],):
        raise ValueError(
            f"regularization must be a number, or (N,) for x (N, D), got shape {shape} for x of "
            f"shape {tuple(x.shape)}"
        )
    if (regularization.dtype, regularization.device) != (x.dtype, x.device):
        raise TypeError(
            f"regularization must be {x.dtype} on {x.device} as x is, got {regularization.dtype} "
            f"on {regularization.device}"
        )
    refuse_not_finite("regularization", regularization)
    if not bool((regularization > 0).all()):
        raise ValueError("regularization must be greater than 0 for every point")
    return regularization.detach()


def _check_targets(x: torch.Tensor, y: torch.Tensor) -> None:
    check_dense(("y",), y=y)
    if y.dim() not in (1, 2) or y.shape[0] != x.shape[0]:
        raise ValueError(
            f"y must be ({x.shape[0]},) or ({x.shape[0]}, C) for x of shape {tuple(x.shape)}, got "
            f"{tuple(y.shape)}"
        )
    if (y.dtype, y.device) != (x.dtype, x.device):
        raise TypeError(f"y must be {x.dtype} on {x.device} as x is, got {y.dtype} on {y.device}")

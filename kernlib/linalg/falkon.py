"""Kernel ridge regression of many rows by few centres: the Falkon solver."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kernlib import progress as progress_of
from kernlib.alone import Alone
from kernlib.debug import eager_only
from kernlib.descriptors.base import shown
from kernlib.errors import ConvergenceWarning, warn
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.reductions.arguments import refuse_own_names
from kernlib.linalg import streamed
from kernlib.linalg.iterative import check_limits
from kernlib.linalg.kernel_systems import as_numbers
from kernlib.linalg.nystrom import check_points, checked_rest
from kernlib.run import run_kernel
from kernlib.runtime.precision import without_autocast

if TYPE_CHECKING:
    import numpy

    from kernlib.distributed.communicator import Group

# Added to K(c, c)'s diagonal, relative to it; ten times that, and so on, where it has no factor. By
# less, products in float32 would be of coefficients that cancel each other.
_JITTER = {torch.float32: 1e-5, torch.float64: 1e-12}
_TRIES = 8


class FalkonResult(NamedTuple):
    """What :func:`falkon` returns.

    - ``coefficients``: (M,) or (M, C), of the centres' dtype.
    - ``residual``: of each column, relative, of the preconditioned system, float64: () or (C,).
    - ``iterations``: passes over the rows, but for the one that the right-hand side takes.
    """

    coefficients: torch.Tensor
    residual: torch.Tensor
    iterations: int


@eager_only
def falkon(
    descriptor: Pairwise,
    x: torch.Tensor | numpy.ndarray,
    y: torch.Tensor | numpy.ndarray,
    centres: torch.Tensor,
    *,
    regularization: float,
    tol: float = 1e-6,
    max_iter: int = 20,
    group: Group = None,
    checkpoint: str | None = None,
    progress: bool | None = False,
    debug: bool = False,
    **hyperparameters: float | torch.Tensor,
) -> FalkonResult:
    """Kernel ridge regression with ``f(p) = sum_m K(p, centres_m) coefficients_m``, which minimises
    ``sum_n |f(x_n) - y_n|^2 / N + regularization f^T f`` in the norm of the kernel's space.
    Predictions are ``kernel_matmul(descriptor, points, centres, coefficients, **hyperparameters)``.

    - ``descriptor``: a positive semidefinite kernel, and ``hyperparameters`` its arguments.
    - ``x`` (N, D) and ``y`` (N,) or (N, C): tensors or arrays of numpy, also ones that
      ``numpy.load(path, mmap_mode="r")`` returned. They stay where they are: rows go to the
      centres' device in chunks of some 32 MB, the next while a product is computed. Pinned memory
      saves a copy.
    - ``centres`` (M, D): float32 or float64, the device and dtype of what is computed; often M rows
      of x. Memory on the device is 16 M^2 bytes.
    - ``regularization``: greater than 0.
    - ``tol``, ``max_iter``: the relative residual of the preconditioned system to reach, and the
      most passes over x.
    - ``group``: of processes each of which has some rows of x and y, any number of them, and all
      centres: as that of :func:`kernlib.distributed.kernel_matmul`, but None for this process
      alone. An iteration sums up M numbers for each column over the processes.
    - ``checkpoint``: with a group, a folder that all processes see, in which the state lies after
      each iteration; a call with the same arguments goes on from it.
    - ``progress``: as that of :func:`kernlib.prepare`: True shows a line on stderr, of the first
      process. ``debug=True`` writes the call's events there.

    T and A are the upper Cholesky factors of K(c, c), with 1e-12 of its diagonal added, in float32
    1e-5, and of ``T T^T / M + regularization I``. Conjugate gradients solve for
    ``A T coefficients``, where the system is near the identity.
    After Rudi, Carratino and Rosasco, "FALKON: An Optimal Large Scale Kernel Method" (2017). A
    residual above ``tol`` warns with a :class:`kernlib.ConvergenceWarning`.

    Raises ValueError for shapes that do not fit and numbers out of range, TypeError for other
    dtypes and descriptors, RuntimeError for tensors that require a gradient while gradients are
    recorded, torch.linalg.LinAlgError for a kernel that is not positive semidefinite.

    Example:
        >>> x = torch.linspace(0.0, 3.0, 200)[:, None]
        >>> fit = kl.linalg.falkon(
        ...     kl.gaussian(), x, x[:, 0].sin(), x[::10], regularization=1e-6, bandwidth=1.0)
        >>> kl.kernel_matmul(
        ...     kl.gaussian(), torch.tensor([[1.57]]), x[::10], fit.coefficients[:, None],
        ...     bandwidth=1.0)
        tensor([[1.00...]])
    """

    def checked() -> Fit:
        limits = tol, max_iter
        return checked_fit(descriptor, x, y, centres, regularization, limits, hyperparameters)

    if group is None:
        if checkpoint is not None:
            raise ValueError("checkpoint needs a group: pass kernlib.distributed.Communicator()")
        fit, processes, state = checked(), Alone(), None
    else:
        from kernlib.distributed import fits  # which loads torch.distributed

        fit, processes, state = fits.agreed(group, checked, checkpoint)
    if not fit.count:
        raise ValueError("x must have rows")
    with torch.no_grad(), without_autocast(centres.device):
        result = _solve(fit, processes, state, progress if not processes.rank else False)
    above = ~(result.residual <= fit.tol)
    if bool(above.any()) and fit.tol:
        warn(
            f"falkon: {int(above.sum())} of {above.numel()} residuals, up to "
            f"{float(result.residual.max()):.2g}, are above tol={fit.tol:g} after "
            f"{result.iterations} iterations (max_iter)",
            ConvergenceWarning,
        )
    if len(y.shape) == 1:
        result = result._replace(
            coefficients=result.coefficients[:, 0], residual=result.residual[0]
        )
    return result


class Fit(NamedTuple):
    """A call in checked arguments; y is (N, C)."""

    descriptor: Pairwise
    x: Any
    y: Any
    centres: torch.Tensor
    mu: float
    tol: float
    max_iter: int
    hyperparameters: dict
    count: int  # rows of all processes


def checked_fit(descriptor, x, y, centres, regularization, limits, hyperparameters: dict) -> Fit:
    """Raises ValueError, TypeError and RuntimeError that name the argument."""
    mu = check_points(descriptor, centres, regularization)
    refuse_own_names("falkon", descriptor, ("y", "centres", "tol", "max_iter"))
    for name, array in (("x", x), ("y", y)):
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise TypeError(f"{name} must be a tensor or an array of numpy, got {shown(array)}")
        if isinstance(array, torch.Tensor) and not array.is_cuda and centres.is_cuda:
            continue
        if isinstance(array, torch.Tensor) and array.device != centres.device:
            raise ValueError(f"{name} must be in host memory or on {centres.device} as centres are")
    if len(x.shape) != 2 or x.shape[1] != centres.shape[1]:
        raise ValueError(
            f"x must be (N, {centres.shape[1]}) as centres are {tuple(centres.shape)}, got "
            f"{tuple(x.shape)}"
        )
    if len(y.shape) not in (1, 2) or y.shape[0] != x.shape[0]:
        raise ValueError(f"y must be ({x.shape[0]},) or ({x.shape[0]}, C), got {tuple(y.shape)}")
    if not centres.shape[0]:
        raise ValueError("centres must have rows")
    tensors = {name: t for name, t in (("x", x), ("y", y)) if isinstance(t, torch.Tensor)}
    hyperparameters = checked_rest("falkon", None, {**tensors, "centres": centres}, hyperparameters)
    tol, max_iter, _ = check_limits(*limits, 1)
    if centres.is_cuda:
        hyperparameters = as_numbers(hyperparameters)
    plain = dataclasses.replace(descriptor, symmetric=False)
    columns = y[:, None] if len(y.shape) == 1 else y
    return Fit(plain, x, columns, centres.detach(), mu, tol, max_iter, hyperparameters, len(x))


class _State(NamedTuple):
    x: torch.Tensor
    r: torch.Tensor
    p: torch.Tensor
    rr: torch.Tensor


def _solve(fit: Fit, processes, checkpoint, progress: bool | None) -> FalkonResult:
    root, outer = _factors(fit)
    mu, count = fit.mu, fit.count

    def inwards(v: torch.Tensor) -> torch.Tensor:
        """``A^-1 v``."""
        return torch.linalg.solve_triangular(outer, v, upper=True)

    def coefficients(v: torch.Tensor) -> torch.Tensor:
        """``T^-1 v``."""
        return torch.linalg.solve_triangular(root, v, upper=True)

    def outwards(v: torch.Tensor, plus: torch.Tensor | float = 0.0) -> torch.Tensor:
        """``A^-T (T^-T v + plus)``."""
        v = torch.linalg.solve_triangular(root.mT, v, upper=False) + plus
        return torch.linalg.solve_triangular(outer.mT, v, upper=False)

    def product(v: torch.Tensor) -> torch.Tensor:
        inner = inwards(v)
        return outwards(gram_product(fit, processes, coefficients(inner)) / count, mu * inner)

    b = outwards(gram_product(fit, processes, None) / count)
    norm = torch.linalg.vector_norm(b, dim=0)
    norm = torch.where(norm > 0, norm, 1)
    rr = b.square().sum(0)
    state, done = _State(torch.zeros_like(b), b, b, rr), 0
    saved = None if checkpoint is None else checkpoint.load([*state, rr.new_tensor(done)])
    if saved is not None:
        *tensors, iterations = saved
        state, done = _State(*tensors), int(iterations)
    with progress_of.shown(progress, "falkon", fit.max_iter - done) as bar:
        while done < fit.max_iter and bool((state.rr.sqrt() > fit.tol * norm).any()):
            worst = float((state.rr.sqrt() / norm).max())
            state = bar.count(f"residual {worst:.1e}", lambda: _step(product, state))  # noqa: B023
            done += 1
            if checkpoint is not None:
                checkpoint.save([*state, rr.new_tensor(done)])
    weights = coefficients(inwards(state.x)).to(fit.centres.dtype)
    return FalkonResult(weights, state.rr.sqrt() / norm, done)


def _step(product: Callable, state: _State) -> _State:
    """One of conjugate gradients. A column that has come to its end stays."""
    x, r, p, rr = state
    q = product(p)
    curvature = (p * q).sum(0)
    goes_on = (curvature > 0) & (rr > 0)
    alpha = torch.where(goes_on, rr / curvature, 0)
    x, r = x + alpha * p, r - alpha * q
    following = r.square().sum(0)
    beta = torch.where(goes_on, following / rr, 0)
    return _State(x, r, r + beta * p, following)


def gram_product(fit: Fit, processes, u: torch.Tensor | None) -> torch.Tensor:
    """``K(x, c)^T K(x, c) u``, or with None ``K(x, c)^T y``, of all rows, in float64, which
    ``processes`` have: ``Alone()``, or what ``as_communicator`` of kernlib.distributed returns.
    Raises ValueError, in all processes, for rows that are not finite."""
    import kernlib

    descriptor, c, values = fit.descriptor, fit.centres, fit.hyperparameters
    total = c.new_zeros((c.shape[0] + 1, fit.y.shape[1]), dtype=torch.float64)
    arrays = (fit.x, fit.y) if u is None else (fit.x,)
    for x, *y in streamed.chunks(arrays, c.device, c.dtype):
        v = y[0] if u is None else kernlib.kernel_matmul(descriptor, x, c, u.to(c.dtype), **values)
        total[:-1] += kernlib.kernel_matmul(descriptor, c, x, v, **values)
        if u is None:  # the last row counts chunks that are not finite, of all processes
            total[-1] += ~(x.isfinite().all() & y[0].isfinite().all())
    total = processes.total(total)
    if u is None and bool((total[-1] > 0).any()):
        raise ValueError("x or y holds NaN or infinities")
    return total[:-1]


def _factors(fit: Fit) -> tuple[torch.Tensor, torch.Tensor]:
    """Of ``K(c, c)`` and of ``T T^T / M + mu I``, upper ones, in float64."""
    c = fit.centres.double()
    values = {
        name: value.double() if isinstance(value, torch.Tensor) else value
        for name, value in fit.hyperparameters.items()
    }
    k = run_kernel(fit.descriptor, c, c, **values)
    if not bool(k.isfinite().all()):
        raise torch.linalg.LinAlgError("falkon: the kernel of the centres holds NaN or infinities")
    count, jitter = len(c), _JITTER[fit.centres.dtype] * float(k.diagonal().mean())
    for _ in range(_TRIES):
        k.diagonal().add_(jitter)
        root, info = torch.linalg.cholesky_ex(k, upper=True)
        if not int(info):
            break
        jitter *= 10
    else:
        raise torch.linalg.LinAlgError("falkon: the kernel is not positive semidefinite")
    k = root @ root.mT
    k /= count
    k.diagonal().add_(fit.mu)
    return root, torch.linalg.cholesky(k, upper=True)

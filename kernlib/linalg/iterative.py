"""Conjugate gradients for symmetric positive definite systems of which only products are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch

from kernlib.debug import eager_only
from kernlib.descriptors.base import as_int, shown
from kernlib.errors import CaptureError, ConvergenceWarning, warn
from kernlib.linalg.captured import Captured, is_busy, is_capturable
from kernlib.linalg.checks import DTYPES, refuse_meta
from kernlib.runtime.numbers import check_kind, host_value
from kernlib.runtime.precision import without_autocast
from kernlib.runtime.tensors import check_dense, refuse_distributed, refuse_transforms

if TYPE_CHECKING:
    from kernlib.linalg.nystrom import NystromPreconditioner

Product = Callable[[torch.Tensor], torch.Tensor]

# A column that its recurrence calls converged, and its true residual does not, starts again while
# each start halves that residual; then rounding has the last word.
_PROGRESS = 0.5
_NO_TRANSFORMS = "conjugate_gradient does not support; give it the columns of one b instead"


class CGResult(NamedTuple):
    """What :func:`conjugate_gradient` returns.

    - ``x``: the solution, of b's shape.
    - ``residual``: ``||b - A x|| / ||b||`` of each column, float64: () or (C,).
    - ``iterations``: products with A in the course of iterating.

    Example:
        >>> x, residual, iterations = kl.linalg.conjugate_gradient(lambda v: 2 * v, torch.ones(3))
        >>> x, iterations
        (tensor([0.5000, 0.5000, 0.5000]), 10)
    """

    x: torch.Tensor  # of b's shape
    residual: torch.Tensor  # ||b - A x|| / ||b|| of each column, float64: () or (C,)
    iterations: int  # products with A in the course of iterating


class _State(NamedTuple):
    x: torch.Tensor
    r: torch.Tensor  # b - A x, by recurrence
    p: torch.Tensor  # direction
    rz: torch.Tensor  # <r, M r> of each column
    active: torch.Tensor  # columns that go on


@eager_only
def conjugate_gradient(
    matmul: Product,
    b: torch.Tensor,
    *,
    preconditioner: Product | NystromPreconditioner | None = None,
    x0: torch.Tensor | None = None,
    tol: float = 1e-6,
    max_iter: int = 1000,
    check_every: int = 10,
    debug: bool = False,
) -> CGResult:
    """Solve ``A x = b`` for symmetric positive definite A until ``||b - A x|| <= tol ||b||``.

    - ``matmul``: a function of v, of b's shape, to ``A v``, such as a kernel's product plus a
      multiple of v; ``preconditioner`` the same for an approximate inverse, symmetric positive
      definite too.
    - ``b`` (N,), or (N, C) for C systems at once: each column has step sizes of its own, and stays
      as it is once it has converged or cannot go on (a direction without positive curvature, a
      NaN). float32 or float64, of any magnitude: columns are scaled by powers of two meanwhile.
      Dot products are summed in float64.
    - ``x0``: where to start, of b's shape; 0 without it.
    - ``tol``: the relative residual to reach, 0 or greater.
    - At most ``max_iter`` iterations. Every ``check_every`` of them the host waits for the device
      to learn whether a column goes on; nothing else waits.
    - ``debug``: True writes the call's events to stderr.

    The residual that a recurrence gives drifts from the true one: when no column goes on, the true
    one is computed, and columns above ``tol`` start again from their x while that helps. The
    result's ``residual`` is the true one of every column, at the price of one more product. One
    above ``tol``, unless that is 0, says that ``max_iter`` or the arithmetic was not enough, and
    warns with a :class:`kernlib.ConvergenceWarning`. Autocast changes nothing.

    The method is that of Hestenes and Stiefel (1952).

    Raises ValueError for shapes that do not fit, also of what ``matmul`` returns, and for limits
    out of range, TypeError for other dtypes and what is no function, RuntimeError for a ``b`` or
    ``x0`` that requires a gradient while gradients are recorded.

    Example:
        >>> a = torch.tensor([[4.0, 1.0], [1.0, 3.0]])
        >>> kl.linalg.conjugate_gradient(lambda v: a @ v, torch.tensor([1.0, 2.0])).x
        tensor([0.0909, 0.6364])
    """
    tol, max_iter, check_every = _check(b, x0, tol, max_iter, check_every)
    _check_functions(matmul, preconditioner)
    result = solve(matmul, b, preconditioner, x0, tol, max_iter, check_every)
    warn_unless_converged("conjugate_gradient", result, tol)
    return result


def warn_unless_converged(task: str, result: CGResult, tol: float) -> None:
    """Warns of columns whose residual is above ``tol``; waits for the device."""
    above = ~(result.residual <= tol)  # a NaN is
    count, blank = int(above.sum()), int(result.residual.isnan().sum())
    if not count or not tol:
        return
    if blank:
        several = f"{blank} of {above.numel()} residuals are NaN, as their x is"
        which = several if above.dim() else "the residual is NaN, as x is"
        warn(
            f"{task}: {which}: the matrix, the right-hand side, x0 or the preconditioner has NaN "
            "or infinity",
            ConvergenceWarning,
        )
        return
    worst = f"{float(result.residual[above].max()):.2g}"
    several = f"{count} of {above.numel()} residuals, up to {worst}, are"
    which = several if above.dim() else f"the residual {worst} is"
    warn(
        f"{task}: {which} above tol={tol:g} after {result.iterations} iterations. More of them "
        "(max_iter), a better conditioned matrix (regularization, preconditioner) or float64 come "
        "nearer",
        ConvergenceWarning,
    )


def solve(
    matmul, b, preconditioner, x0, tol, max_iter: int, check_every: int, capture: bool = False
) -> CGResult:
    """:func:`conjugate_gradient` of checked arguments, without its warning. ``capture`` says that
    matmul and preconditioner never wait for the device, so that a CUDA graph may hold them."""
    with torch.no_grad(), without_autocast(b.device):
        scale = _scales(b)
        b = b * scale
        limit = tol * _norm(b)
        x = torch.zeros_like(b) if x0 is None else x0 * scale
        r = b if x0 is None else b - _product("matmul", matmul, x)
        state = _start(x, r, limit, preconditioner)
        done, best, target = 0, torch.full_like(limit, torch.inf), limit
        steps = _Steps(matmul, preconditioner, capture and is_capturable(b.device))
        while done < max_iter:
            count = min(check_every, max_iter - done)
            done += count
            state = steps.run(state, target, count, done == max_iter)
            if not state.active.any():
                r = b - _product("matmul", matmul, state.x)
                norm = _norm(r)
                again = (norm > limit) & (norm < _PROGRESS * best)
                if not again.any():
                    return _result(state.x / scale, _relative(norm, b), done)
                best = torch.minimum(best, norm)
                # By half less than asked for: the recurrence drifts from the residual again, which
                # would end beside the limit, without the progress that another start takes.
                target = torch.where(again, target / 2, target)
                state = _start(state.x, r, limit, preconditioner, again)
        norm = _norm(b - _product("matmul", matmul, state.x))
        return _result(state.x / scale, _relative(norm, b), done)


def _result(x: torch.Tensor, residual: torch.Tensor, iterations: int) -> CGResult:
    """A column whose residual is NaN has no x: what it began with would look like an answer."""
    return CGResult(x.masked_fill(residual.isnan(), torch.nan), residual, iterations)


def _scales(b: torch.Tensor) -> torch.Tensor:
    """A power of two for each column by which its largest number is near 1, so that the product of
    two residuals neither overflows nor vanishes; 1 for a column that has none."""
    if not b.shape[0]:
        return b.new_ones(b.shape[1:])
    largest = b.abs().amax(0)
    limit = 126 if b.dtype is torch.float32 else 1022  # whose power has a reciprocal
    exponent = torch.frexp(largest).exponent.clamp(-limit, limit)
    usable = largest.isfinite() & (largest > 0)
    return torch.where(usable, torch.exp2(-exponent.to(b.dtype)), 1.0)


def _start(
    x: torch.Tensor,
    r: torch.Tensor,
    limit: torch.Tensor,
    preconditioner: Product | None,
    columns: torch.Tensor | None = None,
) -> _State:
    """The state that goes down the gradient at x, in the given columns."""
    active = _norm(r) > limit  # not of a NaN
    if columns is not None:
        active &= columns
    z = _preconditioned(preconditioner, r)
    rz = _dot(r, z)
    active &= rz > 0
    return _State(x, r, torch.where(active, z, 0), rz, active)


class _Steps:
    """Runs steps: the first ones a launch at a time, then, if ``capture``, as a CUDA graph. It is
    made while the device is at work with the first ones, if that takes longer than to launch them:
    it would wait for some milliseconds behind them."""

    def __init__(self, matmul: Product, preconditioner: Product | None, capture: bool):
        self._functions = matmul, preconditioner
        self._capture, self._begun = capture, False
        self._captured: Captured | None = None

    def run(self, state: _State, target: torch.Tensor, count: int, last: bool = False) -> _State:
        """The state ``count`` steps on; none follow the ``last``."""
        if self._capture and self._begun and self._captured is None:
            self._make((*state, target))
        if self._captured is not None:
            return _State(*self._captured.run((*state, target), count)[:-1])
        self._begun = True
        for _ in range(count):
            state = _step(*self._functions, state, target)
        if self._capture and not last and is_busy(target.device):
            self._make((*state, target))
        return state

    def _make(self, state: tuple[torch.Tensor, ...]) -> None:
        try:
            self._captured = Captured(self._with_target, state)
        except CaptureError:  # done outside of a capture alone
            self._capture = False

    def _with_target(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *state, target = tensors
        return *_step(*self._functions, _State(*state), target), target


def _step(
    matmul: Product, preconditioner: Product | None, state: _State, limit: torch.Tensor
) -> _State:
    x, r, p, rz, active = state
    q = _product("matmul", matmul, p)
    curvature = _dot(p, q)
    active = active & (curvature > 0) & (curvature < torch.inf)
    alpha = torch.where(active, rz / curvature, 0).to(x.dtype)
    # A column that stopped keeps its x and r, even if q has a NaN there.
    x = torch.where(active, x + alpha * p, x)
    r = torch.where(active, r - alpha * q, r)
    z = _preconditioned(preconditioner, r)
    following = _dot(r, z)
    active = active & (_norm(r) > limit) & (following > 0) & (following < torch.inf)
    beta = (following / rz).to(x.dtype)
    return _State(x, r, torch.where(active, z + beta * p, 0), following, active)


def _product(name: str, function: Product, v: torch.Tensor) -> torch.Tensor:
    product = function(v)
    if not isinstance(product, torch.Tensor) or product.shape != v.shape:
        got = getattr(product, "shape", None)
        got = type(product).__name__ if got is None else f"shape {tuple(got)}"
        raise ValueError(f"{name} must return a tensor of shape {tuple(v.shape)}, got {got}")
    if product.dtype != v.dtype:
        raise TypeError(f"{name} must return {v.dtype} for {v.dtype}, got {product.dtype}")
    return product


def _preconditioned(preconditioner: Product | None, r: torch.Tensor) -> torch.Tensor:
    return r if preconditioner is None else _product("preconditioner", preconditioner, r)


def _dot(u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The dot product of each column, in float64."""
    return torch.sum(u * v, dim=0, dtype=torch.float64)


def _norm(v: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(v, dim=0, dtype=torch.float64)


def _relative(norm: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    scale = _norm(b)
    return norm / torch.where(scale > 0, scale, 1)


def _check_functions(matmul, preconditioner) -> None:
    for name, function in (("matmul", matmul), ("preconditioner", preconditioner)):
        is_needed = name == "matmul" or function is not None
        if is_needed and (not callable(function) or isinstance(function, type)):
            raise TypeError(
                f"{name} must be a function of v, such as A.__matmul__, got {shown(function)}"
            )


def _check(b, x0, tol, max_iter, check_every) -> tuple[float, int, int]:
    check_dense(("b",), b=b, x0=x0)
    refuse_distributed(b=b, x0=x0)
    refuse_transforms(_NO_TRANSFORMS, b=b, x0=x0)
    refuse_meta("b", b)
    if b.dtype not in DTYPES:
        raise TypeError(f"b must be float32 or float64, got {b.dtype}")
    if b.dim() not in (1, 2):
        raise ValueError(f"b must be (N,) or (N, C), got shape {tuple(b.shape)}")
    if torch.is_grad_enabled() and (b.requires_grad or (x0 is not None and x0.requires_grad)):
        raise RuntimeError(
            "b or x0 requires a gradient, which conjugate_gradient does not compute; detach it"
        )
    if x0 is not None and (x0.shape, x0.dtype, x0.device) != (b.shape, b.dtype, b.device):
        raise ValueError(
            f"x0 must have b's shape {tuple(b.shape)}, dtype {b.dtype} and device {b.device}, got "
            f"{tuple(x0.shape)}, {x0.dtype}, {x0.device}"
        )
    return check_limits(tol, max_iter, check_every)


def check_limits(tol, max_iter, check_every) -> tuple[float, int, int]:
    """When to end, and how often to look, as plain numbers. Raises TypeError and ValueError."""
    number = host_value("tol", tol, 0)
    if number is None:
        check_kind("tol", tol, 0)
        refuse_meta("tol", tol)
        number = float(tol)
    if not number >= 0:
        raise ValueError(f"tol must be 0 or greater, got {number}")
    max_iter, check_every = as_int("max_iter", max_iter), as_int("check_every", check_every)
    for name, value, least in (("max_iter", max_iter, 0), ("check_every", check_every, 1)):
        if value < least:
            raise ValueError(f"{name} must be {least} or greater, got {shown(value)}")
    return number, max_iter, check_every

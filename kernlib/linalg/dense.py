"""Direct solvers and symmetric eigenproblems: torch's conventions, infos that stay on the device.

Each call takes the memory it may overwrite (:mod:`kernlib.linalg.layouts`) and runs on it the steps
of :mod:`kernlib.linalg.native` (PyTorch) or of :mod:`kernlib.linalg.cusolver`.
"""

from __future__ import annotations

import math
from types import ModuleType

import torch

from kernlib.debug import eager_only
from kernlib.linalg import cusolver, layouts, native
from kernlib.linalg.checks import (
    NOT_CONVERGED,
    NOT_POSITIVE,
    SINGULAR,
    System,
    check_flags,
    check_matrix,
    check_system,
    cholesky_info,
    holds_nan,
    lu_info,
    raise_for_info,
)
from kernlib.linalg.layouts import Work, by_parts
from kernlib.runtime.precision import rounds


@eager_only
def solve_cholesky(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    upper: bool = False,
    overwrite_a: bool = False,
    overwrite_b: bool = False,
    check_errors: bool = False,
    debug: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Solve ``a x = b`` for symmetric positive definite a by ``a = L L^T``.

    - ``a`` (..., N, N), float32 or float64, any strides; of it the lower triangle is read, with
      ``upper=True`` the upper one, as torch.linalg.cholesky has it.
    - ``b`` (..., N, C) with right-hand sides as columns, any strides; (N,), or (..., N) with the
      batch of a, is one vector, as for torch.linalg.solve. Batches broadcast, and an ``a`` that
      serves several b is factored once.
    - ``overwrite_a``: the factor is written into a's memory, in its own triangle for a row- or
      column-major a; the other triangle is lost. ``overwrite_b``: x is written into b, and
      returned.
    - ``check_errors``: whether to wait for the infos and raise. ``debug``: True writes the call's
      events to stderr.

    Returns x, the info of the factorization and that of the solution, int32 of the batch's shape. A
    factorization's info is 0, or the order of the leading minor that is not positive, or is NaN,
    and x is then NaN. Nothing waits for the device, unless ``check_errors=True``. The model is
    kermac's ``solve_cholesky``.

    Raises ValueError for shapes that do not fit, mixed devices and memory that cannot be
    overwritten, TypeError for other dtypes, what is no tensor and no bool, RuntimeError for inputs
    that require a gradient while gradients are recorded, and with ``check_errors``
    torch.linalg.LinAlgError, which names the batch entry that failed.

    Example:
        >>> a, b = torch.tensor([[4.0, 2.0], [2.0, 5.0]]), torch.tensor([8.0, 12.0])
        >>> x, info, _ = kl.linalg.solve_cholesky(a, b)
        >>> x, int(info)
        (tensor([1., 2.]), 0)
    """
    flags = {"overwrite_a": overwrite_a, "overwrite_b": overwrite_b}
    check_flags(upper=upper, check_errors=check_errors, **flags)
    system = check_system(a, b, overwrite_a, overwrite_b)
    with torch.no_grad():
        matrix = layouts.square_work(system.a, overwrite_a)
        steps, flipped = steps_for(matrix.matrix, overwrite_a), upper != matrix.transposed
        info = _zeros(system.a)
        if system.a.numel():
            info = by_parts(lambda part: steps.cholesky(part, flipped), matrix.matrix)
            info = cholesky_info(info, matrix.matrix)

        def solve(factor: torch.Tensor, columns: torch.Tensor, _) -> None:
            by_parts(lambda *parts: steps.cholesky_solve(*parts, flipped), factor, columns)

        x = _substitute(system, matrix, None, overwrite_b, solve)
        return _finish(system, x, info, check_errors, "solve_cholesky", NOT_POSITIVE)


@eager_only
def solve_lu(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    overwrite_a: bool = False,
    overwrite_b: bool = False,
    check_errors: bool = False,
    debug: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Solve ``a x = b`` for any square a by ``a = P L U`` with partial pivoting.

    - ``a`` (..., N, N), all of which is read, and ``b``: as those of :func:`solve_cholesky`, and so
      is the result.
    - ``overwrite_a``: a's memory holds the factors of a if a is column-major, those of its
      transpose if it is row-major. ``overwrite_b``: x is written into b, and returned.
    - ``check_errors``: whether to wait for the infos and raise. ``debug``: True writes the call's
      events to stderr.

    An info greater than 0 is the pivot that is exactly zero, or N + 1 where a holds NaN, and x is
    then NaN. The model is kermac's ``solve_lu``.

    Raises what :func:`solve_cholesky` does: ValueError, TypeError and RuntimeError for arguments,
    and with ``check_errors`` torch.linalg.LinAlgError for a singular matrix.

    Example:
        >>> a, b = torch.tensor([[0.0, 2.0], [1.0, 1.0]]), torch.tensor([4.0, 5.0])
        >>> x, info, _ = kl.linalg.solve_lu(a, b)
        >>> x, int(info)
        (tensor([3., 2.]), 0)
    """
    check_flags(overwrite_a=overwrite_a, overwrite_b=overwrite_b, check_errors=check_errors)
    system = check_system(a, b, overwrite_a, overwrite_b)
    with torch.no_grad():
        matrix = layouts.square_work(system.a, overwrite_a)
        steps, pivots, info = lu_steps_for(matrix.matrix, overwrite_a), None, _zeros(system.a)
        if system.a.numel():
            spoilt = holds_nan(matrix.matrix)
            pivots, info = by_parts(steps.lu, matrix.matrix)
            info = lu_info(info, spoilt, matrix.matrix.shape[-1])

        def solve(factors: torch.Tensor, columns: torch.Tensor, pivots: torch.Tensor) -> None:
            flag = matrix.transposed
            by_parts(lambda *parts: steps.lu_solve(*parts, flag), factors, pivots, columns)

        x = _substitute(system, matrix, pivots, overwrite_b, solve)
        return _finish(system, x, info, check_errors, "solve_lu", SINGULAR)


@eager_only
def eigh(
    a: torch.Tensor,
    *,
    upper: bool = False,
    overwrite_a: bool = False,
    check_errors: bool = False,
    debug: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Eigenvalues and eigenvectors of symmetric a: ``a = V diag(w) V^T``.

    - ``a`` (..., N, N), float32 or float64, any strides; of it the lower triangle is read, with
      ``upper=True`` the upper one.
    - ``overwrite_a``: V is a's memory: a itself, or its transpose for a row-major a.
    - ``check_errors``: whether to wait for the infos and raise. ``debug``: True writes the call's
      events to stderr.

    Returns ascending ``w`` (..., N), ``V`` (..., N, N) with the eigenvectors as columns, and
    ``info``, int32 of the batch's shape: 0, or positive where they did not converge, and w and V
    are NaN. The model is kermac's ``eigh``.

    On a GPU cuSOLVER computes them by way of nvmath-python, the extra ``linalg``. Nothing here
    waits for the device, but cuSOLVER itself does for large matrices (N = 2000, and batches of
    N = 512, on an H200). Without the extra torch does, which always waits.

    Raises what :func:`solve_cholesky` does, torch.linalg.LinAlgError with ``check_errors`` for
    eigenvalues that did not converge, and MissingExtraError inside a CUDA graph's capture without
    the extra.

    Example:
        >>> w, v, info = kl.linalg.eigh(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
        >>> w.round(decimals=4)
        tensor([1., 3.])
    """
    check_flags(upper=upper, overwrite_a=overwrite_a, check_errors=check_errors)
    a = check_matrix(a, overwrite_a)
    batch = a.shape[:-2]
    with torch.no_grad():
        work = layouts.square_work(a, overwrite_a)
        matrix = work.matrix
        if a.numel():
            steps, flipped = eigh_steps_for(matrix), upper != work.transposed
            w, info = by_parts(lambda part: steps.eigh(part, flipped), matrix)
        else:
            w, info = matrix.new_empty(matrix.shape[:2]), _zeros(a)
        # Of one NaN in a, LAPACK may make one in w, finite vectors and no error.
        info.masked_fill_((info == 0) & ~w.isfinite().all(-1), a.shape[-1])
        for t in (w[..., None], matrix):
            t.masked_fill_((info != 0)[:, None, None], math.nan)
        layouts.give_back(work, matrix)
        vectors = matrix.view(a.shape) if work.home is None else work.home
        info = info.view(batch)
        if check_errors:
            raise_for_info(info, "eigh", NOT_CONVERGED, "a")
        return w.view(a.shape[:-1]), vectors, info


def steps_for(matrix: torch.Tensor, overwrite: bool) -> ModuleType:
    """The module that factors and solves. torch would copy a padded matrix, and a large one to
    overwrite, which cuSOLVER takes as it lies; and where TF32 is permitted to products
    :mod:`native` computes in float64."""
    large = overwrite and matrix.shape[-1] >= cusolver.LOOP_FROM
    pays = large or rounds(matrix) or not layouts.is_packed(matrix)
    return cusolver if pays and cusolver.serves(matrix) else native


def lu_steps_for(matrix: torch.Tensor, overwrite: bool) -> ModuleType:
    """As :func:`steps_for`; of a batch torch's way waits for the device from N = 32 on, but it can
    be captured, where cuBLAS's cannot."""
    if matrix.shape[0] > 1 and cusolver.serves(matrix):
        return native if torch.cuda.is_current_stream_capturing() else cusolver
    return steps_for(matrix, overwrite)


def eigh_steps_for(matrix: torch.Tensor) -> ModuleType:
    """The module that finds eigenvalues: torch waits for the device. Raises MissingExtraError in a
    capture."""
    if cusolver.serves(matrix):
        return cusolver
    if matrix.is_cuda and torch.cuda.is_current_stream_capturing():
        cusolver.require("eigh inside a CUDA graph's capture")
    return native


def _substitute(system: System, matrix: Work, pivots, overwrite_b: bool, solve) -> torch.Tensor:
    """Solve for the factored matrix; x of shape (*batch, N, C), in b's memory if it may be."""
    batch, factors = system.a.shape[:-2], matrix.matrix
    columns = layouts.columns_work(system.b, system.batch, overwrite_b)
    x = columns.matrix
    if x.numel():
        joined = layouts.side_by_side(x) if factors.shape[0] == 1 else None
        if joined is not None:
            solve(factors, joined, pivots)
        else:
            wide = None if pivots is None else layouts.spread(pivots, batch, system.batch)
            solve(layouts.spread(factors, batch, system.batch), x, wide)
    layouts.give_back(matrix, factors)
    return x.view(*system.batch, *x.shape[1:]) if columns.home is None else _home(columns, x)


def _home(columns: Work, x: torch.Tensor) -> torch.Tensor:
    layouts.give_back(columns, x)
    return columns.home


def _finish(
    system: System, x: torch.Tensor, info: torch.Tensor, check_errors: bool, task: str, failure: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    info = info.view(system.a.shape[:-2]).expand(system.batch)
    x.masked_fill_((info != 0)[..., None, None], math.nan)
    if check_errors:
        raise_for_info(info, task, failure, "a", system.a.shape[-1])
    solved = torch.zeros(system.batch, dtype=torch.int32, device=x.device)
    return x.squeeze(-1) if system.vector else x, info, solved


def _zeros(a: torch.Tensor) -> torch.Tensor:
    """Infos of a batch of matrices without elements."""
    return torch.zeros(math.prod(a.shape[:-2]), dtype=torch.int32, device=a.device)

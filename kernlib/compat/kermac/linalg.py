"""kermac's solvers: right-hand sides and solutions are rows."""

from __future__ import annotations

from contextlib import contextmanager
from enum import Enum, auto

import torch

from kernlib import linalg
from kernlib.descriptors.base import shown
from kernlib.runtime import tensors as _tensors


class FillMode(Enum):
    """The triangle that is read, in the sense of torch whatever the layout of the matrix; kermac's
    had the other one for a row-major matrix."""

    UPPER = auto()
    LOWER = auto()


class SolverError(torch.linalg.LinAlgError, ValueError):
    """A solver failed, which kermac raised ValueError for."""


def solve_cholesky(
    a: torch.Tensor,
    b: torch.Tensor,
    fill_mode: FillMode = FillMode.LOWER,
    overwrite_a: bool = False,
    overwrite_b: bool = False,
    check_errors: bool = False,
    debug: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Solve ``x a = b`` for symmetric positive definite ``a``.

    ``a`` (N, N) or (L, N, N); ``b`` (C, N) or (L, C, N), any strides. Returns x in b's shape (with
    a's batch, if b has none), and the infos of factorization and solution, int32 (L,), which stay
    on the device.

    - ``fill_mode``: a :class:`FillMode`, the triangle of a that is read.
    - ``overwrite_a``, ``overwrite_b``: whether to write in place, as
      :func:`kernlib.linalg.solve_cholesky` does.
    - ``check_errors``: whether to wait for the infos and raise. ``debug``: True writes the call's
      events to stderr.

    Raises what :func:`kernlib.linalg.solve_cholesky` does; with ``check_errors`` the LinAlgError is
    a ValueError too, as kermac's was.
    """
    options = {"upper": _is_upper(fill_mode), "overwrite_a": overwrite_a, "debug": debug}
    options |= {"overwrite_b": overwrite_b, "check_errors": check_errors}
    return _solve_rows(linalg.solve_cholesky, a, b, options)


def solve_lu(
    a: torch.Tensor,
    b: torch.Tensor,
    overwrite_a: bool = False,
    overwrite_b: bool = False,
    check_errors: bool = False,
    debug: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Solve ``x a = b`` for any square ``a`` of any layout: kermac's system for a row-major ``a``,
    where that for a column-major one was ``x a^T = b``.

    ``b``, ``overwrite_a``, ``overwrite_b``, ``check_errors``, ``debug`` and the result are as those
    of :func:`solve_cholesky`. Raises what :func:`kernlib.linalg.solve_lu` does; with
    ``check_errors`` the LinAlgError is a ValueError too.
    """
    options = {"overwrite_a": overwrite_a, "overwrite_b": overwrite_b}
    options |= {"check_errors": check_errors, "debug": debug}
    return _solve_rows(linalg.solve_lu, _transposed("a", a), b, options)


def eigh(
    a: torch.Tensor,
    fill_mode: FillMode = FillMode.LOWER,
    overwrite_a: bool = False,
    check_errors: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ascending eigenvalues (L, N), eigenvectors (L, N, N) as columns, infos int32 (L,), of
    symmetric ``a`` (L, N, N); of ``a`` (N, N) they are (N,), (N, N) and (1,). ``fill_mode`` is the
    triangle that is read; ``overwrite_a`` and ``check_errors`` are as those of
    :func:`kernlib.linalg.eigh`. Raises what that does; with ``check_errors`` the LinAlgError is a
    ValueError too."""
    options = {"overwrite_a": overwrite_a, "check_errors": check_errors}
    _check_rank("a", a)
    with _as_value_errors():
        w, vectors, info = linalg.eigh(a, upper=_is_upper(fill_mode), **options)
    return w, vectors, info.reshape(-1)


def _is_upper(fill_mode: FillMode) -> bool:
    if not isinstance(fill_mode, FillMode):
        raise TypeError(f"fill_mode must be a FillMode, got {shown(fill_mode)}")
    return fill_mode is FillMode.UPPER


def _solve_rows(solve, a: torch.Tensor, b: torch.Tensor, options: dict):
    """``a x^T = b^T``, both of three dimensions, so that no matrix is taken for vectors."""
    columns = _transposed("b", b)
    _check_rank("a", a)
    batched = a if a.dim() == 3 else a[None]
    with _as_value_errors():
        x, factored, solved = solve(batched, columns if b.dim() == 3 else columns[None], **options)
    rows = x.mT
    flat = b.dim() == 2 and a.dim() == 2
    return rows[0] if flat else rows, factored.reshape(-1), solved.reshape(-1)


@contextmanager
def _as_value_errors():
    try:
        yield
    except torch.linalg.LinAlgError as error:
        raise SolverError(str(error)) from None


def _transposed(name: str, t: torch.Tensor) -> torch.Tensor:
    _check_rank(name, t)
    return t.mT


def _check_rank(name: str, t: torch.Tensor) -> None:
    _tensors.check_dense((name,), **{name: t})
    if t.dim() not in (2, 3):
        raise ValueError(f"{name} must have 2 or 3 dimensions, got shape {tuple(t.shape)}")

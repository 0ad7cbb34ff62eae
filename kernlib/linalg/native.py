"""The steps of the dense solvers in PyTorch, in place: on the CPU, and on GPUs where it suffices.

Matrices are (L, N, N) and right-hand sides (L, N, C), column-major, as
:mod:`kernlib.linalg.layouts` makes them. Where torch may round products to TF32 its factors by LU
and its solutions have no more digits than that: they are computed in float64 there.
"""

from __future__ import annotations

import threading

import torch

from kernlib.runtime.precision import rounds

_loading, _loaded = threading.Lock(), False


def load(device: torch.device) -> None:
    """Have torch load its linear algebra for GPUs, which it does at the first call: those that
    threads make at a time raise "lazy wrapper should be called at most once"
    (https://github.com/pytorch/pytorch/issues/90613). Nothing for other devices."""
    global _loaded
    if _loaded or device.type != "cuda":
        return
    with _loading:
        if not _loaded:
            torch.linalg.cholesky_ex(torch.ones(1, 1, dtype=torch.float32, device=device))
            _loaded = True


def cholesky(a: torch.Tensor, upper: bool) -> torch.Tensor:
    """Write the factor into the triangle that is read; returns info (L,)."""
    load(a.device)
    info = _info(a)
    torch.linalg.cholesky_ex(a, upper=upper, out=(a, info))
    return info


def cholesky_solve(factor: torch.Tensor, b: torch.Tensor, upper: bool) -> None:
    """Write the solutions into b."""
    if rounds(b):
        x = b.double()
        cholesky_solve(factor.double(), x, upper)
        b.copy_(x)
        return
    first, second = (factor.mT, factor) if upper else (factor, factor.mT)
    torch.linalg.solve_triangular(first, b, upper=False, out=b)
    torch.linalg.solve_triangular(second, b, upper=True, out=b)


def lu(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Write both factors into a; returns pivots (L, N) and info (L,)."""
    load(a.device)
    if rounds(a):
        factors = a.double()
        pivots, info = lu(factors)
        a.copy_(factors)
        return pivots, info
    info = _info(a)
    pivots = torch.empty(a.shape[:2], dtype=torch.int32, device=a.device)
    torch.linalg.lu_factor_ex(a, out=(a, pivots, info))
    return pivots, info


def lu_solve(
    factors: torch.Tensor, pivots: torch.Tensor, b: torch.Tensor, transposed: bool
) -> None:
    """Write the solutions into b, those with the transposed matrix if ``transposed``."""
    if rounds(b):
        x = b.double()
        lu_solve(factors.double(), pivots, x, transposed)
        b.copy_(x)
        return
    torch.linalg.lu_solve(factors, pivots, b, adjoint=transposed, out=b)


def eigh(a: torch.Tensor, upper: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Write eigenvectors into a's columns; returns eigenvalues (L, N) and info (L,).

    torch reports a failure as an exception, and on a GPU waits for the device to know of one. The
    entries of a batch are then tried one by one, and those that fail have an info of N.
    """
    load(a.device)
    side = "U" if upper else "L"
    try:
        w, vectors = torch.linalg.eigh(a, UPLO=side)
        a.copy_(vectors)
        return w, _info(a)
    except torch.linalg.LinAlgError:
        pass
    w, info = a.new_zeros(a.shape[:2]), _info(a)
    for index, matrix in enumerate(a):
        try:
            w[index], vectors = torch.linalg.eigh(matrix, UPLO=side)
            matrix.copy_(vectors)
        except torch.linalg.LinAlgError:
            info[index] = a.shape[-1]
    return w, info


def _info(a: torch.Tensor) -> torch.Tensor:
    return torch.zeros(a.shape[0], dtype=torch.int32, device=a.device)

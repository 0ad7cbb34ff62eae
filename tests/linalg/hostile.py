"""Systems on which solvers go wrong, and what solutions must satisfy; for the CPU and a GPU."""

from __future__ import annotations

import warnings

import pytest
import torch

import kernlib as kl
from kernlib import linalg
from tests.linalg.cases import check_eigh, check_solution

NAMES = ("normal", "magnitude 1e-15", "magnitude 1e15", "one huge feature", "clusters", "integers")
SIZES = (1, 2, 3, 31, 32, 33, 127, 128, 129)


def spd(name: str, n: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """A symmetric positive definite matrix."""
    generator = torch.Generator().manual_seed(n)
    m = torch.randn(n, n, generator=generator, dtype=torch.float64)
    if name == "clusters":  # eigenvalues near 0.01 but for a few
        m = m * (torch.arange(n) < 3)
    a = m @ m.mT / n + (0.01 if name == "clusters" else 1.0) * torch.eye(n, dtype=torch.float64)
    if name.startswith("magnitude"):
        a = a * float(name.split()[1])
    if name == "one huge feature":
        size = torch.ones(n, dtype=torch.float64)
        size[n // 2] = 1e4
        a = size[:, None] * a * size
    if name == "integers":
        a = (m @ m.mT).round() + 3 * n * torch.eye(n, dtype=torch.float64)
    return a.to(device, dtype)


def right(n: int, columns: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + n)
    return torch.randn(n, columns, generator=generator, dtype=torch.float64).to(device, dtype)


def check(name: str, n: int, dtype: torch.dtype, device: str, rough: bool = False) -> None:
    """The direct solvers."""
    a, b = spd(name, n, dtype, device), right(n, 3, dtype, device)
    for solve in (linalg.solve_cholesky, linalg.solve_lu):
        x, info, _ = solve(a, b)
        assert not info.any()
        check_solution(a, x, b)
        assert not solve(a, torch.zeros_like(b))[0].any()
    w, v, info = linalg.eigh(a)
    assert not info.any()
    check_eigh(a, w, v, rough)


def check_not_finite(dtype: torch.dtype, device: str) -> None:
    """NaN in one system of a batch, in one column, and a singular system."""
    a = torch.stack([spd("normal", 9, dtype, device)] * 4)
    b = torch.stack([right(9, 3, dtype, device)] * 4)
    for solve in (linalg.solve_cholesky, linalg.solve_lu):
        clean = solve(a, b)[0]
        spoilt = a.clone()
        spoilt[1] = torch.nan
        spoilt[2] = 1.0  # of rank 1: duplicates
        spoilt[2, 0, 0] = -1.0 if solve is linalg.solve_cholesky else 1.0
        x, info, _ = solve(spoilt, b)
        assert info[2] > 0 and x[2].isnan().all() and x[1].isnan().any()
        assert torch.equal(x[[0, 3]], clean[[0, 3]]) and not info[[0, 3]].any()
        columns = b.clone()
        columns[0, 4, 1] = torch.nan
        x = solve(a, columns)[0]
        assert x[0, :, 1].isnan().any()
        torch.testing.assert_close(x[0][:, [0, 2]], clean[0][:, [0, 2]])
        assert torch.equal(x[1:], clean[1:])


def check_nan(n: int, batch: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """One NaN in one matrix: NaN in all of its solution, an info and an error; others as they
    are. In the triangle that is not read it is nothing to a Cholesky factorization."""
    b = right(n, 2, dtype, device)
    for row, column in {(0, 0), (n - 1, n - 1), (n - 1, 0), (n // 2, n // 3), (0, n - 1)}:
        a = spd("normal", n, dtype, device).repeat(*batch, 1, 1)
        (a[1] if batch else a)[row, column] = torch.nan
        for solve, upper in (
            (linalg.solve_lu, None),
            (linalg.solve_cholesky, False),
            (linalg.solve_cholesky, True),
        ):
            options = {} if upper is None else {"upper": upper}
            info_of_nan = n + 1
            if upper is not None:
                is_read = row <= column if upper else row >= column
                info_of_nan = (max(row, column) + 1) * is_read
            wanted = [0, info_of_nan, 0][: batch[0]] if batch else [info_of_nan]
            x, info, _ = solve(a, b, **options)
            assert info.reshape(-1).tolist() == wanted, (solve.__name__, row, column)
            for values, failed in zip(x.reshape(-1, n, 2), wanted, strict=True):
                assert values.isnan().all() if failed else values.isfinite().all()
            if any(wanted):
                said = "a holds NaN" if upper is None else f"minor of order {info_of_nan} is not"
                with pytest.raises(torch.linalg.LinAlgError, match=said):
                    solve(a, b, check_errors=True, **options)
        w, v, info = linalg.eigh(a)
        spoilt = (info.reshape(-1)[1 if batch else 0] > 0).item()
        assert spoilt == (row >= column)
        found = torch.cat((w[..., None], v), -1).reshape(-1, n, n + 1)[1 if batch else 0]
        assert found.isnan().all() if spoilt else found.isfinite().all()


def check_conjugate_gradient(dtype: torch.dtype, device: str) -> None:
    """Columns of all magnitudes at once, a zero, and a NaN, which reaches no other."""
    a, b = spd("normal", 65, dtype, device), right(65, 6, dtype, device)
    limits = (1e-30, 1e30) if dtype == torch.float32 else (1e-250, 1e250)
    for column, size in enumerate((1.0, *limits, 0.0)):
        b[:, column] *= size
    tol = 1e-6 if dtype == torch.float32 else 1e-12
    clean = linalg.conjugate_gradient(a.__matmul__, b, tol=tol)
    assert (clean.residual <= tol).all() and not clean.x[:, 3].any()
    wide = a.double().cpu() @ clean.x.double().cpu() - b.double().cpu()
    size = b.double().cpu().abs().amax(0).clamp(min=1e-300)
    assert ((wide / size).norm(dim=0) <= 4 * tol * (b.double().cpu() / size).norm(dim=0)).all()
    b[3, 5] = torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kl.ConvergenceWarning)
        found = linalg.conjugate_gradient(a.__matmul__, b, tol=tol)
    assert found.residual[5].isnan() and (found.residual[:5] <= tol).all()


def check_kernel_system(dtype: torch.dtype, device: str) -> None:
    """Duplicates, which a regularization permits; the residual is that of float64."""
    x = right(40, 5, dtype, device).repeat(3, 1)
    y = right(120, 2, dtype, device)
    found = linalg.solve_kernel(
        kl.gaussian(), x, y, regularization=0.1, bandwidth=2.0, tol=1e-4, generator=seeded(device)
    )
    assert (found.residual <= 1e-4).all()
    wide = x.double()
    k = kl.run_kernel(kl.gaussian(), wide, wide, bandwidth=2.0)
    k = k + 0.1 * torch.eye(120, dtype=k.dtype, device=device)
    true = (k @ found.x.double() - y.double()).norm(dim=0) / y.double().norm(dim=0)
    torch.testing.assert_close(true.to(found.residual), found.residual, rtol=0.05, atol=1e-7)


def seeded(device: str) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)

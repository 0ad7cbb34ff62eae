"""Solvers."""

from __future__ import annotations

import torch

import kernlib as kl
from kernlib import linalg
from tests.contract import plain
from tests.contract.cases import Context, Entry

KINDS = {
    "upper": "flag", "overwrite_a": "flag", "overwrite_b": "flag", "check_errors": "flag",
    "debug": "flag", "matmul": "function", "preconditioner": "function", "tol": "number",
    "max_iter": "int", "check_every": "int", "rank": "int", "regularization": "number",
    "generator": "any", "descriptor": "descriptor", "bandwidth": "number",
    "cholesky": "flag", "noise": "number",
}  # fmt: skip
NAMES = (
    "factor1",
    "factor2",
    "eigenvalues",
    "symmetric",
    "bandwidth",
    "v",
    "p",
    "feature_map",
    "operator",
    "kernel",
    "inner_p",
    "factors",
    "x",
    "b",
)


def positive(c: Context, dtype) -> torch.Tensor:
    half = c.randn(4, 4, dtype=dtype)
    return half @ half.mT + 4 * torch.eye(4, dtype=dtype, device=c.device)


def _dtype(c: Context) -> torch.dtype:
    return c.random.choice((torch.float32, torch.float64))


def system(c: Context) -> dict:
    dtype = _dtype(c)
    given = {"a": positive(c, dtype), "b": c.randn(*c.random.choice([(4, 2), (4,)]), dtype=dtype)}
    for name in ("overwrite_a", "overwrite_b", "check_errors"):
        if c.random.random() < 0.4:
            given[name] = c.random.random() < 0.5
    return given


def wanted_solution(a, b, overwrite_a=False, overwrite_b=False, check_errors=False, upper=False):
    plain.flag(overwrite_a, overwrite_b, check_errors, upper)
    plain.same_kind(a, b)
    whole, right = plain.wide(a), plain.wide(b)
    if a.dtype not in (torch.float32, torch.float64):
        raise TypeError("dtype")
    found = torch.linalg.solve_ex(whole, right).result
    if whole.is_meta or not whole.isfinite().all():
        return None
    return None if not (torch.linalg.cond(whole) < 1e3).all() else found


def wanted_positive(a, b, overwrite_a=False, overwrite_b=False, check_errors=False, upper=False):
    found = wanted_solution(a, b, overwrite_a, overwrite_b, check_errors, upper)
    lower = plain.wide(a).tril()
    whole = lower + lower.mT.triu(1)
    if whole.is_meta or torch.linalg.cholesky_ex(whole).info.any():
        return None
    return None if found is None else torch.linalg.solve_ex(whole, plain.wide(b)).result


def eigen(c: Context) -> dict:
    given = system(c)
    for name in ("b", "overwrite_b"):
        given.pop(name, None)
    return given


def wanted_values(a, upper=False, overwrite_a=False, check_errors=False):
    plain.flag(upper, overwrite_a, check_errors)
    whole = plain.wide(a)
    if whole.is_meta or not whole.isfinite().all():
        return None
    return torch.linalg.eigvalsh(whole)


def gradients(c: Context) -> dict:
    dtype = _dtype(c)
    a = positive(c, dtype)
    return {"matmul": lambda v: a @ v, "b": c.randn(*c.random.choice([(4, 2), (4,)]), dtype=dtype),
            "preconditioner": None, "x0": None, "tol": 1e-4, "max_iter": 50,
            "check_every": 5}  # fmt: skip


def points(c: Context) -> dict:
    return {"descriptor": kl.gaussian(), "x": c.randn(20, 3, dtype=_dtype(c)), "rank": 5,
            "regularization": 0.5, "generator": None, "bandwidth": 2.0}  # fmt: skip


def kernel_system(c: Context) -> dict:
    given = points(c)
    x = given["x"]
    given = {"descriptor": given["descriptor"], "x": x, "y": c.randn(20, dtype=x.dtype), **given}
    return given | {"tol": 1e-3, "max_iter": 50, "check_every": 5}


def wanted_weights(descriptor, x, y, regularization, bandwidth, rank=None, generator=None,
                   tol=1e-6, max_iter=1000, check_every=10):  # fmt: skip
    plain.same_kind(x, y)
    if x.dim() != 2 or not plain.wide(x).isfinite().all() or not plain.wide(y).isfinite().all():
        raise ValueError("x or y")
    return None


def fit(c: Context) -> dict:
    x = c.randn(20, 3, dtype=_dtype(c))
    y, centres = c.randn(20, dtype=x.dtype), c.randn(4, 3, dtype=x.dtype)
    rows = {"descriptor": kl.gaussian(), "x": x, "y": y, "centres": centres}
    return rows | {"regularization": 0.5, "tol": 1e-3, "max_iter": 30, "bandwidth": 2.0}


def wanted_coefficients(
    descriptor, x, y, centres, regularization, bandwidth, tol=1e-6, max_iter=20
):
    if x.dim() != 2 or y.shape[:1] != x.shape[:1] or centres.shape[1:] != x.shape[1:]:
        raise ValueError("x, y or centres")
    return None


def vectors(c: Context) -> dict:
    return {"v": c.randn(20, 2, dtype=torch.float32)}


def preconditioned(v, **rest):
    x = torch.linspace(0, 3, 60, device=v.device if isinstance(v, torch.Tensor) else "cpu")
    if x.is_meta:
        x = torch.linspace(0, 3, 60)
    made = linalg.nystrom(kl.gaussian(), x.view(20, 3), 5, regularization=0.5, bandwidth=2.0)
    return made(v, **rest)


def kronecker(c: Context) -> dict:
    """The factors are arguments of their own, ``factors`` in errors."""
    dtype = _dtype(c)
    given = {"f0": positive(c, dtype), "f1": positive(c, dtype)[:3, :3]}
    return given | ({"check_errors": c.random.random() < 0.5} if c.random.random() < 0.4 else {})


def kronecker_system(c: Context) -> dict:
    given = kronecker(c)
    dtype = given["f0"].dtype
    given["b"] = c.randn(*c.random.choice([(12, 2), (12,)]), dtype=dtype)
    if c.random.random() < 0.5:
        noise = c.random.choice([0.5, 1, torch.tensor(0.5, dtype=dtype, device=c.device)])
        return {"f0": given.pop("f0"), "f1": given.pop("f1"), **given, "noise": noise}
    return given | ({"cholesky": c.random.random() < 0.5} if c.random.random() < 0.4 else {})


def kronecker_noise(c: Context) -> dict:
    given = kronecker_system(c)
    return {key: value for key, value in given.items() if key not in ("b", "cholesky")}


def _whole(f0, f1, noise=None, symmetric=False):
    plain.same_kind(f0, f1)
    if f0.dtype not in (torch.float32, torch.float64):
        raise TypeError("dtype")
    f0, f1 = plain.wide(f0), plain.wide(f1)
    if f0.shape[-1] != f0.shape[-2] or f1.shape[-1] != f1.shape[-2]:
        raise ValueError("not square")
    if noise is not None or symmetric:
        f0, f1 = (f.tril() + f.tril(-1).mT for f in (f0, f1))
    whole = (f0[..., :, None, :, None] * f1[..., None, :, None, :]).flatten(-4, -3).flatten(-2)
    if noise is None:
        return whole
    shift = noise if isinstance(noise, torch.Tensor) else torch.tensor(float(noise))
    shift = shift.to(whole.device, torch.float64)
    if not shift.is_meta and not (shift >= 0).all():
        raise ValueError("noise")
    eye = torch.eye(whole.shape[-1], dtype=whole.dtype, device=whole.device)
    return whole + shift[..., None, None] * eye


def _is_plain(whole: torch.Tensor) -> bool:
    if whole.is_meta or not whole.isfinite().all():
        return False
    return bool((torch.linalg.cond(whole) < 1e3).all())


def wanted_kron_solve(f0, f1, b, noise=None, cholesky=False, check_errors=False):
    plain.flag(cholesky, check_errors)
    plain.same_kind(f0, b)
    whole, b = _whole(f0, f1, noise, cholesky), plain.wide(b)
    if b.dim() == 1:
        b = b.expand(*whole.shape[:-2], b.shape[0])
    if not _is_plain(whole):
        return None
    if cholesky and not all(_is_positive(f) for f in (f0, f1)):
        return None
    return torch.linalg.solve_ex(whole, b).result


def _is_positive(f) -> bool:
    f = plain.wide(f)
    return not torch.linalg.cholesky_ex(f).info.any()


def wanted_logdet(f0, f1, noise=None, check_errors=False):
    plain.flag(check_errors)
    whole = _whole(f0, f1, noise)
    if not _is_plain(whole) or not (torch.linalg.det(whole) > 0).all():
        return None
    return None if noise is not None and not _is_positive(whole) else torch.logdet(whole)


def masked(c: Context) -> dict:
    dtype = _dtype(c)
    index = torch.tensor([7, 0, 11, 3, 4], device=c.device)
    x = c.randn(*c.random.choice([(5, 2), (5,)]), dtype=dtype)
    return {"f0": positive(c, dtype), "f1": positive(c, dtype)[:3, :3], "x": x, "rows": index}


def wanted_masked(f0, f1, x, rows):
    plain.same_kind(f0, f1)
    plain.same_kind(f0, x)
    f0, f1, x = plain.wide(f0), plain.wide(f1), plain.wide(x)
    whole = (f0[..., :, None, :, None] * f1[..., None, :, None, :]).flatten(-4, -3).flatten(-2)
    if rows.dtype != torch.int64 or rows.dim() != 1 or rows.unique().numel() != rows.numel():
        raise ValueError("rows")
    if not whole.isfinite().all() or not x.isfinite().all():
        return None
    part = whole.cpu()[..., rows.cpu()[:, None], rows.cpu()]
    return part @ x.cpu()


def masked_system(c: Context) -> dict:
    given = masked(c)
    given = {"f0": given["f0"], "f1": given["f1"], "b": given["x"], "index": given["rows"]}
    return given | {"noise": 0.5, "tol": 1e-3, "max_iter": 50, "check_every": 5}


def of_factors(function):
    return lambda f0, f1, *rest, **named: function([f0, f1], *rest, **named)


def masked_product(f0, f1, x, rows, **named):
    return linalg.masked_kron_matmul(x, [f0, f1], rows, **named)


def entry(name, call, arguments, positional, wanted=None, weight=2) -> tuple[str, Entry]:
    return f"kernlib.linalg.{name}", Entry(
        call, arguments, positional, KINDS, wanted, NAMES, weight
    )


ENTRIES = dict(
    (
        entry("solve_cholesky", linalg.solve_cholesky, system, 2, wanted_positive, 3),
        entry("solve_lu", linalg.solve_lu, system, 2, wanted_solution, 3),
        entry("eigh", linalg.eigh, eigen, 1, wanted_values, 2),
        entry("conjugate_gradient", linalg.conjugate_gradient, gradients, 2, None, 3),
        entry("nystrom", linalg.nystrom, points, 3, None, 2),
        entry("solve_kernel", linalg.solve_kernel, kernel_system, 3, wanted_weights, 2),
        entry("falkon", linalg.falkon, fit, 4, wanted_coefficients, 2),
        entry("kron_cholesky", of_factors(linalg.kron_cholesky), kronecker, 2, None, 1),
        entry("kron_inverse", of_factors(linalg.kron_inverse), kronecker, 2, None, 1),
        entry("kron_eigh", of_factors(linalg.kron_eigh), kronecker, 2, None, 1),
        entry(
            "kron_solve", of_factors(linalg.kron_solve), kronecker_system, 3, wanted_kron_solve, 3
        ),
        entry("kron_logdet", of_factors(linalg.kron_logdet), kronecker_noise, 2, wanted_logdet, 2),
        entry("masked_kron_matmul", masked_product, masked, 4, wanted_masked, 2),
        entry("masked_kron_solve", of_factors(linalg.masked_kron_solve), masked_system, 4, None, 3),
        entry("NystromPreconditioner", preconditioned, vectors, 1, None, 1),
    )
)

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
}  # fmt: skip
NAMES = (
    "eigenvalues",
    "symmetric",
    "bandwidth",
    "v",
    "p",
    "feature_map",
    "operator",
    "kernel",
    "inner_p",
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


def vectors(c: Context) -> dict:
    return {"v": c.randn(20, 2, dtype=torch.float32)}


def preconditioned(v, **rest):
    x = torch.linspace(0, 3, 60, device=v.device if isinstance(v, torch.Tensor) else "cpu")
    if x.is_meta:
        x = torch.linspace(0, 3, 60)
    made = linalg.nystrom(kl.gaussian(), x.view(20, 3), 5, regularization=0.5, bandwidth=2.0)
    return made(v, **rest)


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
        entry("NystromPreconditioner", preconditioned, vectors, 1, None, 1),
    )
)

"""Shared by the gpu tests of pair gradients: operands, the float64 reference, and ways forced."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import torch

import kernlib as kl
from kernlib.families.pairwise.gradients import primitive
from kernlib.families.pairwise.kernels import gradient_tensor as tensor
from kernlib.runtime.plan import forget_plans

TERMS = {torch.float32: 3e-6, torch.float64: 1e-12, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@contextmanager
def by(way: str | None):
    """Calls go one way, whatever their size; "wgmma" is "mma" where there is none."""
    if way is None:
        yield
        return
    forget_plans()
    rule = "tensor" if way in ("mma", "wgmma") else way
    narrow = {"mma": 1 << 40, "wgmma": 0}.get(way, tensor.NARROW)
    with (
        mock.patch.object(primitive, "rule", lambda problem: rule),
        mock.patch.object(tensor, "NARROW", narrow),
    ):
        yield
    forget_plans()


def operands(k: int, m: int, n: int, o: int, dtype=torch.float32, batch=()) -> list[torch.Tensor]:
    """a, b, c, d of cdist_grad; some queries are training points."""
    shapes = ((k, m), (n, k), (o, k), (n, m))
    made = [torch.randn(*batch, *shape, device="cuda").to(dtype) for shape in shapes]
    made[3][..., 0] = made[1][..., k // 2]
    made[3][..., 0, :] = made[1][..., 0, :1]
    return made


def expected(given: list[torch.Tensor], p) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in float64 and the sums of absolute terms, both (..., O, N, M) on the CPU."""
    a, b, c, d = (t.detach().cpu().double() for t in given)
    p = p.cpu().double() if isinstance(p, torch.Tensor) else p
    wanted = kl.cdist_grad(a, b, c, d, p=p)
    v = (d[..., :, None, :] - b[..., :, :, None]).abs()
    exponent = p if not isinstance(p, torch.Tensor) else p.reshape(-1, 1, 1, 1)
    size = v.clamp(min=1e-8) if not isinstance(p, torch.Tensor) and p < 1 else v
    slope = torch.where(v == 0, 0.0, size ** (exponent - 1))
    terms = torch.einsum("...ok,...km,...nkm->...onm", c.abs(), a.abs(), slope)
    return wanted, terms


def check(given: list[torch.Tensor], p, out=None, tolerance=None) -> torch.Tensor:
    """Run into a poisoned output and compare, relative to the sums of absolute terms."""
    wanted, terms = expected(given, p)
    if out is None:
        out = torch.full(wanted.shape, float("nan"), dtype=given[0].dtype, device="cuda")
    assert kl.cdist_grad(*given, out=out, p=p) is out
    error = (out.cpu().double() - wanted).abs() / terms.clamp(min=1e-30)
    bound = TERMS[given[0].dtype] if tolerance is None else tolerance
    worst = error.max().item() if error.numel() else 0.0
    assert worst <= bound, f"p={p}: error {worst:.1e} > {bound:.0e}"
    return out

"""Matrices in every layout, and what a solution of theirs must satisfy; for the CPU and the GPU."""

from __future__ import annotations

import torch

LAYOUTS = ("row", "column", "row padded", "column padded", "stepped")
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13}


def laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """A view that holds ``values``, with NaN in the memory around them."""
    *batch, n, m = values.shape
    shapes = {
        "row": (n, m),
        "column": (m, n),
        "row padded": (n + 2, m + 5),
        "column padded": (m + 2, n + 5),
        "stepped": (2 * n, 3 * m),
    }
    memory = values.new_full((*batch, *shapes[layout]), torch.nan)
    if layout.startswith("column"):
        memory = memory.mT
    view = memory[..., ::2, ::3] if layout == "stepped" else memory[..., :n, :m]
    return view.copy_(values)


def positive(*shape: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Symmetric positive definite matrices with eigenvalues from 1 to about 5."""
    m = torch.randn(*shape, dtype=dtype, device=device)
    return m @ m.mT / shape[-1] + torch.eye(shape[-1], dtype=dtype, device=device)


def one_triangle(a: torch.Tensor, upper: bool) -> torch.Tensor:
    """The matrices with NaN in the triangle that is not to be read."""
    named = torch.ones_like(a, dtype=torch.bool)
    return torch.where(named.triu() if upper else named.tril(), a, torch.nan)


def check_solution(a: torch.Tensor, x: torch.Tensor, b: torch.Tensor) -> None:
    """The backward error of x, in units of what the dtype permits."""
    wide = a.double(), x.double(), b.double()
    residual = (wide[0] @ wide[1] - wide[2]).norm()
    scale = wide[0].norm() * wide[1].norm() + wide[2].norm()
    assert residual <= TOLERANCE[x.dtype] * scale


def check_eigh(a: torch.Tensor, w: torch.Tensor, v: torch.Tensor, rough: bool = False) -> None:
    """Ascending values, orthonormal columns, ``V diag(w) V^T = a``. ``rough``: as torch computes
    them on a GPU, in float32 by Jacobi's method to 2e-4."""
    tolerance = 1e-3 if rough and v.dtype is torch.float32 else 2 * TOLERANCE[v.dtype]
    a, w, v = a.double(), w.double(), v.double()
    assert (w.diff(dim=-1) >= 0).all()
    assert ((v * w[..., None, :]) @ v.mT - a).norm() <= tolerance * a.norm()
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    assert (v.mT @ v - eye).norm() <= tolerance * eye.expand_as(a).norm()

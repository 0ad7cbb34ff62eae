"""Hostile data for products with structured matrices, and the bars that products, gradients and
second derivatives are held to; for the CPU and for a GPU.

The points are those of ``pairwise_hostile.py``. A product is linear in each operand, so the sum of
absolute terms of a result is the same result of absolute operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from tests.support import hostile
from tests.support.hostile import FORWARD, GRADIENT, errors

NAMES = (
    "normal",
    "one sign",
    "offset 1e3",
    "offset 1e6",
    "one huge feature",
    "denormals",
    "magnitude 1e-20",
    "magnitude 1e20",
    "rows of inf",
    "rows of nan",
    "integers",
    "heavy tails",
)
FINITE = tuple(name for name in NAMES if name in hostile.FINITE or name == "one sign")
SIZES = (1, 3, 4, 5, 31, 32, 33, 127, 128, 129)  # 1 and 2^k - 1, 2^k, 2^k + 1
GPU_BAR = {"one sign": 3e-6}  # tensor cores truncate sums, which for terms of one sign adds up


def matrix(name: str, rows: int, columns: int, dtype, device="cpu", seed: int = 0) -> torch.Tensor:
    """One of NAMES, (rows, columns)."""
    if name == "one sign":
        return matrix("normal", rows, columns, dtype, device, seed).abs()
    sizes = {"rows": rows, "columns": 1, "features": columns}
    return hostile.case(name, dtype, device, seed, **sizes).a


def pruned(w: torch.Tensor) -> torch.Tensor:
    """With every third entry 0, and a row and a column without any."""
    w = w.clone()
    w.view(-1)[::3] = 0
    w[len(w) // 2] = 0
    w[:, w.shape[1] // 2] = 0
    return w


def dense(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The product with a matrix."""
    return x @ w.mT


def factor(pattern: tuple, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The product with a Kronecker-sparse factor, by its definition."""
    a, _, c, d = pattern
    return torch.einsum("nikl,ijkl->nijl", x.reshape(-1, a, c, d), w).flatten(1)


class Operands(NamedTuple):
    """Of a product ``run(x, w)``: ``x`` (rows, in), the weight, a gradient that arrives, of the
    result's shape, and a direction of x's shape."""

    x: torch.Tensor
    w: torch.Tensor
    g: torch.Tensor
    u: torch.Tensor


def operands(
    name: str, side: str, rows: int, wide: int, out: int, weight: tuple, dtype, device="cpu"
) -> Operands:
    """``side``, "x" or "w", is hostile; the others are normal, or integers and of one sign too.
    ``weight`` is its shape, and ``wide`` and ``out`` the features that come and go."""
    calm = name if name in ("one sign", "integers") else "normal"
    shape = (weight[0] * weight[1], weight[2] * weight[3]) if len(weight) == 4 else weight
    x = matrix(name if side == "x" else calm, rows, wide, dtype, device, 1)
    w = matrix(name if side == "w" else calm, *shape, dtype, device, 2)
    g = matrix(calm, rows, out, dtype, device, 3)
    u = matrix(calm, rows, wide, dtype, device, 4)
    return Operands(x, w.reshape(weight), g, u)


def derivatives(run: Callable, given: Operands, of_weight: bool = True) -> dict[str, torch.Tensor]:
    """The product, its gradients and its second derivatives by name. ``of_weight=False`` for a
    weight that is a constant."""
    x, w, g, u = (t.detach().clone().requires_grad_() for t in given)
    y = run(x, w)
    sides = (x, w) if of_weight else (x,)
    first = torch.autograd.grad(y, sides, g, create_graph=True)
    second = torch.autograd.grad(first[0], (g, w) if of_weight else (g,), u)
    names = ("by x", "by w") if of_weight else ("by x",)
    again = ("by g of that by x", "by w of that by x")
    found = zip((*names, *again[: len(second)]), (*first, *second), strict=True)
    return {"y": y.detach()} | {name: value.detach() for name, value in found}


def exact(run: Callable, given: Operands, of_weight: bool = True) -> tuple[dict, dict]:
    """The same in float64, and the sums of absolute terms."""
    wide = Operands(*(t.detach().double() for t in given))
    absolute = Operands(*(t.abs() for t in wide))
    return derivatives(run, wide, of_weight), derivatives(run, absolute, of_weight)


def check(
    found: dict, wanted: tuple[dict, dict], rivals: dict | None, where: str, gpu: bool = False
) -> None:
    """Fails where one of ``found`` misses the bar of its type: of infinities and NaN on a ``gpu``
    only that neither is a number. Denormals may be off by their steps, and flushed on a GPU."""
    exacts, terms = wanted
    for name, out in found.items():
        bar = (FORWARD if name == "y" else GRADIENT)[out.dtype]
        if gpu and out.dtype == torch.float32:
            bar = max(bar, max((b for n, b in GPU_BAR.items() if n in where), default=0.0))
        info = torch.finfo(out.dtype)
        flushed = gpu and out.dtype in (torch.float32, torch.bfloat16)
        least = (1024 if flushed else info.eps * 1024) * info.tiny / bar
        of_exact, size = (
            exacts[name].cpu(),
            terms[name].cpu().clamp(min=least if "denormals" in where else 0),
        )
        if gpu and out.dtype != torch.float64:
            spoilt = ~of_exact.isfinite()
            assert not out.cpu()[spoilt].isfinite().any(), f"{where}, {name}: a number"
            out, of_exact = out.cpu().masked_fill(spoilt, 0), of_exact.masked_fill(spoilt, 0)
        ours = errors(out, of_exact, size).max().item()
        theirs = 0.0
        if rivals is not None:
            theirs = errors(rivals[name], exacts[name], size)
            theirs = theirs[theirs.isfinite()].max().item() if theirs.isfinite().any() else 0.0
        assert ours <= max(bar, 2 * theirs), f"{where}, {name}: {ours:.2e}, torch's {theirs:.2e}"


def check_exact(found: dict, wanted: tuple[dict, dict], where: str) -> None:
    """Of integers, whose results a type holds or rounds once."""
    for name, out in found.items():
        assert torch.equal(out, wanted[0][name].to(out.dtype)), f"{where}, {name}"


def pairs(names: tuple[str, ...] = NAMES) -> Iterator[tuple[str, str]]:
    """What is hostile: a name, and x or w."""
    return ((name, side) for name in names for side in ("x", "w"))

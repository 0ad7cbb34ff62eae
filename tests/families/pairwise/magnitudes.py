"""Points of any magnitude, their norms and sums of powers in float64, and what float32 is held to:
the bar where the exact result is a number of float32, elsewhere the infinity or 0 that rounding it
gives."""

from __future__ import annotations

from collections.abc import Iterator

import torch

TINY = torch.finfo(torch.float32).tiny
MOST = torch.finfo(torch.float32).max
EXPONENTS = (0.3, 0.7, 1.3, 2.0, 3.0, 7.3, 10.0, 20.0, 64.0)


def points(rows: int, columns: int, features: int, p: float) -> Iterator[tuple[str, tuple]]:
    """Points ``a`` and ``b`` by a name: all of one size, whose powers leave float32 or do not, and
    some beside others of another size."""
    generator = torch.Generator().manual_seed(7)
    a, b = (torch.randn(count, features, generator=generator) for count in (rows, columns))
    for size in (1e-30, 1e-20, 1e-11, 1e-6, 0.01, 1.0, 100.0, 3e4, 1e8, 1e20, 1e30):
        yield f"size {size}", (a * size, b * size)
    yield "points of 0", (a * 1e-25, torch.zeros_like(b))
    yield "rows of 0", (torch.zeros_like(a), b * 1e-25)
    outlier, alone = b.clone() * 1e-6, b.clone() * 0.01
    outlier[5::16, 0], alone[3, -1] = 1.0, 5e3
    yield "outliers", (a * 1e-6, outlier)
    yield "one outlier", (a * 0.01, alone)
    twins = a[torch.arange(columns) % rows]
    for size in (1e-12, 1.0, 100.0, 3e4, 1e8):
        yield f"duplicates {size}", (a * size, twins * size)
    yield "near duplicates", (a, twins + 1e-5 * b)
    ladders = (10.0 ** torch.linspace(-30, 30, len(x))[:, None] for x in (a, b))
    yield "each its own", tuple(x * ladder for x, ladder in zip((a, b), ladders, strict=True))
    infinite = b * 1e-11
    infinite[1, 0] = torch.inf
    yield "an infinity", (a * 1e-11, infinite)


def exact(a: torch.Tensor, b: torch.Tensor, p: float, root: bool) -> torch.Tensor:
    """Norms, or sums of powers, of differences as float32 has them: an infinite one is infinite."""
    v = (b[None] - a[:, None]).abs().double()
    v = torch.where(v.isfinite(), (b.double()[None] - a.double()[:, None]).abs(), v)
    largest = v.amax(-1)
    unit = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    scaled = ((v / unit[..., None]) ** p).sum(-1)
    return unit * scaled ** (1 / p) if root else scaled * unit**p


def bar(p: float, root: bool) -> float:
    """Of norms 1e-6 ``max(1, 1 / p)``; of their powers as many roundings of a difference, and those
    of a logarithm."""
    return 1e-6 * max(1.0, 1 / p) if root else 6e-6 * max(1.0, p / 10)


def check(found: torch.Tensor, wanted: torch.Tensor, most: float, where: str) -> None:
    """Fails where a result is further from ``wanted`` than ``most`` of it."""
    found, wanted = found.double().cpu(), wanted.double().cpu()
    over, under = wanted > MOST, wanted < 2 * TINY
    assert (found[over] >= (1 - 1e-5) * MOST).all(), f"{where}: {found[over].min()}"
    assert ((found - wanted)[under].abs() <= TINY).all(), f"{where}: {found[under].max()}"
    usual = ~over & ~under
    error = ((found - wanted).abs() / wanted)[usual]
    worst = error.nan_to_num(torch.inf).max().item() if error.numel() else 0.0
    assert worst <= most, f"{where}: error {worst:.2e} > {most:.1e}"

"""Points on which distances and kernels go wrong, and the bar that results on them are held to.

Made in float64 on the CPU from a seed and then rounded, so that a CPU and a GPU see the same
numbers::

    for case in hostile.cases(torch.float32, "cuda"):
        exact = formula(*case.exact)
        hostile.check(out, exact, rival=torch_result, where=case.name)

Every case has ``rows`` x ``columns`` pairs of ``features``. ``scale`` is about the size of one
difference of coordinates, so that a bandwidth of ``scale * features ** 0.5`` is a sensible one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

# Errors allowed beside twice torch's own, relative to the sum of absolute terms: one rounding of
# the output for half types, whose arithmetic is float32.
FORWARD = {
    torch.float32: 1e-6,
    torch.float64: 1e-13,
    torch.float16: 2.0**-11 + 1e-6,
    torch.bfloat16: 2.0**-8 + 1e-6,
}
GRADIENT = FORWARD | {torch.float32: 3e-6}
DTYPES = tuple(FORWARD)
SIZES = (1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 128, 129)  # 1 and 2^k - 1, 2^k, 2^k + 1


class Case(NamedTuple):
    """Points ``a`` (rows, features) and ``b`` (columns, features)."""

    name: str
    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @property
    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same points in float64 on the CPU."""
        return self.a.detach().cpu().double(), self.b.detach().cpu().double()


class _Maker(NamedTuple):
    generator: torch.Generator
    rows: int
    columns: int
    features: int
    dtype: torch.dtype

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.normal(self.rows, self.features), self.normal(self.columns, self.features)

    def twins(self, apart: float) -> tuple[torch.Tensor, torch.Tensor]:
        """``b`` is ``a`` again and again, every second time with noise of size ``apart``."""
        a, b = self.pair()
        same = a[torch.arange(self.columns) % self.rows]
        noise = apart * b * (torch.arange(self.columns) % 2 == 0)[:, None]
        return a, same.to(self.dtype).double() + noise

    def clusters(self, apart: float) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = self.pair()
        centres = self.normal(4, self.features)
        return tuple(centres[torch.arange(len(x)) % 4] + apart * x for x in (a, b))

    def rounded(self) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple((3 * x).round() for x in self.pair())

    def heavy(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cauchy's distribution, cut where a half type ends."""
        most = min(1e30, torch.finfo(self.dtype).max / 4)
        return tuple((x / self.normal(*x.shape)).clamp(-most, most) for x in self.pair())

    def huge_feature(self) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = self.pair()
        place = self.features // 3
        for x in (a, b):
            x[:, place] *= 1e6 if self.dtype != torch.float16 else 1e3
        return a, b

    def with_rows_of(self, value: float) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = self.pair()
        a[0] = value
        b[-1] = -value
        a[-1, self.features - 1] = value
        return a, b

    def sized(self, size: float) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(size * x for x in self.pair())


def _far(dtype: torch.dtype, size: float) -> float:
    """``size``, or what float16 still holds of it."""
    return size if dtype != torch.float16 else {1e20: 1e3, 1e-20: 1e-3, 1e6: 1e4}.get(size, size)


def _denormal(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).tiny * 2.0**-6


_ONE = lambda _: 1.0  # noqa: E731
# By name: the points, and the size of a difference of their coordinates.
_MAKERS: dict[str, tuple[Callable[[_Maker], tuple], Callable[[torch.dtype], float]]] = {
    "normal": (_Maker.pair, _ONE),
    "offset 1e3": (lambda m: tuple(x + 1e3 for x in m.pair()), _ONE),
    "offset 1e6": (lambda m: tuple(x + _far(m.dtype, 1e6) for x in m.pair()), _ONE),
    "duplicates": (lambda m: m.twins(0.0), _ONE),
    "near duplicates 1e-3": (lambda m: m.twins(1e-3), _ONE),
    "near duplicates 1e-6": (lambda m: m.twins(1e-6), _ONE),
    "clusters 1e-7": (lambda m: m.clusters(1e-7), _ONE),
    "one huge feature": (_Maker.huge_feature, _ONE),
    "denormals": (lambda m: m.sized(_denormal(m.dtype)), _denormal),
    "magnitude 1e-20": (lambda m: m.sized(_far(m.dtype, 1e-20)), lambda d: _far(d, 1e-20)),
    "magnitude 1e4": (lambda m: m.sized(1e4), lambda _: 1e4),
    "magnitude 1e20": (lambda m: m.sized(_far(m.dtype, 1e20)), lambda d: _far(d, 1e20)),
    "rows of inf": (lambda m: m.with_rows_of(float("inf")), _ONE),
    "rows of nan": (lambda m: m.with_rows_of(float("nan")), _ONE),
    "integers": (_Maker.rounded, _ONE),
    "heavy tails": (_Maker.heavy, _ONE),
}
NAMES = tuple(_MAKERS)
FINITE = tuple(name for name in NAMES if not name.startswith("rows of"))


def case(
    name: str,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    rows: int = 33,
    columns: int = 65,
    features: int = 19,
) -> Case:
    """The case of a name in NAMES."""
    generator = torch.Generator().manual_seed(seed)
    make, scale = _MAKERS[name]
    a, b = make(_Maker(generator, rows, columns, features, dtype))
    return Case(name, a.to(device, dtype), b.to(device, dtype), scale(dtype))


def cases(
    dtype: torch.dtype, device="cpu", seed: int = 0, names=NAMES, **sizes: int
) -> Iterator[Case]:
    """Every case of ``names``; ``sizes`` are those of :func:`case`."""
    return (case(name, dtype, device, seed, **sizes) for name in names)


def errors(out: torch.Tensor, exact: torch.Tensor, terms: torch.Tensor | None = None):
    """``|out - exact|`` of each element beside ``terms``, its sum of absolute terms (``|exact|`` if
    left out), in float64 on the CPU.

    Where ``exact`` is not finite, or more than the type holds, the error is 0 if ``out`` is the
    same infinity or NaN, else inf. What the type can only hold as a denormal is wrong by whole
    steps of it.
    """
    found, exact = out.detach().cpu().double(), exact.detach().cpu().double()
    terms = exact.abs() if terms is None else terms.detach().cpu().double().expand_as(exact)
    info = torch.finfo(out.dtype)
    rounded = exact.to(out.dtype).double() if out.dtype != torch.float64 else exact
    step = info.tiny * info.eps
    off = (found - exact).abs()
    off = torch.where(off <= step, 0.0, off)
    made = torch.where(off == 0, 0.0, off / terms)
    same = (found == rounded) | (found.isnan() & exact.isnan())
    made = torch.where(rounded.isfinite(), made, torch.where(same, 0.0, torch.inf))
    return torch.where(made.isnan(), torch.inf, made)


def worst(out, exact, terms=None, rival=None) -> tuple[float, float]:
    """The largest error of ``out``, and of ``rival``, over the elements of which the rival makes
    anything at all; the second is 0 without a rival."""
    ours = errors(out, exact, terms)
    theirs = torch.zeros_like(ours) if rival is None else errors(rival, exact, terms)
    known = theirs.isfinite()
    if not known.any():
        return 0.0, 0.0
    return ours[known].max().item(), theirs[known].max().item()


def check(
    out: torch.Tensor,
    exact: torch.Tensor,
    terms: torch.Tensor | None = None,
    rival: torch.Tensor | None = None,
    where: str = "",
    bars: dict[torch.dtype, float] = FORWARD,
) -> None:
    """Fails where ``out`` is further from ``exact`` than the larger of twice the ``rival`` and the
    bar of its type."""
    ours, theirs = worst(out, exact, terms, rival)
    bar = max(2 * theirs, bars[out.dtype])
    assert ours <= bar, f"{where}: error {ours:.2e} > {bar:.1e}, torch's {theirs:.2e}"

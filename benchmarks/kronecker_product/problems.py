"""What the benchmark of Kronecker products measures: sizes, tensors, floors, values in float64."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import torch

from benchmarks.common.timing import memory

Size = tuple[int, int]  # rows and columns of a factor
MOST_BYTES = 4e9  # of x, factors and result


class Kind(NamedTuple):
    """A dtype, operations/s that tensor cores reach on an H200 in its arithmetic, and the error
    against float64 that kernlib may have."""

    dtype: torch.dtype
    rate: float
    must_error: float


KINDS = {
    "fp32": Kind(torch.float32, 296e12, 1e-6),  # by three products of half-precision numbers
    "fp16": Kind(torch.float16, 888e12, 1e-3),
    "fp64": Kind(torch.float64, 61e12, 1e-13),
}
# Rows, size and count of square factors, and the milliseconds that fp32, fp16 and fp64 may take.
NAMED = (
    (1024, 8, 5, {"fp32": 0.090, "fp16": 0.048, "fp64": 0.25}),
    (1024, 16, 4, {"fp32": 0.200, "fp16": 0.092, "fp64": 0.50}),
    (1024, 32, 3, {"fp32": 0.095, "fp16": 0.048, "fp64": 0.25}),
    (1024, 64, 2, {"fp32": 0.018, "fp16": 0.009, "fp64": 0.035}),
    (1024, 128, 2, {"fp32": 0.065, "fp16": 0.025, "fp64": 0.19}),
    (1024, 8, 6, {"fp32": 0.80, "fp16": 0.42}),
    (1024, 64, 3, {"fp32": 0.90, "fp16": 0.42}),
    (320, 128, 3, {"fp32": 3.4, "fp16": 1.25}),
    (1024, 32, 4, {"fp32": 3.6, "fp16": 1.7}),
)
LEFT_SHARE = 1.1  # of the time on the right that the left may take
PREFIXES = ("left", "train")  # sections that names begin with
SMALL = ((20, 2, 7), (1, 2, 9), (50, 2, 9), (20, 2, 10), (1, 2, 11), (8, 8, 3), (20, 8, 3))
SMALL_MS = 0.006  # of one, in a graph
DRAWN = 60


class Problem(NamedTuple):
    """One case: x (rows, in) with factors on its right, or (in, rows) on its left."""

    section: str  # "named", "left", "train", "small", "drawn" or "portable"
    rows: int
    sizes: tuple[Size, ...]
    kind: str
    must: float | None = None

    @property
    def name(self) -> str:
        first = self.sizes[0]
        if set(self.sizes) == {(first[0], first[0])}:
            sizes = f"{first[0]}^{len(self.sizes)}"
        else:
            sizes = "*".join(f"{p}x{q}" for p, q in self.sizes)
        section = f"{self.section} " if self.section in PREFIXES else ""
        portable = " portable" * self.is_portable
        return f"kronecker_product {section}{self.rows} {sizes} {self.kind}{portable}"

    @property
    def is_portable(self) -> bool:
        """Whether it is measured with KERNLIB_PORTABLE=1, beside the kernels that a GPU has for
        itself."""
        return self.section == "portable"

    @property
    def side(self) -> str:
        return "left" if self.section == "left" else "right"

    @property
    def dtype(self) -> torch.dtype:
        return KINDS[self.kind].dtype

    @property
    def features(self) -> Size:
        """Of x and of the result."""
        return math.prod(p for p, _ in self.sizes), math.prod(q for _, q in self.sizes)

    def floor(self) -> tuple[float, str]:
        """Milliseconds and what bounds them. Gradients read x and that of the result, write that by
        x, and are as many operations for x and for the factors as the product."""
        trains = self.section == "train"
        x, result = self.features
        numbers = self.rows * (x + result + (2 * x + result) * trains)
        numbers += sum(p * q for p, q in self.sizes) * (3 if trains else 1)
        moving = numbers * self.dtype.itemsize / memory().copied * 1e3
        count = operations(self.rows, self.sizes) * (3 if trains else 1)
        computing = count / KINDS[self.kind].rate * 1e3
        return max(moving, computing), "memory" if moving >= computing else "tensor cores"


def operations(rows: int, sizes: tuple[Size, ...]) -> float:
    """Of a product, the factor that shortens rows most first."""
    features, count = math.prod(p for p, _ in sizes), 0.0
    for p, q in sorted(sizes, key=lambda size: 1 / size[0] - 1 / size[1]):
        count += 2.0 * rows * features * q
        features = features // p * q
    return count


def problems() -> list[Problem]:
    """All cases."""
    found = []
    for rows, size, count, musts in NAMED:
        sizes = ((size, size),) * count
        for kind in KINDS:
            found.append(Problem("named", rows, sizes, kind, musts.get(kind)))
        for kind in ("fp32", "fp16"):
            found.append(Problem("left", rows, sizes, kind, musts[kind] * LEFT_SHARE))
            found.append(Problem("train", rows, sizes, kind))
            found.append(Problem("portable", rows, sizes, kind))
    found += [
        Problem("small", rows, ((size, size),) * count, kind, SMALL_MS)
        for rows, size, count in SMALL
        for kind in KINDS
    ]
    shapes = drawn()
    return found + [Problem("drawn", *shape, kind) for kind in KINDS for shape in shapes]


def drawn() -> list[tuple[int, tuple[Size, ...]]]:
    """Rows and sizes of factors, the same ones always: 2 to 8 factors of 2 to 128 rows and columns,
    mixed, and 1 to 4096 rows, of which x, factors and result fit."""
    source, found = random.Random(2026), []
    while len(found) < DRAWN:
        rows = round(2 ** source.uniform(0, 12))
        sizes = tuple(
            (round(2 ** source.uniform(1, 7)), round(2 ** source.uniform(1, 7)))
            for _ in range(source.randint(2, 8))
        )
        if _largest_bytes(rows, sizes) <= MOST_BYTES:
            found.append((rows, sizes))
    return found


def _largest_bytes(rows: int, sizes: tuple[Size, ...]) -> float:
    """Of x, result and everything between them in float64, on the way that makes it most."""
    features, most = float(math.prod(p for p, _ in sizes)), 0.0
    ends = features + math.prod(q for _, q in sizes)
    for p, q in reversed(sizes):
        features = features / p * q
        most = max(most, features)
    return 8.0 * rows * (ends + most)


def tensors(problem: Problem, device: str = "cuda") -> tuple[torch.Tensor, list, torch.Tensor]:
    """x, the factors, which leave the size of a number as it is, and a place for the result."""
    ends = [(problem.rows, features) for features in problem.features]
    shapes = ends if problem.side == "right" else [shape[::-1] for shape in ends]
    x = torch.randn(shapes[0], device=device).to(problem.dtype)
    factors = []
    for p, q in problem.sizes:
        shape = (p, q) if problem.side == "right" else (q, p)
        factors.append((torch.randn(shape, device=device) / p**0.5).to(problem.dtype))
    return x, factors, torch.empty(shapes[1], dtype=problem.dtype, device=device)


def exact(x: torch.Tensor, factors: list, side: str, some: torch.Tensor) -> torch.Tensor:
    """Some rows of the product, or columns, in float64."""
    y = (x[some] if side == "right" else x[:, some].mT).double()
    for factor in reversed(factors):
        f = (factor if side == "right" else factor.mT).double()
        y = (y.unflatten(-1, (-1, f.shape[-2])) @ f).mT.flatten(-2)
    return y

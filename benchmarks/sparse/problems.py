"""What the benchmark of sparse matrices measures: shapes, patterns, floors, targets, float64."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from benchmarks.common.timing import memory
from kernlib.families.sparse.prune import largest

# The shapes (rows, columns) of MACKO-SpMV's benchmark, of layers of language models.
SHAPES = (
    (4096, 4096), (8192, 8192), (8192, 29568), (32000, 5120), (32000, 8192), (28672, 8192),
    (5120, 5120), (5120, 13824), (3584, 20480), (4096, 11008), (13824, 5120), (18944, 3584),
    (14336, 4096), (4096, 14336), (8192, 28672), (11008, 4096), (32000, 4096), (20480, 3584),
    (3584, 18944), (21504, 7168), (7168, 7168), (28672, 7168), (7168, 28672), (27648, 9216),
    (9216, 9216), (36864, 9216), (9216, 36864), (36864, 12288), (12288, 12288), (49152, 12288),
    (12288, 49152),
)  # fmt: skip
DENSITIES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
LARGE = ((8192, 28672), (12288, 49152))
HEADLINE = (*LARGE, (4096, 4096), (4096, 11008), (11008, 4096))
SHOWN_DENSITIES = (0.7, 0.5, 0.3, 0.1)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SECTIONS = ("headline", "frozen", "compress", "columns", "quantised", "formats", "grid")

# Targets: times of cuBLAS over ours, by density, for the LARGE shapes and for the other HEADLINE
# ones; the time of eight columns over that of one; errors over cuBLAS's; milliseconds.
OVER_CUBLAS = {0.7: 1.10, 0.5: 1.45, 0.3: 2.1, 0.1: 4.3}
OVER_CUBLAS_SMALL = {0.5: 1.3}
OVER_CUBLAS_COLUMNS = {16: 1.25, 32: 1.1, 64: 1.0}  # by vectors, for LARGE[0] at density 0.5
EIGHT_OVER_ONE = 1.25
OVER_HALF = {"int8": 1.35, "fp8": 1.35, "int4": 1.6}  # times of 16-bit values over those of fewer
OVER_ERROR = 1.05
COMPRESS_MS = 50.0
NOISE = 1.03  # between two measurements of the same kernel on the same data

EXACT_ENTRIES = 1 << 26  # of a matrix that are in float64 at once, 512 MB


class Problem(NamedTuple):
    """A product of a matrix (rows, cols) with ``columns`` vectors, or, in the section ``compress``,
    the way from the dense matrix to the compressed one. ``frozen``, whether it is promised that
    nobody writes the matrix; ``values``, those in fewer bits."""

    section: str
    rows: int
    cols: int
    density: float
    kind: str = "fp16"
    columns: int = 1
    format: str = "auto"
    frozen: bool = False
    values: str | None = None

    @property
    def name(self) -> str:
        return self.named(self.columns)

    def named(self, columns: int) -> str:
        """The name of the same case with another number of columns."""
        shape = f"{self.rows}x{self.cols} density={self.density:g}"
        if self.section == "compress":
            return f"compress {shape} {self.kind}"
        several = f"N={columns} " if columns > 1 else ""
        frozen = " frozen" if self.frozen else ""
        return f"spmv {shape} {self.values or self.format} {several}{self.kind}{frozen}"

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.kind]

    @property
    def dense_bytes(self) -> int:
        return self.rows * self.cols * self.dtype.itemsize

    @property
    def vector_bytes(self) -> int:
        """Of x and y."""
        return (self.rows + self.cols) * self.columns * self.dtype.itemsize

    def floor_us(self, nbytes: int) -> float:
        """Microseconds in which ``nbytes`` of a matrix, x and y pass through memory once."""
        return (nbytes + self.vector_bytes) / memory().copied * 1e6

    def compress_floor_ms(self, nbytes: int) -> float:
        """Milliseconds to read the dense matrix twice, as its size must be known before anything is
        written, and to write ``nbytes``."""
        return (2 * self.dense_bytes + nbytes) / memory().copied * 1e3

    def must_us(self, rivals: dict[str, float], one: float | None) -> float | None:
        """The target, from the times of rivals and, for eight columns, of ``one``."""
        if self.format != "auto":
            return None
        if self.values is not None:
            half = rivals.get(f"kernlib {self.kind}")
            return None if half is None else half / OVER_HALF[self.values]
        if self.columns == 8 and one is not None:
            return EIGHT_OVER_ONE * one
        if self.columns in OVER_CUBLAS_COLUMNS and "cublas" in rivals:
            is_held = (self.rows, self.cols) == LARGE[0] and self.density == 0.5
            return rivals["cublas"] / OVER_CUBLAS_COLUMNS[self.columns] if is_held else None
        if self.columns > 1 or not rivals:
            return None
        over = OVER_CUBLAS if (self.rows, self.cols) in LARGE else OVER_CUBLAS_SMALL
        best = NOISE * min(rivals.values())
        if (self.rows, self.cols) in HEADLINE and self.density in over and "cublas" in rivals:
            best = min(best, rivals["cublas"] / over[self.density])
        return best


def problems(section: str) -> list[Problem]:
    """The cases of a section, those of one shape and dtype side by side."""
    if section == "headline":
        return [
            Problem(section, *shape, density, kind, columns)
            for kind, shapes in (("fp16", HEADLINE), ("bf16", (LARGE[0], (4096, 11008))))
            for shape in shapes
            for density in SHOWN_DENSITIES
            for columns in (1, 8)
        ]
    if section == "frozen":
        return [
            one._replace(section=section, frozen=True)
            for one in problems("headline")
            if one.kind == "fp16"
        ]
    if section == "compress":
        return [Problem(section, *shape, density) for shape in LARGE for density in (0.5, 0.1)]
    if section == "columns":
        return [
            Problem(section, *shape, 0.5, columns=n)
            for shape in ((4096, 4096), LARGE[0])
            for n in (2, 4, 16, 32, 64)
        ]
    if section == "quantised":
        return [Problem(section, *LARGE[0], 0.5, values=values) for values in OVER_HALF]
    if section == "formats":
        return [
            Problem(section, *shape, density, format=name)
            for shape in ((4096, 4096), LARGE[0])
            for density in DENSITIES
            for name in ("bitmap", "u8", "u4", "u2", "macko")
        ]
    headline = {(*shape, density) for shape in HEADLINE for density in SHOWN_DENSITIES}
    every = [(*shape, density) for shape in SHAPES for density in DENSITIES]
    return [Problem("grid", *one) for one in every if one not in headline]


# Tensors and values.


@lru_cache(maxsize=1)
def drawn(rows: int, cols: int, dtype: torch.dtype, device: str):
    """Values without a zero, and float32 numbers of which the largest say what stays: the same for
    every density, kept for the cases that follow."""
    generator = torch.Generator(device).manual_seed(0)
    values = torch.randn(rows, cols, generator=generator, device=device, dtype=dtype)
    values.masked_fill_(values.abs() < 2**-12, 2**-12)  # no zero among those that stay
    return values, torch.rand(rows, cols, generator=generator, device=device)


def weight(problem: Problem, device: str = "cuda") -> torch.Tensor:
    """A dense matrix with exactly ``round(density * rows * cols)`` entries, anywhere."""
    values, keys = drawn(problem.rows, problem.cols, problem.dtype, device)
    return values.masked_fill(~largest(keys, problem.density), 0)


def vectors(problem: Problem, device: str = "cuda") -> torch.Tensor:
    """x, (cols,) or (columns, cols), such that y is of the size of the values."""
    generator = torch.Generator(device).manual_seed(1)
    shape = (problem.cols,) if problem.columns == 1 else (problem.columns, problem.cols)
    x = torch.randn(shape, generator=generator, device=device)
    return (x / math.sqrt(problem.cols * problem.density)).to(problem.dtype)


def exact(dense: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The product in float64, some rows of the matrix at a time."""
    count = max(1, EXACT_ENTRIES // dense.shape[1])
    wide = x.double().mT if x.dim() > 1 else x.double()
    y = torch.cat([rows.double() @ wide for rows in dense.split(count)])
    return y.mT if x.dim() > 1 else y

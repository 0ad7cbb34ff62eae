"""What the Kronecker-sparse benchmark measures: patterns, tensors, floors, values in float64."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

import kernlib as kl
from benchmarks.common.timing import memory
from kernlib.families.kronecker_sparse import reference

Pattern = tuple[int, int, int, int]

BATCH = 25088  # 196 tokens of 128 images
PATTERNS: tuple[Pattern, ...] = (
    (6, 64, 64, 1), (1, 768, 192, 2), (4, 192, 48, 16), (1, 256, 256, 16),
    (12, 192, 48, 4), (4, 128, 128, 4), (1, 512, 512, 4), (2, 48, 192, 16),
)  # fmt: skip
LAYOUTS = {"first": False, "last": True}


class Kind(NamedTuple):
    """A dtype and what float32 may be: operations/s that tensor cores reach on an H200, and torch's
    dense products there; the error against float64 that kernlib may have."""

    dtype: torch.dtype
    precision: str
    rate: float
    dense_rate: float
    must_error: float


KINDS = {
    "fp16": Kind(torch.float16, "fp32", 770e12, 770e12, 1e-3),
    "fp32": Kind(torch.float32, "fp32", 138e12, 51e12, 1e-6),  # by 3xTF32, and by FFMA
    "tf32": Kind(torch.float32, "tf32", 415e12, 415e12, 2e-3),
    "bf16": Kind(torch.bfloat16, "fp32", 770e12, 770e12, 8e-3),
}


class Problem(NamedTuple):
    """One case. A training step is a product and its gradients by x and by the weight."""

    section: str  # "patterns", "grid", "train" or "host"
    pattern: Pattern
    batch_last: bool
    kind: str
    batch: int = BATCH

    @property
    def name(self) -> str:
        part = "" if self.section == "patterns" else f"{self.section} "
        layout = "last" if self.batch_last else "first"
        return f"kronecker_sparse {part}{text_of(self.pattern)} {layout} {self.kind}"

    @property
    def dtype(self) -> torch.dtype:
        return KINDS[self.kind].dtype

    @property
    def features(self) -> tuple[int, int]:
        """Of the input and of the output."""
        a, b, c, d = self.pattern
        return a * c * d, a * b * d

    @property
    def descriptor(self) -> kl.KroneckerSparse:
        precision = KINDS[self.kind].precision
        return kl.KroneckerSparse(*self.pattern, batch_last=self.batch_last, precision=precision)

    def shape(self, features: int) -> tuple[int, int]:
        """Of a tensor with these features, in the layout."""
        return (features, self.batch) if self.batch_last else (self.batch, features)

    @property
    def operations(self) -> float:
        """Of one product."""
        return 2.0 * self.batch * math.prod(self.pattern)

    @property
    def memory_ms(self) -> float:
        """Milliseconds in which a product's three tensors pass through memory once."""
        numbers = self.batch * sum(self.features) + math.prod(self.pattern)
        return numbers * self.dtype.itemsize / memory().copied * 1e3

    @property
    def products(self) -> int:
        """Of the same size each: with its gradients a product is three."""
        return 3 if self.section == "train" else 1

    def floor(self) -> tuple[float, str]:
        """Milliseconds and what bounds them."""
        computing = self.operations / KINDS[self.kind].rate * 1e3
        bound = "memory" if self.memory_ms >= computing else "tensor cores"
        return self.products * max(self.memory_ms, computing), bound


def text_of(pattern: Pattern) -> str:
    """``(a,b,c,d)``."""
    return f"({','.join(map(str, pattern))})"


# Which there are.


def problems(section: str, patterns: list | tuple, kinds: tuple[str, ...]) -> list[Problem]:
    """Every pattern in both layouts and all kinds, kind by kind."""
    every = itertools.product(kinds, LAYOUTS.values(), patterns)
    return [Problem(section, pattern, last, kind) for kind, last, pattern in every]


def grid() -> list[Pattern]:
    """The 376 patterns of KSMM's benchmark whose tensors have less than 2^31 - 1 numbers."""
    counts = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
    sizes = (48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
    dropped = {(1024, 256), (256, 1024), (128, 512), (512, 128), (64, 256), (256, 64)}
    found = [
        (a, b, c, d)
        for a, b, c, d in itertools.product(counts, sizes, sizes, (4, 16, 64))
        if (b == c or b == 4 * c or c == 4 * b) and (b, c) not in dropped
        and max(BATCH * a * c * d, BATCH * a * b * d, a * b * c * d) < 2**31 - 1
    ]  # fmt: skip
    assert len(found) == 376
    return found


def sample(count: int = 40) -> list[Pattern]:
    """Some patterns of the grid, the same ones always."""
    return random.Random(2026).sample(grid(), count)


# Tensors and values.


def tensors(problem: Problem, device: str = "cuda") -> tuple[torch.Tensor, ...]:
    """x, weight and out."""
    generator = torch.Generator(device).manual_seed(0)
    like = {"device": device, "dtype": problem.dtype}
    inputs, outputs = (problem.shape(size) for size in problem.features)
    x = torch.randn(inputs, generator=generator, **like)
    weight = torch.randn(problem.pattern, generator=generator, **like)
    weight /= math.sqrt(problem.pattern[2])  # so that the result is of the size of x
    return x, weight, torch.empty(outputs, **like)


def stand_ins(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """x and weight without memory, for compiling ahead."""
    like = {"device": "meta", "dtype": problem.dtype, "requires_grad": problem.section == "train"}
    x = torch.empty(problem.shape(problem.features[0]), **like)
    return x, torch.empty(problem.pattern, **like)


def pick(problem: Problem, t: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Some entries of the batch, (entries, features)."""
    return t[:, rows].mT if problem.batch_last else t[rows]


def exact(problem: Problem, x: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor):
    """Some rows of the product in float64."""
    points = pick(problem, x, rows).double()
    return reference.multiply(problem.pattern, points, weight.double(), False)


@contextmanager
def float32_products(problem: Problem) -> Iterator[None]:
    """torch's own products of float32 as accurate as kernlib's: in TF32 for ``tf32`` alone."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if problem.kind == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)

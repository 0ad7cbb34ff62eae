"""Products of float8 with scales: kernlib, its floor, and dense products of float8 and of bfloat16
by cuBLAS."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.common.harness import Row, Session, attempt
from benchmarks.common.timing import memory, relative_error, sample_rows
from kernlib import blocksparse

RATE = 1767e12  # operations/s of wgmma with e4m3
BLOCK = 128
MUST_TERAFLOPS = {0.5: 850.0}
MUST_ERROR = 4e-3  # float32 sums, rounded to bfloat16 once


class Scaled(NamedTuple):
    """A product with a matrix of ``n`` x ``n`` and ``n`` columns."""

    mode: str  # "dsd" or "dds nt", as a linear layer
    n: int
    density: float

    @property
    def name(self) -> str:
        return f"blocksparse {self.mode} {self.n} block={BLOCK} density={self.density:g} fp8"

    @property
    def operations(self) -> float:
        live = round(self.density * (self.n // BLOCK) ** 2)
        return 2.0 * live * BLOCK**2 * self.n

    def floor(self) -> tuple[float, str]:
        """Milliseconds, and what bounds them."""
        read = self.operations / (2.0 * self.n) + self.n**2
        moving = (read / memory().read + 2 * self.n**2 / memory().written) * 1e3
        computing = self.operations / RATE * 1e3
        return max(moving, computing), "memory" if moving >= computing else "tensor cores"


def problems() -> list[Scaled]:
    """All cases."""
    modes, densities = ("dsd", "dds nt"), (0.1, 0.25, 0.5)
    return [Scaled(mode, n, d) for n in (4096, 8192) for mode in modes for d in densities]


def measure(problem: Scaled, session: Session, device: str = "cuda") -> Row:
    n = problem.n
    layout = blocksparse.random(n, n, BLOCK, problem.density, device=device)
    values, scale = blocksparse.quantize(
        torch.randn(layout.capacity, BLOCK, BLOCK, device=device) / (n * problem.density) ** 0.5
    )
    x, own = blocksparse.quantize(torch.randn(n, n, device=device), -1)
    out = torch.empty(n, n, dtype=torch.bfloat16, device=device)
    is_layer, some = problem.mode != "dsd", sample_rows(n, device)
    whole = layout.to_dense(values.double() * scale.double()[:, None, None])
    wanted = _exact(whole, x.double() * own.double()[:, None], some, is_layer)

    def ours(out, values, x, scale, own):
        if is_layer:
            return blocksparse.scaled_dds(x, values, layout, own, scale, transpose_b=True, out=out)
        return blocksparse.scaled_dsd(values, x, layout, scale, own, transpose_b=True, out=out)

    def timed(call, buffers, wanted: torch.Tensor) -> tuple[float, float]:
        error = relative_error(call(*buffers)[some], wanted)
        return session.time(call, buffers), error

    out.fill_(math.nan)
    ms, error = timed(ours, (out, values, x, scale, own), wanted)
    row = Row(problem.name, "ms", ms, *problem.floor(), error=error)
    row.must_error = MUST_ERROR
    if problem.density in MUST_TERAFLOPS:
        row.must = problem.operations / (MUST_TERAFLOPS[problem.density] * 1e9)
    dense, rows = blocksparse.quantize(whole, -1)  # as cuBLAS takes it, a scale a row
    wanted = _exact(dense.double() * rows.double()[:, None], x.double() * own.double()[:, None],
                    some, is_layer)  # fmt: skip
    del whole
    for name, call, buffers in _rivals(dense, rows, x, own, is_layer):
        found = attempt(name, problem.name, partial(timed, call, buffers, wanted))
        if found is not None:
            row.rivals[name], row.rival_errors[name] = found
    return row


def _exact(weight, x, some, is_layer: bool) -> torch.Tensor:
    """Some rows of x times the weight's transpose, or of the transpose of that."""
    return x[some] @ weight.mT if is_layer else weight[some] @ x.mT


def _rivals(dense, scales, x, own, is_layer: bool) -> list[tuple]:
    left, right = ((x, own), (dense, scales)) if is_layer else ((dense, scales), (x, own))

    def scaled_mm(a, b, rows, columns):
        return torch._scaled_mm(a, b.mT, rows, columns, out_dtype=torch.bfloat16)

    wide = [(t.float() * s[:, None]).bfloat16() for t, s in (left, right)]
    given = left[0], right[0], left[1][:, None], right[1][None]
    return [
        ("cublas fp8", scaled_mm, given),
        ("cublas bf16", lambda a, b: a @ b.mT, tuple(wide)),
    ]

"""Calls with categories, and their values in float64, pair by pair."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

import kernlib as kl


class Case(NamedTuple):
    """Points with codes, and the tables of their features."""

    a: torch.Tensor
    b: torch.Tensor
    a_codes: torch.Tensor
    b_codes: torch.Tensor
    tables: list

    @property
    def codes(self) -> dict:
        return {"a_codes": self.a_codes, "b_codes": self.b_codes, "tables": self.tables}

    def run(self, descriptor, **values) -> torch.Tensor:
        return kl.run_kernel(descriptor, self.a, self.b, **self.codes, **values)


def drawn(m, n, k, sizes, dtype=torch.float64, codes=torch.int64, seed=0, device="cpu") -> Case:
    """Points of so many features, and a categorical one for each of ``sizes``."""
    made = torch.Generator().manual_seed(seed + 1000 * m + n)
    a, b = (torch.randn(rows, k, generator=made, dtype=torch.float64) for rows in (m, n))
    tables = [torch.rand(s, s, generator=made, dtype=torch.float64) for s in sizes]
    found = [
        torch.stack([torch.randint(0, s, (rows,), generator=made) for s in sizes], -1).to(codes)
        for rows in (m, n)
    ]
    a, b, *tables = (t.to(device, dtype) for t in (a, b, *tables))
    return Case(a, b, *(t.to(device) for t in found), tables)


def table_sums(case: Case) -> torch.Tensor:
    """What the tables add, (M, N) in float64, by every pair's own codes."""
    m, n = case.a_codes.shape[0], case.b_codes.shape[0]
    total = torch.zeros(m, n, dtype=torch.float64)
    for c, table in enumerate(case.tables):
        size, table = table.shape[0], table.double().cpu()
        rows, columns = (t[:, c].tolist() for t in (case.a_codes, case.b_codes))
        for i, code in enumerate(rows):
            for j, other in enumerate(columns):
                inside = 0 <= code < size and 0 <= other < size
                total[i, j] += table[code, other] if inside else math.nan
    return total


def sums(case: Case, p: float) -> torch.Tensor:
    """``sum_k |a - b|^p`` and what the tables add, in float64."""
    a, b = case.a.double().cpu(), case.b.double().cpu()
    return (a[:, None] - b).abs().pow(p).sum(-1) + table_sums(case)

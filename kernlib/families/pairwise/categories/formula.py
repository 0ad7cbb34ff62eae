"""A matrix with categories out of operators of torch and the kernel of its numerical sums:
differentiable in all of it, as often as is asked for, and as whoever records calls sees it."""

from __future__ import annotations

from functools import lru_cache

import torch

from kernlib.families.pairwise import checks
from kernlib.families.pairwise.categories.arguments import Tables
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.request import Request
from kernlib.families.pairwise.stages_reference import finish
from kernlib.run import run_kernel
from kernlib.runtime.dtypes import accumulator

_OF_SUMS = ("p", "inner_p", "inner_scale")


@lru_cache(maxsize=256)
def of_sums(descriptor: Pairwise) -> Pairwise:
    """The descriptor of the numerical features' sums alone."""
    return Pairwise(
        descriptor.operator,
        descriptor.inner,
        precision=descriptor.precision,
        direct=descriptor.direct,
    )


def matrix(request: Request, tables: Tables) -> torch.Tensor:
    """The matrix of a checked call in the arithmetic's dtype, (M, N), or (L, M, N) where something
    has a batch. ``out`` and ``accumulate`` are not looked at."""
    descriptor, a, b, _, _, row_offset, col_offset, values = request
    wide, diagonal = accumulator(a.dtype), row_offset - col_offset
    given = {name: values[name] for name in _OF_SUMS if name in values}
    sums = run_kernel(of_sums(descriptor), a.to(wide), b.to(wide), **given)
    s = sums + gathered(tables)
    flat = s.dim() == 2
    root = checks.follows_inner(descriptor, values)
    made = finish(descriptor, s[None] if flat else s, values, root=root, diagonal=diagonal)
    return made[0] if flat and made.shape[0] == 1 else made


def gathered(tables: Tables) -> torch.Tensor:
    """``sum_c tables[c][a_codes[m, c], b_codes[n, c]]``, (M, N) or (L, M, N); NaN where a code is
    outside its table."""
    total = None
    for feature, size in enumerate(tables.sizes):
        table = tables.table(feature)
        # Whose last row and column are where other codes lead.
        padded = torch.nn.functional.pad(table, (0, 1, 0, 1), value=float("nan"))
        places = (_inside(t[..., feature], size) for t in (tables.a_codes, tables.b_codes))
        found = _entries(padded, *places)
        total = found if total is None else total + found
    return total


def _inside(codes: torch.Tensor, size: int) -> torch.Tensor:
    return torch.where((codes >= 0) & (codes < size), codes, size).long()


def _entries(table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Rows, then columns, so that a gradient sorts no more than codes."""
    if table.dim() == rows.dim() + 1 == columns.dim() + 1 == 2:
        return table[rows][:, columns]
    batch = max(table.shape[0] if table.dim() == 3 else 1,
                *(t.shape[0] if t.dim() == 2 else 1 for t in (rows, columns)))  # fmt: skip
    several = torch.arange(batch, dtype=torch.int64, device=table.device)[:, None]
    table = table.expand(batch, *table.shape[-2:])
    found = table[several, rows.expand(batch, rows.shape[-1])]
    columns = columns.expand(batch, columns.shape[-1])
    return found.mT[several, columns].mT

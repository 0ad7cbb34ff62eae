"""Codes of categorical features and their tables: all that can be wrong with them, and the one form
that kernels and formulas take them in."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import torch

from kernlib.descriptors.base import shown
from kernlib.families.pairwise import checks, stages
from kernlib.families.pairwise.descriptor import CODES, Pairwise
from kernlib.families.pairwise.lowering.tables import MOST_ELEMENTS
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.numbers import extremes, host_value
from kernlib.runtime.tensors import check_dense, common_batch

CODE_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Tables(NamedTuple):
    """Codes (M, C) and (N, C), or with a batch in front, of int32 or int64; and the tables of all
    features, each row by row, one behind the other: (E,) or (L, E), in the arithmetic's dtype."""

    a_codes: torch.Tensor
    b_codes: torch.Tensor
    flat: torch.Tensor
    sizes: tuple[int, ...]  # categories of each feature

    def of_rows(self, rows: slice) -> Tables:
        """The tables for some points of a."""
        return self._replace(a_codes=self.a_codes[..., rows, :])

    def tensors(self) -> dict[str, torch.Tensor]:
        # By name: Dynamo of torch 2.8 follows no slice of a named tuple.
        return dict(zip(CODES, (self.a_codes, self.b_codes, self.flat), strict=True))

    def table(self, feature: int) -> torch.Tensor:
        """(S, S) or (L, S, S)."""
        starts = [0]
        for size in self.sizes:
            starts.append(starts[-1] + size * size)
        start, end = tuple(pairwise(starts))[feature]
        size = self.sizes[feature]
        return self.flat[..., start:end].view(*self.flat.shape[:-1], size, size)


def separate(descriptor: Pairwise, values: dict) -> tuple[tuple, dict]:
    """Codes and tables of a call, and its hyperparameters. Raises TypeError where one is missing,
    or for an unknown keyword in its place."""
    missing = [name for name in CODES if values.get(name) is None]
    if missing:
        checks.check_names(descriptor, values)  # one of these may be the missing one, misspelt
        raise TypeError(
            f"{descriptor.describe()} needs {', '.join(missing)}: the call is {descriptor.call}"
        )
    rest = {name: value for name, value in values.items() if name not in CODES}
    return tuple(values[name] for name in CODES), rest


def placed(
    descriptor: Pairwise, a: torch.Tensor, b: torch.Tensor | None, codes: tuple
) -> tuple[torch.Tensor, Tables]:
    """``a``, with the batch that codes or tables may have, and those in their one form.

    Raises TypeError and ValueError that name the argument.
    """
    checks.check_tensors(a, b, None)
    if b is None:
        raise ValueError("b is missing; for K(a, a) pass a and its codes twice")
    a_codes, b_codes, tables = codes
    count = descriptor.categories
    for name, coded, points, x in (("a_codes", a_codes, a, "a"), ("b_codes", b_codes, b, "b")):
        _check_codes(name, coded, points, x, count)
    sizes = _check_tables(tables, a, count)
    if a_codes.dtype != b_codes.dtype or a_codes.dtype not in CODE_TYPES[:2]:
        narrow = torch.int64 not in (a_codes.dtype, b_codes.dtype)
        dtype = torch.int32 if narrow else torch.int64
        a_codes, b_codes = a_codes.to(dtype), b_codes.to(dtype)
    record = Tables(a_codes, b_codes, _packed(tables, accumulator(a.dtype)), sizes)
    batch = _batch(a, b, record)
    if batch is not None and (a.dim() == 2 or a.shape[0] == 1):
        a = a.expand(batch, *a.shape[-2:])
    return a, record


def check_exponents(descriptor: Pairwise, values: dict) -> None:
    """Raises ValueError for p = inf as a number: a maximum is no sum."""
    if not isinstance(descriptor.inner, stages.Power):
        return
    for name in ("p", "inner_p"):
        value = values.get(name)
        if value is None:
            continue
        tensor = isinstance(value, torch.Tensor)
        if math.inf in (extremes(value) if tensor else (host_value(name, value),)):
            raise ValueError(f"{name} must be finite: tables add to sums, and inf has a maximum")


def _check_codes(name: str, codes, points: torch.Tensor, of: str, count: int) -> None:
    check_dense((name,), **{name: codes})
    if codes.dtype not in CODE_TYPES:
        names = ", ".join(str(t).removeprefix("torch.") for t in CODE_TYPES)
        raise TypeError(f"{name} must be one of {names}, got {codes.dtype}")
    if points.dim() not in (2, 3):
        raise ValueError(f"{of} must be (N, K) or (L, N, K), got shape {tuple(points.shape)}")
    if codes.dim() not in (2, 3) or codes.shape[-1] != count:
        raise ValueError(
            f"{name} must be (N, {count}) or (L, N, {count}), a code for each of the descriptor's "
            f"{count} categories, got shape {tuple(codes.shape)}"
        )
    if codes.shape[-2] != points.shape[-2]:
        raise ValueError(
            f"{name} must have a row for each of the {points.shape[-2]} points of {of}, got shape "
            f"{tuple(codes.shape)}"
        )
    _check_device(name, codes, points)


def _check_tables(tables, a: torch.Tensor, count: int) -> tuple[int, ...]:
    """The sizes of the tables."""
    if isinstance(tables, torch.Tensor):
        check_dense((), tables=tables)
        shape = tuple(tables.shape)
        if len(shape) not in (3, 4) or shape[-1] != shape[-2] or shape[-3] != count:
            raise ValueError(
                f"tables must be ({count}, S, S) or (L, {count}, S, S), a table for each of the "
                f"descriptor's {count} categories, or a list of {count} tables, got shape {shape}"
            )
        sizes, by_name = (shape[-1],) * count, {"tables": tables}
    else:
        if not isinstance(tables, (list, tuple)):
            raise TypeError(f"tables must be a tensor or a list of them, got {shown(tables)}")
        if len(tables) != count:
            raise ValueError(
                f"tables must be {count} tables, one for each of the descriptor's categories, got "
                f"{len(tables)}"
            )
        by_name = {f"tables[{place}]": table for place, table in enumerate(tables)}
        check_dense(tuple(by_name), **by_name)
        for name, table in by_name.items():
            if table.dim() != 2 or table.shape[0] != table.shape[1]:
                raise ValueError(f"{name} must be (S, S), got shape {tuple(table.shape)}")
        sizes = tuple(table.shape[0] for table in tables)
    if 0 in sizes:
        raise ValueError("tables must have a category each at least, got one of none")
    if sum(size * size for size in sizes) > MOST_ELEMENTS:
        raise ValueError(f"tables must have 2**30 - 1 entries at most, got sizes {sizes}")
    for name, table in by_name.items():
        _check_kind(name, table, a)
    return sizes


def _check_kind(name: str, table: torch.Tensor, a: torch.Tensor) -> None:
    allowed = tuple(dict.fromkeys((a.dtype, accumulator(a.dtype))))
    if table.dtype not in allowed:
        names = " or ".join(map(str, allowed))
        raise TypeError(f"{name} must be {names} for {a.dtype} inputs, got {table.dtype}")
    _check_device(name, table, a)


def _check_device(name: str, tensor: torch.Tensor, points: torch.Tensor) -> None:
    if tensor.device != points.device:
        raise ValueError(f"{name} must be on the inputs' device {points.device}, got "
                         f"{tensor.device}")  # fmt: skip


def _packed(tables, wide: torch.dtype) -> torch.Tensor:
    if isinstance(tables, torch.Tensor):
        return tables.to(wide).contiguous().flatten(-3)
    return torch.cat([table.to(wide).reshape(-1) for table in tables])


def _batch(a: torch.Tensor, b: torch.Tensor, made: Tables) -> int | None:
    """The batch of all of these, None if nothing has one. Raises ValueError when two differ."""
    sizes = {
        name: t.shape[0] for name, t in {"a": a, "b": b, **made.tensors()}.items()
        if t.dim() == (2 if name == "tables" else 3)
    }  # fmt: skip
    return common_batch(sizes) if sizes else None

"""What a log-sum-exp adds to rows and columns: the potentials of entropic optimal transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.reductions import arguments
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.tensors import check_dense


class Potentials(NamedTuple):
    """(M,) or (L, M), and (N,) or (L, N); None for zeros."""

    row_potential: torch.Tensor | None
    col_potential: torch.Tensor | None


def added(
    run: Callable, descriptor: Pairwise, a, b, potentials: Potentials, offsets: tuple[int, int]
) -> torch.Tensor:
    """``run(v, wide)``, a log-sum-exp of values plus v, with both potentials. Raises ValueError and
    TypeError that name a potential of another shape, dtype or device."""
    arguments.refuse_own_names("kernel_logsumexp", descriptor, Potentials._fields)
    arguments.check_tensors(descriptor, a, b, None)
    second = arguments.sides(descriptor, a, b, *offsets)[1]
    arguments.result_shape(a, second, None, {})
    for name, t, points in zip(Potentials._fields, potentials, (a, second), strict=True):
        if t is not None:
            _check(name, t, points, "a" if points is a and name != "col_potential" else "b")
    rows, columns = potentials
    wide = accumulator(a.dtype)
    if columns is not None:
        columns = columns.to(wide)
    if columns is None or columns.dim() == 1:
        result = run(columns, True)
    else:
        result = run(columns[..., None], True).squeeze(-1)
    if rows is not None:
        result = _plus(result, rows)
    is_wide = any(t is not None and t.dtype == wide for t in potentials)
    return result if is_wide else result.to(a.dtype)


def _check(name: str, t, points: torch.Tensor, side: str) -> None:
    check_dense((), **{name: t})
    count, letter = points.shape[-2], "M" if name == "row_potential" else "N"
    if t.dim() not in (1, 2):
        shapes = f"({letter},) or (L, {letter})"
        raise ValueError(f"{name} must be {shapes}, got shape {tuple(t.shape)}")
    if t.shape[-1] != count:
        raise ValueError(
            f"{name} must have a value for each of the {count} points of {side}, got shape "
            f"{tuple(t.shape)}"
        )
    wide = accumulator(points.dtype)
    if t.dtype not in (points.dtype, wide):
        dtypes = f"{wide}" if wide == points.dtype else f"{points.dtype} or {wide}"
        raise TypeError(f"{name} must be {dtypes} beside a of {points.dtype}, got {t.dtype}")
    if t.device != points.device:
        raise ValueError(f"{name} must be on the inputs' device {points.device}, got {t.device}")


def _plus(result: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A result with the potential of rows."""
    if result.dim() == rows.dim() == 2:
        batch, entries = result.shape[0], rows.shape[0]
        if batch != 1 and entries != 1 and batch != entries:
            raise ValueError(
                f"batches must be 1 or equal, got a result: {batch}, row_potential: {entries}"
            )
    return result + rows

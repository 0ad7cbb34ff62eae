"""What a log-sum-exp adds to rows and columns: the potentials of entropic optimal transport."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernlib.families.pairwise import per_point
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.reductions import arguments
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.tensors import check_dense


def added(
    run: Callable, descriptor: Pairwise, a, b, potentials: tuple, offsets: tuple[int, int]
) -> torch.Tensor:
    """``run(v, wide)``, a log-sum-exp of values plus v, with the potentials of rows, (M,) or
    (L, M), and of columns, (N,) or (L, N), each of which may be None. Raises ValueError and
    TypeError that name a potential of another shape, dtype or device."""
    rows, columns = potentials
    arguments.refuse_own_names("kernel_logsumexp", descriptor, per_point.POTENTIALS)
    arguments.check_tensors(descriptor, a, b, None)
    second = arguments.sides(descriptor, a, b, *offsets)[1]
    arguments.result_shape(a, second, None, {})
    sides = ("row_potential", rows, a, "a"), ("col_potential", columns, second, "b")
    for name, t, points, side in sides:
        if t is not None:
            _check(name, t, points, side)
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


def of_formula(run: Callable, descriptor, a, b, rows, columns) -> torch.Tensor:
    """``run(descriptor, a, b)`` of a formula, with the potentials of rows and of columns, each of
    which may be None. That of columns is one more tensor of the formula."""
    from kernlib.families.pairwise.formula import algebra  # most calls need none

    values = {}
    if columns is not None:
        check_dense(("col_potential",), col_potential=columns)
        descriptor = algebra.with_column(descriptor, _COLUMN)
        values[_COLUMN] = columns
    result = run(descriptor, a, b, **values)
    if rows is None:
        return result
    check_dense(("row_potential",), row_potential=rows)
    if rows.shape[-1] != result.shape[-1] or rows.device != result.device:
        raise ValueError(
            f"row_potential must have a value for each of the {result.shape[-1]} rows on "
            f"{result.device}, got shape {tuple(rows.shape)} on {rows.device}"
        )
    return result + rows


_COLUMN = "col_potential_"  # the name of a formula's tensor


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

"""Kronecker products of a matrix whose columns, or rows, are spread over processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

import kernlib
from kernlib.descriptors.base import shown
from kernlib.distributed.communicator import Processes, as_communicator
from kernlib.distributed.rows import autocast_of, replicated, rows_key, rows_texts, said, value_key
from kernlib.families.kronecker_product.matmul import as_factors
from kernlib.runtime.tensors import check_dense

if TYPE_CHECKING:
    from kernlib.distributed.communicator import Group


def kron_matmul(
    x: torch.Tensor,
    factors: Sequence[torch.Tensor],
    *,
    sharded: str = "columns",
    result: str | None = None,
    group: Group = None,
    precision: str | None = None,
) -> torch.Tensor:
    """This process's part of ``x (F1 ⊗ ... ⊗ FN)``.

    - ``x`` (M, in_r): this process's columns of all rows, or, with ``sharded="rows"``, some rows of
      all columns, (M_r, in). Columns follow each other by rank. Their numbers are those of
      :func:`kron_columns`: the rows of F1, or of as many leading factors as have a row for each
      process, are dealt out as ``torch.chunk`` deals them, with all columns of each.
    - ``factors``: matrices, two-dimensional, the same in all processes.
    - ``result``: how the result is dealt out, "columns" or "rows"; None as x is. From columns of x
      "rows" saves an exchange: this process gets all columns of its rows, which are dealt out as
      ``torch.chunk`` deals them. From rows of x there are only rows.
    - ``group``: as that of :func:`kernlib.distributed.kernel_matmul`; ``precision`` as that of
      :func:`kernlib.kron_matmul`.

    The result's columns are dealt out alike, by the columns of the factors. With columns, all
    factors but the leading ones are applied to what a process has. Then rows take the place of
    columns by one exchange, the leading factors follow, and another exchange gives each process its
    columns: each process sends ``(size - 1) / size`` of what it has, twice, or with
    ``result="rows"`` once. With rows of x nothing is exchanged but gradients of factors. float32,
    float16, bfloat16 and float64; differentiable by x and the factors, whose gradients are the sums
    of all processes'.

    Raises ValueError and TypeError, with columns in all processes, that name the rank and what
    differs, and what :func:`kernlib.kron_matmul` raises. The distributed product of the FastKron
    project is its model, which exchanges once for each group of factors, too.

    Example:
        >>> y = kl.distributed.kron_matmul(x, [f1, f2, f3])  # doctest: +SKIP
    """
    communicator = as_communicator(group)
    factors = as_factors(factors)

    def texts() -> dict[str, str]:
        return _texts(communicator, x, factors, sharded, result, precision)

    def key() -> tuple:
        return _key(x, factors, sharded, result, precision)

    if sharded == "rows":  # which needs nothing of the others
        communicator.checked("kron_matmul", texts, key)
        factors = [replicated(factor, communicator) for factor in factors]
        return kernlib.kron_matmul(x, factors, precision=precision)
    every = communicator.agree("kron_matmul", texts, lambda: tuple(x.shape), key)
    if communicator.size == 1:
        return kernlib.kron_matmul(x, factors, precision=precision)
    factors = [replicated(factor, communicator) for factor in factors]
    rows = [rows for rows, _ in every]
    if len(set(rows)) > 1:
        raise ValueError(f"x must have the same rows in all processes, got {rows} by rank")
    count = leading(factors, communicator.size)
    outer, inner = factors[:count], factors[count:]
    here, size = communicator.rank, communicator.size
    steps, lines = shares(math.prod(f.shape[0] for f in outer), size), shares(rows[0], size)
    columns = shares(math.prod(f.shape[1] for f in outer), size)
    if inner:
        within = math.prod(f.shape[0] for f in inner)
        x = kernlib.kron_matmul(x.reshape(-1, within), inner, precision=precision)
    width = math.prod(f.shape[1] for f in inner)
    x = _ToRows.apply(communicator, x.reshape(rows[0], steps[here], width), steps, lines)
    x = kernlib.kron_matmul(x, [f.mT for f in outer], side="left", precision=precision)
    if result == "rows":
        return x.reshape(lines[here], sum(columns) * width)
    return _ToColumns.apply(communicator, x, columns, lines).view(rows[0], columns[here] * width)


def kron_columns(factors: Sequence[torch.Tensor], size: int) -> tuple[list[int], list[int]]:
    """How many columns of x, and of the result, each process has for :func:`kron_matmul`, by rank.

    - ``factors``: matrices, of which the sizes count; ``size``: how many processes there are.

    Raises AttributeError for factors that are no tensors.

    Example:
        >>> kl.distributed.kron_columns([torch.zeros(3, 2), torch.zeros(5, 5)], 2)
        ([10, 5], [5, 5])
    """
    count = leading(factors, size)
    columns = []
    for side in (0, 1):
        outer, inner = (
            math.prod(factor.shape[side] for factor in part)
            for part in (factors[:count], factors[count:])
        )
        columns.append([step * inner for step in shares(outer, size)])
    return columns[0], columns[1]


def leading(factors: Sequence[torch.Tensor], size: int) -> int:
    """How many factors have a row for each of so many processes together, at least one."""
    count = 1
    while count < len(factors) and math.prod(f.shape[0] for f in factors[:count]) < size:
        count += 1
    return count


def shares(count: int, size: int) -> list[int]:
    """How many of ``count`` each of ``size`` processes has, as of ``torch.chunk``."""
    step = -(-count // size)
    return [max(0, min(step, count - step * rank)) for rank in range(size)]


class _ToRows(torch.autograd.Function):
    """Columns (M, n_r, width), of which each process has so many of ``steps``, become rows
    (m_r, n, width), of which it has so many of ``lines``."""

    @staticmethod
    def forward(ctx, communicator, x, steps, lines):
        ctx.request = communicator, steps, lines
        width, here = x.shape[2], communicator.rank
        sends = [n * steps[here] * width for n in lines]
        receives = [lines[here] * n * width for n in steps]
        received = communicator.exchange(x.contiguous().view(-1), sends, receives)
        parts = zip(received.split(receives), steps, strict=True)
        return torch.cat([part.view(lines[here], n, width) for part, n in parts], 1)

    @staticmethod
    def backward(ctx, grad):
        communicator, steps, lines = ctx.request
        return None, _ToColumns.apply(communicator, grad, steps, lines), None, None


class _ToColumns(torch.autograd.Function):
    """What :class:`_ToRows` undoes."""

    @staticmethod
    def forward(ctx, communicator, x, steps, lines):
        ctx.request = communicator, steps, lines
        width, here = x.shape[2], communicator.rank
        sends = [lines[here] * n * width for n in steps]
        receives = [n * steps[here] * width for n in lines]
        packed = x.new_empty(sum(sends))
        for part, columns in zip(packed.split(sends), x.split(steps, 1), strict=True):
            part.view(columns.shape).copy_(columns)
        received = communicator.exchange(packed, sends, receives)
        return received.view(sum(lines), steps[here], width)

    @staticmethod
    def backward(ctx, grad):
        communicator, steps, lines = ctx.request
        return None, _ToRows.apply(communicator, grad, steps, lines), None, None


def _key(x, factors, sharded: str, result, precision) -> tuple:
    """What the checks and the texts of a call depend on. Values of factors are compared, which
    takes time, where processes agree on them."""
    by = value_key if sharded == "columns" else rows_key
    parts = [(factor.shape, *by(factor)) for factor in factors]
    return repr((sharded, result, precision)), autocast_of(x), *rows_key(x), *parts


def _texts(communicator: Processes, x, factors, sharded: str, result, precision) -> dict[str, str]:
    """Raises what :func:`kernlib.kron_matmul` of no rows raises, and for other columns than this
    process has."""
    if sharded not in ("columns", "rows"):
        raise ValueError(f'sharded must be "columns" or "rows", got {shown(sharded)}')
    if result not in (None, "rows", sharded):
        also = '"columns", ' if sharded == "columns" else ""
        raise ValueError(f'result must be {also}"rows" or None here, got {shown(result)}')
    named = {f"factors[{place}]": factor for place, factor in enumerate(factors)}
    check_dense(("x", *named), x=x, **named)
    communicator.check_device("x", x)
    if not factors:
        raise ValueError("factors has none")
    for name, factor in named.items():
        if factor.dim() != 2:
            raise ValueError(f"{name} must be a matrix here, got shape {tuple(factor.shape)}")
    if x.dim() != 2:
        raise ValueError(f"x must be (rows, columns) here, got shape {tuple(x.shape)}")
    each = [math.prod(factor.shape[0] for factor in factors)] * communicator.size
    if sharded == "columns":
        each, _ = kron_columns(factors, communicator.size)
    if x.shape[1] != each[communicator.rank]:
        raise ValueError(
            f"x must have {each[communicator.rank]} columns in this process, of {each} by rank, "
            f"got {x.shape[1]}"
        )
    with torch.no_grad():
        kernlib.kron_matmul(
            x.new_empty((0, sum(each) if sharded == "columns" else each[0])),
            factors,
            precision=precision,
        )
    texts = {
        "sharded": sharded,
        "result": str(result or sharded),
        "precision": str(precision),
        "factors": str(len(factors)),
        "autocast": autocast_of(x),
    }
    for name, factor in named.items():
        texts[name] = f"{tuple(factor.shape)} {said(factor)}" if sharded == "columns" else ""
    of_x = rows_texts("x", x)
    return texts | {name: text for name, text in of_x.items() if "dimensions" not in name}

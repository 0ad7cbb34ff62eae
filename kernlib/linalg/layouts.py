"""Memory for LAPACK and cuSOLVER: batches of column-major matrices, in place or copied, no more
than one call takes.

A row-major a is the column-major a^T. Symmetric problems read its other triangle, LU solves with
the transposed factors, so neither needs a transposing copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

# A grid has at most 65,535 blocks in two of its dimensions, and cuSOLVER and cuBLAS spend one of
# these on the batch; larger batches fail, with an internal error or silently.
MOST = 32_768


class Work(NamedTuple):
    """Memory that a solver may overwrite."""

    matrix: torch.Tensor  # (L, rows, columns), each of them column-major
    transposed: bool  # matrix is the transpose of what was given
    home: torch.Tensor | None  # the tensor to copy the result to; None if matrix is its memory


def is_column_major(t: torch.Tensor) -> bool:
    """Whether elements of a column are neighbours, and columns do not overlap."""
    rows, columns = t.shape[-2:]
    return (rows <= 1 or t.stride(-2) == 1) and (columns <= 1 or t.stride(-1) >= max(rows, 1))


def leading_dimension(t: torch.Tensor) -> int:
    """Elements from one column of a column-major matrix to the next."""
    return t.stride(-1) if t.shape[-1] > 1 else max(t.shape[-2], 1)


def is_packed(t: torch.Tensor) -> bool:
    """Whether column-major matrices have no gaps within or between them."""
    return t.mT.is_contiguous()


def square_work(a: torch.Tensor, overwrite: bool) -> Work:
    """The matrices (..., N, N) of a, or a packed copy of them, whichever way round they lie."""
    by_rows = not is_column_major(a) and is_column_major(a.mT)
    matrix = a.mT if by_rows else a
    return _work(matrix, overwrite, by_rows)


def columns_work(b: torch.Tensor, batch: torch.Size, overwrite: bool) -> Work:
    """The right-hand sides (..., N, C) of b, or a packed copy of them, one set for each entry of
    ``batch``."""
    return _work(b.expand(*batch, *b.shape[-2:]), overwrite, False)


def side_by_side(b: torch.Tensor) -> torch.Tensor | None:
    """The columns of packed (L, N, C) as those of one matrix, (1, N, L*C); None where gaps are."""
    count, rows, columns = b.shape
    if not is_packed(b):
        return None
    return b.mT.reshape(1, count * columns, rows).mT


def spread(t: torch.Tensor, batch: torch.Size, wide: torch.Size) -> torch.Tensor:
    """The (L, ...) of a batch as those of a wider batch, matrices column-major."""
    if math.prod(batch) == math.prod(wide):
        return t
    transposed = t.mT if t.dim() == 3 else t
    tail = transposed.shape[1:]
    transposed = transposed.reshape(*batch, *tail).expand(*wide, *tail).reshape(-1, *tail)
    return transposed.mT if t.dim() == 3 else transposed


def _work(matrix: torch.Tensor, overwrite: bool, transposed: bool) -> Work:
    if overwrite and is_column_major(matrix):
        flat = _flat(matrix)
        if flat is not None:
            return Work(flat, transposed, None)
    rows, columns = matrix.shape[-2:]
    copy = torch.empty(
        (*matrix.shape[:-2], columns, rows), dtype=matrix.dtype, device=matrix.device
    )
    copy.copy_(matrix.mT)
    flat = copy.view(math.prod(matrix.shape[:-2]), columns, rows).mT
    return Work(flat, transposed, matrix if overwrite else None)


def _flat(t: torch.Tensor) -> torch.Tensor | None:
    """The (L, rows, columns) view of a tensor, None where its batch strides permit none."""
    try:
        return t.view(math.prod(t.shape[:-2]), *t.shape[-2:])
    except RuntimeError:
        return None


def give_back(work: Work, result: torch.Tensor) -> None:
    """Copy a result (L, rows, columns) to the memory it was to be written to."""
    if work.home is not None:
        work.home.copy_(result.view(work.home.shape))


def is_limited(t: torch.Tensor) -> bool:
    """Whether those libraries compute with a tensor."""
    return t.is_cuda


def by_parts(function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    """``function(*tensors)``, which answers a tensor or several, or writes in place and answers
    None. All tensors have one batch in front, that of the first without its last two dimensions."""
    batch = tensors[0].shape[:-2]
    count = batch.numel()
    if count <= MOST or not is_limited(tensors[0]):
        return function(*tensors)
    flat = [t.reshape(count, *t.shape[len(batch) :]).split(MOST) for t in tensors]
    parts = [function(*part) for part in zip(*flat, strict=True)]
    if parts[0] is None:
        return None
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(parts).unflatten(0, batch)
    return tuple(torch.cat(pieces).unflatten(0, batch) for pieces in zip(*parts, strict=True))

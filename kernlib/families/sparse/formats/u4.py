"""The format u4: a value and a step of 4 bits for each entry
(:mod:`kernlib.families.sparse.formats.slices`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kernlib.families.sparse.formats import slices
from kernlib.families.sparse.lowering import codes

CODE = codes.U4
FORMAT = CODE.name
TENSORS = slices.TENSORS


def encode(
    dense: torch.Tensor, width: int | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Tensors and facts of a matrix: see :func:`kernlib.families.sparse.formats.slices.encode`."""
    return slices.encode(CODE, dense, width)


def decode(
    tensors: Mapping[str, torch.Tensor],
    facts: Mapping[str, int],
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """The dense matrix, contiguous, bit for bit but for the sign of -0.0."""
    return slices.decode(CODE, tensors, facts, shape, dtype)


def nbytes(dense: torch.Tensor) -> int | None:
    """Bytes of what :func:`encode` would make; None for a matrix it refuses."""
    return slices.nbytes(CODE, dense)


def measure(dense: torch.Tensor, counts: torch.Tensor | None = None) -> torch.Tensor:
    """:func:`nbytes` as an int64 on the matrix's device, -1 for None, without a synchronisation.
    ``counts``, which other formats go by, are not needed."""
    return slices.measure(CODE, dense)


def check(
    tensors: Mapping[str, torch.Tensor],
    facts: Mapping[str, int],
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    """Raises ValueError, naming what is wrong, unless tensors and facts are of this format, shape
    and dtype."""
    slices.check(CODE, tensors, facts, shape, dtype)

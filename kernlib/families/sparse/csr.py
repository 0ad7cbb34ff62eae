"""Compressed matrices made from the three tensors of CSR, which are checked before they are
used."""

from __future__ import annotations

import torch

from kernlib.debug import eager_only
from kernlib.descriptors.base import shown, whole
from kernlib.families.sparse.formats.torch_layouts import of_rows
from kernlib.families.sparse.matrix import SparseMatrix, of_entries
from kernlib.runtime.tensors import check_dense, refuse_distributed


@eager_only
def from_csr(
    crow: torch.Tensor,
    col: torch.Tensor,
    values: torch.Tensor,
    shape: tuple[int, int],
    format: str = "auto",
    columns: int = 1,
    *,
    debug: bool = False,
) -> SparseMatrix:
    """A matrix in CSR form, compressed: :func:`kernlib.sparse.compress` of a matrix of a ``shape``
    (R, C) whose row ``r`` holds ``values[crow[r]:crow[r + 1]]`` in the columns ``col[crow[r]:crow[r
    + 1]]``, each of them once, in any order. ``values`` (nnz,) are float16, bfloat16 or float32,
    the indices ``crow`` (R + 1,) and ``col`` (nnz,) int32 or int64. ``format``, ``columns`` and
    ``debug`` are those of compress. No dense matrix is made: beside the result this takes some 300
    MB at most, and 60 bytes a row. The host waits for the device, since indices are checked before
    they are used.

    Raises TypeError for what is no dense tensor, and for a ``shape`` that is not two ints;
    ValueError for other dtypes, sizes and devices, and for indices that cannot be those of such a
    matrix; and what :func:`kernlib.sparse.compress` raises.

    Example:
        >>> crow, col, values = torch.tensor([0, 1, 3]), torch.tensor([1, 2, 0]), torch.ones(3)
        >>> kl.sparse.from_csr(crow, col, values, (2, 4), format="bitmap").to_dense()
        tensor([[0., 1., 0., 0.],
                [1., 0., 1., 0.]])
    """
    check_dense(("crow", "col", "values"), crow=crow, col=col, values=values)
    refuse_distributed(crow=crow, col=col, values=values)
    shape = _checked_shape(shape)
    if values.dim() != 1:
        raise ValueError(f"values must have one dimension, got shape {tuple(values.shape)}")
    return of_entries(of_rows(crow, col, values, shape), format, columns)


def _checked_shape(shape) -> tuple[int, int]:
    """Raises TypeError for what is not two ints, ValueError for sizes below 0."""
    sizes = tuple(map(whole, shape)) if isinstance(shape, (tuple, list)) else ()
    if len(sizes) != 2 or None in sizes:
        raise TypeError(f"shape must be two ints (rows, columns), got {shown(shape)}")
    if min(sizes) < 0:
        raise ValueError(f"shape must be (rows, columns) of at least 0, got {sizes}")
    return int(sizes[0]), int(sizes[1])

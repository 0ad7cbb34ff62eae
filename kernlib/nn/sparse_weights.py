"""The weights that :class:`kernlib.nn.SparseLinear` is made of, compressed."""

from __future__ import annotations

import torch
from torch import nn

from kernlib.families.sparse.formats.registry import check_format
from kernlib.families.sparse.layout import DTYPES
from kernlib.families.sparse.lowering.rates import check_columns
from kernlib.families.sparse.matrix import SparseMatrix, compressed, is_unpruned
from kernlib.families.sparse.prune import check_density, check_per, magnitude


def matrix_of(linear: nn.Linear, format, density, per, columns) -> SparseMatrix:
    """The weight of a layer, pruned if there is a density, and compressed. Raises as
    :meth:`SparseLinear.from_linear` does."""
    check_linear(linear)
    check_options(density, format, per, columns)
    weight = linear.weight.detach()
    if density is not None:
        weight = magnitude(weight, density, per)
    return counted(compressed(weight, format, columns), int(torch.count_nonzero(weight)))


def is_silently_dense(matrix: SparseMatrix, density, format) -> bool:
    """Whether a weight that nobody has pruned is kept dense, and nobody has said so."""
    return density is None and format == "auto" and is_unpruned(matrix)


def check_options(density, format, per, columns) -> None:
    """Raises TypeError or ValueError for arguments that are none, used or not."""
    if density is not None:
        check_density(density)
    check_format(format)
    check_per(per)
    check_columns(columns)


def check_linear(linear) -> None:
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"linear must be an nn.Linear, got {type(linear).__name__}")
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"the weight of linear must be a tensor, got {type(weight).__name__}")
    if nn.parameter.is_lazy(weight):
        raise ValueError("the weight is one of a lazy layer that has not been called: call it once")
    checked_dtype(weight.dtype)
    if weight.is_nested or weight.dim() != 2:
        shape = "a nested tensor" if weight.is_nested else f"shape {tuple(weight.shape)}"
        raise ValueError(f"the weight must be a matrix (out_features, in_features), got {shape}")
    if weight.is_meta:
        raise ValueError("the weight is on meta, without values to compress: load it first")


def checked_dtype(dtype: torch.dtype) -> torch.dtype:
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES.values():
        known = ", ".join(DTYPES)
        raise TypeError(f"a SparseLinear holds {known}, got {dtype} for dtype")
    return dtype


def counted(matrix: SparseMatrix, nnz: int | None) -> SparseMatrix:
    """A matrix whose number of entries is known, so that nobody counts them again."""
    return SparseMatrix(
        matrix.format, matrix.shape, matrix.dtype, matrix.tensors, matrix.facts, nnz
    )

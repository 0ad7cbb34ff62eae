"""The weights that :class:`kernlib.nn.SparseLinear` is made of, compressed; and the matrices of
tensors that were put in their place."""

from __future__ import annotations

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from kernlib.descriptors.base import shown
from kernlib.families.sparse.formats.encoding import check_columns, entries_in
from kernlib.families.sparse.formats.registry import check_format
from kernlib.families.sparse.layout import DTYPES, format_of, parse_layout
from kernlib.families.sparse.matrix import (
    SPARSE_LAYOUTS,
    SparseMatrix,
    compressed,
    is_unpruned,
)
from kernlib.families.sparse.matrix import rounded as in_dtype
from kernlib.families.sparse.prune import check_density, check_per, magnitude
from kernlib.families.sparse.tensors import loaded
from kernlib.nn.linears import plain_linear, refuse_stand_in
from kernlib.runtime.tensors import check_dense, check_layout, stand_ins


def matrix_of(linear: nn.Linear, format, density, per, columns) -> SparseMatrix | None:
    """The weight of a checked layer, pruned if there is a density, and compressed; None of one on
    meta. Raises as :meth:`SparseLinear.from_linear` does."""
    check_options(density, format, per, columns)
    weight = linear.weight.detach()
    if weight.is_meta:
        return None
    if density is not None:
        weight = magnitude(weight, density, per)
    matrix = compressed(weight, format, columns)
    if weight.layout in SPARSE_LAYOUTS:  # whose entries have been counted
        return matrix
    return counted(matrix, entries_in(weight))


def is_silently_dense(matrix: SparseMatrix | None, density, format) -> bool:
    """Whether an unpruned weight is kept dense without a request for that."""
    return density is None and format == "auto" and matrix is not None and is_unpruned(matrix)


def check_options(density, format, per, columns) -> None:
    """Raises TypeError or ValueError for invalid arguments, used or not."""
    if density is not None:
        check_density(density)
    check_format(format)
    check_per(per)
    check_columns(columns)


def check_linear(linear, density=None) -> nn.Linear:
    """The nn.Linear that a layer is. Raises TypeError and ValueError for one that has no weight to
    compress, after pruning if there is a density, or a bias that does not fit it."""
    linear = plain_linear(linear)
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"the weight of linear must be a tensor, got {type(weight).__name__}")
    if nn.parameter.is_lazy(weight):
        raise ValueError("the weight is one of a lazy layer that has not been called: call it once")
    checked_dtype(weight.dtype)
    if weight.is_nested or weight.dim() != 2:
        shape = "a nested tensor" if weight.is_nested else f"shape {tuple(weight.shape)}"
        raise ValueError(f"the weight must be a matrix (out_features, in_features), got {shape}")
    if density is not None or weight.layout not in SPARSE_LAYOUTS:
        check_layout("the weight", weight)
    refuse_stand_in(weight)
    check_bias(getattr(linear, "bias", None), weight)
    return linear


def check_bias(bias, weight: torch.Tensor | SparseMatrix) -> None:
    """Raises TypeError and ValueError for what is neither None nor a bias for a weight."""
    if bias is None:
        return
    check_dense(("bias",), bias=bias)
    rows = tuple(weight.shape[:1])
    if tuple(bias.shape) != rows:
        raise ValueError(f"bias must have shape {rows}, got {tuple(bias.shape)}")
    if bias.dtype != weight.dtype:
        raise TypeError(f"bias must be {weight.dtype} as the matrix is, got {bias.dtype}")
    if bias.device != weight.device:
        raise ValueError(f"bias must be on {weight.device} as the matrix is, got {bias.device}")


def checked_dtype(dtype: torch.dtype) -> torch.dtype:
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES.values():
        names = ", ".join(DTYPES)
        raise TypeError(f"dtype of a SparseLinear must be one of {names}, got {shown(dtype)}")
    return dtype


def counted(matrix: SparseMatrix, nnz: int | None) -> SparseMatrix:
    """A matrix whose number of entries is known, so that they are not counted again."""
    return SparseMatrix(
        matrix.format, matrix.shape, matrix.dtype, matrix.tensors, matrix.facts, nnz
    )


def restored(layout: str, tensors: dict[str, torch.Tensor]) -> SparseMatrix:
    """The matrix of a pickled layer, whose tensors are looked at as those of a state are, but where
    they have no values. Raises ValueError."""
    format, *kind, facts = parse_layout(layout)
    if not stand_ins(*tensors.values()) and not any(t.is_meta for t in tensors.values()):
        tensors = loaded(format, *kind, facts, tensors)
    return SparseMatrix.from_layout(layout, tuple(tensors[n] for n in format_of(format).TENSORS))


def rounded(matrix: SparseMatrix, dtype: torch.dtype) -> SparseMatrix:
    """:func:`kernlib.families.sparse.matrix.rounded`, with errors that speak of the layer."""
    dtype = checked_dtype(dtype)
    if matrix.device.type == "meta":
        raise TypeError(
            f"a SparseLinear on meta has no values to turn from {matrix.dtype} into {dtype}"
        )
    return in_dtype(matrix, dtype)


def of_others(matrix: SparseMatrix, tensors: dict[str, torch.Tensor]) -> SparseMatrix:
    """The matrix of other tensors than those held, by the names of the buffers."""
    if not is_dynamo_compiling():  # there the operator checks them when it runs
        check_dense(tuple(tensors), **tensors)
        tensors = {name: _untracked(name, tensor) for name, tensor in tensors.items()}
        if not stand_ins(*tensors.values()):
            from kernlib.families.sparse.fitted import fitted

            return fitted(matrix.layout, tuple(tensors.values()))
    return SparseMatrix.from_layout(matrix.layout, tuple(tensors.values()))


def _untracked(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor inside transforms of torch.func without those that compute gradients, to which the
    matrix is a constant. Raises RuntimeError for one that is mapped over."""
    functorch = torch._C._functorch
    while functorch.is_gradtrackingtensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    if functorch.is_batchedtensor(tensor):
        raise RuntimeError(f"torch.vmap maps the input of a SparseLinear, not its {name}")
    return tensor

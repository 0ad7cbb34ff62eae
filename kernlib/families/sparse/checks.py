"""Everything that can be wrong with a compressed matrix's product, said in the caller's words."""

from __future__ import annotations

import math

import torch

from kernlib.families.sparse.descriptor import SparseMatmul
from kernlib.families.sparse.layout import DTYPES
from kernlib.families.sparse.matrix import SparseMatrix
from kernlib.runtime.arguments import check_out, check_parameters
from kernlib.runtime.products import Call
from kernlib.runtime.tensors import check_dense, check_memory


def check_call(descriptor: SparseMatmul, operands: tuple, out, parameters: dict) -> Call:
    """Check everything that a signature decides. Raises ValueError and TypeError."""
    check_kinds(descriptor, operands)
    w, x = operands
    check_dense(("x",), x=x, out=out)
    shape = check_operands(w, x)
    check_parameters(descriptor, w.shape[0], parameters, x, look=True)
    if out is not None:
        check_out(out, x, shape)
        check_memory(out)
    return Call(math.prod(shape[:-1]), shape, x.dtype, x.device)


def check_kinds(descriptor: SparseMatmul, operands: tuple) -> None:
    """Raises TypeError for other operands than a compressed matrix and an x."""
    if len(operands) != 2:
        raise TypeError(f"{descriptor.describe()} takes w and x, got {len(operands)} operands")
    w = operands[0]
    if not isinstance(w, SparseMatrix):
        raise TypeError(
            f"w must be a SparseMatrix, as kernlib.sparse.compress makes, got {type(w).__name__}"
        )


def check_operands(w: SparseMatrix, x: torch.Tensor) -> tuple[int, ...]:
    """The output's shape. Sizes of x may be symbols. Raises ValueError and TypeError."""
    return check_x(w.shape, w.dtype, w.device, x)


def check_x(shape: tuple[int, int], dtype: torch.dtype, device, x: torch.Tensor) -> tuple:
    """The output's shape for x and a matrix of this shape, dtype and device. Raises ValueError and
    TypeError."""
    rows, cols = shape
    if x.dtype not in DTYPES.values():
        raise TypeError(f"x must be one of {', '.join(DTYPES)}, got {x.dtype}")
    if x.dtype != dtype:
        raise TypeError(f"x and w must have one dtype, got {x.dtype} and {dtype}")
    if x.device != device:
        raise ValueError(f"x and w must be on one device, got {x.device} and {device}")
    if x.dim() == 0 or x.shape[-1] != cols:
        raise ValueError(
            f"x must be (..., {cols}) for w of shape {(rows, cols)}, got shape {tuple(x.shape)}"
        )
    return (*x.shape[:-1], rows)

"""Everything that can be wrong with a compressed matrix's product, said in the caller's words."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from kernlib.descriptors.sparse import SparseMatmul
from kernlib.ops.hyperparameters import check_host, check_kind, check_tensor, host_value
from kernlib.ops.sparse_matrix import DTYPES, SparseMatrix
from kernlib.ops.tensors import check_dense, check_memory, check_out_shape


class Call(NamedTuple):
    """A checked call: ``columns`` is the product of x's leading dimensions."""

    columns: int
    out_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def check_call(descriptor: SparseMatmul, w: SparseMatrix, x, out, parameters: dict) -> Call:
    """Check everything that a signature decides. Raises ValueError and TypeError."""
    check_dense(("x",), x=x, out=out)
    shape = check_operands(w, x)
    check_parameters(descriptor, w.shape[0], parameters, x, look=True)
    if out is not None:
        check_out(out, x, shape)
        check_memory(out)
    return Call(math.prod(shape[:-1]), shape, x.dtype, x.device)


def check_matrix(w) -> None:
    """Raises TypeError for what is no compressed matrix."""
    if not isinstance(w, SparseMatrix):
        raise TypeError(
            f"w must be a SparseMatrix, as kernlib.sparse.compress makes, got {type(w).__name__}"
        )


def check_operands(w: SparseMatrix, x: torch.Tensor) -> tuple[int, ...]:
    """The output's shape. Raises ValueError and TypeError; sizes of x may be symbols."""
    return check_x(w.shape, w.dtype, w.device, x)


def check_x(shape: tuple[int, int], dtype: torch.dtype, device, x: torch.Tensor) -> tuple:
    """The output's shape for a matrix of such shape, dtype and device. Raises ValueError and
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


def check_parameters(
    descriptor: SparseMatmul, rows: int, parameters: dict, x: torch.Tensor, look: bool
) -> None:
    """Each parameter of the epilogue is given and fits; ``look`` at values in host memory. Raises
    ValueError and TypeError."""
    check_names(descriptor, parameters)
    for name, value in parameters.items():
        if name in descriptor.vectors:
            check_vector(rows, name, value, x)
        else:
            _check_scalar(descriptor, name, value, x, look)


def check_names(descriptor: SparseMatmul, parameters: dict) -> None:
    """Each parameter of the epilogue is given, and nothing else. Raises TypeError for what is none
    of them, ValueError for one that is missing."""
    needed = descriptor.parameters
    for name in parameters:
        if name not in needed:
            known = ", ".join(needed) or "none"
            raise TypeError(f"{name} is no argument of {descriptor.describe()}; it takes {known}")
    missing = [name for name in needed if name not in parameters]
    if missing:
        raise ValueError(f"{descriptor.describe()} needs {', '.join(missing)}")


def check_vector(rows: int, name: str, value, x: torch.Tensor) -> None:
    """A vector has a value for each row of w. Raises ValueError and TypeError."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        raise TypeError(
            f"{name} must be a dense tensor of shape ({rows},), got {type(value).__name__}"
        )
    if value.dim() != 1 or value.shape[0] != rows:
        raise ValueError(f"{name} must have shape ({rows},), got {tuple(value.shape)}")
    if value.dtype != x.dtype:
        raise TypeError(f"x and {name} must have one dtype, got {x.dtype} and {value.dtype}")
    if value.device != x.device:
        raise ValueError(f"x and {name} must be on one device, got {x.device} and {value.device}")


def _check_scalar(descriptor: SparseMatmul, name: str, value, x, look: bool) -> None:
    if not look and isinstance(value, (torch.SymInt, torch.SymFloat)):
        return
    number = host_value(name, value, 0)
    if number is not None:
        check_host(name, number, descriptor.positive)
        return
    if look and not torch._C._functorch.is_functorch_wrapped_tensor(value):
        check_tensor(name, value, descriptor.positive, dimensions=0)
    else:
        check_kind(name, value, 0)
    if value.device != x.device and value.device.type != "cpu":
        raise ValueError(f"{name} is on {value.device}, x on {x.device}")


def check_out(out: torch.Tensor, x: torch.Tensor, shape: tuple[int, ...]) -> None:
    """``out`` is what a call of x could return. Raises ValueError and TypeError."""
    check_out_shape(out, shape)
    if out.device != x.device:
        raise ValueError(f"out must be on the device of x, {x.device}, got {out.device}")
    if out.dtype != x.dtype:
        raise TypeError(f"out must be {x.dtype} as x is, got {out.dtype}")


def refuse_out_of_recorded(out) -> None:
    """Raises RuntimeError for an ``out`` of a call whose gradient is recorded."""
    if out is not None:
        raise RuntimeError(
            "out takes no result whose gradient is recorded: leave it out, detach the inputs, or "
            "call under torch.no_grad()"
        )

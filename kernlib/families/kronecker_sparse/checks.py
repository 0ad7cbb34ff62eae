"""Everything that can be wrong with a Kronecker-sparse call, said in the caller's words."""

from __future__ import annotations

import math

import torch

from kernlib.families.kronecker_sparse.descriptor import KroneckerSparse, KroneckerSparseChain
from kernlib.runtime.arguments import check_out, check_parameters, check_same_kind
from kernlib.runtime.dtypes import KERNEL_TYPES
from kernlib.runtime.products import Call
from kernlib.runtime.tensors import check_dense, check_memory

TYPES = (*KERNEL_TYPES, torch.float64)  # float64 is computed by torch


def check_call(descriptor: KroneckerSparse, operands: tuple, out, parameters: dict) -> Call:
    """Check everything that a signature decides. Raises ValueError and TypeError."""
    check_kinds(descriptor, operands)
    x, weight = operands
    check_dense(("x", "weight"), x=x, weight=weight, out=out)
    shape = check_operands(descriptor.pattern, descriptor.batch_last, x, weight)
    check_parameters(descriptor, descriptor.out_features, parameters, x, True, TYPES)
    if out is not None:
        check_out(out, x, shape)
        check_memory(out)
    return Call(math.prod(shape) // descriptor.out_features, shape, x.dtype, x.device)


def check_operands(pattern: tuple, batch_last: bool, x, weight) -> tuple[int, ...]:
    """The output's shape. Raises ValueError and TypeError; sizes may be symbols."""
    check_same_kind("x", x, "weight", weight, TYPES)
    if tuple(weight.shape) != tuple(pattern):
        raise ValueError(
            f"weight must have shape {tuple(pattern)}, the pattern, got {tuple(weight.shape)}"
        )
    a, b, c, d = pattern
    if x.dim() == 0 or x.shape[0 if batch_last else -1] != a * c * d:
        expected = f"({a * c * d}, ...)" if batch_last else f"(..., {a * c * d})"
        raise ValueError(
            f"x must be {expected} for the pattern {tuple(pattern)}, got shape {tuple(x.shape)}"
        )
    return (a * b * d, *x.shape[1:]) if batch_last else (*x.shape[:-1], a * b * d)


def check_gradient(grad, x, pattern: tuple[int, ...], batch_last: bool) -> None:
    """The operands of a weight's gradient fit its pattern and each other. Raises ValueError and
    TypeError; sizes of the batch may be symbols."""
    check_dense(("grad", "x"), grad=grad, x=x)
    check_same_kind("x", x, "grad", grad, TYPES)
    a, b, c, d = pattern
    axis = 0 if batch_last else -1
    for name, tensor, wanted in (("grad", grad, a * b * d), ("x", x, a * c * d)):
        if tensor.dim() == 0 or tensor.shape[axis] != wanted:
            raise ValueError(
                f"{name} must have {wanted} features for the pattern {tuple(pattern)}, got shape "
                f"{tuple(tensor.shape)}"
            )
    batches = [t.shape[1:] if batch_last else t.shape[:-1] for t in (grad, x)]
    if batches[0] != batches[1]:
        raise ValueError(
            f"grad and x must have one batch, got {tuple(grad.shape)} and {tuple(x.shape)}"
        )


def check_kinds(descriptor: KroneckerSparse | KroneckerSparseChain, operands: tuple) -> None:
    """An x and one weight a factor. Raises TypeError."""
    count = len(descriptor.factors)
    if len(operands) != 1 + count:
        expected = "one weight" if count == 1 else f"{count} weights, one a factor in its order"
        given = f"got {len(operands) - 1}" if operands else "got neither"
        raise TypeError(f"{descriptor.describe()} takes x and {expected}, {given}")

"""Everything that can be wrong with a Kronecker product, said in the caller's words."""

from __future__ import annotations

import math

import torch

from kernlib.families.kronecker_product.descriptor import KroneckerProduct
from kernlib.runtime.arguments import (
    check_broadcast,
    check_out,
    check_parameters,
    check_same_kind,
)
from kernlib.runtime.dtypes import KERNEL_TYPES
from kernlib.runtime.products import Call
from kernlib.runtime.tensors import broadcast_shapes, check_dense, check_memory, check_out_shape

TYPES = (*KERNEL_TYPES, torch.float64)


def names(operands: tuple) -> tuple[str, ...]:
    """What errors call the operands."""
    return "x", *(f"factors[{index}]" for index in range(len(operands) - 1))


def check_kinds(descriptor: KroneckerProduct, operands: tuple) -> None:
    """An x and one factor for each shape, all of them dense tensors. Raises TypeError."""
    count = len(descriptor.shapes)
    if len(operands) != 1 + count:
        expected = "one factor" if count == 1 else f"{count} factors in their order"
        given = f"got {len(operands) - 1}" if operands else "got neither"
        raise TypeError(f"{descriptor.describe()} takes x and {expected}, {given}")
    known = names(operands)
    check_dense(known, **dict(zip(known, operands, strict=True)))


def check_call(descriptor: KroneckerProduct, operands: tuple, out, parameters: dict) -> Call:
    """Check everything that a signature decides. Raises ValueError and TypeError."""
    check_kinds(descriptor, operands)
    x = operands[0]
    shape = check_operands(descriptor, operands)
    check_parameters(descriptor, descriptor.out_features, parameters, x, True, TYPES, shape)
    if out is not None:
        check_dense((), out=out)
        check_out(out, x, shape)
        check_memory(out)
    return Call(math.prod(shape) // descriptor.out_features, shape, x.dtype, x.device)


def as_matrix(
    descriptor: KroneckerProduct, operands: tuple, out, parameters: dict
) -> tuple[tuple, torch.Tensor | None, dict]:
    """Operands with a vector x as one row or column, ``out`` as a matrix of the same kind, and the
    parameters for that. Raises what :func:`check_call` raises."""
    check_kinds(descriptor, operands)
    other = -3 - descriptor.axis  # the dimension that the vector lacks
    operands = operands[0].unsqueeze(other), *operands[1:]
    parameters = dict(parameters)
    for name in descriptor.summands:
        value = parameters.get(name)
        if isinstance(value, torch.Tensor) and value.dim():
            check_broadcast((descriptor.out_features,), name, value)
            parameters[name] = value.unsqueeze(other)
    if out is None:
        return operands, None, parameters
    check_dense((), out=out)
    shape = list(check_operands(descriptor, operands))
    del shape[other]
    check_out_shape(out, tuple(shape))
    return operands, out.unsqueeze(other), parameters


def check_operands(descriptor: KroneckerProduct, operands: tuple) -> tuple[int, ...]:
    """The output's shape, for an x with two dimensions or more. Sizes may be symbols. Raises
    ValueError and TypeError."""
    x, *factors = operands
    axis, features = descriptor.axis, descriptor.in_features
    if x.dim() < 2 or x.shape[axis] != features:
        expected = f"(..., {features})" if axis == -1 else f"({features},) or (..., {features}, M)"
        raise ValueError(
            f"x must be {expected} for {descriptor.describe()}, got shape {tuple(x.shape)}"
        )
    batches = [x.shape[:-2]]
    pairs = zip(factors, descriptor.factor_shapes, strict=True)
    for index, (factor, expected) in enumerate(pairs):
        name = f"factors[{index}]"
        check_same_kind("x", x, name, factor, TYPES)
        if factor.dim() < 2 or tuple(factor.shape[-2:]) != expected:
            raise ValueError(
                f"{name} must have shape {expected}, or a batch of it, got {tuple(factor.shape)}"
            )
        batches.append(factor.shape[:-2])
    batch = _broadcast(batches, names(operands))
    rows = x.shape[-3 - axis]  # the other of the last two
    ends = (rows, descriptor.out_features) if axis == -1 else (descriptor.out_features, rows)
    return (*batch, *ends)


def _broadcast(batches: list, known: tuple[str, ...]) -> tuple[int, ...]:
    try:
        return broadcast_shapes(*batches)
    except RuntimeError:
        named = zip(known, batches, strict=True)
        shown = ", ".join(f"{name} {tuple(batch)}" for name, batch in named if len(batch))
        raise ValueError(
            "dimensions in front of the last two must broadcast, those of x and of each factor, "
            f"got {shown}"
        ) from None

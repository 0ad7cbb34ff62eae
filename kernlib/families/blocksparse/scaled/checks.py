"""Everything that can be wrong with a scaled block-sparse product, said in the caller's words."""

from __future__ import annotations

import math

import torch

from kernlib.families.blocksparse import checks
from kernlib.families.blocksparse.scaled.descriptor import BlockSparseScaledMatmul
from kernlib.runtime.arguments import check_broadcast, check_names, check_same_kind
from kernlib.runtime.products import Call
from kernlib.runtime.tensors import check_dense, check_memory, check_out_shape

STORAGE = torch.float8_e4m3fn
NAMES = ("scale_a", "scale_b")


def check_kinds(descriptor: BlockSparseScaledMatmul, operands: tuple) -> None:
    """A layout, two tensors and their scales. Raises TypeError."""
    if len(operands) != 5:
        raise TypeError(
            f"{descriptor.describe()} takes layout, a, b, scale_a and scale_b, got "
            f"{len(operands)} operands"
        )
    layout, *tensors = operands
    checks.check_layout(layout)
    names = (*checks.OPERANDS[descriptor.mode], *NAMES)
    check_dense(names, **dict(zip(names, tensors, strict=True)))


def check_call(descriptor: BlockSparseScaledMatmul, operands: tuple, out, parameters) -> Call:
    """Check everything that a signature decides. Raises ValueError and TypeError."""
    check_kinds(descriptor, operands)
    check_names(descriptor, parameters)
    shape, dtype = check_operands(descriptor, operands), getattr(torch, descriptor.out_dtype)
    device = operands[1].device
    if out is not None:
        check_dense((), out=out)
        check_result(out, shape, dtype, device)
        check_memory(out)
    return Call(math.prod(shape), shape, dtype, device)


def check_result(out: torch.Tensor, shape: tuple[int, ...], dtype, device: torch.device) -> None:
    """``out`` is what a call could return. Raises ValueError and TypeError."""
    check_out_shape(out, shape)
    if out.device != device:
        raise ValueError(f"out must be on the device of a, {device}, got {out.device}")
    if out.dtype != dtype:
        raise TypeError(f"out must be {dtype}, the descriptor's out_dtype, got {out.dtype}")


def check_operands(descriptor: BlockSparseScaledMatmul, operands: tuple) -> tuple[int, ...]:
    """The result's shape. Raises ValueError and TypeError; sizes may be symbols."""
    layout, a, b, *scales = operands
    named = list(zip(checks.OPERANDS[descriptor.mode], (a, b), strict=True))
    for name, t in named:
        if t.dtype != STORAGE:
            raise TypeError(
                f"{name} must be {STORAGE}, got {t.dtype}; kernlib.blocksparse.quantize makes it"
            )
    check_same_kind(*named[0], *named[1])
    shape = checks.shape_of(descriptor, layout, a, b)
    for name, scale in zip(NAMES, scales, strict=True):
        if scale.dtype != torch.float32:
            raise TypeError(f"{name} must be torch.float32, got {scale.dtype}")
        if scale.device != a.device:
            raise ValueError(f"{name} must be on the device of a, {a.device}, got {scale.device}")
    stored, dense = (0, 1) if descriptor.mode == "dsd" else (1, 0)
    wanted = tuple((a, b)[stored].shape[:-2])
    if tuple(scales[stored].shape) != wanted:
        raise ValueError(
            f"{NAMES[stored]} must have a scale for each slot of the values, {wanted}, got "
            f"{tuple(scales[stored].shape)}"
        )
    check_broadcast(columns_shape(descriptor, shape), NAMES[dense], scales[dense])
    return shape


def columns_shape(descriptor: BlockSparseScaledMatmul, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a result's shape that of the scales of its columns: what is no line of op(S)."""
    return (*shape[:-2], shape[-3 - descriptor.axis])

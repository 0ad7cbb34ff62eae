"""Plans of scaled block-sparse products: the problem that lowering sees, and its kernel, loaded."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch

from kernlib.families.blocksparse import plans
from kernlib.families.blocksparse.layout import NAMES, Layout
from kernlib.families.blocksparse.lowering import scaled
from kernlib.families.blocksparse.lowering.problem import Spmm
from kernlib.families.blocksparse.lowering.scaled import Scales
from kernlib.families.blocksparse.scaled import checks, reference
from kernlib.families.blocksparse.scaled.descriptor import BlockSparseScaledMatmul
from kernlib.lowering.steps import Lowered
from kernlib.runtime.arguments import address_of
from kernlib.runtime.devices import arch_of, lower_on
from kernlib.runtime.products import Call, ProductPlan, make_plan


class Read(NamedTuple):
    """How a kernel reads a call's tensors: whether values and the dense operand are copied so that
    the sum runs along neighbours, to which shapes scales are expanded, or None, and whether a given
    ``out`` is written by a copy."""

    copies: tuple[bool, bool]
    slots: tuple[int, ...] | None
    columns: tuple[int, ...] | None
    apart: bool


class Parts(NamedTuple):
    """A call's tensors by what they are, and whether the dense operand's last dimension is what is
    summed over."""

    values: torch.Tensor
    dense: torch.Tensor
    slots: torch.Tensor
    columns: torch.Tensor
    is_deep: bool


def parts_of(descriptor: BlockSparseScaledMatmul, operands: tuple) -> Parts:
    _, a, b, scale_a, scale_b = operands
    if descriptor.mode == "dsd":
        return Parts(a, b, scale_a, scale_b, descriptor.transpose_b)
    return Parts(b, a, scale_b, scale_a, not descriptor.transpose_a)


def problem_of(
    call: Call, descriptor: BlockSparseScaledMatmul, operands: tuple, out
) -> tuple[Spmm, Scales, Read] | None:
    """The problem of a checked call in pairs, strides of its scales, and how tensors are read; None
    for what is not summed along rows of stored blocks, or of other blocks."""
    layout, made = operands[0], parts_of(descriptor, operands)
    if layout.block != (scaled.BLOCK,) * 2 or descriptor.transposed != (descriptor.mode == "dds"):
        return None
    copies = not _is_pairs(made.values, -1), not _is_pairs(made.dense, _depth(made))
    values = _new(made.values, -1) if copies[0] else made.values
    dense = _new(made.dense, _depth(made)) if copies[1] else made.dense
    given = (values, dense) if descriptor.mode == "dsd" else (dense, values)
    found, read = plans.problem_of(call, descriptor, (layout, *given), out, {})
    pairs = None if any(read.copies) else scaled.in_pairs(found)
    if pairs is None:
        return None
    columns = checks.columns_shape(descriptor, call.out_shape)
    slots = (*call.out_shape[: len(columns) - 1 - (layout.heads is not None)], layout.capacity)
    is_one, is_scalar = math.prod(made.slots.shape[:-1]) == 1, made.columns.numel() == 1
    head = call.out_shape[-1 if descriptor.mode == "dsd" else -2]
    batch = head * (layout.heads or 1)
    steps = (0, 0, 0) if is_scalar else (batch, head if layout.heads else 0, 1)
    return (
        pairs,
        Scales(0 if is_one else layout.capacity, *steps),
        Read(copies, None if is_one else slots, None if is_scalar else columns, read.apart),
    )


def plan(call: Call, descriptor, operands: tuple, out, parameters: dict) -> ProductPlan:
    """The plan of a checked call on CUDA tensors, its kernel loaded."""
    layout, a, b, *scales = operands
    device = a.get_device()
    arch = arch_of(device)  # one too old is refused for an empty result as well
    tensors, request = (a, b, *layout.tensors, *scales), (descriptor, operands, out, parameters)
    names = (*NAMES, "values", "dense", *scaled.SCALES)
    found = problem_of(call, descriptor, operands, out) if call.batch else None
    lowered = lower_on(lambda count: lower(found, arch, count), device)
    if not lowered.steps:
        return make_plan(tensors, call, request, _nowhere, names, None, False, _by_torch)
    read = found[2]
    place = partial(_place, descriptor, read)
    return make_plan(tensors, call, request, place, names, lowered, read.apart)


def lower(found: tuple[Spmm, Scales, Read] | None, arch: str, multiprocessors: int) -> Lowered:
    """The launches of what :func:`problem_of` found; none where torch computes."""
    if found is None or not scaled.takes(found[0], arch):
        return Lowered(())
    return scaled.lower(*found[:2], multiprocessors)


def _place(descriptor, read: Read, operands: tuple) -> tuple[list[int], list]:
    """Addresses of what the kernel reads, and the tensors."""
    layout: Layout = operands[0]
    values, dense, slots, columns, is_deep = parts_of(descriptor, operands)
    if read.copies[0]:
        values = values.contiguous()
    if read.copies[1]:
        dense = dense.contiguous() if is_deep else dense.mT.contiguous()
    slots = (slots if read.slots is None else slots.expand(read.slots)).contiguous()
    if read.columns is not None:
        columns = columns.expand(read.columns).contiguous()
    kept = [values, dense, slots, columns]
    return [*layout.addresses, *(t.data_ptr() for t in kept)], kept


def _nowhere(operands: tuple) -> tuple[list[int], None]:
    return [], None


def _by_torch(descriptor, operands: tuple, values: dict, out) -> torch.Tensor:
    return reference.scaled_matmul(descriptor, *operands)


def _depth(made: Parts) -> int:
    """The dimension of the dense operand that is summed over."""
    return -1 if made.is_deep else -2


def _is_pairs(t: torch.Tensor, dim: int) -> bool:
    """Whether neighbours along a dimension lie side by side, and all else at whole 16 bytes."""
    others = [n for i, n in enumerate(t.stride()) if i != t.dim() + dim and t.shape[i] > 1]
    return t.stride(dim) == 1 and address_of(t) % 16 == 0 and not any(n % 16 for n in others)


def _new(t: torch.Tensor, dim: int) -> torch.Tensor:
    """What a copy is like of which a dimension is contiguous."""
    shape = list(t.shape) if dim == -1 else [*t.shape[:-2], t.shape[-1], t.shape[-2]]
    made = torch.empty(shape, dtype=t.dtype, device="meta")
    return made if dim == -1 else made.mT

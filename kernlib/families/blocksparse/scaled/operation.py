"""Scaled block-sparse products as they are called: what is checked, which kernel is planned, and
what torch computes, which is CPU tensors, calls inside transforms of torch.func, calls whose
gradient is recorded and whatever the kernel does not take."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from kernlib.families.blocksparse import checks, plans
from kernlib.families.blocksparse.checks import FLOAT8, LAYOUT_NAMES
from kernlib.families.blocksparse.kernels import scaled
from kernlib.families.blocksparse.kernels.scaled import SCALED, Scales
from kernlib.families.blocksparse.layout import NAMES as TENSORS
from kernlib.families.blocksparse.layout import Layout
from kernlib.families.blocksparse.lowering.problem import Scope, Spmm
from kernlib.families.blocksparse.scaled import reference
from kernlib.families.blocksparse.scaled.descriptor import BlockSparseScaledMatmul
from kernlib.lowering import kernel
from kernlib.lowering.kernel import Gpu
from kernlib.lowering.steps import Lowered
from kernlib.runtime import products
from kernlib.runtime.arguments import (
    address_of,
    check_broadcast,
    check_names,
    check_same_kind,
    refuse_out_of_recorded,
)
from kernlib.runtime.devices import arch_of, lower_on
from kernlib.runtime.operation import KERNELS, REFERENCE, by_operator
from kernlib.runtime.products import Call, ProductPlan, front_door, make_plan
from kernlib.runtime.tensors import (
    UNREADABLE,
    check_dense,
    check_memory,
    check_out_shape,
    is_wrapped,
    signature,
    stand_ins,
)

if TYPE_CHECKING:
    from kernlib.jit.spec import KernelSpec
    from kernlib.runtime.ahead import Planned

SCALES = ("scale_a", "scale_b")


# Checks, in the caller's words.


def check_kinds(descriptor: BlockSparseScaledMatmul, operands: tuple) -> None:
    """A layout, two tensors and their scales. Raises TypeError."""
    if len(operands) != 5:
        raise TypeError(
            f"{descriptor.describe()} takes layout, a, b, scale_a and scale_b, got "
            f"{len(operands)} operands"
        )
    layout, *tensors = operands
    checks.check_layout(layout)
    names = (*checks.OPERANDS[descriptor.mode], *SCALES)
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
        if t.dtype != FLOAT8:
            raise TypeError(
                f"{name} must be {FLOAT8}, got {t.dtype}; kernlib.blocksparse.quantize makes it"
            )
    check_same_kind(*named[0], *named[1])
    shape = checks.shape_of(descriptor, layout, a, b)
    for name, scale in zip(SCALES, scales, strict=True):
        if scale.dtype != torch.float32:
            raise TypeError(f"{name} must be torch.float32, got {scale.dtype}")
        if scale.device != a.device:
            raise ValueError(f"{name} must be on the device of a, {a.device}, got {scale.device}")
    stored, dense = (0, 1) if descriptor.mode == "dsd" else (1, 0)
    slots = tuple((a, b)[stored].shape[:-2])
    if tuple(scales[stored].shape) != slots:
        raise ValueError(
            f"{SCALES[stored]} must have a scale for each slot of the values, {slots}, got "
            f"{tuple(scales[stored].shape)}"
        )
    check_broadcast(_columns_shape(descriptor, shape), SCALES[dense], scales[dense])
    return shape


def _columns_shape(descriptor: BlockSparseScaledMatmul, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the column scales of a result: its shape without the dimension of op(S)'s
    lines."""
    return (*shape[:-2], shape[-3 - descriptor.axis])


# The plan.


class Read(NamedTuple):
    """How a kernel reads a call's tensors: whether values and the dense operand are copied so that
    the sum runs along neighbours, to which shapes scales are expanded, or None, and whether a given
    ``out`` is written by a copy."""

    copies: tuple[bool, bool]
    slots: tuple[int, ...] | None
    columns: tuple[int, ...] | None
    apart: bool


class Parts(NamedTuple):
    """A call's tensors by their roles, and whether the sum runs over the dense operand's last
    dimension."""

    values: torch.Tensor
    dense: torch.Tensor
    slots: torch.Tensor
    columns: torch.Tensor
    is_deep: bool


def _parts(descriptor: BlockSparseScaledMatmul, operands: tuple) -> Parts:
    _, a, b, scale_a, scale_b = operands
    if descriptor.mode == "dsd":
        return Parts(a, b, scale_a, scale_b, descriptor.transpose_b)
    return Parts(b, a, scale_b, scale_a, not descriptor.transpose_a)


def problem_of(
    call: Call, descriptor: BlockSparseScaledMatmul, operands: tuple, out
) -> tuple[Spmm, Scales, Read] | None:
    """The problem of a checked call in pairs, strides of its scales, and how tensors are read. None
    for sums that do not run along rows of stored blocks, and for other blocks."""
    layout, parts = operands[0], _parts(descriptor, operands)
    if layout.block != (scaled.BLOCK,) * 2 or descriptor.transposed != (descriptor.mode == "dds"):
        return None
    copies = not _is_pairs(parts.values, -1), not _is_pairs(parts.dense, _depth(parts))
    values = _copy_of(parts.values, -1) if copies[0] else parts.values
    dense = _copy_of(parts.dense, _depth(parts)) if copies[1] else parts.dense
    pair = (values, dense) if descriptor.mode == "dsd" else (dense, values)
    problem, read = plans.problem_of(call, descriptor, (layout, *pair), out, {})
    in_pairs = None if any(read.copies) else scaled.in_pairs(problem)
    if in_pairs is None:
        return None
    columns = _columns_shape(descriptor, call.out_shape)
    slots = (*call.out_shape[: len(columns) - 1 - (layout.heads is not None)], layout.capacity)
    is_one, is_scalar = math.prod(parts.slots.shape[:-1]) == 1, parts.columns.numel() == 1
    head = call.out_shape[-1 if descriptor.mode == "dsd" else -2]
    batch = head * (layout.heads or 1)
    steps = (0, 0, 0) if is_scalar else (batch, head if layout.heads else 0, 1)
    return (
        in_pairs,
        Scales(0 if is_one else layout.capacity, *steps),
        Read(copies, None if is_one else slots, None if is_scalar else columns, read.apart),
    )


def _plan(call: Call, descriptor, operands: tuple, out, parameters: dict) -> ProductPlan:
    """The plan of a checked call on CUDA tensors, its kernel loaded."""
    device = operands[1].get_device()
    arch = arch_of(device)  # an old device is refused for an empty result too
    tensors, request = _tensors(operands), (descriptor, operands, out, parameters)
    names = (*TENSORS, "values", "dense", *scaled.SCALES)
    problem = problem_of(call, descriptor, operands, out) if call.batch else None
    lowered = lower_on(lambda count: _lower(problem, arch, count), device)
    if not lowered.steps:
        return make_plan(tensors, call, request, _nowhere, names, None, False, _by_torch)
    read = problem[2]
    place = partial(_place, descriptor, read)
    return make_plan(tensors, call, request, place, names, lowered, read.apart)


def _lower(problem: tuple[Spmm, Scales, Read] | None, arch: str, multiprocessors: int) -> Lowered:
    """The launches of what :func:`problem_of` returned; none where torch computes."""
    gpu = Gpu(arch, multiprocessors)
    option = kernel.choose((SCALED,), problem[0], gpu) if problem else None
    if option is None:
        return Lowered(())
    return option.kernel.launch(problem[1], problem[0], gpu, option.knobs)


def _place(descriptor, read: Read, operands: tuple) -> tuple[list[int], list]:
    """Addresses of what the kernel reads, and the tensors."""
    layout: Layout = operands[0]
    values, dense, slots, columns, is_deep = _parts(descriptor, operands)
    if read.copies[0]:
        values = values.contiguous()
    if read.copies[1]:
        dense = dense.contiguous() if is_deep else dense.mT.contiguous()
    slots = (slots if read.slots is None else slots.expand(read.slots)).contiguous()
    if read.columns is not None:
        columns = columns.expand(read.columns).contiguous()
    tensors = [values, dense, slots, columns]
    return [*layout.addresses, *(t.data_ptr() for t in tensors)], tensors


def _by_torch(descriptor, operands: tuple, parameters: dict, out=None) -> torch.Tensor:
    return reference.scaled_matmul(descriptor, *operands)


def _nowhere(operands: tuple) -> tuple[list[int], None]:
    return [], None


def _depth(parts: Parts) -> int:
    """The dimension of the dense operand that is summed over."""
    return -1 if parts.is_deep else -2


def _is_pairs(t: torch.Tensor, dim: int) -> bool:
    """Whether neighbours along a dimension lie side by side, and all else at whole 16 bytes."""
    strides = [n for i, n in enumerate(t.stride()) if i != t.dim() + dim and t.shape[i] > 1]
    return t.stride(dim) == 1 and address_of(t) % 16 == 0 and not any(n % 16 for n in strides)


def _copy_of(t: torch.Tensor, dim: int) -> torch.Tensor:
    """The shape and strides of a copy with one dimension contiguous."""
    shape = list(t.shape) if dim == -1 else [*t.shape[:-2], t.shape[-1], t.shape[-2]]
    copy = torch.empty(shape, dtype=t.dtype, device="meta")
    return copy if dim == -1 else copy.mT


# The call.


def _key(descriptor: BlockSparseScaledMatmul, operands: tuple, out, parameters: dict):
    """All that a plan depends on: the descriptor, the layout's sizes and device, but nothing of its
    contents, then shapes, strides, dtypes, device and alignment. None where there can be no plan.
    """
    try:
        layout, a, b, scale_a, scale_b = operands
        if not isinstance(layout, Layout):  # whose own attributes may have these names
            checks.check_layout(layout)
        key = (descriptor.text, layout.key)
        for tensor in (a, b, scale_a, scale_b):
            key += signature(tensor)
        if out is not None:
            key += signature(out)
        if parameters:
            key += tuple(parameters)
    except UNREADABLE:
        check_kinds(descriptor, operands)
        check_dense((), out=out)
        return None
    return key


def _way(call: Call, descriptor, operands: tuple, out, parameters: dict) -> str:
    """Plans are for CUDA tensors; torch computes all else, and calls inside a transform of
    torch.func. Raises UnsupportedError for devices that have no backend."""
    if not products.is_on_gpu(call.device):
        return REFERENCE
    return REFERENCE if any(map(is_wrapped, (*operands[1:], out))) else KERNELS


def _tensors(operands: tuple) -> tuple[torch.Tensor, ...]:
    layout, a, b, *scales = operands
    return (a, b, *layout.tensors, *scales)


def _names(operands: tuple) -> tuple[str, ...]:
    return ("a", "b", *LAYOUT_NAMES, *SCALES)


def _cast(operands: tuple, parameters: dict) -> tuple[tuple, dict]:
    """The tensors as they are: quantised tensors are not cast."""
    return operands, parameters


PRODUCT = products.Product(
    name="blocksparse_scaled",
    operators="kernlib.families.blocksparse.scaled.operators",
    key=_key,
    check=check_call,
    way=_way,
    plan=_plan,
    reference=_by_torch,
    tensors=_tensors,
    names=_names,
    check_operands=check_kinds,
    cast=_cast,
)
calls = products.bind(PRODUCT)


def _recorded(descriptor, operands: tuple, out, parameters: dict) -> torch.Tensor:
    """A call whose gradient is recorded, by torch's own operators."""
    if stand_ins(*_tensors(operands)):
        return by_operator(PRODUCT, (descriptor, operands, out, parameters))
    refuse_out_of_recorded(out)
    check_call(descriptor, operands, None, parameters)
    return reference.scaled_matmul(descriptor, *operands)


run = front_door(PRODUCT, calls, _recorded)
RUNS = {BlockSparseScaledMatmul: run}


# Calls before anybody makes them.


def planned(descriptor: BlockSparseScaledMatmul, tensors: tuple, arguments: dict) -> list[Planned]:
    """The parts of a call that have a plan: nothing where a gradient is recorded, which torch
    computes."""
    from kernlib.runtime.ahead import planned_product

    call = planned_product(PRODUCT, calls, None, descriptor, tensors, arguments)
    PRODUCT.check(*call.request)
    return [] if call.recorded else [call]


def variants(
    descriptor: BlockSparseScaledMatmul, arch: str, dtypes: tuple[torch.dtype, ...]
) -> list[KernelSpec]:
    """Every kernel that lowering can choose for a descriptor, whose inputs are of float8 whatever
    ``dtypes`` are: none but on sm_90a, and where the sum runs along rows of stored blocks."""
    if descriptor.transposed != (descriptor.mode == "dds"):
        return []
    scope = Scope((scaled.BLOCK,) * 2, (descriptor.out_dtype,), arch=arch)
    return kernel.specs((SCALED,), (), scope, arch)

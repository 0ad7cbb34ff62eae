"""What can be wrong with a block-sparse product, said in the caller's words, and with what softmax
and attention take as well: layouts, values and scales."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from kernlib.families.blocksparse.descriptor import BlockSparseMatmul
from kernlib.families.blocksparse.layout import NAMES, Layout
from kernlib.runtime import products
from kernlib.runtime.arguments import check_out, check_parameters, check_same_kind
from kernlib.runtime.dtypes import FLOAT_TYPES as TYPES
from kernlib.runtime.numbers import check_host, check_kind, check_tensor, host_value, on_device
from kernlib.runtime.tensors import broadcast_shapes, check_dense, check_memory

FLOAT8 = torch.float8_e4m3fn  # of scaled products
LAYOUT_NAMES = tuple(map("layout.{}".format, NAMES))  # what errors call a layout's tensors
# What errors call a and b: of S they are its values, as functions of one mode call them too.
OPERANDS = {"sdd": ("a", "b"), "dsd": ("values", "b"), "dds": ("a", "values")}
ANY_NUMBER: frozenset[str] = frozenset()  # of the numbers, those that must be positive


class Call(NamedTuple):
    """A checked call of softmax or attention, whose result has so many elements."""

    count: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def check_kinds(descriptor: BlockSparseMatmul, operands: tuple) -> None:
    """A layout and two dense tensors. Raises TypeError."""
    if len(operands) != 3:
        raise TypeError(
            f"{descriptor.describe()} takes layout, a and b, got {len(operands)} operands"
        )
    layout, *tensors = operands
    check_layout(layout)
    names = OPERANDS[descriptor.mode]
    check_dense(names, **dict(zip(names, tensors, strict=True)))


def check_layout(layout) -> None:
    """Raises TypeError for what is no Layout."""
    if not isinstance(layout, Layout):
        kind = type(layout).__name__
        maker = "Layout.from_block_mask" if kind == "BlockMask" else "Layout(mask, block)"
        raise TypeError(
            f"layout must be a kernlib.blocksparse.Layout, got {kind}; {maker} makes one"
        )


def check_call(
    descriptor: BlockSparseMatmul, operands: tuple, out, parameters: dict
) -> products.Call:
    """Check everything that a signature decides. Raises ValueError and TypeError."""
    check_kinds(descriptor, operands)
    a = operands[1]
    shape = check_operands(descriptor, operands)
    features = features_of(descriptor, shape)
    check_parameters(descriptor, features, parameters, a, True, TYPES, shape)
    if out is not None:
        check_dense((), out=out)
        check_out(out, a, shape)
        check_memory(out)
    return products.Call(math.prod(shape), shape, a.dtype, a.device)


def features_of(descriptor: BlockSparseMatmul, shape: tuple[int, ...]) -> int:
    """The number of features of a result of that shape: a vector of the epilogue has a value for
    each."""
    return shape[descriptor.axis]


def check_operands(descriptor: BlockSparseMatmul, operands: tuple) -> tuple[int, ...]:
    """The result's shape. Raises ValueError and TypeError; sizes may be symbols."""
    layout, a, b = operands
    first, second = OPERANDS[descriptor.mode]
    check_same_kind(first, a, second, b, TYPES)
    return shape_of(descriptor, layout, a, b)


def shape_of(descriptor: BlockSparseMatmul, layout: Layout, a, b) -> tuple[int, ...]:
    """:func:`check_operands` of two tensors of one dtype and device."""
    check_place(layout, OPERANDS[descriptor.mode][0], a)
    rows, cols = layout.shape
    if descriptor.mode == "sdd":
        return _check_sdd(descriptor, layout, a, b)
    if descriptor.transposed:
        rows, cols = cols, rows
    if descriptor.mode == "dsd":
        lead = check_values("values", a, layout)
        columns = _dense(descriptor, "b", b, layout, cols, -2)
        return _shape(layout, ("values", lead), ("b", b), (rows, columns))
    lead = check_values("values", b, layout)
    lines = _dense(descriptor, "a", a, layout, rows, -1)
    return _shape(layout, ("values", lead), ("a", a), (lines, cols))


def _check_sdd(descriptor: BlockSparseMatmul, layout: Layout, a, b) -> tuple[int, ...]:
    rows, cols = layout.shape
    depth = _dense(descriptor, "a", a, layout, rows, -2)
    other = _dense(descriptor, "b", b, layout, cols, -1)
    if depth != other:
        raise ValueError(
            f"a and b must have one size to sum over, got {depth} of a {tuple(a.shape)} and "
            f"{other} of b {tuple(b.shape)}"
        )
    inner = layout.heads is not None
    batch = _broadcast(("a", _lead(a, inner)), ("b", _lead(b, inner)))
    return (*batch, layout.capacity, *layout.block)


def check_values(name: str, values: torch.Tensor, layout: Layout) -> tuple[int, ...]:
    """The leading dimensions of values. Raises ValueError."""
    expected = (layout.capacity, *layout.block)
    if values.dim() < 3 or tuple(values.shape[-3:]) != expected:
        shown = ", ".join(map(str, expected))
        raise ValueError(
            f"{name} must hold the layout's blocks, (..., {shown}), got {tuple(values.shape)}"
        )
    return tuple(values.shape[:-3])


def _dense(
    descriptor: BlockSparseMatmul, name: str, t: torch.Tensor, layout: Layout, size: int, axis: int
) -> int:
    """The size of a dense operand's other dimension, whose ``axis``, where it is not transposed,
    has a given size. Raises ValueError."""
    transpose = getattr(descriptor, f"transpose_{name}")
    if transpose:
        axis = -3 - axis
    other = -3 - axis
    heads = layout.heads
    if t.dim() < 2 + (heads is not None) or t.shape[axis] != size:
        ends = f"{size}, n" if axis == -2 else f"n, {size}"
        inner = "" if heads is None else f"{heads}, "
        raise ValueError(
            f"{name} must be (..., {inner}{ends}) for a layout of {layout.text}"
            f"{f' and transpose_{name}' * transpose}, got {tuple(t.shape)}"
            f"{_turned(descriptor, name, t, layout, size, axis)}"
        )
    if heads is not None and t.shape[-3] not in (1, heads):
        raise ValueError(f"{name} must have {heads} heads, or 1, got {tuple(t.shape)}")
    return t.shape[other]


def _turned(descriptor: BlockSparseMatmul, name: str, t, layout: Layout, size: int, axis: int):
    """What to transpose for the operand to fit, or ""."""
    if t.dim() < 2 or t.shape[axis] == size:
        return ""
    other = {"sdd": "", "dsd": "transpose_a", "dds": "transpose_b"}[descriptor.mode]
    if other and t.shape[axis] == sum(layout.shape) - size:
        flag = other
    elif t.shape[-3 - axis] == size:
        flag = f"transpose_{name}"
    else:
        return ""
    return f"; did you mean {flag}={not getattr(descriptor, flag)}?"


def _lead(t: torch.Tensor, has_heads: bool) -> tuple[int, ...]:
    return tuple(t.shape[: -3 if has_heads else -2])


def _shape(layout: Layout, values: tuple, dense: tuple, ends: tuple) -> tuple[int, ...]:
    """The shape of a dense result."""
    name, t = dense
    batch = _broadcast(values, (name, _lead(t, layout.heads is not None)))
    return (*batch, *(() if layout.heads is None else (layout.heads,)), *ends)


def _broadcast(*named: tuple[str, tuple]) -> tuple[int, ...]:
    try:
        return broadcast_shapes(*(lead for _, lead in named))
    except RuntimeError:
        shown = " and ".join(f"{name} {tuple(lead)}" for name, lead in named)
        raise ValueError(
            "dimensions in front of blocks, heads and matrices must broadcast, got those of "
            f"{shown}"
        ) from None


# What softmax and attention take as well.


def check_place(layout: Layout, name: str, t: torch.Tensor) -> None:
    """A layout is on the device of a tensor. Raises ValueError."""
    if layout.device != t.device:
        raise ValueError(
            f"layout must be on the device of {name}, {t.device}, got {layout.device}; "
            "layout.to(device) makes a copy there"
        )


def check_dtype(name: str, t: torch.Tensor) -> None:
    """A tensor has a dtype that is computed. Raises TypeError."""
    if t.dtype not in TYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in TYPES)
        raise TypeError(f"{name} must be one of {names}, got {t.dtype}")


def check_scale(scale, name: str, t: torch.Tensor, look: bool) -> None:
    """A scale is a real number, or a real tensor of shape () in host memory or on the device of
    ``t``, which errors call ``name``; ``look`` at values in host memory. Raises ValueError and
    TypeError."""
    if isinstance(scale, (torch.SymInt, torch.SymFloat)):
        return
    number = host_value("scale", scale, 0)
    if number is not None:
        check_host("scale", number, ANY_NUMBER)
        return
    if look and not torch._C._functorch.is_functorch_wrapped_tensor(scale):
        check_tensor("scale", scale, ANY_NUMBER, dimensions=0)
    else:
        check_kind("scale", scale, 0)
    if scale.device != t.device and scale.device.type != "cpu":
        raise ValueError(f"scale is on {scale.device}, {name} on {t.device}: move it there")


def scale_of(
    scale, device: torch.device, dtype: torch.dtype
) -> tuple[float, int, torch.Tensor | None]:
    """A scale for a launch: a number and an address, one of which counts, and a tensor to hold
    until the launch. Raises ValueError, TypeError and CaptureError."""
    number = host_value("scale", scale, 0)
    if number is not None:
        check_host("scale", number, ANY_NUMBER)
        return number, 0, None
    if scale.device.type == "cpu":
        check_tensor("scale", scale, ANY_NUMBER, dimensions=0)
    tensor = on_device("scale", scale, device, dtype)
    return 0.0, tensor.data_ptr(), tensor

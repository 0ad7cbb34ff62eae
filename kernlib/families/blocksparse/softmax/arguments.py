"""Everything that can be wrong with a block-sparse softmax, said in the caller's words."""

from __future__ import annotations

import math

import torch

from kernlib.families.blocksparse.checks import (
    LAYOUT_NAMES,
    Call,
    check_dtype,
    check_layout,
    check_place,
    check_scale,
    check_values,
)
from kernlib.families.blocksparse.softmax.descriptor import BlockSparseSoftmax
from kernlib.runtime.arguments import autocast_device, check_broadcast, check_out
from kernlib.runtime.dtypes import KERNEL_TYPES
from kernlib.runtime.tensors import (
    check_dense,
    check_memory,
    refuse_any_overlap,
    refuse_partial_overlap,
)

NAMES = ("rpe", "key_padding_mask", "attn_mask")


def given(rpe=None, key_padding_mask=None, attn_mask=None) -> dict:
    """The tensors besides x that a call has."""
    values = (rpe, key_padding_mask, attn_mask)
    return {name: value for name, value in zip(NAMES, values, strict=True) if value is not None}


def check_kinds(descriptor: BlockSparseSoftmax, operands: tuple) -> None:
    """A layout and x. Raises TypeError."""
    if len(operands) != 2:
        raise TypeError(
            f"{descriptor.describe()} takes layout and x, got {len(operands)} operands; scale, "
            "rpe and masks are keyword arguments"
        )
    layout, x = operands
    check_layout(layout)
    check_dense(("x",), x=x)


def check_call(descriptor, operands: tuple, out, scale, parameters: dict) -> Call:
    """Check everything that a signature decides. Raises ValueError and TypeError."""
    check_kinds(descriptor, operands)
    _, x = operands
    check_operands(descriptor, operands, parameters)
    check_scale(scale, "x", x, True)
    if out is not None:
        check_dense((), out=out)
        check_out(out, x, tuple(x.shape))
        check_memory(out)
    return Call(math.prod(x.shape), tuple(x.shape), x.dtype, x.device)


def check_operands(descriptor, operands: tuple, parameters: dict) -> None:
    """Shapes, dtypes and devices. Raises ValueError and TypeError; sizes may be symbols."""
    layout, x = operands
    check_dtype("x", x)
    check_place(layout, "x", x)
    lead = check_values("x", x, layout)
    _check_names(descriptor, parameters)
    (rows, cols), heads = layout.shape, () if layout.heads is None else (layout.heads,)
    shapes = {
        "rpe": (*lead, *heads, rows, cols),
        "key_padding_mask": (*lead, cols),
        "attn_mask": (rows, cols),
    }
    for name, value in parameters.items():
        check_dense((name,), **{name: value})
        if name == "attn_mask" and tuple(value.shape) != (rows, cols):
            raise ValueError(wrong_mask((rows, cols), tuple(value.shape)))
        check_broadcast(shapes[name], name, value)
        _check_kind(name, value, x)


def _check_names(descriptor: BlockSparseSoftmax, parameters: dict) -> None:
    needed = descriptor.parameters
    for name in NAMES:
        if name in needed and name not in parameters:
            raise ValueError(f"{descriptor.describe()} needs {name}")
        if name in parameters and name not in needed:
            flag = "True" if name == "rpe" else "'add' or 'mul'"
            raise ValueError(
                f"{name} is given, and {descriptor.describe()} takes none: make one with "
                f"{name}={flag}"
            )


def _check_kind(name: str, value: torch.Tensor, x: torch.Tensor) -> None:
    """Raises TypeError for another dtype than x's, or bool of a mask, ValueError for another
    device."""
    is_mask = name != "rpe"
    if value.dtype != x.dtype and not (is_mask and value.dtype == torch.bool):
        kind = f"{x.dtype} as x is{', or torch.bool' * is_mask}"
        raise TypeError(f"{name} must be {kind}, got {value.dtype}")
    if value.device != x.device:
        raise ValueError(f"{name} must be on the device of x, {x.device}, got {value.device}")


def refuse_overlap(operands: tuple, out, scale, parameters: dict) -> None:
    """Raises ValueError for an ``out`` that shares memory with an argument, but x itself."""
    if out is None or out.is_meta:
        return
    layout, x = operands
    refuse_partial_overlap(out, x=x)
    named = dict(zip(LAYOUT_NAMES, layout.tensors, strict=True))
    refuse_any_overlap(out, scale=scale, **parameters, **named)


def autocast(operands: tuple, parameters: dict) -> dict:
    """The tensors besides x as autocast has them: floats in the dtype of x, which stays."""
    _, x = operands
    kind = autocast_device(x.device)
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return parameters
    return {name: _cast(value, x.dtype) for name, value in parameters.items()}


def _cast(value, dtype: torch.dtype):
    is_float = isinstance(value, torch.Tensor) and value.dtype in KERNEL_TYPES
    return value.to(dtype) if is_float else value


def wrong_mask(shape: tuple[int, int], got: tuple[int, ...]) -> str:
    """The message for an attn_mask of another shape."""
    advice = "; what differs by head or batch is an rpe of floats, which is added"
    return f"attn_mask must have shape {shape}, got {got}{advice * (len(got) > 2)}"

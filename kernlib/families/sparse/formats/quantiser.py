"""Scales of groups of values, and the codes that stand for values, in torch on any device.

The scale of a group is the bfloat16 nearest to its largest magnitude over the largest code. A code
is its value over that scale, rounded to the nearest. So a value comes back as ``code * scale``,
rounded once to the matrix's dtype, within half a scale for integers, and within 1/16 of itself for
e4m3 or 2^-10 of the scale. The largest magnitude of a group may lose 2^-9 of itself to the scale.

Three rules for what is rare. A scale is at least the least normal bfloat16, 2^-126: smaller values
become 0 where torch or a GPU flushes subnormals, which would then divide by 0. A group without
entries has the scale 1. Where the largest code times a scale would round to infinity in the
matrix's dtype, the scale is the next smaller bfloat16.
"""

from __future__ import annotations

import torch

from kernlib.families.sparse.formats.encoding import INFINITY, MAGNITUDE
from kernlib.families.sparse.lowering.quantised import FP8, INT4, INT8, ValueCode

LEAST_SCALE = 2.0**-126


def scales_of(most: torch.Tensor, code: ValueCode, dtype: torch.dtype) -> torch.Tensor:
    """The scales, bfloat16, of groups by their largest magnitudes, float32."""
    # By a tensor: by a number torch multiplies with a reciprocal on GPUs.
    scale = (most / most.new_full((), code.largest)).clamp_min(LEAST_SCALE).to(torch.bfloat16)
    overflows = (scale.float() * code.largest).to(dtype).isinf()
    smaller = (scale.view(torch.int16) - 1).view(torch.bfloat16)
    scale = torch.where(overflows, smaller, scale)
    return torch.where(most > 0, scale, torch.ones_like(scale))


def codes_of(values: torch.Tensor, scale: torch.Tensor, code: ValueCode) -> torch.Tensor:
    """The codes, uint8, of float32 values and their scales."""
    shares = (values / scale.float()).clamp_(-code.largest, code.largest)
    if code is FP8:
        return shares.to(torch.float8_e4m3fn).view(torch.uint8)
    integers = shares.round_().to(torch.int16)
    return (integers + 128 if code is INT8 else integers & 15).to(torch.uint8)


def values_of(
    codes: torch.Tensor, scale: torch.Tensor, code: ValueCode, dtype: torch.dtype
) -> torch.Tensor:
    """The values that codes stand for, given their scales."""
    if code is FP8:
        numbers = codes.view(torch.float8_e4m3fn).float()
    elif code is INT4:
        numbers = ((codes ^ 8).to(torch.int16) - 8).float()
    else:
        numbers = (codes.to(torch.int16) - 128).float()
    return (numbers * scale.float()).to(dtype)


def check_finite(bits: torch.Tensor, dtype: torch.dtype, code: ValueCode) -> None:
    """Raises ValueError for values that are NaN or infinite, by their bits."""
    refuse(count_of_others(bits, dtype), code)


def count_of_others(bits: torch.Tensor, dtype: torch.dtype) -> int:
    """How many values are NaN or infinite."""
    return int(((bits & MAGNITUDE[dtype]) >= INFINITY[dtype]).sum())


def refuse(count: int, code: ValueCode) -> None:
    """Raises ValueError for a matrix with so many values that no code stands for."""
    if count:
        raise ValueError(
            f"the matrix has {count} entries that are NaN or infinite, which values="
            f"{code.values!r} cannot represent: replace them, as torch.nan_to_num does, or "
            "compress with values=None"
        )

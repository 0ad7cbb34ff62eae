"""Numbers of a call: by value from the host, by pointer from the device, never synchronising."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real

import torch

from kernlib.errors import CaptureError

HALF_TYPES = (torch.float16, torch.bfloat16)
_SHAPES = ("()", "() or (L,)")  # by the dimensions that a tensor may have, L being the batch


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The arithmetic's dtype: float32 for half types, else the tensors' own."""
    return torch.float32 if dtype in HALF_TYPES else dtype


def host_value(name: str, value: object, dimensions: int = 1) -> float | None:
    """A real number as float, a tensor as None. Raises TypeError for anything else, ValueError for
    an int beyond any float. ``dimensions``, 0 or 1, are those that a tensor may have."""
    if type(value) is float:
        return value
    if isinstance(value, torch.Tensor):
        return None
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{name} must fit a float64, got an int of many digits") from None
    raise TypeError(
        f"{name} must be a real number or a tensor of shape {_SHAPES[dimensions]}, got {value!r} "
        f"({type(value).__name__})"
    )


def check_kind(name: str, value: torch.Tensor, dimensions: int = 1) -> None:
    """A hyperparameter tensor is real and of shape (), or (L,) where it may have a dimension.
    Raises ValueError, TypeError."""
    if value.dim() > dimensions:
        shape = tuple(value.shape)
        raise ValueError(f"{name} must have shape {_SHAPES[dimensions]}, got {shape}")
    if value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name} must be real, got {value.dtype}")


def check_host(name: str, value: float, positive: frozenset[str]) -> None:
    """Host values are numbers, those of ``positive`` greater than zero. Raises ValueError."""
    if name in positive:
        if not value > 0:
            raise ValueError(f"{name} must be greater than 0, got {value}")
    elif math.isnan(value):
        raise ValueError(f"{name} must be a number, got nan")


def check_tensor(
    name: str,
    value: torch.Tensor,
    positive: frozenset[str],
    check: Callable[[str, float, frozenset[str]], None] = check_host,
    dimensions: int = 1,
) -> None:
    """:func:`check_kind`, and one in host memory holds values that would do as numbers, of which
    ``check`` decides. Raises ValueError, TypeError."""
    check_kind(name, value, dimensions)
    if value.device.type == "cpu" and value.numel():
        check(name, float(value.detach().double().min()), positive)  # min() keeps a NaN


def on_device(name: str, value: torch.Tensor, device: torch.device, dtype: torch.dtype):
    """``value`` on ``device`` in ``dtype``; the copies it may take do not wait for the device.

    Raises ValueError for a tensor of another GPU, CaptureError for one in host memory inside a
    CUDA graph's capture.
    """
    if value.device == device:
        return value if value.dtype == dtype else value.to(dtype)
    if value.device.type != "cpu":
        raise ValueError(f"{name} is on {value.device}, the inputs on {device}")
    if torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            f"{name} is in host memory, which a replay of the CUDA graph would read again after it "
            f"has gone: pass a number or a tensor on {device}"
        )
    return value.to(dtype).contiguous().pin_memory().to(device, non_blocking=True)

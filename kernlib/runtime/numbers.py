"""Numbers of a call. Those of the host are passed by value, those on the device by pointer, and
nothing waits for the device."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from kernlib.descriptors.base import real, shown
from kernlib.errors import CaptureError
from kernlib.runtime.tensors import check_layout

# The real dtypes, which torch can convert to float32 or float64. Older torch lacks some of them.
_REAL = frozenset(
    getattr(torch, name)
    for name in (
        "float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
        "float8_e4m3fnuz", "float8_e5m2fnuz", "uint8", "int8", "int16", "int32", "int64",
        "uint16", "uint32", "uint64",
    )
    if hasattr(torch, name)
)  # fmt: skip
_SHAPES = ("()", "() or (L,)")  # by how many dimensions a tensor may have; L is the batch


def host_value(name: str, value: object, dimensions: int = 1) -> float | None:
    """A real number as a float, or None for a tensor. Raises TypeError for anything else,
    ValueError for an int that no float holds. ``dimensions``, 0 or 1, says how many a tensor may
    have: errors name the shapes."""
    if type(value) is float:
        return value
    if isinstance(value, torch.Tensor):
        return None
    number = real(value)
    if number is None:
        raise TypeError(
            f"{name} must be a real number or a tensor of shape {_SHAPES[dimensions]}, got "
            f"{shown(value)} ({type(value).__name__})"
        )
    try:
        return float(number)
    except OverflowError:
        raise ValueError(f"{name} must fit a float64, got one of many digits") from None


def plain(name: str, value: object, dimensions: int = 1) -> float | torch.Tensor:
    """A real number of any type as a float, and a tensor as it is. Raises what :func:`host_value`
    raises."""
    number = host_value(name, value, dimensions)
    return value if number is None else number


def check_kind(name: str, value: torch.Tensor, dimensions: int = 1) -> None:
    """A hyperparameter tensor is dense, real and of shape (), or (L,) where it may have a
    dimension. Raises ValueError, TypeError."""
    check_layout(name, value)
    if value.dim() > dimensions:
        advice = "; one for each feature is a lengthscale" if name == "bandwidth" else ""
        shape = f"{tuple(value.shape)}{advice}"
        raise ValueError(f"{name} must have shape {_SHAPES[dimensions]}, got {shape}")
    if value.dtype not in _REAL:
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
    """:func:`check_kind`. The values of a tensor in host memory must also pass ``check``, as
    numbers must. Raises ValueError, TypeError."""
    check_kind(name, value, dimensions)
    for number in extremes(value):
        check(name, number, positive)


def extremes(value: torch.Tensor) -> tuple[float, ...]:
    """The smallest and the largest number of a tensor in host memory, or its only one; NaN if one
    of them is NaN. Empty for a tensor without numbers, and for one on a device, which is not
    read."""
    if value.device.type != "cpu" or not value.numel():
        return ()
    if value.numel() == 1:
        return (float(value.detach()),)
    return tuple(map(float, value.detach().double().aminmax()))


def on_device(name: str, value: torch.Tensor, device: torch.device, dtype: torch.dtype):
    """``value`` on ``device`` in ``dtype``; the copies it may take do not wait for the device.

    Raises ValueError for a tensor of another GPU, CaptureError for one in host memory inside a
    CUDA graph's capture.
    """
    if value.device == device:
        return value if value.dtype == dtype else value.to(dtype)
    if value.device.type != "cpu":
        raise ValueError(f"{name} is on {value.device}, the inputs on {device}: move it there")
    if device.type == "meta":
        return value.to(device, dtype)
    if torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            f"{name} is in host memory, which a replay of the CUDA graph would read again after it "
            f"has gone: pass a number or a tensor on {device}"
        )
    return value.to(dtype).contiguous().pin_memory().to(device, non_blocking=True)

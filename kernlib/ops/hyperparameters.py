"""Numbers of a call: by value from the host, by pointer from the device, never synchronising."""

from __future__ import annotations

import math
from numbers import Real

import torch

from kernlib.errors import CaptureError

HALF_TYPES = (torch.float16, torch.bfloat16)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The arithmetic's dtype: float32 for half types, else the tensors' own."""
    return torch.float32 if dtype in HALF_TYPES else dtype


def host_value(name: str, value: object) -> float | None:
    """A real number as float, a tensor as None. Raises TypeError for anything else, ValueError for
    an int beyond any float."""
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
        f"{name} must be a real number or a tensor of shape () or (L,), got {value!r} "
        f"({type(value).__name__})"
    )


def check_exponent(name: str, value: float) -> None:
    """Inner exponents are 0 to inf. Raises ValueError."""
    if not value >= 0:
        raise ValueError(f"{name} must be 0 or greater (inf for the maximum), got {value}")


def check_positive(name: str, value: float) -> None:
    """Raises ValueError for zero, negative and NaN."""
    if not value > 0:
        raise ValueError(f"{name} must be greater than 0, got {value}")


def check_kind(name: str, value: torch.Tensor) -> None:
    """A hyperparameter tensor is real and of shape () or (L,). Raises ValueError, TypeError."""
    if value.dim() > 1:
        raise ValueError(f"{name} must have shape () or (L,), got {tuple(value.shape)}")
    if value.is_complex() or value.dtype == torch.bool:
        raise TypeError(f"{name} must be real, got {value.dtype}")


def check_tensor(name: str, value: torch.Tensor, positive: frozenset[str]) -> None:
    """:func:`check_kind`, and one in host memory holds values that would do as numbers. Raises
    ValueError, TypeError."""
    check_kind(name, value)
    if value.device.type == "cpu" and value.numel():
        check_host(name, float(value.detach().double().min()), positive)  # min() keeps a NaN


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


def check_host(name: str, value: float, positive: frozenset[str]) -> None:
    """What can be said of a host value by its name alone."""
    if name in ("p", "inner_p"):
        check_exponent(name, value)
    elif name in positive:
        check_positive(name, value)
    elif name == "epsilon" and not value >= 0:
        raise ValueError(f"epsilon must be 0 or greater, got {value}")
    elif math.isnan(value):
        raise ValueError(f"{name} must be a number, got nan")

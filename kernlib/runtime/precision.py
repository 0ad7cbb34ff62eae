"""Torch's settings for products: the precision that they permit for float32, and autocast."""

from __future__ import annotations

from contextlib import nullcontext

import torch


def float32_precision() -> str:
    """The precision that torch permits for products of float32: "fp32" or "tf32", read at the
    call."""
    try:
        return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    except RuntimeError:  # torch's newer setting, one for each backend, is in use
        return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "fp32"


def without_autocast(device: torch.device):
    """A context in which autocast does not round the operands of torch's products."""
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()

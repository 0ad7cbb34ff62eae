"""What torch's settings permit the products of float32 tensors to be, and how to be rid of them."""

from __future__ import annotations

from contextlib import nullcontext

import torch


def float32_precision() -> str:
    """Either "fp32" or "tf32", read at the call."""
    try:
        return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    except RuntimeError:  # torch's newer setting, one for each backend, is in use
        return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "fp32"


def without_autocast(device: torch.device):
    """What keeps autocast from rounding the operands of torch's products, in a ``with``."""
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()

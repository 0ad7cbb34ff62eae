"""What torch's settings permit the products of float32 tensors to be."""

from __future__ import annotations

import torch


def float32_precision() -> str:
    """Either "fp32" or "tf32", read at the call."""
    try:
        return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    except RuntimeError:  # torch's newer setting, one for each backend, is in use
        return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "fp32"

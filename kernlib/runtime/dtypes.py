"""torch's dtypes of tensors that kernels take, and of their sums."""

from __future__ import annotations

import torch

from kernlib.lowering import dtypes

DTYPE_NAMES = {getattr(torch, name): name for name in dtypes.DTYPES}  # that lowering knows
KERNEL_TYPES = {getattr(torch, name): name for name in dtypes.FLOAT_SUMS}  # of kernels of products
_HALF_TYPES = (torch.float16, torch.bfloat16)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The arithmetic's dtype: float32 for half types, else the tensors' own."""
    return torch.float32 if dtype in _HALF_TYPES else dtype

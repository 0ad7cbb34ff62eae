"""torch's dtypes of tensors that kernels take, and of their sums."""

from __future__ import annotations

import torch

from kernlib.lowering import dtypes

# The names of the dtypes that lowering knows, and of those that kernels of products take.
DTYPE_NAMES = {getattr(torch, name): name for name in dtypes.DTYPES}
KERNEL_TYPES = {getattr(torch, name): name for name in dtypes.FLOAT_SUMS}
FLOAT_TYPES = (*KERNEL_TYPES, torch.float64)  # with what torch computes of products
_HALF_TYPES = (torch.float16, torch.bfloat16)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums of such values are computed in: float32 for half types, else the same."""
    return torch.float32 if dtype in _HALF_TYPES else dtype

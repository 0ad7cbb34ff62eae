"""The GPU that tests run on."""

from __future__ import annotations

import torch

from kernlib.runtime.devices import arch_of


def on_hopper() -> bool:
    """Whether calls may take the kernels of sm_90a: on no other GPU, nor with KERNLIB_PORTABLE."""
    return arch_of(torch.cuda.current_device()) == "sm_90a"

"""NVTX ranges around what kernlib loads and launches, for Nsight Systems, where the setting
``KERNLIB_NVTX`` asks for them. Without that setting a launch costs nothing more."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from kernlib import settings


def range_of(name: str) -> AbstractContextManager:
    """A range of this name, or nothing where none are asked for."""
    return torch.cuda.nvtx.range(name) if settings.current().nvtx else nullcontext()


def ranged(launch: Callable, name: str) -> Callable:
    """``launch`` within a range of this name, or ``launch`` itself where no ranges are asked
    for."""
    if not settings.current().nvtx:
        return launch
    push, pop = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop

    def within():
        push(name)
        try:
            return launch()
        finally:
            pop()

    return within

"""Points that tests of the family draw."""

from __future__ import annotations

import torch


def draw(*shape: int, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    """Normal numbers, others for each shape and seed."""
    generator = torch.Generator().manual_seed(1000 * seed + 10 * sum(shape) + len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def points(*shape: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    """The same in float32."""
    return draw(*shape, seed=seed, dtype=dtype)

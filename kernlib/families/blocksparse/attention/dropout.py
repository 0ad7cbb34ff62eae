"""The probabilities that a dropout keeps: a function of seed, batch, head, row and column alone, by
Philox 4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).

dropout.cuh of kernel_sources/blocksparse/attention is the same for kernels, and says which number
of 16 bits is an element's.
"""

from __future__ import annotations

from ctypes import c_float

import torch

LEVELS = 1 << 16
# The least p whose threshold is LEVELS: 1 - 2**-17 rounds up, and to that in float32 what is half a
# step of 2**-24 below. As a number, since Dynamo does not follow ctypes.
ALL = 1 - 2.0**-17 - 2.0**-25
_WORD = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def threshold(p: float) -> int:
    """How many of the numbers are dropped: p of LEVELS, in float32 as kernels count them."""
    return int(c_float(c_float(p).value * LEVELS + 0.5).value)


def share(p: float) -> float:
    """The factor of the elements that stay, by the share that is dropped after rounding."""
    levels = LEVELS - threshold(p)
    return LEVELS / levels if levels else 0.0


def kept(seed: int | torch.Tensor, p: float, line, row, col) -> torch.Tensor:
    """Bools of the shape that int64 tensors of indices broadcast to; ``line`` is that of the batch
    times the number of heads, and the head's."""
    words = philox((row & ~8, col & ~9, line, torch.zeros_like(line)), seed)
    low, high = (torch.where(col & 8 != 0, words[i + 1], words[i]) for i in (0, 2))
    word = torch.where(row & 8 != 0, high, low)
    return (torch.where(col & 1 != 0, word >> 16, word) & LEVELS - 1) >= threshold(p)


def philox(counter: tuple, seed: int | torch.Tensor) -> tuple:
    """Four words of 32 bits, of a counter of four, each an int64 tensor, and a seed of 64."""
    first, second, third, fourth = counter
    key = seed & _WORD, seed >> 32 & _WORD
    for step in range(_ROUNDS):
        low, high = (word + step * by & _WORD for word, by in zip(key, _STEPS, strict=True))
        # Products wrap around 2**64, which leaves both of their words as they are.
        left, right = first * _MULTIPLIERS[0], third * _MULTIPLIERS[1]
        first, second, third, fourth = (
            (right >> 32 & _WORD) ^ second ^ low,
            right & _WORD,
            (left >> 32 & _WORD) ^ fourth ^ high,
            left & _WORD,
        )
    return first, second, third, fourth

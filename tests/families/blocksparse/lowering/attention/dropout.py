"""Which weights a dropout leaves, as dropout.cuh says it, by numpy."""

import numpy as np
import torch

LEFT, RIGHT = 0xD2511F53, 0xCD9E8D57
STEPS = 0x9E3779B9, 0xBB67AE85
WORD = np.uint64(0xFFFFFFFF)


def philox(counter: list[np.ndarray], seed: int) -> list[np.ndarray]:
    """Philox 4x32-10 of words in uint64."""
    x, key = list(counter), [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        left, right = x[0] * np.uint64(LEFT), x[2] * np.uint64(RIGHT)
        first, second = (np.uint64(k) for k in key)
        high_left, high_right = left >> np.uint64(32), right >> np.uint64(32)
        x = [high_right ^ x[1] ^ first, right & WORD, high_left ^ x[3] ^ second, left & WORD]
        key = [(k + step) & 0xFFFFFFFF for k, step in zip(key, STEPS, strict=True)]
    return x


def kept(seed: int, p: float, batch: int, heads: int, rows: int, cols: int) -> torch.Tensor:
    """What each weight (batch, heads, rows, cols) is multiplied by, in float64."""
    head = np.arange(batch * heads, dtype=np.uint64).reshape(batch, heads, 1, 1)
    row = np.arange(rows, dtype=np.uint64).reshape(1, 1, rows, 1)
    col = np.arange(cols, dtype=np.uint64).reshape(1, 1, 1, cols)
    counter = [row & ~np.uint64(8), col & ~np.uint64(9), head, np.zeros_like(head)]
    words = philox(list(np.broadcast_arrays(*counter)), seed)
    one = np.uint64(1)
    which = (row >> np.uint64(3) & one) * np.uint64(2) + (col >> np.uint64(3) & one)
    word = np.choose(np.broadcast_to(which, words[0].shape).astype(np.int64), words)
    number = word >> np.uint64(16) * (col & one) & np.uint64(0xFFFF)
    threshold = int(p * 65536 + 0.5)
    scale = 65536 / (65536 - threshold) if threshold < 65536 else 0.0
    return torch.from_numpy(np.where(number >= np.uint64(threshold), scale, 0.0))

"""By torch's operators the bits of a layout's lines, 32 to a word, on any device without waiting,
and all tensors of a layout of a mask, on the CPU."""

from __future__ import annotations

import torch

from kernlib.families.blocksparse.lowering.problem import WORD, Blocks
from kernlib.lowering.arithmetic import ceil_div

BYTE = 8


def pack(mask: torch.Tensor) -> torch.Tensor:
    """Words (lines, W(n)) of a mask (lines, n) of bools, as int32: the lowest bit first."""
    lines, columns = mask.shape
    words = ceil_div(columns, WORD)
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, words * WORD - columns))
    values = torch.tensor([1 << bit for bit in range(BYTE)], dtype=torch.uint8, device="cpu")
    parts = padded.view(lines, words, WORD // BYTE, BYTE) * values.to(mask.device)
    return parts.sum(-1, dtype=torch.uint8).view(torch.int32).view(lines, words)


def unpack(words: torch.Tensor, columns: int) -> torch.Tensor:
    """The mask (lines, columns) of bools that :func:`pack` took."""
    lines = words.shape[0]
    places = torch.arange(BYTE, dtype=torch.uint8, device=words.device)
    spread = words.view(torch.uint8).unsqueeze(-1) >> places & 1
    return spread.view(lines, words.shape[1] * WORD)[:, :columns].to(torch.bool)


def popcount(words: torch.Tensor) -> torch.Tensor:
    """How many bits of each int32 are set. By sums of neighbours, as torch has no operator."""
    pairs = words - (words >> 1 & 0x55555555)
    fours = (pairs & 0x33333333) + (pairs >> 2 & 0x33333333)
    return ((fours + (fours >> 4) & 0x0F0F0F0F) * 0x01010101) >> 24


def encode(
    mask: torch.Tensor, blocks: Blocks, dropped: tuple[int, int] = (0, 0)
) -> tuple[torch.Tensor, ...]:
    """The six tensors of a mask (heads, rows, columns) of bools. Blocks behind the capacity's are
    dropped and counted; ``dropped`` are duplicates and indices out of range that were so before."""
    places = mask.nonzero().to(torch.int32)
    live, capacity = places.shape[0], blocks.capacity
    stored = places[:capacity]
    if live > capacity:
        mask = torch.zeros_like(mask)
        mask[tuple(stored.long().unbind(1))] = True
    heads, height, width = mask.shape
    row_bits = pack(mask.reshape(heads * height, width))
    col_bits = pack(mask.mT.reshape(heads * width, height))
    rows = _slots(stored[:, 0] * height + stored[:, 1], capacity)
    cols = _slots(stored[:, 2], capacity)
    counted = (stored.shape[0], live - stored.shape[0], *dropped)
    counts = torch.tensor(counted, dtype=torch.int32, device=mask.device)
    return row_bits, _ranks(row_bits), col_bits, rows, cols, counts


def _ranks(row_bits: torch.Tensor) -> torch.Tensor:
    """Blocks ahead of each word."""
    counts = popcount(row_bits).flatten()
    return (counts.cumsum(0, dtype=torch.int32) - counts).view(row_bits.shape)


def _slots(live: torch.Tensor, capacity: int) -> torch.Tensor:
    """One value a slot, -1 behind the live ones."""
    return torch.nn.functional.pad(live, (0, capacity - live.shape[0]), value=-1)

"""Bits of a layout's lines, 32 to a word, by torch's operators on any device without waiting."""

from __future__ import annotations

import torch

from kernlib.families.blocksparse.lowering.problem import WORD
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

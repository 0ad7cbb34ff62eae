"""The tensors of a layout by torch's operators: of a mask on the CPU."""

from __future__ import annotations

import torch

from kernlib.families.blocksparse.contents import bits
from kernlib.families.blocksparse.lowering.problem import Blocks


def encode(
    mask: torch.Tensor, blocks: Blocks, dropped: tuple[int, int] = (0, 0)
) -> tuple[torch.Tensor, ...]:
    """The six tensors of a mask (heads, rows, columns) of bools. Blocks behind the capacity's are
    dropped and counted; ``dropped`` are duplicates and indices out of range that were so before."""
    places = mask.nonzero().to(torch.int32)
    live, capacity = places.shape[0], blocks.capacity
    kept = places[:capacity]
    if live > capacity:
        mask = torch.zeros_like(mask)
        mask[tuple(kept.long().unbind(1))] = True
    heads, height, width = mask.shape
    row_bits = bits.pack(mask.reshape(heads * height, width))
    col_bits = bits.pack(mask.mT.reshape(heads * width, height))
    rows = _slots(kept[:, 0] * height + kept[:, 1], capacity)
    cols = _slots(kept[:, 2], capacity)
    counted = (kept.shape[0], live - kept.shape[0], *dropped)
    counts = torch.tensor(counted, dtype=torch.int32, device=mask.device)
    return row_bits, _ranks(row_bits), col_bits, rows, cols, counts


def _ranks(row_bits: torch.Tensor) -> torch.Tensor:
    """Blocks ahead of each word."""
    own = bits.popcount(row_bits).flatten()
    return (own.cumsum(0, dtype=torch.int32) - own).view(row_bits.shape)


def _slots(live: torch.Tensor, capacity: int) -> torch.Tensor:
    """One value a slot, -1 behind the live ones."""
    return torch.nn.functional.pad(live, (0, capacity - live.shape[0]), value=-1)

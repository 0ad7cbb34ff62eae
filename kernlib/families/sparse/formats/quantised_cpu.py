"""The bitmap formats of fewer bits in torch: blocks of slabs, each by a few operations.

Axes of the 16 x 256 positions of a chunk, by which bits and codes are ordered: row = (half, g) of
2 x 8, and column = (block, t, j) of 8 x 4 x 8.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernlib.families.sparse.formats import quantiser
from kernlib.families.sparse.formats.bitmap_cpu import (
    COLUMNS,
    HEADER,
    POSITIONS,
    ROWS,
    UNIT,
    headers,
)
from kernlib.families.sparse.formats.encoding import bits, nonzero
from kernlib.families.sparse.lowering.quantised import ValueCode
from kernlib.lowering.arithmetic import ceil_div

AT_ONCE = 1 << 22  # positions that one step holds in memory, some 30 bytes for each
# Where the word of a row and block lies, for (half, block, g) in order.
WORDS = [
    (block // 2 * 8 + (g ^ block // 2)) * 4 + block % 2 * 2 + half
    for half in range(2)
    for block in range(8)
    for g in range(8)
]


def blocks(dense: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    """A matrix, some slabs at a time, in the order of codes, (chunks, half, block, g, t * j), and
    the number of the first chunk."""
    across = ceil_div(dense.shape[1], COLUMNS)
    for top in range(0, dense.shape[0] if across else 0, step(across)):
        part = dense[top : top + step(across)]
        slabs = ceil_div(part.shape[0], ROWS)
        padded = part.new_zeros(slabs * ROWS, across * COLUMNS)
        padded[: part.shape[0], : part.shape[1]] = part
        axes = padded.view(slabs, 2, 8, across, 8, 32).permute(0, 3, 1, 4, 2, 5)
        yield axes.reshape(slabs * across, 2, 8, 8, 32).contiguous(), top // ROWS * across


def step(across: int) -> int:
    """Rows of a block: whole slabs."""
    return max(1, AT_ONCE // (POSITIONS * max(1, across))) * ROWS


def counts_of(present: torch.Tensor) -> torch.Tensor:
    """Entries of each half of chunks, (chunks, 2), int32."""
    return present.flatten(2).sum(-1, dtype=torch.int32)


def units_of(counts: torch.Tensor, code: ValueCode) -> torch.Tensor:
    """The 16-byte units of chunks with so many entries in each half."""
    nbytes = counts.amax(-1) if code.bits == 4 else counts.sum(-1, dtype=counts.dtype)
    return (nbytes + (code.offset + UNIT - 1)).div_(UNIT, rounding_mode="floor")


def coded(
    block: torch.Tensor, code: ValueCode, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of a block, of its shape, and scales (chunks, g, group, half)."""
    values = block.float().view(len(block), 2, code.groups, 8 // code.groups, 8, 32)
    scale = quantiser.scales_of(values.abs().amax((3, 5)), code, dtype)  # chunks, half, group, g
    codes = quantiser.codes_of(values, scale[:, :, :, None, :, None], code)
    return codes.view(block.shape), scale.permute(0, 3, 2, 1)


def put_scales(data: torch.Tensor, starts: torch.Tensor, scales: torch.Tensor) -> None:
    """Write the scales of chunks at ``starts``."""
    lines = (
        scales.reshape(len(starts), -1).contiguous().view(torch.uint8).view(len(starts), -1, UNIT)
    )
    data.view(-1, UNIT)[_scale_units(starts, lines.shape[1])] = lines


def scales_at(data: torch.Tensor, starts: torch.Tensor, code: ValueCode) -> torch.Tensor:
    """The scales of chunks at ``starts``, (chunks, g, group, half)."""
    lines = data.view(-1, UNIT)[_scale_units(starts, 2 * code.groups)]
    return lines.view(torch.bfloat16).view(len(starts), 8, code.groups, 2)


def _scale_units(starts: torch.Tensor, count: int) -> torch.Tensor:
    units = torch.arange(count, dtype=torch.int64, device=starts.device)
    return starts[:, None] + HEADER // UNIT + units


def fill(dense: torch.Tensor, offsets: torch.Tensor, data: torch.Tensor, code: ValueCode) -> None:
    """Write the chunks of a matrix, at ``offsets``, into ``data``, which holds zeros."""
    for block, first in blocks(dense):
        starts = offsets[first : first + len(block)].long()
        present = nonzero(bits(block))
        codes, scales = coded(block, code, dense.dtype)
        data.view(-1, UNIT)[headers(starts)] = words_of(present)
        put_scales(data, starts, scales)
        put_codes(data, starts, counts_of(present), codes[present], code)


def put_codes(
    data: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    codes: torch.Tensor,
    code: ValueCode,
) -> None:
    """Write codes, in order, behind the scales of chunks at ``starts``."""
    places, lower = places_of(starts, counts, code)
    if code.bits == 8:
        data[places] = codes
        return
    data[places[~lower]] = codes[~lower]
    data[places[lower]] |= codes[lower] << 4


def codes_at(
    data: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor, code: ValueCode
) -> torch.Tensor:
    """The codes of chunks at ``starts``, in order."""
    places, lower = places_of(starts, counts, code)
    stored = data[places]
    return stored if code.bits == 8 else torch.where(lower, stored >> 4, stored & 15)


def places_of(
    starts: torch.Tensor, counts: torch.Tensor, code: ValueCode
) -> tuple[torch.Tensor, torch.Tensor]:
    """The byte of each code of chunks at ``starts``, and whether it is of the lower rows."""
    first = (starts * UNIT + code.offset)[:, None].repeat(1, 2)
    if code.bits == 8:
        first[:, 1] += counts[:, 0]
    flat = counts.reshape(-1).long()
    before = flat.cumsum(0) - flat
    numbers = torch.arange(int(flat.sum()), dtype=torch.int64, device=starts.device)
    places = (first.view(-1) - before).repeat_interleave(flat) + numbers
    lower = torch.arange(flat.numel(), dtype=torch.int64, device=starts.device) % 2 == 1
    return places, lower.repeat_interleave(flat)


def words_of(present: torch.Tensor) -> torch.Tensor:
    """The bitmaps, (chunks, 32, 16) bytes, of positions in the order of codes."""
    lines = present.view(-1, 128, 4, 8).transpose(2, 3).reshape(-1, 128, 4, 8)  # bit 4 j + t
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=present.device)
    words = torch.empty(len(lines), 128, 4, dtype=torch.uint8, device=present.device)
    words[:, WORDS] = (lines * weights).sum(-1, dtype=torch.uint8)
    return words.view(-1, 32, UNIT)


def positions(words: torch.Tensor) -> torch.Tensor:
    """The reverse of :func:`words_of`: (chunks, half, block, g, t * j)."""
    places = torch.arange(8, dtype=torch.uint8, device=words.device)
    lines = (words.reshape(-1, 128, 4)[:, WORDS, :, None] >> places) & 1
    return lines.bool().view(-1, 128, 8, 4).transpose(2, 3).reshape(-1, 2, 8, 8, 32)


def inside(rows: int, cols: int, device: torch.device) -> torch.Tensor:
    """Which positions of a chunk, in the order of codes, are of its first rows and columns."""
    inner = torch.zeros(ROWS, COLUMNS, dtype=torch.bool, device=device)
    inner[:rows, :cols] = True
    return inner.view(2, 8, 8, 32).permute(0, 2, 1, 3)


def chunks_at(
    data: torch.Tensor, starts: torch.Tensor, code: ValueCode, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of chunks at ``starts``: which positions have entries, and the values of these, in order."""
    present = positions(data.view(-1, UNIT)[headers(starts)])
    codes = codes_at(data, starts, counts_of(present), code)
    scale = scales_at(data, starts, code).permute(0, 3, 2, 1)  # chunks, half, group, g
    scale = scale.repeat_interleave(8 // code.groups, 2)[..., None].expand(present.shape)
    return present, quantiser.values_of(codes, scale[present], code, dtype)


def decode(
    data: torch.Tensor,
    offsets: torch.Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype,
    code: ValueCode,
) -> torch.Tensor:
    """The dense matrix of chunks."""
    out = torch.zeros(shape, dtype=dtype, device=data.device)
    across = ceil_div(shape[1], COLUMNS)
    for top in range(0, shape[0] if across else 0, step(across)):
        part = out[top : top + step(across)]
        slabs = ceil_div(part.shape[0], ROWS)
        first = top // ROWS * across
        starts = offsets[first : first + slabs * across].long()
        present, values = chunks_at(data, starts, code, dtype)
        chunks = values.new_zeros(present.shape)
        chunks[present] = values
        dense = chunks.view(slabs, across, 2, 8, 8, 32).permute(0, 2, 4, 1, 3, 5)
        dense = dense.reshape(slabs * ROWS, across * COLUMNS)
        part.copy_(dense[: part.shape[0], : part.shape[1]])
    return out

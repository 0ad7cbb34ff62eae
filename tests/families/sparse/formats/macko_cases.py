"""MACKO's format by a loop over elements, its golden vectors, and matrices that try it."""

from __future__ import annotations

import torch

BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
DTYPES = tuple(BITS)
NAN_BITS = {torch.float16: 0x7FFF, torch.bfloat16: 0x7FFF, torch.float32: 0x7FFFFFFF}


def encode_by_loop(dense: torch.Tensor) -> tuple[list[int], list[int], list[int]]:
    """Bits of values, bytes of deltas and row_ptr, as the format is defined."""
    values, codes, row_ptr = [], [], [0]
    for row, bits in zip(dense.tolist(), dense.view(BITS[dense.dtype]).tolist(), strict=True):
        gap, kept = 0, len(values)
        for value, pattern in zip(row, bits, strict=True):
            if value != 0 or gap == 15:
                values.append(pattern if value == value else NAN_BITS[dense.dtype])
                codes.append(gap)
                gap = 0
                kept = len(values) if value != 0 else kept
            else:
                gap += 1
        del values[kept:], codes[kept:]
        row_ptr.append(kept)
    padding = -len(values) % 8
    values, codes = values + [0] * padding, codes + [0] * padding
    deltas = [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
    return values, deltas, row_ptr


def as_lists(tensors: dict[str, torch.Tensor]) -> tuple[list[int], list[int], list[int]]:
    values = tensors["values"]
    bits = values.view(BITS[values.dtype]).tolist()
    return bits, tensors["deltas"].tolist(), tensors["row_ptr"].tolist()


def canonical(dense: torch.Tensor) -> torch.Tensor:
    """What comes back of a matrix, but for -0.0 where pads stand."""
    bits = dense.contiguous().view(BITS[dense.dtype]).clone()
    bits[(dense == 0).view(bits.shape)] = 0
    bits[dense.isnan()] = NAN_BITS[dense.dtype]
    return bits.view(dense.dtype)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    kind = BITS[x.dtype]
    same = x.shape == y.shape and x.dtype == y.dtype
    return same and bool((x.contiguous().view(kind) == y.contiguous().view(kind)).all())


def random(rows: int, columns: int, density: float, dtype=torch.float16, device="cpu"):
    """A matrix of normal numbers, of which ``density`` are not zero."""
    x = torch.randn(rows, columns, device=device).clamp(-3, 3)
    kept = torch.rand(rows, columns, device=device) < density
    return torch.where(kept & (x != 0), x, torch.zeros_like(x)).to(dtype)


def peculiar(rows: int, columns: int, density: float, dtype=torch.float16, device="cpu"):
    """One with both zeros, infinities, several NaNs and the smallest number among its values."""
    bits = BITS[dtype]
    x = random(rows, columns, density, dtype, device)
    shift = 16 if dtype == torch.float32 else 0
    infinity = {torch.float16: 0x7C00}.get(dtype, 0x7F80) << shift
    lowest = -0x8000 << shift
    special = torch.tensor(
        [lowest, infinity, lowest + infinity, infinity + 1, lowest + infinity + 5, 1, lowest],
        dtype=bits,
        device=device,
    )
    where = torch.rand(rows, columns, device=device) < 0.2
    which = torch.randint(len(special), (rows, columns), device=device)
    return torch.where(where, special[which], x.view(bits)).view(dtype)


def golden() -> dict[str, tuple[torch.Tensor, tuple[list[int], list[int], list[int]]]]:
    """Name to matrix of float16 and the bits of values, deltas and row_ptr."""

    def numbered(columns: int, rows: list[list[int]]) -> torch.Tensor:
        x, count = torch.zeros(len(rows), columns, dtype=torch.float16), 0
        for r, places in enumerate(rows):
            for c in places:
                count += 1
                x[r, c] = count
        return x

    def bits(values: list[float]) -> list[int]:
        return torch.tensor(values, dtype=torch.float16).view(torch.int16).tolist()

    first = [[0, 1, 8, 12, 29], [0, 1, 14, 19], [21], [5], [4, 5, 7, 13, 23, 26, 28, 29, 31]]
    third = numbered(40, [[15], [16], [0], [33], [39]])
    third[3, 15] = -0.0
    third.view(torch.int16)[4, 39] = 0xFE01 - 0x10000
    return {
        "G1": (
            numbered(32, first),
            (
                bits([1, 2, 3, 4, 0, 5, 6, 7, 8, 9, 0, *range(10, 21), 0, 0]),
                [0, 54, 15, 0, 76, 95, 69, 16, 149, 18, 16, 0],
                [0, 6, 10, 12, 13, 22],
            ),
        ),
        "G2": (
            numbered(32, [[], [31], [1]]),
            (bits([0, 1, 2, 0, 0, 0, 0, 0]), [255, 1, 0, 0], [0, 0, 2, 3]),
        ),
        "G3": (
            third,
            (
                [0x3C00, 0, 0x4000, 0x4200, -0x8000, 0, 0x4400, 0, 0, 0x7FFF, *[0] * 6],
                [255, 0, 255, 241, 127, 0, 0, 0],
                [0, 1, 3, 4, 7, 10],
            ),
        ),
    }

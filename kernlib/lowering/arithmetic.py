"""Arithmetic of tiles and alignment that kernels of all families need."""

from __future__ import annotations


def ceil_div(count: int, size: int) -> int:
    """How many parts of a size hold a count."""
    return -(-count // size)


def round_up(count: int, size: int) -> int:
    """The next multiple of a size."""
    return -(-count // size) * size

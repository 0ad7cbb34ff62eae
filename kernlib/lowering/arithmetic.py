"""Arithmetic of tiles and alignment that kernels of all families need."""

from __future__ import annotations


def ceil_div(count: int, size: int) -> int:
    """How many parts of ``size`` are needed to hold ``count``: the quotient, rounded up."""
    return -(-count // size)


def round_up(count: int, size: int) -> int:
    """The least multiple of ``size`` that is not below ``count``."""
    return -(-count // size) * size

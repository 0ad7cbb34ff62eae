"""How long one product with a compressed matrix takes, by format: data, and what reads it.

A product reads its matrix once, so its time is a fixed part and the matrix's bytes over a rate. The
rate depends on density: decoding costs instructions for each position, bytes come for each entry.
"""

from __future__ import annotations

from typing import NamedTuple


class Rate(NamedTuple):
    """Of one format at one density: the fixed time of a call in microseconds, and TB/s."""

    density: float
    fixed_us: float
    tb_per_s: float


# By arch and format, densities ascending. A GPU that is not here takes those of DEFAULT, as the
# formats' order depends little on it.
DEFAULT = "sm_90a"
# Measured on an H200: dense, bitmap and u8 with 8192 x 28672 and 4096 x 4096.
RATES: dict[str, dict[str, tuple[Rate, ...]]] = {
    "sm_90a": {
        "dense": (Rate(0.0, 4.0, 4.37),),
        "bitmap": (
            Rate(0.1, 4.7, 1.02),
            Rate(0.3, 4.7, 2.21),
            Rate(0.5, 4.7, 3.34),
            Rate(0.7, 4.7, 3.59),
        ),
        "u8": (Rate(0.0, 3.8, 4.14),),
        "u4": (Rate(0.0, 3.8, 4.14),),
        "macko": (Rate(0.0, 4.0, 3.2),),
    },
}


def microseconds(format: str, arch: str, density: float, nbytes: int) -> float:
    """The time of a product with a matrix of ``nbytes`` in a format: rates between two densities of
    the table are interpolated, beyond them they are those of the nearest."""
    fixed, rate = _between(RATES.get(arch, RATES[DEFAULT])[format], density)
    return fixed + nbytes / rate * 1e-6


def _between(rates: tuple[Rate, ...], density: float) -> tuple[float, float]:
    """The fixed time and the rate at a density."""
    behind = next((i for i, rate in enumerate(rates) if rate.density > density), len(rates))
    if behind in (0, len(rates)):
        return rates[min(behind, len(rates) - 1)][1:]
    low, high = rates[behind - 1], rates[behind]
    share = (density - low.density) / (high.density - low.density)
    fixed, rate = (x + share * (y - x) for x, y in zip(low[1:], high[1:], strict=True))
    return fixed, rate

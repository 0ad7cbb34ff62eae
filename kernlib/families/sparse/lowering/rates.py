"""How long one product with a compressed matrix takes, by format: measured rates, and their use.

A product reads its matrix once, so its time is a fixed part and the matrix's bytes over a rate. The
rate depends on density, as decoding costs instructions for each position and bytes come for each
entry, and on the number of vectors, as each gathers x for each entry. Small matrices take longer
than their bytes: as long as the sums that one thread adds up.
"""

from __future__ import annotations

from typing import NamedTuple

from kernlib.families.sparse.lowering.codes import SLICES


class Rate(NamedTuple):
    """Of one format at one density: the fixed time of a call in microseconds, and TB/s."""

    density: float
    fixed_us: float
    tb_per_s: float


# By arch, vectors up to a number, and format, densities ascending. A GPU that is not here takes
# those of DEFAULT, as the formats' order depends little on it.
DEFAULT = "sm_90a"
# Measured on an H200 with 8192 x 28672, 12288 x 49152 and 4096 x 4096: one vector takes as long
# within 10 %, several within 25 %. Those of 4 vectors are of the layers of a llama, of 17 to 90
# million entries at densities of .1 and .5, and of 8192 x 28672. With 16 vectors u8, u4, u2 and
# macko are taken as twice those of 8 but for what was measured of u8 at .1 and of u4 at .3, and
# fixed times are those of matrices of random sizes on an H100. More vectors only bitmap has kernels
# for: others are decoded, and never faster. Those of bitmap from 16 vectors on are of 8192 x 28672
# and 4096 x 4096 on an H200.
RATES: dict[str, dict[int, dict[str, tuple[Rate, ...]]]] = {
    "sm_90a": {
        2: {
            "dense": (Rate(0.0, 4.7, 4.17),),
            "bitmap": (
                Rate(0.1, 6.0, 1.28),
                Rate(0.3, 6.0, 2.67),
                Rate(0.4, 6.0, 3.31),
                Rate(0.5, 6.0, 3.75),
            ),
            "u8": (Rate(0.0, 4.7, 4.17),),
            "u4": (Rate(0.0, 4.7, 4.17),),
            "u2": (Rate(0.0, 4.7, 4.17),),
            "macko": (Rate(0.0, 8.0, 3.95),),
        },
        4: {
            "dense": (Rate(0.0, 4.7, 4.15),),
            "bitmap": (
                Rate(0.1, 5.5, 1.25),
                Rate(0.3, 6.0, 2.7),
                Rate(0.4, 6.5, 3.25),
                Rate(0.5, 6.5, 3.6),
            ),
            "u8": (Rate(0.1, 4.5, 2.8), Rate(0.5, 6.5, 3.45)),
            "u4": (Rate(0.1, 4.5, 2.3), Rate(0.3, 6.5, 3.4), Rate(0.5, 8.0, 3.4)),
            "u2": (Rate(0.1, 4.5, 2.5), Rate(0.3, 6.5, 3.3), Rate(0.5, 8.5, 3.4)),
            "macko": (Rate(0.0, 9.0, 1.3),),
        },
        8: {
            "dense": (Rate(0.0, 4.7, 4.15),),
            "bitmap": (
                Rate(0.1, 8.0, 1.28),
                Rate(0.3, 8.0, 2.67),
                Rate(0.4, 8.0, 3.2),
                Rate(0.5, 8.0, 3.35),
            ),
            "u8": (Rate(0.05, 8.0, 1.75), Rate(0.1, 8.0, 2.3)),
            "u4": (Rate(0.1, 8.0, 2.0), Rate(0.3, 8.0, 2.5)),
            "u2": (Rate(0.0, 8.0, 2.3),),
            "macko": (Rate(0.0, 11.0, 0.7),),
        },
        16: {
            "dense": (Rate(0.0, 4.7, 4.15),),
            "bitmap": (
                Rate(0.05, 6.2, 0.77),
                Rate(0.1, 6.2, 1.08),
                Rate(0.2, 7.6, 1.78),
                Rate(0.3, 8.2, 2.49),
                Rate(0.5, 9.9, 3.59),
            ),
            "u8": (Rate(0.0, 5.8, 1.2),),
            "u4": (Rate(0.0, 5.8, 1.1),),
            "u2": (Rate(0.0, 7.5, 1.05),),
            "macko": (Rate(0.0, 11.0, 0.35),),
        },
        32: {
            "dense": (Rate(0.0, 4.7, 4.15),),
            "bitmap": (
                Rate(0.05, 6.7, 0.72),
                Rate(0.1, 6.9, 1.05),
                Rate(0.2, 8.3, 1.72),
                Rate(0.3, 9.2, 2.4),
                Rate(0.5, 10.5, 3.42),
            ),
            "u8": (Rate(0.0, 40.0, 0.11),),
            "u4": (Rate(0.0, 40.0, 0.11),),
            "u2": (Rate(0.0, 40.0, 0.11),),
            "macko": (Rate(0.0, 40.0, 0.11),),
        },
        64: {
            "dense": (Rate(0.0, 4.7, 4.15),),
            "bitmap": (
                Rate(0.05, 8.9, 0.62),
                Rate(0.1, 9.7, 0.93),
                Rate(0.2, 11.3, 1.51),
                Rate(0.3, 12.3, 2.1),
                Rate(0.5, 13.3, 3.0),
            ),
            "u8": (Rate(0.0, 40.0, 0.11),),
            "u4": (Rate(0.0, 40.0, 0.11),),
            "u2": (Rate(0.0, 40.0, 0.11),),
            "macko": (Rate(0.0, 40.0, 0.11),),
        },
    },
}
# Of a code of u8, u4 and u2, by vectors up to a number: a lane takes those of its row in a panel
# one after the other, each with a read of x from shared memory. On an H100 1277 x 619 at .844, 522
# codes, takes 13.4 to 14.7 us with one vector where its bytes would take 8.6; 67 x 1420 at .539,
# 388 codes, 18.5 to 19.7 with 5. Rows of whole 128 bytes have the table's times: small matrices of
# such rows were not measured.
CODE_US = {2: 0.012, 4: 0.015, 8: 0.018, 16: 0.02}
PADDING_US = 3.5  # of the copy of x for the kernels of matrices whose rows are no whole 16 bytes
ALIGNED = (
    128  # bytes that rows of a dense matrix are multiples of where cuBLAS has the table's rates
)


class Dense(NamedTuple):
    """Of cuBLAS with other rows, in microseconds: fixed, a MB, one where rows are no whole 4 bytes,
    a KB of a row, and beside that one of the first FIRST_KB."""

    fixed: float
    megabyte: float
    odd: float
    row: float
    first: float


# Fitted to 148 matrices of 64 to 16384 rows and columns of random sizes by 1 to 64 vectors, in
# float16 on an H100: half of the times are within 12 %, and few are three times as long.
ONE, SEVERAL = Dense(2.68, 0.5, 0.5, 0.3, 0.0), Dense(3.45, 0.505, 0.76, 0.083, 1.4)
FIRST_KB = 2.0
# Of few rows, which one tile holds, and few vectors in half types cuBLAS does not divide the sums
# where rows are no whole 16 bytes: then their terms wait for each other, TERM_US each. On an H100
# 77 x 1661 by 3 vectors took 21.9 us in float16, 67 x 1420 by 5 20.6; but 72 x 1072 by 5, of whole
# 16 bytes, 4.1, 90 x 1218 by 11 6.1 and 473 x 2682 by 3 8.4. In float32 it divides them.
UNDIVIDED_ROWS, UNDIVIDED_COLUMNS = 128, 8
LAUNCH_US, TERM_US = 2.7, 0.012
MOST_COLUMNS = 64  # beyond which a dense matrix is fastest, whatever is stored


def microseconds(
    format: str,
    arch: str,
    density: float,
    nbytes: int,
    columns: int = 1,
    row: int = ALIGNED,
    itemsize: int = 2,
    width: int = 0,
) -> float:
    """The time of a product with a matrix of ``nbytes`` in a format and so many vectors: rates
    between two densities of the table are interpolated, beyond them they are those of the
    nearest. ``row`` is the bytes of a row of the dense matrix, whose numbers have ``itemsize``,
    ``width`` the columns that a lane of u8, u4 and u2 takes of one row."""
    if format == "dense" and row % ALIGNED:
        return _dense(columns, nbytes, row, itemsize)
    by_columns = RATES.get(arch, RATES[DEFAULT])
    most = min(number for number in by_columns if number >= columns)
    fixed, rate = _between(by_columns[most][format], density)
    if row % 16 and format != "dense":
        fixed += PADDING_US
    is_timed = format in SLICES and row % ALIGNED
    codes = density * min(width, row // itemsize)
    of_lane = codes * _of_code(columns) if is_timed else 0.0
    return fixed + max(nbytes / rate * 1e-6, of_lane)


def _of_code(columns: int) -> float:
    """Microseconds of a code; none of what is decoded for more vectors than kernels take."""
    return next((time for most, time in CODE_US.items() if columns <= most), 0.0)


def _dense(columns: int, nbytes: int, row: int, itemsize: int) -> float:
    rates = ONE if columns == 1 else SEVERAL
    megabytes, kilobytes = nbytes / 1e6, row / 1e3
    moved = megabytes * (rates.odd if row % 4 else rates.megabyte)
    time = rates.fixed + moved + kilobytes * rates.row + min(kilobytes, FIRST_KB) * rates.first
    is_few = 1 < columns <= UNDIVIDED_COLUMNS and nbytes <= UNDIVIDED_ROWS * row
    if is_few and row % 16 and itemsize == 2:
        return max(time, LAUNCH_US + TERM_US * row / itemsize)
    return time


def _between(rates: tuple[Rate, ...], density: float) -> tuple[float, float]:
    """The fixed time and the rate at a density."""
    behind = next((i for i, rate in enumerate(rates) if rate.density > density), len(rates))
    if behind in (0, len(rates)):
        return rates[min(behind, len(rates) - 1)][1:]
    low, high = rates[behind - 1], rates[behind]
    share = (density - low.density) / (high.density - low.density)
    fixed, rate = (x + share * (y - x) for x, y in zip(low[1:], high[1:], strict=True))
    return fixed, rate

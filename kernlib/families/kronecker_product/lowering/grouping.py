"""Which factors are applied in one pass over memory, and in which order within it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from kernlib.lowering.arithmetic import round_up
from kernlib.records import NamedTuple

CHUNK = 8  # numbers that tensor cores take at once
MERGED = 16  # rows and columns of small neighbours that are applied as one matrix
MOST_SPLIT = 1024  # elements of a matrix that is kept as two words each
Size = tuple[int, int]  # rows and columns of a factor

# Cycles of one multiprocessor of an H200, to compare runs by. Of an element that is read or written
# in shared memory, what else a warp does with it counted in: 1 / 9 and 1 / 17 as measured with rows
# of 8^5, estimates for the others; of a term at 566 (half types), 282 (TF32) and 61 (double)
# TFLOP/s; of a byte of device memory at 4.2 TB/s.
SHARED_CYCLES = {"fp32": 1 / 16, "tf32": 1 / 16, "fp64": 1 / 8, "half": 1 / 17, "pairs": 1 / 9}
TERM_CYCLES = {
    "fp32": 3 / 608,
    "tf32": 1 / 608,
    "fp64": 1 / 131,
    "half": 1 / 1221,
    "pairs": 3 / 1221,
}
BYTE_CYCLES = 1 / 18
TILE_CYCLES = 1500.0  # of a tile, beside what is done with its elements
LAUNCH_CYCLES = 4000.0  # on all multiprocessors
MULTIPROCESSORS = 132

# What is asked of a value again and again while kernels are chosen, some ten times of each.
cached = lru_cache(maxsize=1024)


class Mode(NamedTuple):
    """What applies ``parts`` factors from ``first`` on, as one matrix, to an array
    ``(left, rows, right)``."""

    left: int
    rows: int
    columns: int
    right: int
    first: int
    parts: int

    @property
    def inputs(self) -> int:
        """Elements that it reads."""
        return self.left * self.rows * self.right

    @property
    def outputs(self) -> int:
        """Elements that it writes."""
        return self.left * self.columns * self.right

    @property
    def matrix(self) -> int:
        """Elements of the matrix, with zeros up to multiples of CHUNK."""
        return round_up(self.rows, CHUNK) * round_up(self.columns, CHUNK)

    def stored(self, arithmetic: str) -> int:
        """Elements of shared memory for the matrix: for both words of each in 3xTF32, lest they be
        split again for each row of fragments, where those are not too many."""
        return self.matrix * (2 if arithmetic == "fp32" and self.matrix <= MOST_SPLIT else 1)

    @property
    def terms(self) -> int:
        """Multiplications, those with zeros among them."""
        return self.left * self.right * self.matrix


@cached
def modes(sizes: tuple[Size, ...], columns: int = 1, inside: bool = False) -> tuple[Mode, ...]:
    """The modes of factors on so many columns, in the order of the fewest operations: with a matrix
    (P, Q), ``1 / P - 1 / Q`` is least of the one that comes first. The last of equals is first, as
    its elements lie side by side."""
    merged = _merged(sizes)
    now = [rows for rows, _, _, _ in merged]
    order = sorted(range(len(merged)), key=lambda i: (1 / merged[i][0] - 1 / merged[i][1], -i))
    made = []
    for index in order:
        rows, width, first, parts = merged[index]
        left, right = math.prod(now[:index]), math.prod(now[index + 1 :])
        if inside:
            right *= columns
        else:
            left *= columns
        made.append(Mode(left, rows, width, right, first, parts))
        now[index] = width
    return tuple(made)


@cached
def _merged(sizes: tuple[Size, ...]) -> tuple[tuple[int, int, int, int], ...]:
    """Rows, columns, first factor and count of each matrix: neighbours up to MERGED, in the fewest
    matrices; and in such as are all of multiples of CHUNK, where there are."""
    return _partition(sizes, MERGED)[1]


def _partition(sizes: tuple[Size, ...], most: int) -> tuple[tuple[int, int, int], tuple]:
    """The best matrices of neighbours up to so many rows and columns, each a single factor at
    least, behind what they are the least in: how many are of no whole chunks; how many; terms of an
    element."""
    best: list[tuple[tuple[int, int, int], tuple]] = [((0, 0, 0), ())]
    for last in range(1, len(sizes) + 1):
        found = []
        for first in range(last - 1, -1, -1):
            rows, columns = (math.prod(size[side] for size in sizes[first:last]) for side in (0, 1))
            if first < last - 1 and max(rows, columns) > most:
                break
            ragged, count, terms = best[first][0]
            ragged += rows % CHUNK > 0 or columns % CHUNK > 0
            cost = ragged, count + 1, terms + round_up(rows, CHUNK) * round_up(columns, CHUNK)
            found.append((cost, (*best[first][1], (rows, columns, first, last - first))))
        best.append(min(found, key=lambda each: each[0]))
    return best[-1]


@cached
def widest(sizes: tuple[Size, ...]) -> int:
    """The most elements that a column has between two of its modes, or at either end."""
    return max(max(mode.inputs, mode.outputs) for mode in modes(sizes))


def arithmetic_of(dtype: str, precision: str) -> str:
    """The arithmetic in which numbers of a dtype are multiplied: "fp64", "fp32" (3xTF32) or "tf32",
    which half types use as well."""
    return {"float64": "fp64", "float32": precision}.get(dtype, "tf32")


@cached
def matrices(sizes: tuple[Size, ...], arithmetic: str) -> int:
    """Elements of all matrices in shared memory."""
    return sum(mode.stored(arithmetic) for mode in modes(sizes))


def fits(run: tuple[Size, ...], arithmetic: str, most: int, room: int) -> bool:
    """Whether a column of a run has at most so many elements, and with the matrices takes no more
    shared memory."""
    width = widest(run)
    return width <= most and width + matrices(run, arithmetic) <= room


def groups(
    sizes: tuple[Size, ...], elements: int, cost: Callable[..., float | None]
) -> tuple[tuple[int, int], ...] | None:
    """The runs of factors, each ``(first, behind its last)``, that take the least time, in the
    order of their launches: the last factors first. None where a factor fits none.

    ``cost(run, elements, begins, ends)`` is the time of a run of factors on so many elements, which
    are those of x if it ``begins`` and gives the result if it ``ends``; None for one that does not
    fit."""
    count = len(sizes)
    best: dict[int, tuple[float, tuple]] = {count: (0.0, ())}
    sizes_at = {count: elements}
    for first in range(count - 1, -1, -1):
        rows, columns = sizes[first]
        sizes_at[first] = sizes_at[first + 1] // rows * columns
    for first in range(count - 1, -1, -1):
        for last in range(first + 1, count + 1):
            if last not in best:
                continue
            own = cost(sizes[first:last], sizes_at[last], last == count, first == 0)
            if own is None:
                continue
            whole = best[last][0] + own
            if first not in best or whole < best[first][0]:
                best[first] = whole, (*best[last][1], (first, last))
    return best[0][1] if 0 in best else None


def cycles(
    run: tuple[Size, ...],
    elements: int,
    ends: tuple[float, float],
    handed: tuple[float, float],
    arithmetic: str,
    is_hidden: bool,
    tile: int,
) -> float:
    """The time of a run on all multiprocessors, by tiles of so many elements. ``ends`` are the
    bytes of an element that are read from device memory and written to it, which are ``is_hidden``
    where a multiprocessor holds two blocks, that move and compute side by side; ``handed`` those
    from the run before and to the next, which wait for each other: by way of the L2 cache, at no
    more than the rate of device memory."""
    features = math.prod(rows for rows, _ in run)
    columns, found = elements / features, modes(run)
    terms = sum(mode.terms for mode in found) * columns
    passed = sum(mode.inputs + mode.outputs for mode in found) * columns
    work = terms * TERM_CYCLES[arithmetic] + passed * SHARED_CYCLES[arithmetic]
    moved, waited = (
        (found[0].inputs * read + found[-1].outputs * written) * columns * BYTE_CYCLES
        for read, written in (ends, handed)
    )
    hidden = 7 / 8 if is_hidden else 1 / 2  # a single block hides what it reads ahead
    tiles = elements / tile * TILE_CYCLES
    whole = work + moved - hidden * min(work, moved) + waited + tiles
    return whole / MULTIPROCESSORS + LAUNCH_CYCLES

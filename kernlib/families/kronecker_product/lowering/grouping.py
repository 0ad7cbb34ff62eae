"""Which factors are applied in one pass over memory, and in which order within it: those groups
that take the least time, by the rates of an H200."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from kernlib.families.kronecker_product.lowering.problem import Problem
from kernlib.jit import targets
from kernlib.lowering.arithmetic import round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Gpu, Kernel

CHUNK = 8  # numbers that tensor cores take at once
MERGED = 16  # rows and columns of small neighbours that are applied as one matrix
MOST_SPLIT = 1024  # elements of a matrix that is kept as two words each
COLUMNS = 1024  # that the time of a group is estimated for
MULTIPROCESSORS = 132  # of the GPU whose times groups are chosen by
# Of kernels for any sizes: elements that a tile's size is a multiple of, warps of a block, and
# registers of a thread for results, in elements.
LINE, MOST_WARPS, SUMS = 32, 16, {"float32": 64, "float64": 32}
Size = tuple[int, int]  # rows and columns of a factor

# Cycles of one multiprocessor of an H200, to compare groups of factors by. Of an element that is
# read or written in shared memory, what else a warp does with it counted in: 1 / 9 and 1 / 17 as
# measured with rows of 8^5, estimates for the others; of a term at 566 (half types), 282 (TF32) and
# 61 (double) TFLOP/s; of a byte of device memory at 4.2 TB/s.
CLOCK = 2048.0  # cycles a microsecond: 1980, as a power of two, which rounds no time
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
    applied = []
    for index in order:
        rows, width, first, parts = merged[index]
        left, right = math.prod(now[:index]), math.prod(now[index + 1 :])
        if inside:
            right *= columns
        else:
            left *= columns
        applied.append(Mode(left, rows, width, right, first, parts))
        now[index] = width
    return tuple(applied)


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
        choices = []
        for first in range(last - 1, -1, -1):
            rows, columns = (math.prod(size[side] for size in sizes[first:last]) for side in (0, 1))
            if first < last - 1 and max(rows, columns) > most:
                break
            ragged, count, terms = best[first][0]
            ragged += rows % CHUNK > 0 or columns % CHUNK > 0
            cost = ragged, count + 1, terms + round_up(rows, CHUNK) * round_up(columns, CHUNK)
            choices.append((cost, (*best[first][1], (rows, columns, first, last - first))))
        best.append(min(choices, key=lambda each: each[0]))
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


class Group(NamedTuple):
    """Neighbouring factors that one kernel applies, to so many elements: to those of x if it
    ``begins``, and for the result if it ``ends``. The columns lie ``inside``, behind the features,
    or in front of them."""

    sizes: tuple[Size, ...]
    elements: int
    dtype: str
    precision: str
    inside: bool
    begins: bool = True
    ends: bool = True

    @property
    def arithmetic(self) -> str:
        """As :func:`arithmetic_of` names it."""
        return arithmetic_of(self.dtype, self.precision)


def fits(group: Group, arch: str, blocks: int = 1) -> bool:
    """Whether shared memory holds a column of a group and its matrices, in kernels for any sizes of
    which a multiprocessor has so many blocks."""
    width = widest(group.sizes)
    most = room(group.dtype, arch) // blocks
    return (
        width <= most_features(group.dtype)
        and width + matrices(group.sizes, group.arithmetic) <= most
    )


def most_features(dtype: str) -> int:
    """The longest column that a tile of such kernels can be of: its results wait in registers."""
    return SUMS[DTYPES[dtype].accumulator] * MOST_WARPS * 32


def room(dtype: str, arch: str) -> int:
    """Elements of shared memory of a block of such kernels."""
    return targets.SHARED_BYTES[arch] // DTYPES[dtype].sums.bytes - LINE


def product_of(problem: Problem) -> Group:
    """All factors of a problem, on as many columns as times are estimated for."""
    kind = problem.dtype, problem.precision, problem.inside
    return Group(problem.sizes, COLUMNS * problem.in_features, *kind)


@cached
def groups(kernel: Kernel, product: Group, arch: str) -> tuple[tuple[int, int], ...] | None:
    """The groups of neighbours, each ``(first, behind its last)``, in which a kernel takes the
    least time for all factors, in the order of launches: the last factors first. None where it
    does not take a factor. Times are those of one GPU, so that what a row's bits depend on is the
    same on all."""
    count, gpu = len(product.sizes), Gpu(arch, MULTIPROCESSORS)
    best: dict[int, tuple[float, tuple]] = {count: (0.0, ())}
    elements = {count: product.elements}
    for first in range(count - 1, -1, -1):
        rows, columns = product.sizes[first]
        elements[first] = elements[first + 1] // rows * columns
    for first in range(count - 1, -1, -1):
        for last in range(first + 1, count + 1):
            if last not in best:
                continue
            ends = last == count, first == 0
            sizes = product.sizes[first:last]
            group = Group(sizes, elements[last], *product[2:5], *ends)
            if not kernel.takes(group, arch):
                continue
            time = best[last][0] + kernel.estimate(group, {}, gpu)
            if first not in best or time < best[first][0]:
                best[first] = time, (*best[last][1], (first, last))
    return best[0][1] if 0 in best else None


def group_time(
    group: Group,
    arithmetic: str,
    ends: tuple[float, float],
    handed: tuple[float, float],
    is_hidden: bool,
    tile: int,
) -> float:
    """Microseconds of a group of factors on all multiprocessors, by tiles of so many elements.
    ``ends`` are the bytes of an element that are read from device memory and written to it, which
    are ``is_hidden`` where a multiprocessor holds two blocks, that move and compute side by side;
    ``handed`` those from the group before and to the next, which wait for each other: by way of the
    L2 cache, at no more than the rate of device memory."""
    features, applied = math.prod(rows for rows, _ in group.sizes), modes(group.sizes)
    columns = group.elements / features
    terms = sum(mode.terms for mode in applied) * columns
    passed = sum(mode.inputs + mode.outputs for mode in applied) * columns
    work = terms * TERM_CYCLES[arithmetic] + passed * SHARED_CYCLES[arithmetic]
    moved, waited = (
        (applied[0].inputs * read + applied[-1].outputs * written) * columns * BYTE_CYCLES
        for read, written in (ends, handed)
    )
    hidden = 7 / 8 if is_hidden else 1 / 2  # a single block hides what it reads ahead
    tiles = group.elements / tile * TILE_CYCLES
    cycles = work + moved - hidden * min(work, moved) + waited + tiles
    return (cycles / MULTIPROCESSORS + LAUNCH_CYCLES) / CLOCK

"""Which factors are applied in one pass over memory, and in which order within it."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from kernlib.families.kronecker_product.lowering.problem import Problem
from kernlib.lowering.arithmetic import round_up
from kernlib.lowering.kernel import Gpu, Kernel

CHUNK = 8  # numbers that tensor cores take at once
MERGED = 16  # rows and columns of small neighbours that are applied as one matrix
MOST_SPLIT = 1024  # elements of a matrix that is kept as two words each
COLUMNS = 1024  # that the time of a group is estimated for
MULTIPROCESSORS = 132  # of the GPU whose times groups are chosen by
Size = tuple[int, int]  # rows and columns of a factor

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

"""Whether torch's batched products, a factor at a time, are faster than kernels for any sizes.

They are where factors are large and ragged: on few rows, where kernels have fewer tiles than a GPU
has multiprocessors, and on many, where a tile has so few columns that its results go to memory in
short pieces. Small neighbours are multiplied out first where that is faster: three factors that are
one in the end are read and written once. Times are estimated, by constants fitted to the products
of ``estimates.py``, of both ways.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from kernlib.families.kronecker_product.lowering import estimates
from kernlib.families.kronecker_product.lowering.estimates import GPU, MOST_BYTES
from kernlib.families.kronecker_product.lowering.grouping import CHUNK, Size
from kernlib.families.kronecker_product.lowering.problem import Layout, Problem
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Gpu

# That torch must be faster by: the ratio of two estimates is wrong by 1.2 as a rule, either way. Of
# 120 ragged products, those of the fit, 8 take more than 1.05 times the time of the fastest way
# that was measured, as many as with 1.0 and 1.1; with 0.9 it is 12, with 1.3 it is 17. Of whole
# sizes torch was measured with kernels that rules choose alone, and on few rows of small ones.
GAIN, WHOLE_GAIN = 1.05, 1.3
MERGED = 64  # rows and columns up to which neighbours are one factor: two tiles on either side


class Rates(NamedTuple):
    """Of torch in one dtype, in microseconds: a product's launch; a block on one multiprocessor,
    and a term of its tile; a term of a matrix that the last block waits for; and of a block's terms
    the part that is left where all sizes are multiples of 8, as cuBLAS has them aligned."""

    launch: float
    block: float
    term: float
    depth: float
    aligned: float


# Of torch: microseconds, and bytes a microsecond. Of the 1024 results of a tile a term takes 0.0045
# in float32, which are 128 multiplications a cycle of 1.75 GHz, and 0.0072 in float64, between the
# 0.0091 of 64 a cycle and the tensor cores' 0.0046. Aligned tiles in float64 have these to
# themselves: one of 128 terms takes 0.5 with its block, at 67 TFLOP/s of the GPU.
RATES = {
    "float32": Rates(3.7, 0.17, 0.0045, 0.028, 0.9),
    "float64": Rates(2.7, 0.31, 0.0072, 0.0084, 0.21),
}
TILE, TERMS = 32, 8  # results of a block's tile on either side, and terms that it takes at once
PASS = 2.1  # a launch that copies, computes number by number or multiplies two factors out
TORCH_BYTES = 5.8e6  # that products read and write, to a large part in the L2 cache
PASS_BYTES = 2.5e6  # the same of passes over x or the result, in device memory


class Timed(Protocol):
    """What knows how long its launches take."""

    def time(self, problem: Problem, gpu: Gpu) -> float:
        """In microseconds."""


def gains(problem: Problem, kernels: Timed, gpu: Gpu, passes: int) -> bool:
    """Whether torch, with so many passes over the result behind its products, takes less time than
    kernels do. What nobody measured is kernels', and so are half types and factors that vary with
    the batch, of which torch would make copies."""
    if problem.dtype not in RATES or not estimates.are_known(problem, gpu):
        return False
    chain = fastest(problem, passes)
    if chain is None:
        return False
    gain = GAIN if estimates.are_ragged(problem) else WHOLE_GAIN
    return gain * torch_time(problem, chain, passes) < kernels.time(problem, gpu)


def fastest(problem: Problem, passes: int) -> list[Product] | None:
    """The products that take torch less time: of the factors as they are, or of small neighbours
    multiplied out; None where either takes too much memory."""
    ways = [products(problem)]
    merged = products(problem, MERGED)
    if len(merged) < len(ways[0]):
        ways.append(merged)
    item = DTYPES[problem.dtype].bytes
    ways = [way for way in ways if _memory(problem, way, passes) * item <= MOST_BYTES]
    return min(ways, key=lambda way: torch_time(problem, way, passes), default=None)


# What torch does.


class Product(NamedTuple):
    """A factor, by its number, applied to an array ``(left, size[0], right)``: by a batched product
    of ``left`` matrices, or one product where ``right`` is 1 or what it is applied to ``turned``,
    which copies that before and the result after. ``parts`` are the neighbours from that factor on
    whose Kronecker product it is."""

    factor: int
    left: int
    size: Size
    right: int
    turned: bool
    parts: int = 1

    @property
    def elements(self) -> int:
        """That are read and written."""
        return self.left * self.right * sum(self.size)

    @property
    def tiles(self) -> int:
        """Tiles of TILE x TILE results."""
        columns = self.size[1]
        if self.right == 1 or self.turned:
            return ceil_div(self.left * self.right, TILE) * ceil_div(columns, TILE)
        return self.left * ceil_div(self.right, TILE) * ceil_div(columns, TILE)


def products(problem: Problem, most: int = 0) -> list[Product]:
    """Those of ``reference.multiply`` from the right, in its order: the factor that shortens rows
    most is first, and one is turned that is wide beside what lies behind it. Neighbours of up to
    ``most`` rows and columns are one factor."""
    before = problem.batch * problem.columns
    merged, chain = _merged(problem, most), []
    now = [size[0] for _, _, size in merged]
    growth = [1 / rows - 1 / columns for _, _, (rows, columns) in merged]
    for index in sorted(range(len(now)), key=growth.__getitem__):
        first, parts, (_, columns) = merged[index]
        left, right = before * math.prod(now[:index]), math.prod(now[index + 1 :])
        turned = right > 1 and 2 * right < columns
        chain.append(Product(first, left, (now[index], columns), right, turned, parts))
        now[index] = columns
    return chain


def _merged(problem: Problem, most: int) -> list[tuple[int, int, Size]]:
    """The first factor, count and size of neighbours that are one: from the first on, as many as
    there may be."""
    merged: list[tuple[int, int, Size]] = []
    for number, factor in enumerate(problem.factors):
        size = factor.rows, factor.columns
        if merged:
            first, count, (rows, columns) = merged[-1]
            both = rows * factor.rows, columns * factor.columns
            if max(both) <= most:
                merged[-1] = first, count + 1, both
                continue
        merged.append((number, 1, size))
    return merged


def _memory(problem: Problem, chain: list[Product], passes: int) -> int:
    """The most elements beside x and the result that are there at once."""
    copied = not _is_contiguous(problem, problem.x)
    most = 2 * problem.batch * problem.columns * problem.out_features * (passes > 0)
    for index, each in enumerate(chain):
        read, written = (each.left * each.right * size for size in each.size)
        last = index == len(chain) - 1 and not passes
        beside = read * ((index > 0 or copied) + each.turned) + written * ((not last) + each.turned)
        most = max(most, beside)
    return most


def torch_time(problem: Problem, chain: list[Product], passes: int) -> float:
    """Microseconds of torch's products, of a copy of an x that is not contiguous, and of passes
    over the result, which read it and write it."""
    rates, item = RATES[problem.dtype], DTYPES[problem.dtype].bytes
    time = sum(_product_time(each, rates, item) for each in chain)
    moved = 2 * problem.batch * problem.columns * item / PASS_BYTES
    if not _is_contiguous(problem, problem.x):
        time += PASS + moved * problem.in_features
    return time + passes * (PASS + moved * problem.out_features)


def _product_time(product: Product, rates: Rates, item: int) -> float:
    moved = product.elements * item / TORCH_BYTES
    rows = product.size[0]
    sizes = (*product.size, *[product.right] * (product.right > 1))
    term = rates.term if any(size % CHUNK for size in sizes) else rates.aligned * rates.term
    block = rates.block + round_up(rows, TERMS) * term
    time = rates.launch + moved + product.tiles * block / GPU[1] + rows * rates.depth
    time += (product.parts - 1) * PASS
    return time + 2 * (PASS + moved) if product.turned else time


def _is_contiguous(problem: Problem, x: Layout) -> bool:
    columns, features = problem.columns, problem.in_features
    sides = (x.feature, 1, features), (x.column, features, columns)
    batches = x.batch, columns * features, problem.batch
    return all(stride == dense or size == 1 for stride, dense, size in (*sides, batches))

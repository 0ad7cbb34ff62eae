"""Whether torch's batched products, a factor at a time, are faster than kernels for any sizes.

They are where factors are large and ragged: on few rows, where kernels have fewer tiles than a GPU
has multiprocessors, and on many, where a tile has so few columns that its results go to memory in
short pieces. Both times are estimated, by constants fitted to those that products of 2 to 8 factors
of 2 to 128 rows and columns took in CUDA graphs on an H100, on 1 to 2353 rows in float32 and
float64.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.descriptors.expression import Node, Operation
from kernlib.families.kronecker_product.lowering.grouping import Mode, Size
from kernlib.families.kronecker_product.lowering.problem import Layout, Problem
from kernlib.families.kronecker_product.lowering.runs import Run
from kernlib.families.kronecker_product.lowering.variant import Part, Variant
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES

GPU = "sm_90a", 132  # of which there are measurements, and its multiprocessors
GAIN = 1.3  # that torch must be faster by: the ratio of two estimates is wrong by 1.2 as a rule
MOST_BYTES = 1 << 30  # beside x and result, of what torch keeps between two factors


class Rates(NamedTuple):
    """Of torch in one dtype, in microseconds: a product's launch; a block on one multiprocessor,
    and a term of its tile; a term of a matrix that the last block waits for."""

    launch: float
    block: float
    term: float
    depth: float


# Of torch: microseconds, and bytes a microsecond.
RATES = {
    "float32": Rates(3.7, 0.167, 0.0041, 0.029),
    "float64": Rates(2.7, 0.364, 0.0028, 0.011),
}
TILE, TERMS = 32, 8  # results of a block's tile on either side, and terms that it takes at once
PASS = 2.35  # a launch that copies, or computes number by number
TORCH_BYTES = 6.0e6  # that products read and write, to a large part in the L2 cache
PASS_BYTES = 2.5e6  # the same of passes over x or the result, in device memory
SUMMAND = 5  # passes that leave out a summand where its scale is 0, beside those that add it
# Of kernels, the same.
LAUNCH = 1.6  # in a graph, beside what follows
MATRIX = 0.00087  # a number of a matrix, which blocks put into shared memory at once
MODE = 0.71  # a factor applied to a tile, beside what follows
STEP, STEP_RESULTS = 0.027, 1024  # a term of so many results, of one warp
RESULT = 0.0036  # a number that a warp reads from shared memory or writes there
WHOLE = 0.22  # of MODE and RESULT, where rows and columns are multiples of 8
KERNEL_BYTES = 6.7e6  # as TORCH_BYTES
PIECE = 150  # bytes that take as long as a jump to where a tile goes on in memory


class Launch(NamedTuple):
    """One of kernels for any sizes: runs of factors, the kernel, and how many blocks it has."""

    runs: tuple[Run, ...]
    made: Variant
    blocks: int


def gains(problem: Problem, launches: list[Launch], device: tuple[str, int], passes: int) -> bool:
    """Whether torch, with so many passes over the result behind its products, takes clearly less
    time than kernels do, on a GPU of an arch and so many multiprocessors. Products from the left,
    which nobody measured, are kernels', and those of factors that vary with the batch, of which
    torch would make copies."""
    if device != GPU or problem.dtype not in RATES or problem.inside:
        return False
    if any(factor.batch_stride for factor in problem.factors):
        return False
    made = products(problem)
    if _kept(problem, made, passes) * DTYPES[problem.dtype].bytes > MOST_BYTES:
        return False
    return GAIN * torch_time(problem, made, passes) < kernel_time(launches)


# What torch does.


class Product(NamedTuple):
    """A factor, by its number, applied to an array ``(left, size[0], right)``: by a batched product
    of ``left`` matrices, or one product where ``right`` is 1 or what it is applied to ``turned``,
    which copies that before and the result after."""

    factor: int
    left: int
    size: Size
    right: int
    turned: bool

    @property
    def elements(self) -> int:
        """That are read and written."""
        return self.left * self.right * sum(self.size)

    @property
    def tiles(self) -> int:
        columns = self.size[1]
        if self.right == 1 or self.turned:
            return ceil_div(self.left * self.right, TILE) * ceil_div(columns, TILE)
        return self.left * ceil_div(self.right, TILE) * ceil_div(columns, TILE)


def products(problem: Problem) -> list[Product]:
    """Those of ``reference.multiply`` from the right, in its order: the factor that shortens rows
    most is first, and one is turned that is wide beside what lies behind it."""
    before = problem.batch * problem.columns
    now, made = [factor.rows for factor in problem.factors], []
    growth = [1 / factor.rows - 1 / factor.columns for factor in problem.factors]
    for index in sorted(range(len(now)), key=growth.__getitem__):
        columns = problem.factors[index].columns
        left, right = before * math.prod(now[:index]), math.prod(now[index + 1 :])
        turned = right > 1 and 2 * right < columns
        made.append(Product(index, left, (now[index], columns), right, turned))
        now[index] = columns
    return made


def _kept(problem: Problem, made: list[Product], passes: int) -> int:
    """The most elements beside x and the result that are there at once."""
    copied = not _is_contiguous(problem, problem.x)
    most = 2 * problem.batch * problem.columns * problem.out_features * (passes > 0)
    for index, each in enumerate(made):
        read, written = (each.left * each.right * size for size in each.size)
        last = index == len(made) - 1 and not passes
        kept = read * ((index > 0 or copied) + each.turned) + written * ((not last) + each.turned)
        most = max(most, kept)
    return most


def passes_of(epilogue: tuple[Epilogue, ...]) -> int:
    """Passes over the result that torch makes of an epilogue: one for each operation."""
    return sum(
        _operations(part.tree()) + SUMMAND * sum(scale is not None for _, scale in part.summands)
        for part in epilogue
    )


def _operations(node: Node) -> int:
    if not isinstance(node, Operation):
        return 0
    return 1 + sum(_operations(operand) for operand in node.operands)


def torch_time(problem: Problem, made: list[Product], passes: int) -> float:
    """Microseconds of torch's products, of a copy of an x that is not contiguous, and of passes
    over the result, which read it and write it."""
    rates, item = RATES[problem.dtype], DTYPES[problem.dtype].bytes
    whole = sum(_product_time(each, rates, item) for each in made)
    moved = 2 * problem.batch * problem.columns * item / PASS_BYTES
    if not _is_contiguous(problem, problem.x):
        whole += PASS + moved * problem.in_features
    return whole + passes * (PASS + moved * problem.out_features)


def _product_time(product: Product, rates: Rates, item: int) -> float:
    moved = product.elements * item / TORCH_BYTES
    rows = product.size[0]
    block = rates.block + round_up(rows, TERMS) * rates.term
    whole = rates.launch + moved + product.tiles * block / GPU[1] + rows * rates.depth
    return whole + 2 * (PASS + moved) if product.turned else whole


def _is_contiguous(problem: Problem, x: Layout) -> bool:
    columns, features = problem.columns, problem.in_features
    sides = (x.feature, 1, features), (x.column, features, columns)
    batches = x.batch, columns * features, problem.batch
    return all(stride == wanted or size == 1 for stride, wanted, size in (*sides, batches))


# What kernels do.


def kernel_time(launches: list[Launch]) -> float:
    """Microseconds of kernels for any sizes."""
    parts = [
        (launch, run, part)
        for launch in launches
        for run, part in zip(launch.runs, launch.made.parts, strict=True)
    ]
    return LAUNCH * len(launches) + sum(_run_time(*each) for each in parts)


def _run_time(launch: Launch, run: Run, part: Part) -> float:
    """A run's: each block takes tiles in turn, one warp at the rate of another, however many there
    are on a multiprocessor."""
    modes, warps = part.modes, launch.made.warps
    tiles = run.batch * run.outer * run.inner * ceil_div(run.columns, part.columns)
    tile = sum(_mode_time(mode, warps) for mode in modes)
    whole = ceil_div(tiles, launch.blocks) * tile + MATRIX * sum(mode.matrix for mode in modes)
    width = math.prod(factor.columns for factor in run.factors)
    elements = run.elements + run.elements // width * math.prod(f.rows for f in run.factors)
    moved = elements * launch.made.itemsize / KERNEL_BYTES * GPU[1]
    if run.inside:  # pieces of so many columns, or of all
        piece = 1 + PIECE / (part.columns * launch.made.itemsize)
        moved *= max(1.0, min(piece, run.columns / part.columns))
    return whole + moved / min(GPU[1], launch.blocks)


def _mode_time(mode: Mode, warps: int) -> float:
    steps = mode.rows * ceil_div(mode.outputs, STEP_RESULTS * warps)
    is_ragged = mode.matrix > mode.rows * mode.columns
    apart = MODE + RESULT * (mode.inputs + mode.outputs) / warps
    return STEP * steps + (apart if is_ragged else WHOLE * apart)

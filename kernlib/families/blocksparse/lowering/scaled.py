"""The kernel of kernel_sources/blocksparse/scaled/scaled.cuh: products with blocks of 128 x 128 in
float8, with scales.

A problem is one of pairs, two numbers that are neighbours along the depth being one of two bytes:
so blocks are of 128 x 64, strides are those of pairs, and the rest is hopper.cuh's. Its dtype is
the result's.
"""

from __future__ import annotations

from itertools import product

from kernlib.families.blocksparse.lowering import hopper, order
from kernlib.families.blocksparse.lowering.problem import Dense, Spmm, Values
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering import tma
from kernlib.lowering.choice import Choice
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import Lowered
from kernlib.lowering.wgmma import multiply
from kernlib.records import NamedTuple

KIND = "scaled"
STORAGE = "float8_e4m3fn"
BLOCK = 128
WIDTHS = (256, 128)  # columns of a tile
QUARTER = 64  # of one wgmma
SCALES = "slots", "columns"  # names of their addresses
STEPS = "4q"  # struct ScaleStrides


class Scales(NamedTuple):
    """Strides: of the slots' scales from batch to batch, of the columns' from batch, head and
    column to the next."""

    slot_batch: int
    column_batch: int
    column_head: int
    column: int


class Variant(NamedTuple):
    """Everything that code generation chooses."""

    dtype: str  # of the result
    columns: int  # of a tile
    lines_last: bool


def in_pairs(problem: Spmm) -> Spmm | None:
    """A problem of blocks of 128 x 128, its strides those of single numbers, as the kernel has it;
    None where neighbours along the depth do not lie side by side, two and two."""
    blocks, values, dense = problem.blocks, problem.values, problem.dense
    if (blocks.rows, blocks.cols) != (BLOCK, BLOCK) or problem.transposed:
        return None
    steps = values.batch, values.slot, values.row, dense.batch, dense.head, dense.column
    if values.column != 1 or dense.line != 1 or any(step % 2 for step in steps):
        return None
    batch, slot, row, *others = (step // 2 for step in steps)
    dense_batch, head, column = others
    return problem._replace(
        blocks=blocks._replace(cols=BLOCK // 2),
        values=Values(batch, slot, row, 1, values.alignment),
        dense=Dense(dense_batch, head, 1, column, dense.alignment),
    )


def takes(problem: Spmm, arch: str) -> bool:
    """Whether the kernel computes a problem of pairs."""
    return hopper.takes(problem, arch)


def candidates(problem: Spmm) -> list[Choice]:
    """The columns of a tile, most first: no more than twice as many as the problem has."""
    known = [width for width in WIDTHS if width < 2 * problem.columns] or WIDTHS[-1:]
    return [{"columns": width} for width in known]


def lower(
    problem: Spmm,
    scales: Scales,
    multiprocessors: int,
    choice: Choice | None = None,
) -> Lowered:
    """The launch of a problem of pairs that the kernel takes, with the columns of ``choice``, one
    of :func:`candidates`."""
    choice = choice or hopper.default(problem, candidates(problem), multiprocessors)
    width = int(choice["columns"])
    maps = (
        tma.tensor_map(
            problem.dtype, hopper.values_extent(problem), (hopper.ROW, hopper.ROW, 1, 1)
        ),
        tma.tensor_map(problem.dtype, hopper.dense_extent(problem), (hopper.ROW, width, 1, 1)),
        hopper.out_map(problem),
    )
    numbers = hopper.numbers(problem, multiprocessors, width)
    fixed, kernel = parameters().pack(*scales, *numbers), spec(_variant(problem, width))
    given = problem, kernel, fixed, ("values", "dense", "out"), maps, multiprocessors, width
    return hopper.launch((), *given, behind=SCALES)


def _variant(problem: Spmm, width: int) -> Variant:
    return Variant(problem.dtype, width, bool(hopper.is_across(problem.out)))


def variants(dtype: str) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for results of a dtype."""
    made = [spec(Variant(dtype, *each)) for each in product(WIDTHS, (False, True))]
    return order.variants((BLOCK, BLOCK)) + made


def spec(made: Variant) -> KernelSpec:
    """The KernelSpec of a variant."""
    dtype, columns, lines_last = made
    words = [f"{BLOCK}x{BLOCK}", f"{hopper.TILE_LINES}x{columns}"] + ["lines_last"] * lines_last
    source = f"""{text.preamble(dtype, dtype, ())}
constexpr int TILE_COLUMNS = {columns};
constexpr bool LINES_LAST = {str(lines_last).lower()};
constexpr int SUMMANDS = 0;
constexpr int PARAMETER_BYTES = {parameters().size};

#include "common/hopper.cuh"

{multiply(STORAGE, QUARTER, False)}
#include "blocksparse/scaled/scaled.cuh"
"""
    made = KernelSpec(
        "blocksparse",
        source,
        "blocksparse_scaled",
        hopper.THREADS,
        hopper.shared_bytes(hopper.stage_bytes(columns)),
        description=text.describe("blocksparse", KIND, dtype, "", words, ()),
    )
    return named(made, dtype, *words)


def parameters() -> Parameters:
    """The parameter struct: maps, the layout's bits and ranks, scales, sizes."""
    pointers = len(hopper.LISTS) + len(SCALES)
    return text.parameters(pointers, f"<{STEPS}{hopper.FIXED}", (), maps=3)

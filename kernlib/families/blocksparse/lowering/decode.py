"""The kernel of kernel_sources/blocksparse/decode/decode.cuh: up to 16 columns in half types, on
every GPU.

Blocks and columns are read by 16 bytes along the depth; other layouts go to the portable kernel.
"""

from __future__ import annotations

from itertools import product

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.blocksparse.lowering import portable
from kernlib.families.blocksparse.lowering.problem import Spmm
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.choice import Choice
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import Lowered, Step
from kernlib.records import NamedTuple

KIND = "decode"
COLUMNS = (8, 16)
TILE_LINES = 16
WARPS = (4, 8, 16)  # of a CTA
BUSY = 12  # warps of a multiprocessor that keep its share of device memory's bandwidth on its way
MOST_DEPTH = 2**30
NAMES = ("row_bits", "row_ranks", "cols", "values", "dense", "out")
FIXED = "12q2i"  # struct Fixed


class Variant(NamedTuple):
    """Everything that code generation chooses besides the epilogue."""

    dtype: str
    lines: int  # of a block
    depth: int
    columns: int
    warps: int
    along_lines: bool  # lines lie closer together in the result than columns


def takes(problem: Spmm, arch: str) -> bool:
    """Whether the kernel computes a problem."""
    if problem.dtype == "float32" or problem.transposed or problem.columns > COLUMNS[-1]:
        return False
    blocks, dense = problem.blocks, problem.dense
    if not blocks.capacity or not problem.lines or _tiles(problem) > portable.MOST_X:
        return False
    if blocks.cols * blocks.grid_cols >= MOST_DEPTH or portable.values_access(problem) != "depth":
        return False
    outer = problem.batch, blocks.heads
    return portable.access(problem.dtype, dense, outer, None, problem.columns) == "depth"


def candidates(problem: Spmm, arch: str) -> list[Choice]:
    """The warps that share the blocks of 16 lines."""
    return [{"warps": warps} for warps in WARPS]


def default(problem: Spmm, known: list[Choice], multiprocessors: int) -> Choice:
    """Of the candidates the one taken untuned: the fewest warps that are enough in all, as those of
    a CTA wait for each other once. A batch does not count: it would change a result's bits."""
    tiles = _tiles(problem)
    enough = (c for c in known if tiles * int(c["warps"]) >= BUSY * multiprocessors)
    return next(enough, known[-1])


def lower(
    epilogue: tuple[Epilogue, ...],
    problem: Spmm,
    arch: str,
    multiprocessors: int,
    choice: Choice | None = None,
) -> Lowered:
    """The launch of a problem that the kernel takes, with the warps of ``choice``, one of
    :func:`candidates`."""
    choice = choice or default(problem, candidates(problem, arch), multiprocessors)
    values, dense, out = problem.values, problem.dense, problem.out
    numbers = (
        *(values.batch, values.slot, values.row, dense.batch, dense.head, dense.column),
        *out[:4],
        *(problem.lines, problem.batch, problem.columns, problem.blocks.row_words),
        *(number for side in problem.summands for number in side[:4]),
    )
    pointers = tuple((name, 0) for name in NAMES)
    step = Step(
        spec(epilogue, variant(problem, int(choice["warps"]))),
        (_tiles(problem), min(problem.batch, portable.MOST_Y)),
        parameters(epilogue).pack(*numbers),
        (*pointers, *text.vector_pointers(epilogue), *text.summand_pointers(epilogue)),
        text.scalar_count(epilogue),
    )
    return Lowered((step,))


def variants(
    epilogue: tuple[Epilogue, ...], block: tuple[int, int], dtypes: tuple[str, ...], arch: str
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for blocks of a size."""
    halves = [dtype for dtype in dtypes if dtype != "float32"]
    return [
        spec(epilogue, Variant(dtype, *block, *rest))
        for dtype, *rest in product(halves, COLUMNS, WARPS, (False, True))
    ]


def variant(problem: Spmm, warps: int) -> Variant:
    """The kernel of a problem that it takes, with so many warps."""
    blocks = problem.blocks
    columns = next(most for most in COLUMNS if problem.columns <= most)
    along_lines, _ = portable.stores(problem)
    return Variant(problem.dtype, blocks.rows, blocks.cols, columns, warps, along_lines)


def spec(epilogue: tuple[Epilogue, ...], made: Variant) -> KernelSpec:
    """The KernelSpec of a variant."""
    dtype, lines, depth, columns, warps, along_lines = made
    words = [f"{lines}x{depth}", f"{TILE_LINES}x{columns}", f"{warps}warps"]
    words += ["along_lines"] * along_lines
    source = f"""{text.preamble(dtype, dtype, epilogue)}
constexpr int LINES = {lines};
constexpr int DEPTH = {depth};
constexpr int COLUMNS = {columns};
constexpr int WARPS = {warps};
constexpr bool ALONG_LINES = {str(along_lines).lower()};
constexpr int SUMMANDS = {len(text.summands(epilogue))};
constexpr int PARAMETER_BYTES = {parameters(epilogue).size};

#include "blocksparse/decode/decode.cuh"
"""
    found = KernelSpec(
        "blocksparse",
        source,
        "blocksparse_decode",
        32 * warps,
        4 * warps * TILE_LINES * columns,
        description=text.describe("blocksparse", KIND, dtype, "", words, epilogue),
    )
    return named(found, dtype, *words, epilogue=epilogue)


def parameters(epilogue: tuple[Epilogue, ...]) -> Parameters:
    """The parameter struct: the layout's words, operands, the epilogue's, strides and sizes."""
    sides = portable.SIDE * len(text.summands(epilogue))
    return text.parameters(len(NAMES), f"<{FIXED}{sides}", epilogue)


def _tiles(problem: Spmm) -> int:
    return ceil_div(problem.lines, TILE_LINES) * problem.blocks.heads

"""The kernel of kernel_sources/blocksparse/sampled/sampled.cuh: the stored blocks of a dense
product by mma.sync, for any strides, on every GPU."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.errors import UnsupportedError
from kernlib.families.blocksparse.lowering.portable import (
    CHUNK_BYTES,
    LARGE_SHARED,
    MOST_X,
    MOST_Y,
    SIDE,
    access,
    is_split,
    numbers,
    waiting_bytes,
)
from kernlib.families.blocksparse.lowering.problem import Sdd
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.choice import Choice
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import Lowered, Step

KIND = "sampled"
PRECISION = True  # variants() takes it
FIXED = "13q6I"  # struct Fixed
NAMES = ("rows", "cols", "a", "b", "out")
TILE = 128  # rows or columns of a block of threads
DEPTH_BYTES, STAGES = 64, 3
LEAST_WARPS = 4


class Variant(NamedTuple):
    """Everything that code generation chooses besides the epilogue."""

    dtype: str
    precision: str
    rows: int  # of a block
    cols: int
    a: str  # how far 16-byte copies can run: see Access in operand.cuh
    b: str

    @property
    def slots(self) -> int:
        """Of a block of threads."""
        return max(1, TILE // max(self.rows, self.cols))

    @property
    def warp(self) -> tuple[int, int]:
        """Rows and columns of a warp. 3xTF32 keeps two sums for each of its outputs."""
        rows, cols = min(64, self.rows), min(32, self.cols)
        if self.rows == self.cols == TILE and not is_split(self.dtype, self.precision):
            return 64, 64
        return (rows, cols) if self._warps(rows, cols) >= LEAST_WARPS else (rows // 2, cols)

    @property
    def warps(self) -> int:
        return self._warps(*self.warp)

    @property
    def blocks(self) -> int:
        """That share a multiprocessor, by the registers of their sums."""
        rows, cols = self.warp
        sums = rows * cols // 32 * (2 if is_split(self.dtype, self.precision) else 1)
        return (2 if sums >= 128 else 3 if sums >= 32 else 4) * LEAST_WARPS // self.warps

    def _warps(self, rows: int, cols: int) -> int:
        return self.slots * (self.rows // rows) * (self.cols // cols)


def takes(problem: Sdd, arch: str) -> bool:
    """Whether the kernel computes a problem: all of them."""
    return isinstance(problem, Sdd)


def candidates(problem: Sdd, arch: str) -> list[Choice]:
    """There is one."""
    return [{}]


def default(problem: Sdd, known: list[Choice], multiprocessors: int) -> Choice:
    """Of the candidates the one taken untuned."""
    return known[0]


def lower(
    epilogue: tuple[Epilogue, ...],
    problem: Sdd,
    arch: str,
    multiprocessors: int,
    choice: Choice | None = None,
) -> Lowered:
    """The launch of a problem. Raises UnsupportedError for sizes that no grid can hold."""
    made = variant(problem)
    count = ceil_div(problem.blocks.capacity, made.slots)
    if count > MOST_X or problem.depth >= 2**31:
        raise UnsupportedError(
            f"{problem.blocks.capacity} blocks of sums of {problem.depth} terms are more than one "
            f"launch holds ({MOST_X} blocks, 2**31 terms); call it on slices"
        )
    pointers = tuple((name, 0) for name in NAMES)
    step = Step(
        spec(epilogue, made, arch),
        (count, min(problem.batch, MOST_Y)),
        parameters(epilogue).pack(*_numbers(problem)),
        (*pointers, *text.vector_pointers(epilogue), *text.summand_pointers(epilogue)),
        text.scalar_count(epilogue),
    )
    return Lowered((step,))


def variants(
    epilogue: tuple[Epilogue, ...],
    block: tuple[int, int],
    dtypes: tuple[str, ...],
    arch: str,
    precision: str | None = None,
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for blocks of a size. ``precision`` is float32's,
    None for both."""
    accesses = ("depth", "line", "gather")
    return [
        spec(epilogue, Variant(*kind, *block, a, b), arch)
        for kind, a, b in product(numbers(dtypes, precision), accesses, accesses)
    ]


def variant(problem: Sdd) -> Variant:
    """The kernel of a problem."""
    batches, kind = (problem.batch, problem.blocks.heads), problem.dtype
    # Of b a column of the matrix is what a line is of a.
    b = problem.b._replace(line=problem.b.column, column=problem.b.line)
    return Variant(
        problem.dtype,
        problem.precision,
        problem.blocks.rows,
        problem.blocks.cols,
        *(_access(kind, t, batches, problem.depth) for t in (problem.a, b)),
    )


def _access(dtype: str, t, batches: tuple[int, int], depth: int) -> str:
    """Of an operand whose lines are the matrix's, and whose columns the depth."""
    turned = t._replace(line=t.column, column=t.line)
    return access(dtype, turned, batches, depth, None)


def spec(epilogue: tuple[Epilogue, ...], made: Variant, arch: str) -> KernelSpec:
    """The KernelSpec of a variant."""
    dtype, precision = made.dtype, made.precision
    words = [f"{made.rows}x{made.cols}", f"{made.a}/{made.b}"]
    found = KernelSpec(
        "blocksparse",
        _source(epilogue, made, arch),
        "blocksparse_sampled",
        32 * made.warps,
        shared_bytes(made, arch),
        description=text.describe("blocksparse", KIND, dtype, precision, words, epilogue),
    )
    return named(found, dtype, *[precision] * (dtype == "float32"), *words, epilogue=epilogue)


def _source(epilogue: tuple[Epilogue, ...], made: Variant, arch: str) -> str:
    """The generated CUDA text: types, ``Finish``, constants, one include."""
    warp_lines, warp_columns = made.warp
    return f"""{text.preamble(made.dtype, made.dtype, epilogue)}
constexpr int ROWS = {made.rows};
constexpr int COLS = {made.cols};
constexpr int SLOTS = {made.slots};
constexpr int WARPS = {made.warps};
constexpr int WARP_LINES = {warp_lines};
constexpr int WARP_COLUMNS = {warp_columns};
constexpr int DEPTH_BYTES = {DEPTH_BYTES};
constexpr int STAGES = {stages(arch)};
constexpr int MIN_BLOCKS = {made.blocks};
constexpr int PRODUCTS = {3 if is_split(made.dtype, made.precision) else 1};
constexpr int SUMMANDS = {len(text.summands(epilogue))};
constexpr int PARAMETER_BYTES = {parameters(epilogue).size};
constexpr bool ALONG_LINES = false;

#define ACCESS_A Access::{made.a}
#define ACCESS_B Access::{made.b}

#include "blocksparse/sampled/sampled.cuh"
"""


def stages(arch: str) -> int:
    """Stages under way: one more where a multiprocessor has shared memory for it."""
    return STAGES + (targets.SHARED_BYTES[arch] >= LARGE_SHARED)


def shared_bytes(made: Variant, arch: str) -> int:
    """The stages of both operands, or the sums that take their place."""
    one = DEPTH_BYTES * made.slots * (made.rows + made.cols)
    return max(stages(arch) * one, waiting_bytes(made.warps, *made.warp, False))


def parameters(epilogue: tuple[Epilogue, ...]) -> Parameters:
    """The parameter struct: the layout's lists, operands, the epilogue's, strides and sizes."""
    sides = SIDE * len(text.summands(epilogue))
    return text.parameters(len(NAMES), f"<{FIXED}{sides}", epilogue)


def _numbers(problem: Sdd) -> list[int]:
    """What the parameter struct holds behind addresses and scalars."""
    a, b, values, blocks = problem.a, problem.b, problem.values, problem.blocks
    return [
        *(*a[:4], b.batch, b.head, b.column, b.line, *values[:4]),
        *(blocks.capacity, problem.batch, problem.depth, blocks.grid_rows),
        *(a.column <= a.line, b.line <= b.column, stores(problem)),
        *(number for side in problem.summands for number in side[:4]),
    ]


def stores(problem: Sdd) -> bool:
    """Whether rows of blocks take 16-byte stores."""
    values, chunk = problem.values, CHUNK_BYTES // DTYPES[problem.dtype].bytes
    slot = values.slot if problem.blocks.capacity > 1 else 0
    apart = values.batch if problem.batch > 1 else 0, slot, values.row
    whole = values.alignment % CHUNK_BYTES == 0 and not any(stride % chunk for stride in apart)
    return values.column == 1 and whole

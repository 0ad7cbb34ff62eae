"""The kernel of kernel_sources/blocksparse/sampled/sampled.cuh: the stored blocks of a dense
product by mma.sync, for any strides, on every GPU."""

from __future__ import annotations

from itertools import product

from kernlib.descriptors.epilogues import Epilogue
from kernlib.errors import UnsupportedError
from kernlib.families.blocksparse.lowering import parts, times
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
from kernlib.families.blocksparse.lowering.times import Rate
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.choice import Choice
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import WORKSPACE, Lowered, Step
from kernlib.records import NamedTuple

KIND = "sampled"
PRECISION = True  # variants() takes it
FIXED = "14q8I"  # struct Fixed
NAMES = ("rows", "cols", "a", "b", "out")
TILE = 128  # rows or columns of a block of threads
DEPTH_BYTES, STAGES = 64, 3
LEAST_WARPS = 4
LEAST_STEPS = 4  # stages of a part

# What stages take, by whether numbers are split, and by the larger side of a block.
RATES = {
    (False, 16): Rate(0.30, 0.12, 4),
    (False, 32): Rate(0.35, 0.15, 3),
    (False, 64): Rate(0.42, 0.25, 4),
    (False, 128): Rate(0.68, 0.0, 1),
    (True, 16): Rate(0.53, 0.43, 3),
    (True, 32): Rate(0.75, 0.22, 2),
    (True, 64): Rate(1.04, 0.0, 1),
    (True, 128): Rate(1.58, 0.0, 1),
}
START, FILLING = 2.7, 0.4  # microseconds of a launch without stages; stages until one is multiplied


class Variant(NamedTuple):
    """Everything that code generation chooses besides the epilogue."""

    dtype: str
    precision: str
    rows: int  # of a block
    cols: int
    a: str  # how far 16-byte copies can run: see Access in operand.cuh
    b: str
    partial: bool = False  # whether sums of parts of the depth are left to parts.cuh

    @property
    def slots(self) -> int:
        """Of a block of threads."""
        return slots(self.rows, self.cols)

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
    """One part of the depth, or several of whole stages."""
    steps = ceil_div(problem.depth, stage_depth(problem.dtype))
    found = parts.counts(parts.sums_of(problem, False), steps // LEAST_STEPS)
    return [{}, *({"parts": count} for count in found)]


def default(problem: Sdd, known: list[Choice], multiprocessors: int) -> Choice:
    """Of the candidates the one taken untuned: what takes least by rule; of equals the first."""
    return min(known, key=lambda choice: microseconds(problem, choice, multiprocessors))


def best_microseconds(problem: Sdd, arch: str, multiprocessors: int) -> float:
    """What the default takes by rule."""
    known = candidates(problem, arch)
    return min(microseconds(problem, choice, multiprocessors) for choice in known)


def microseconds(problem: Sdd, choice: Choice, multiprocessors: int) -> float:
    """What a candidate takes by rule."""
    split, blocks = int(choice.get("parts", 1)), problem.blocks
    steps = ceil_div(ceil_div(problem.depth, stage_depth(problem.dtype)), split)
    count = ceil_div(blocks.capacity, slots(*blocks[:2])) * problem.batch * split
    is_words = is_split(problem.dtype, problem.precision)
    rate = RATES[is_words, max(blocks.rows, blocks.cols)]
    sums = parts.sums_of(problem, False)
    own = START + times.stages(count, steps + FILLING, rate, multiprocessors)
    if split == 1:
        return own + 4 * sums.elements / times.BYTES
    return own + times.adding_up(sums.elements, split)


def lower(
    epilogue: tuple[Epilogue, ...],
    problem: Sdd,
    arch: str,
    multiprocessors: int,
    choice: Choice | None = None,
) -> Lowered:
    """The launch of a problem, or those of as many parts as ``choice`` says, one of
    :func:`candidates`. Raises UnsupportedError for sizes that no grid can hold."""
    if choice is None:
        choice = default(problem, candidates(problem, arch), multiprocessors)
    split = int(choice.get("parts", 1))
    made = variant(problem)._replace(partial=split > 1)
    count = ceil_div(problem.blocks.capacity, made.slots)
    if count * split > MOST_X or problem.depth >= 2**31:
        raise UnsupportedError(
            f"{problem.blocks.capacity} blocks of sums of {problem.depth} terms are more than one "
            f"launch holds ({MOST_X} blocks, 2**31 terms); call it on slices"
        )
    if split > 1:
        return _in_parts(epilogue, problem, made, arch, split)
    pointers = tuple((name, 0) for name in NAMES)
    sides = [number for side in problem.summands for number in side[:4]]
    step = Step(
        spec(epilogue, made, arch),
        (count, min(problem.batch, MOST_Y)),
        parameters(epilogue).pack(*_numbers(problem), *sides),
        (*pointers, *text.vector_pointers(epilogue), *text.summand_pointers(epilogue)),
        text.scalar_count(epilogue),
    )
    return Lowered((step,))


def _in_parts(
    epilogue: tuple[Epilogue, ...], problem: Sdd, made: Variant, arch: str, split: int
) -> Lowered:
    """The launches of so many parts of the depth, fewer if whole stages come out so."""
    stage = stage_depth(problem.dtype)
    depth = ceil_div(ceil_div(problem.depth, stage), split) * stage
    split = ceil_div(problem.depth, depth)
    count, sums = ceil_div(problem.blocks.capacity, made.slots), parts.sums_of(problem, False)
    pointers = (*((name, 0) for name in NAMES[:-1]), (WORKSPACE, 0))
    main = Step(
        spec((), made, arch),
        (count * split, min(problem.batch, MOST_Y)),
        parameters(()).pack(*_numbers(problem, sums, depth)),
        pointers,
    )
    last = parts.step(epilogue, problem, sums, split, arch)
    return Lowered((main, last), 4 * sums.elements * split)


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
    found = parts.variants(epilogue, dtypes, True)
    for kind, *ends in product(numbers(dtypes, precision), accesses, accesses, (False, True)):
        made = Variant(*kind, *block, *ends)
        found.append(spec(epilogue, made, arch))
    return found


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
    """The KernelSpec of a variant; parts of sums take no epilogue."""
    dtype, precision = made.dtype, made.precision
    epilogue = () if made.partial else epilogue
    words = [f"{made.rows}x{made.cols}", f"{made.a}/{made.b}"] + ["partial"] * made.partial
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
    return f"""{text.preamble(made.dtype, "float32" if made.partial else made.dtype, epilogue)}
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
constexpr bool PARTIAL = {str(made.partial).lower()};

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


def _numbers(problem: Sdd, sums: parts.Sums | None = None, part_depth: int = 0) -> list[int]:
    """Struct Fixed, of a result or of ``sums`` of parts of the depth."""
    a, b, values, blocks = problem.a, problem.b, problem.values, problem.blocks
    out, stride, whole = values[:4], 0, stores(problem)
    if sums is not None:
        out, stride, whole = sums.side, sums.elements, True
    return [
        *(*a[:4], b.batch, b.head, b.column, b.line, *out, blocks.capacity, stride),
        *(ceil_div(blocks.capacity, slots(*blocks[:2])), part_depth),
        *(problem.batch, problem.depth, blocks.grid_rows),
        *(a.column <= a.line, b.line <= b.column, whole),
    ]


def stage_depth(dtype: str) -> int:
    """Depths of a stage."""
    return DEPTH_BYTES // DTYPES[dtype].bytes


def slots(rows: int, cols: int) -> int:
    """Of a block of threads, for blocks of so many rows and columns."""
    return max(1, TILE // max(rows, cols))


def stores(problem: Sdd) -> bool:
    """Whether rows of blocks take 16-byte stores."""
    values, chunk = problem.values, CHUNK_BYTES // DTYPES[problem.dtype].bytes
    slot = values.slot if problem.blocks.capacity > 1 else 0
    apart = values.batch if problem.batch > 1 else 0, slot, values.row
    whole = values.alignment % CHUNK_BYTES == 0 and not any(stride % chunk for stride in apart)
    return values.column == 1 and whole

"""The kernels softmax.cuh and gradient.cuh of kernel_sources/blocksparse/softmax: softmax over the
stored blocks of each row, and its gradient, one launch each.

Sizes and strides are launch arguments: one kernel serves every layout of one width of blocks, as
do the warps that share a row. How long the rows of a layout are is on the device; its capacity
says how long they are likely to be, by which the number of registers and warps is chosen. Rows of
any length come out right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from kernlib.families.blocksparse.lowering.problem import Blocks
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import Lowered, Step
from kernlib.records import NamedTuple

FAMILY = "blocksparse"
THREADS = 256
WARPS = THREADS // 32
CHUNK_BYTES = 16
TEAMS = (1, 2, 4, 8)  # warps that may share a row
HELD = (2, 8)  # chunks of a thread: the latter are 64 elements of a half type
HELD_BESIDE_ALL = (2, 4)  # where rpe and both masks take registers too
ACROSS = (16, 32, 64, 128)  # columns of a block
MOST_ACROSS, MOST_DOWN = 2**31 - 1, 65535  # of a grid

MASKS = (None, "add", "mul", "bool")  # kinds, by their numbers in softmax.cuh
SIZES = "10I"
# Operands in the order of the parameter block; 0 stands for one that is not there.
OPERANDS = ("row_ranks", "cols", "counts", "x", "out", "rpe", "key", "attn")
GRADIENT_OPERANDS = ("row_ranks", "counts", "y", "grad", "to_x", "to_logits")
PARAMETERS = Parameters(len(OPERANDS), f"<{2 * 5 + 3 * 5}q{SIZES}", 1)
GRADIENT_PARAMETERS = Parameters(len(GRADIENT_OPERANDS), f"<{3 * 5}q{SIZES}", 1)


class Operand(NamedTuple):
    """A tensor: strides in elements, 0 along what broadcasts, and the alignment of its first
    address in bytes, 16 at most. Strides of values are those of the batch's outer and inner
    dimension, slots, rows and columns of a block; of rpe and masks those of the batch's two
    dimensions, heads, lines and columns of the matrix."""

    strides: tuple[int, int, int, int, int]
    alignment: int = 16


class Options(NamedTuple):
    """What of a call is part of the code: masks are of a kind of MASKS."""

    causal: bool = False
    rpe: bool = False
    key: str | None = None
    attn: str | None = None


class Softmax(NamedTuple):
    """Of values over the rows of a matrix; ``batch`` is its outer and inner dimension. ``rpe``,
    ``key`` and ``attn`` are None where ``options`` have none."""

    dtype: str
    blocks: Blocks
    batch: tuple[int, int]
    options: Options
    x: Operand
    out: Operand
    rpe: Operand | None = None
    key: Operand | None = None
    attn: Operand | None = None


class Gradient(NamedTuple):
    """Of a softmax by its logits and by x, both of the strides of ``out``."""

    dtype: str
    blocks: Blocks
    batch: tuple[int, int]
    y: Operand
    grad: Operand
    out: Operand


class Variant(NamedTuple):
    """What the code of one kernel depends on; ``options`` are None for the gradient's."""

    dtype: str
    columns: int
    held: int
    vectors: bool
    options: Options | None


def takes(blocks: Blocks) -> bool:
    """Whether a grid holds the rows, of fewer than 2**31 tasks, and an int the number of a
    column."""
    rows = blocks.heads * blocks.grid_rows * blocks.rows
    return max(rows, blocks.grid_cols * blocks.cols) <= MOST_ACROSS


def lower(problem: Softmax | Gradient) -> Lowered:
    """The launch of a problem that :func:`takes` says yes to."""
    blocks = problem.blocks
    vectors, options = _vectors(problem), _options(problem)
    held, warps = width(problem.dtype, blocks, _known(options, vectors))
    made = Variant(problem.dtype, blocks.cols, held, vectors, options)
    tasks = _lines(blocks) * (blocks.rows // rows_of(problem.dtype, blocks.cols))
    batch = math.prod(problem.batch)
    grid = max(1, ceil_div(tasks, WARPS // warps)), min(max(1, batch), MOST_DOWN)
    numbers = [n for operand in _operands(problem) for n in operand.strides]
    numbers += _sizes(problem, warps)
    if isinstance(problem, Softmax):
        fixed, names = PARAMETERS.pack(*numbers), OPERANDS
    else:
        fixed, names = GRADIENT_PARAMETERS.pack(*numbers), GRADIENT_OPERANDS
    pointers = tuple((name, 0) for name in names)
    return Lowered((Step(spec(made), grid, fixed, pointers, scalars=1),))


def rows_of(dtype: str, columns: int) -> int:
    """Rows of a task: as many as 128 bytes of a block hold, at least one."""
    return max(1, 8 * CHUNK_BYTES // (columns * DTYPES[dtype].bytes))


def width(dtype: str, blocks: Blocks, known: tuple[int, ...] = HELD) -> tuple[int, int]:
    """Chunks of a thread, of those that are known, and warps of a row that hold the rows a layout
    is likely to have: of the mean number of blocks and three standard deviations more, as chance
    would place them. The fewest warps, each of which waits for most of its row at once."""
    lines = _lines(blocks)
    mean = blocks.capacity / lines if lines else 0.0
    empty = max(0.0, 1 - mean / blocks.grid_cols) if lines else 0.0
    likely = min(blocks.grid_cols, mean + 3 * math.sqrt(mean * empty))
    at_once = 32 * CHUNK_BYTES // (rows_of(dtype, blocks.cols) * blocks.cols * DTYPES[dtype].bytes)
    for warps, held in product(TEAMS, known):
        if held * warps * at_once >= likely:
            return held, warps
    return known[-1], TEAMS[-1]


def _known(options: Options | None, vectors: bool) -> tuple[int, ...]:
    """Chunks that a thread may have. Those of which each element is read alone are few: they are
    slow for that, and such code is long."""
    if not vectors:
        return HELD[:1]
    is_all = options is not None and None not in (options.key, options.attn) and options.rpe
    return HELD_BESIDE_ALL if is_all else HELD


def _lines(blocks: Blocks) -> int:
    """Lines of blocks, none where they have no columns."""
    return blocks.heads * blocks.grid_rows if blocks.grid_cols else 0


def _options(problem: Softmax | Gradient) -> Options | None:
    return problem.options if isinstance(problem, Softmax) else None


def _operands(problem: Softmax | Gradient) -> list[Operand]:
    """In the order of the parameter block."""
    if isinstance(problem, Gradient):
        return [problem.y, problem.grad, problem.out]
    none = Operand((0,) * 5)
    dense = (problem.rpe, problem.key, problem.attn)
    return [problem.x, problem.out, *(operand or none for operand in dense)]


def _sizes(problem: Softmax | Gradient, warps: int) -> list[int]:
    blocks = problem.blocks
    tasks = blocks.rows // rows_of(problem.dtype, blocks.cols)
    return [
        math.prod(problem.batch), max(1, problem.batch[1]), _lines(blocks),
        max(1, blocks.grid_rows), blocks.row_words, blocks.rows, tasks.bit_length() - 1,
        blocks.capacity, warps.bit_length() - 1, 0,
    ]  # fmt: skip


def _vectors(problem: Softmax | Gradient) -> bool:
    """Whether chunks of each operand lie side by side, aligned."""
    itemsize = DTYPES[problem.dtype].bytes
    chunk = CHUNK_BYTES // itemsize
    if isinstance(problem, Gradient):
        return all(_aligned(t, chunk, itemsize) for t in _operands(problem))
    found = _aligned(problem.x, chunk, itemsize) and _aligned(problem.out, chunk, itemsize)
    kinds = (None, problem.options.key, problem.options.attn)
    for operand, kind in zip((problem.rpe, problem.key, problem.attn), kinds, strict=True):
        if operand is not None:
            found = found and _aligned(operand, chunk, 1 if kind == "bool" else itemsize)
    return found


def _aligned(operand: Operand, chunk: int, itemsize: int) -> bool:
    *strides, column = operand.strides
    whole = all(stride % chunk == 0 for stride in strides)
    return column == 1 and whole and operand.alignment % (chunk * itemsize) == 0


def spec(made: Variant) -> KernelSpec:
    """The KernelSpec of a variant."""
    cuda, options = DTYPES[made.dtype].cuda, made.options
    stem = "gradient" if options is None else "softmax"
    parameters = GRADIENT_PARAMETERS if options is None else PARAMETERS
    shared = 2 * WARPS * rows_of(made.dtype, made.columns) * (4 if options is None else 8)
    source = f"""#include "common/types.cuh"

using InputT = {cuda};

constexpr int THREADS = {THREADS};
constexpr int CHUNKS = {made.held};
constexpr int BLOCK_COLUMNS = {made.columns};
constexpr bool VECTORS = {_flag(made.vectors)};
constexpr int PARAMETER_BYTES = {parameters.size};
{"" if options is None else _option_lines(options, cuda)}
#include "blocksparse/softmax/{stem}.cuh"
"""
    words = _words(made)
    entry = "blocksparse_softmax" if options is not None else "blocksparse_softmax_gradient"
    kind = entry.removeprefix("blocksparse_").replace("_", " ")
    description = " ".join(["blocksparse", kind, *words])
    found = KernelSpec(FAMILY, source, entry, THREADS, shared, description=description)
    return named(found, *words)


def _option_lines(options: Options, cuda: str) -> str:
    kinds = {"KEY": options.key, "ATTN": options.attn}
    numbers = "".join(
        f"constexpr int {name} = {MASKS.index(kind)};\n" for name, kind in kinds.items()
    )
    key, attn = ("unsigned char" if kind == "bool" else cuda for kind in kinds.values())
    return f"""constexpr bool CAUSAL = {_flag(options.causal)};
constexpr bool RPE = {_flag(options.rpe)};
{numbers}using KeyT = {key};
using AttnT = {attn};
"""


def _flag(value: bool) -> str:
    return str(value).lower()


def _words(made: Variant) -> list[str]:
    words = [made.dtype, f"x{made.columns}", f"{made.held} chunks"]
    words += ["strided"] * (not made.vectors)
    if made.options is not None:
        causal, rpe, key, attn = made.options
        words += ["causal"] * causal + ["rpe"] * rpe
        words += [f"key {key}"] * (key is not None) + [f"attn {attn}"] * (attn is not None)
    return words


def variants(options: list[Options], dtypes: tuple[str, ...]) -> Iterator[KernelSpec]:
    """Every spec that :func:`lower` may choose for calls of these options, and their gradients."""
    for kind, dtype in product((*options, None), dtypes):
        for columns, vectors in product(ACROSS, (True, False)):
            for held in _known(kind, vectors):
                yield spec(Variant(dtype, columns, held, vectors, kind))

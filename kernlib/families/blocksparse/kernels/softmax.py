"""Softmax over the stored blocks of each row, and its gradient, one launch each.

How long the rows of a layout are is on the device; its capacity says how long they are likely to
be, by which the number of registers and warps is chosen. Rows of any length come out right.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import ClassVar, NamedTuple

from kernlib.families.blocksparse.lowering.problem import Blocks
from kernlib.families.blocksparse.lowering.softmax import (
    MASKS,
    Gradient,
    Operand,
    Options,
    Softmax,
    takes,
)
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.config import Fact
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Gpu, Kernel, named
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import Lowered, Step

THREADS = 256
WARPS = THREADS // 32
CHUNK_BYTES = 16
TEAMS = (1, 2, 4, 8)  # warps that may share a row
CHUNKS = (2, 8)  # chunks of a thread: the latter are 64 elements of a half type
CHUNKS_BESIDE_ALL = (2, 4)  # where rpe and both masks take registers too
ACROSS = (16, 32, 64, 128)  # columns of a block
MOST_DOWN = 65535  # of a grid
NONE = Operand((0,) * 5)

# Operands in the order of the parameter block; 0 stands for one that is not there.
OPERANDS = ("row_ranks", "cols", "counts", "x", "out", "rpe", "key", "attn")
GRADIENT_OPERANDS = ("row_ranks", "counts", "y", "grad", "to_x", "to_logits")
SIZES = (
    "u32 batch", "u32 inner",  # entries of the batch, and of its inner dimension
    "u32 lines", "u32 grid_rows", "u32 words",  # of blocks, of one head; words of a line's bits
    "u32 block_rows", "u32 task_bits",  # rows of a block; tasks of a line of blocks, a power of 2
    "u32 capacity", "u32 team_bits",  # slots; warps of a task, a power of 2
    "u32 unused",
)  # fmt: skip


class Rows(Kernel):
    """What both kernels have in common. Their subject is the Options of a call, None of a
    gradient; their scope the dtypes."""

    operands: ClassVar[tuple[str, ...]]
    fixed: ClassVar[Fields]
    shared_of_row: ClassVar[int]  # bytes, of a warp

    class Variant(NamedTuple):
        """What the code of one kernel depends on besides the options."""

        dtype: str
        columns: int
        chunks: int  # of a thread
        vectors: bool

    def takes(self, problem: Softmax | Gradient, arch: str = "") -> bool:
        """Whether the kernel computes a problem."""
        return takes(problem.blocks)

    def launch(
        self,
        options: Options | None,
        problem: Softmax | Gradient,
        gpu: Gpu | None = None,
        choice: Mapping[str, int] | None = None,
    ) -> Lowered:
        """The launch of a problem, on any GPU."""
        blocks, dtype = problem.blocks, problem.dtype
        vectors = _vectors(problem)
        chunks, warps = width(dtype, blocks, _chunks(options, vectors))
        rows = rows_of(dtype, blocks.cols)
        batch, tasks = math.prod(problem.batch), blocks.rows // rows
        fixed = self.fixed.pack(
            **{f"{name}_strides": operand.strides for name, operand in _operands(problem).items()},
            batch=batch,
            inner=max(1, problem.batch[1]),
            lines=_lines(blocks),
            grid_rows=max(1, blocks.grid_rows),
            words=blocks.row_words,
            block_rows=blocks.rows,
            task_bits=tasks.bit_length() - 1,
            capacity=blocks.capacity,
            team_bits=warps.bit_length() - 1,
            unused=0,
        )
        step = Step(
            self.spec(options, self.Variant(dtype, blocks.cols, chunks, vectors)),
            (
                max(1, ceil_div(_lines(blocks) * tasks, WARPS // warps)),
                min(max(1, batch), MOST_DOWN),
            ),
            fixed,
            tuple((name, 0) for name in self.operands),
            scalars=1,
        )
        return Lowered((step,))

    def axes(self, options: Options | None, dtypes: tuple[str, ...]) -> Mapping[str, Iterable]:
        """Of all layouts."""
        return {
            "dtype": dtypes,
            "columns": ACROSS,
            "chunks": sorted({*CHUNKS, *_chunks(options, True)}),
            "vectors": (True, False),
        }

    def is_legal(self, variant: Variant, options: Options | None, dtypes: tuple[str, ...]) -> bool:
        """Whether a thread may have so many chunks."""
        return variant.chunks in _chunks(options, variant.vectors)

    def spec(self, options: Options | None, variant: Variant, arch: str = "") -> KernelSpec:
        """The specification of a variant."""
        dtype, columns, chunks, vectors = variant
        facts = {
            "InputT": DTYPES[dtype].cuda,
            "CHUNKS": chunks,
            "BLOCK_COLUMNS": columns,
            "VECTORS": vectors,
            "PARAMETER_BYTES": Parameters(len(self.operands), self.fixed.format, 1).size,
            **self.facts(options, dtype),
        }
        words = [dtype, f"x{columns}", f"{chunks} chunks", *["strided"] * (not vectors)]
        if options is not None:
            words += ["causal"] * options.causal + ["rpe"] * options.rpe
            kinds = ("key", options.key), ("attn", options.attn)
            words += [f"{name} {kind}" for name, kind in kinds if kind is not None]
        includes = ("blocksparse/softmax/strides.cuh",)
        return named(
            KernelSpec(
                "blocksparse",
                self.source(facts, self.fixed.text(), includes=includes),
                self.entry,
                THREADS,
                WARPS * rows_of(dtype, columns) * self.shared_of_row,
                description=" ".join(["blocksparse", self.name, *words]),
            ),
            *words,
        )

    def facts(self, options: Options | None, dtype: str) -> dict[str, Fact]:
        """Facts of the kernel alone."""
        return {}


class SoftmaxRows(Rows):
    """An exponential of each logit, once where a row fits into its warps' registers."""

    role = name = "softmax"
    header = "blocksparse/softmax/softmax.cuh"
    entry = "blocksparse_softmax"
    reason = "the one kernel of a softmax over stored blocks; warps a row by the layout's capacity"
    operands = OPERANDS
    fixed = Fields((
        "SlotStrides x_strides", "SlotStrides out_strides",
        "DenseStrides rpe_strides", "DenseStrides key_strides", "DenseStrides attn_strides",
        *SIZES,
    ))  # fmt: skip
    shared_of_row = 16

    def facts(self, options: Options, dtype: str) -> dict[str, Fact]:
        """What is left out, and masks by their kinds."""
        elements = DTYPES[dtype].cuda
        return {
            "CAUSAL": options.causal,
            "RPE": options.rpe,
            "KEY": MASKS.index(options.key),
            "ATTN": MASKS.index(options.attn),
            "KeyT": "unsigned char" if options.key == "bool" else elements,
            "AttnT": "unsigned char" if options.attn == "bool" else elements,
        }


class GradientRows(Rows):
    """By logits, and by x."""

    role = name = "softmax gradient"
    header = "blocksparse/softmax/gradient.cuh"
    entry = "blocksparse_softmax_gradient"
    reason = "the one kernel of its gradient"
    operands = GRADIENT_OPERANDS
    fixed = Fields((
        "SlotStrides y_strides", "SlotStrides grad_strides", "SlotStrides out_strides", *SIZES
    ))  # fmt: skip
    shared_of_row = 8


SOFTMAX, GRADIENT = SoftmaxRows(), GradientRows()


def lower(problem: Softmax | Gradient) -> Lowered:
    """The launch of a problem whose blocks :func:`takes` says yes to."""
    if isinstance(problem, Gradient):
        return GRADIENT.launch(None, problem)
    return SOFTMAX.launch(problem.options, problem)


def variants(options: list[Options], dtypes: tuple[str, ...]) -> Iterator[KernelSpec]:
    """Every spec that :func:`lower` may choose for calls of these options, and their gradients."""
    for each in options:
        yield from SOFTMAX.specs(each, dtypes, "")
    yield from GRADIENT.specs(None, dtypes, "")


def rows_of(dtype: str, columns: int) -> int:
    """Rows of a task: as many as 128 bytes of a block hold, at least one."""
    return max(1, 8 * CHUNK_BYTES // (columns * DTYPES[dtype].bytes))


def width(dtype: str, blocks: Blocks, among: tuple[int, ...] = CHUNKS) -> tuple[int, int]:
    """Chunks of a thread, of those that there are, and warps of a row that hold the rows a layout
    is likely to have: of the mean number of blocks and three standard deviations more, as chance
    would place them. The fewest warps, each of which waits for most of its row at once."""
    lines = _lines(blocks)
    mean = blocks.capacity / lines if lines else 0.0
    empty = max(0.0, 1 - mean / blocks.grid_cols) if lines else 0.0
    likely = min(blocks.grid_cols, mean + 3 * math.sqrt(mean * empty))
    at_once = 32 * CHUNK_BYTES // (rows_of(dtype, blocks.cols) * blocks.cols * DTYPES[dtype].bytes)
    for warps, chunks in product(TEAMS, among):
        if chunks * warps * at_once >= likely:
            return chunks, warps
    return among[-1], TEAMS[-1]


def _chunks(options: Options | None, vectors: bool) -> tuple[int, ...]:
    """Chunks that a thread may have. Those of which each element is read alone are few: they are
    slow for that, and such code is long."""
    if not vectors:
        return CHUNKS[:1]
    is_all = options is not None and None not in (options.key, options.attn) and options.rpe
    return CHUNKS_BESIDE_ALL if is_all else CHUNKS


def _lines(blocks: Blocks) -> int:
    """Lines of blocks, none where they have no columns."""
    return blocks.heads * blocks.grid_rows if blocks.grid_cols else 0


def _operands(problem: Softmax | Gradient) -> dict[str, Operand]:
    """Those that have strides."""
    names = ("y", "grad", "out")
    if isinstance(problem, Softmax):
        names = ("x", "out", "rpe", "key", "attn")
    return {name: getattr(problem, name) or NONE for name in names}


def _vectors(problem: Softmax | Gradient) -> bool:
    """Whether chunks of each operand lie side by side, aligned."""
    itemsize = DTYPES[problem.dtype].bytes
    chunk = CHUNK_BYTES // itemsize
    options = problem.options if isinstance(problem, Softmax) else Options()
    bools = [name for name in ("key", "attn") if getattr(options, name) == "bool"]
    return all(
        operand is NONE or _aligned(operand, chunk, 1 if name in bools else itemsize)
        for name, operand in _operands(problem).items()
    )


def _aligned(operand: Operand, chunk: int, itemsize: int) -> bool:
    *strides, column = operand.strides
    is_aligned = all(stride % chunk == 0 for stride in strides)
    return column == 1 and is_aligned and operand.alignment % (chunk * itemsize) == 0

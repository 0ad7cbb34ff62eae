"""The stored blocks of a dense product by mma.sync, for any strides, on every GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.errors import UnsupportedError
from kernlib.families.blocksparse.kernels import parts
from kernlib.families.blocksparse.lowering import mma, summands
from kernlib.families.blocksparse.lowering.mma import Rate, is_split
from kernlib.families.blocksparse.lowering.problem import Dense, Sdd
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.config import Constant
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Choice, Gpu, Kernel
from kernlib.lowering.parameters import Fields
from kernlib.lowering.steps import Lowered, Step

OPERANDS = ("rows", "cols", "a", "b", "out")
FIXED = (
    "Side a_view", "Side b_view", "Side out_view",  # lines of a, columns of b; else depths
    "i64 capacity",
    "i64 part_stride",  # PARTIAL: elements from one part's sums to the next one's
    "u32 groups", "u32 part_depth",  # of SLOTS slots; of a part of the depth, whole stages of it
    "u32 batch", "u32 depth",
    "u32 grid_rows",  # of blocks of a head
    "u32 a_depth_first", "u32 b_depth_first",  # for gathers: depths lie closer together than lines
    "u32 whole_stores",  # of Target
)  # fmt: skip
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


class Sampled(Kernel):
    """A block of threads takes blocks that follow each other, whose rows of a are read once."""

    role = "sdd"
    name = "sampled"
    header = "blocksparse/sampled/sampled.cuh"
    entry = "blocksparse_sampled"
    rank = 9
    reason = (
        "blocks of a dense product by mma.sync on every GPU: chosen for what no kernel before "
        "it takes or speeds up"
    )

    class Variant(NamedTuple):
        """Everything that code generation chooses besides the epilogue."""

        dtype: str
        precision: str
        rows: int  # of a block
        cols: int
        a: str  # how far 16-byte copies can run: see access.cuh
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

    def takes(self, problem: Sdd, arch: str) -> bool:
        """Whether the kernel computes a problem: all of them."""
        return isinstance(problem, Sdd)

    def choices(self, problem: Sdd, arch: str) -> list[Choice]:
        """One part of the depth, or several of whole stages."""
        steps = ceil_div(problem.depth, stage_depth(problem.dtype))
        counts = parts.counts(parts.sums_of(problem, False), steps // LEAST_STEPS)
        return [{}, *({"parts": count} for count in counts)]

    def estimate(self, problem: Sdd, choice: Mapping[str, Any], gpu: Gpu) -> float:
        """Microseconds of a problem by a choice."""
        split, blocks = int(choice.get("parts", 1)), problem.blocks
        steps = ceil_div(ceil_div(problem.depth, stage_depth(problem.dtype)), split)
        count = ceil_div(blocks.capacity, slots(*blocks[:2])) * problem.batch * split
        is_words = is_split(problem.dtype, problem.precision)
        rate = RATES[is_words, max(blocks.rows, blocks.cols)]
        sums = parts.sums_of(problem, False)
        time = START + mma.microseconds(count, steps + FILLING, rate, gpu.multiprocessors)
        if split == 1:
            return time + 4 * sums.elements / mma.BYTES
        return time + mma.adding_up(sums.elements, split)

    def launch(
        self, epilogue: tuple[Epilogue, ...], problem: Sdd, gpu: Gpu, choice: Mapping[str, Any]
    ) -> Lowered:
        """The launch of a problem, or those of as many parts as there are, fewer if whole stages
        come out so. Raises UnsupportedError for sizes that no grid can hold."""
        split, variant = int(choice.get("parts", 1)), variant_of(problem)
        count = ceil_div(problem.blocks.capacity, variant.slots)
        if count * split > mma.MOST_X or problem.depth >= 2**31:
            raise UnsupportedError(
                f"{problem.blocks.capacity} blocks of sums of {problem.depth} terms are more than "
                f"one launch holds ({mma.MOST_X} blocks, 2**31 terms); call it on slices"
            )
        if split == 1:
            return Lowered((self._main(epilogue, problem, variant, gpu.arch),))
        stage = stage_depth(problem.dtype)
        depth = ceil_div(ceil_div(problem.depth, stage), split) * stage
        split = ceil_div(problem.depth, depth)
        sums = parts.sums_of(problem, False)
        main = self._main((), problem, variant._replace(partial=True), gpu.arch, sums, depth)
        return parts.PARTS.behind(main, epilogue, problem, sums, split, gpu.arch)

    def _main(
        self,
        epilogue: tuple[Epilogue, ...],
        problem: Sdd,
        variant: Variant,
        arch: str,
        sums: parts.Sums | None = None,
        part_depth: int = 0,
    ) -> Step:
        """The launch that leaves a result, or ``sums`` of parts of the depth."""
        a, b, blocks = problem.a, problem.b, problem.blocks
        count = ceil_div(blocks.capacity, variant.slots)
        fixed = _fixed(epilogue).pack(
            a_view=a[:4],
            b_view=(b.batch, b.head, b.column, b.line),
            capacity=blocks.capacity,
            groups=count,
            part_depth=part_depth,
            batch=problem.batch,
            depth=problem.depth,
            grid_rows=blocks.grid_rows,
            a_depth_first=a.column <= a.line,
            b_depth_first=b.line <= b.column,
            **parts.target(problem, mma.has_chunks(problem), sums),
        )
        return Step(
            self.spec(epilogue, variant, arch),
            (count, min(problem.batch, mma.MOST_Y)),
            fixed,
            text.pointers(OPERANDS, epilogue),
            text.scalar_count(epilogue),
        )

    def axes(self, epilogue: tuple[Epilogue, ...], scope) -> Mapping[str, Iterable]:
        """Of blocks of one size."""
        accesses = ("depth", "line", "gather")
        return {
            "dtype": scope.dtypes,
            "precision": ("fp32", "tf32"),
            "rows": [scope.block[0]],
            "cols": [scope.block[1]],
            "a": accesses,
            "b": accesses,
            "partial": (False, True),
        }

    def is_legal(self, variant: Variant, epilogue: tuple[Epilogue, ...], scope) -> bool:
        """Whether a dtype has the precision."""
        return variant[:2] in mma.numbers((variant.dtype,), scope.precision)

    def specs(self, epilogue: tuple[Epilogue, ...], scope, arch: str) -> list[KernelSpec]:
        """With those of the launch behind."""
        behind = parts.PARTS.specs(epilogue, (scope.dtypes, True), arch)
        return [*behind, *super().specs(epilogue, scope, arch)]

    def spec(self, epilogue: tuple[Epilogue, ...], variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant; parts of sums take no epilogue."""
        epilogue = () if variant.partial else epilogue
        dtype, precision, rows, cols, a, b, partial = variant
        fields, (warp_lines, warp_columns) = _fixed(epilogue), variant.warp
        facts = {
            **text.facts(dtype, "float32" if partial else dtype, epilogue),
            "ROWS": rows,
            "COLS": cols,
            "SLOTS": variant.slots,
            "WARPS": variant.warps,
            "WARP_LINES": warp_lines,
            "WARP_COLUMNS": warp_columns,
            "DEPTH_BYTES": DEPTH_BYTES,
            "STAGES": mma.stages(STAGES, arch),
            "MIN_BLOCKS": variant.blocks,
            "PRODUCTS": 3 if is_split(dtype, precision) else 1,
            "ALONG_LINES": False,
            "PARTIAL": partial,
            "ACCESS_A": Constant(f"Access::{a}"),
            "ACCESS_B": Constant(f"Access::{b}"),
            "PARAMETER_BYTES": text.parameters(len(OPERANDS), fields.format, epilogue).size,
        }
        source = self.source(
            facts, fields.text(), text.typed_finish(epilogue), includes=mma.INCLUDES
        )
        words = [f"{rows}x{cols}", f"{a}/{b}"] + ["partial"] * partial
        shared = shared_bytes(variant, arch)
        return self.named_spec(
            source, 32 * variant.warps, shared, dtype, words, epilogue, precision
        )


SAMPLED = Sampled()


def _fixed(epilogue: tuple[Epilogue, ...]) -> Fields:
    return Fields((*FIXED, *summands.members(epilogue)))


def best_microseconds(problem: Sdd, arch: str, multiprocessors: int) -> float:
    """What the choice of least estimate takes."""
    gpu = Gpu(arch, multiprocessors)
    return min(SAMPLED.estimate(problem, each, gpu) for each in SAMPLED.choices(problem, arch))


def variant_of(problem: Sdd) -> Sampled.Variant:
    """The kernel of a problem."""
    batches, kind = (problem.batch, problem.blocks.heads), problem.dtype
    # Of b a column of the matrix is what a line is of a.
    b = problem.b._replace(line=problem.b.column, column=problem.b.line)
    return Sampled.Variant(
        problem.dtype,
        problem.precision,
        problem.blocks.rows,
        problem.blocks.cols,
        *(_access(kind, t, batches, problem.depth) for t in (problem.a, b)),
    )


def _access(dtype: str, t: Dense, batches: tuple[int, int], depth: int) -> str:
    """Of an operand whose lines are the matrix's, and whose columns the depth."""
    turned = t._replace(line=t.column, column=t.line)
    return mma.access(dtype, turned, batches, depth, None)


def shared_bytes(variant: Sampled.Variant, arch: str) -> int:
    """The stages of both operands, or the sums that take their place."""
    one = DEPTH_BYTES * variant.slots * (variant.rows + variant.cols)
    return max(
        mma.stages(STAGES, arch) * one, mma.waiting_bytes(variant.warps, *variant.warp, False)
    )


def stage_depth(dtype: str) -> int:
    """Depths of a stage."""
    return DEPTH_BYTES // DTYPES[dtype].bytes


def slots(rows: int, cols: int) -> int:
    """Of a block of threads, for blocks of so many rows and columns."""
    return max(1, TILE // max(rows, cols))

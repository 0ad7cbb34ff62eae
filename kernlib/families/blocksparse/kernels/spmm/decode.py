"""Products with up to 16 columns in half types, on every GPU.

Blocks and columns are read by 16 bytes along the depth; other layouts go to the portable kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.blocksparse.kernels.spmm import portable
from kernlib.families.blocksparse.lowering import mma, summands
from kernlib.families.blocksparse.lowering.problem import Spmm
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.kernel import Choice, Gpu, Kernel
from kernlib.lowering.parameters import Fields
from kernlib.lowering.steps import Lowered, Step

COLUMNS = (8, 16)
TILE_LINES = 16
WARPS = (4, 8, 16)  # of a CTA
BUSY = 12  # warps of a multiprocessor that keep its share of device memory's bandwidth on its way
MOST_DEPTH = 2**30
OPERANDS = ("row_bits", "row_ranks", "cols", "values", "dense", "out")
FIXED = (
    "i64 value_batch", "i64 value_slot", "i64 value_row",
    "i64 dense_batch", "i64 dense_head", "i64 dense_column",
    "Side out_view",
    "i64 lines",  # of a head
    "i64 batch",
    "int columns",
    "int words",  # of a row of blocks
)  # fmt: skip


class Decode(Kernel):
    """Reads each stored block once; a CTA sums 16 lines by some warps."""

    role = "spmm"
    name = "decode"
    header = "blocksparse/decode/decode.cuh"
    entry = "blocksparse_decode"
    rank = 1
    reason = (
        "up to 16 columns of half types, the depth side by side in both operands: the first "
        "choice for what it takes"
    )

    class Variant(NamedTuple):
        """Everything that code generation chooses besides the epilogue."""

        dtype: str
        lines: int  # of a block
        depth: int
        columns: int
        warps: int
        along_lines: bool  # lines lie closer together in the result than columns

    def takes(self, problem: Spmm, arch: str) -> bool:
        """Whether the kernel computes a problem."""
        if problem.dtype == "float32" or problem.transposed or problem.columns > COLUMNS[-1]:
            return False
        blocks, outer = problem.blocks, (problem.batch, problem.blocks.heads)
        if not blocks.capacity or not problem.lines or _tiles(problem) > mma.MOST_X:
            return False
        if blocks.cols * blocks.grid_cols >= MOST_DEPTH:
            return False
        dense = mma.access(problem.dtype, problem.dense, outer, None, problem.columns)
        return mma.values_access(problem) == dense == "depth"

    def choices(self, problem: Spmm, arch: str) -> list[Choice]:
        """The warps that share the blocks of 16 lines."""
        return [{"warps": warps} for warps in WARPS]

    def default(self, problem: Spmm, gpu: Gpu) -> Choice:
        """The choice taken untuned: the fewest warps that are enough in all, as those of a CTA wait
        for each other once. A batch does not count: it would change a result's bits."""
        busy = BUSY * gpu.multiprocessors
        enough = (warps for warps in WARPS if _tiles(problem) * warps >= busy)
        return {"warps": next(enough, WARPS[-1])}

    def launch(
        self, epilogue: tuple[Epilogue, ...], problem: Spmm, gpu: Gpu, choice: Mapping[str, int]
    ) -> Lowered:
        """The launch of a problem."""
        values, dense, blocks = problem.values, problem.dense, problem.blocks
        fixed = _fixed(epilogue).pack(
            value_batch=values.batch,
            value_slot=values.slot,
            value_row=values.row,
            dense_batch=dense.batch,
            dense_head=dense.head,
            dense_column=dense.column,
            out_view=problem.out[:4],
            lines=problem.lines,
            batch=problem.batch,
            columns=problem.columns,
            words=blocks.row_words,
            **summands.values(problem.summands),
        )
        along_lines, _ = portable.stores(problem)
        columns = next(most for most in COLUMNS if problem.columns <= most)
        variant = self.Variant(
            problem.dtype, blocks.rows, blocks.cols, columns, int(choice["warps"]), along_lines
        )
        step = Step(
            self.spec(epilogue, variant, gpu.arch),
            (_tiles(problem), min(problem.batch, mma.MOST_Y)),
            fixed,
            text.pointers(OPERANDS, epilogue),
            text.scalar_count(epilogue),
        )
        return Lowered((step,))

    def axes(self, epilogue: tuple[Epilogue, ...], scope) -> Mapping[str, Iterable]:
        """Of blocks of one size, in half types."""
        rows, cols = scope.block
        return {
            "dtype": [dtype for dtype in scope.dtypes if dtype != "float32"],
            "lines": [rows],
            "depth": [cols],
            "columns": COLUMNS,
            "warps": WARPS,
            "along_lines": (False, True),
        }

    def spec(self, epilogue: tuple[Epilogue, ...], variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant."""
        dtype, lines, depth, columns, warps, along_lines = variant
        words = [f"{lines}x{depth}", f"{TILE_LINES}x{columns}", f"{warps}warps"]
        words += ["along_lines"] * along_lines
        fields = _fixed(epilogue)
        parameters = text.parameters(len(OPERANDS), fields.format, epilogue)
        facts = {
            **text.facts(dtype, dtype, epilogue),
            "LINES": lines,
            "DEPTH": depth,
            "COLUMNS": columns,
            "WARPS": warps,
            "ALONG_LINES": along_lines,
            "PARAMETER_BYTES": parameters.size,
        }
        texts = fields.text(), text.typed_finish(epilogue)
        source = self.source(facts, *texts, includes=("common/math.cuh", summands.HEADER))
        shared = 4 * warps * TILE_LINES * columns
        return self.named_spec(source, 32 * warps, shared, dtype, words, epilogue)


def _fixed(epilogue: tuple[Epilogue, ...]) -> Fields:
    return Fields((*FIXED, *summands.members(epilogue)))


def _tiles(problem: Spmm) -> int:
    return ceil_div(problem.lines, TILE_LINES) * problem.blocks.heads

"""Products with blocks of 128 x 128 in float8, with scales, on Hopper.

A problem is one of pairs, two numbers that are neighbours along the depth being one of two bytes:
so blocks are of 128 x 64, strides are those of pairs, and the rest is the kernel's for half types.
Its dtype is the result's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kernlib.families.blocksparse.kernels.order import ORDER
from kernlib.families.blocksparse.lowering import hopper
from kernlib.families.blocksparse.lowering.problem import Dense, Spmm, Values
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.kernel import Choice, Gpu, Kernel
from kernlib.lowering.steps import Lowered
from kernlib.lowering.wgmma import multiply

STORAGE = "float8_e4m3fn"
BLOCK = 128
WIDTHS = (256, 128)  # columns of a tile
QUARTER = 64  # of one wgmma
WORDS = 4  # of a stage
SCALES = "slots", "columns"  # names of their addresses
FIELDS = hopper.fields(
    (), "i64 slot_batch", "i64 column_batch", "i64 column_head", "i64 column_step"
)
PARAMETERS = text.parameters(len(hopper.LISTS) + len(SCALES), FIELDS.format, (), maps=3)


class Scales(NamedTuple):
    """Strides: of the slots' scales from batch to batch, of the columns' from batch, head and
    column to the next."""

    slot_batch: int
    column_batch: int
    column_head: int
    column_step: int


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


class Scaled(Kernel):
    """Tiles as of blocks in half types; the subject is the strides of scales."""

    role = "scaled"
    name = "scaled"
    header = "blocksparse/scaled/scaled.cuh"
    entry = "blocksparse_scaled"
    reason = "wgmma of float8, sm_90a, blocks of 128 x 128"

    class Variant(NamedTuple):
        """Everything that code generation chooses."""

        dtype: str  # of the result
        columns: int  # of a tile
        lines_last: bool

    def takes(self, problem: Spmm, arch: str) -> bool:
        """Whether the kernel computes a problem of pairs."""
        return hopper.is_for_maps(problem, arch)

    def choices(self, problem: Spmm, arch: str) -> list[Choice]:
        """The columns of a tile."""
        return hopper.widths(problem, WIDTHS)

    def default(self, problem: Spmm, gpu: Gpu) -> Choice:
        """The choice taken untuned."""
        return hopper.best_width(problem, self.choices(problem, gpu.arch), gpu.multiprocessors)

    def launch(self, scales: Scales, problem: Spmm, gpu: Gpu, choice: Mapping[str, int]) -> Lowered:
        """The launch of a problem of pairs."""
        width, count = int(choice["columns"]), gpu.multiprocessors
        variant = self.Variant(problem.dtype, width, bool(hopper.is_across(problem.out)))
        numbers = FIELDS.values(**scales._asdict(), **hopper.numbers(problem, count, width))
        return hopper.launch(
            (),
            problem,
            self.spec((), variant, gpu.arch),
            PARAMETERS.pack(*numbers),
            ("values", "dense", "out"),
            hopper.operand_maps(problem, width),
            count,
            width,
            behind=SCALES,
        )

    def axes(self, subject, scope) -> Mapping[str, Iterable]:
        """Of results in half types."""
        return {
            "dtype": hopper.halves(scope),
            "columns": WIDTHS,
            "lines_last": (False, True),
        }

    def specs(self, subject, scope, arch: str) -> list[KernelSpec]:
        """The specifications of all variants of a scope, and of the order of their tiles."""
        return ORDER.before(super().specs(subject, scope, arch), scope)

    def spec(self, subject, variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant."""
        dtype, columns, lines_last = variant
        words = [f"{BLOCK}x{BLOCK}", f"{hopper.TILE_LINES}x{columns}"]
        words += ["lines_last"] * lines_last
        stage_bytes = hopper.stage_bytes(columns)
        facts = {
            **text.facts(dtype, dtype, ()),
            **hopper.walk(BLOCK, False),
            **hopper.ring(stage_bytes, WORDS),
            "LINES": BLOCK,
            "DEPTH": BLOCK // 2,
            "TILE_COLUMNS": columns,
            "DEPTH_LAST": True,
            "LINES_LAST": lines_last,
            "SUMS_ACROSS": False,
            "BY_MAPS": True,
            "SCALED": True,
            "PARAMETER_BYTES": PARAMETERS.size,
        }
        texts = FIELDS.text(), text.typed_finish(()), multiply(STORAGE, QUARTER, False)
        source = self.source(facts, *texts, includes=hopper.INCLUDES)
        shared = hopper.shared_bytes(stage_bytes)
        return self.named_spec(source, hopper.THREADS, shared, dtype, words)


SCALED = Scaled()

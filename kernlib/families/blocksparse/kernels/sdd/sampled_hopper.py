"""Blocks of 64 and 128 of a product of dense matrices in half types, on Hopper.

The copy engine wants strides of whole 16 bytes; other layouts go to the portable kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.blocksparse.kernels.sdd import operands, sampled
from kernlib.families.blocksparse.lowering import hopper, summands
from kernlib.families.blocksparse.lowering.problem import Sdd
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering import tma
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.kernel import Choice, Gpu, Kernel
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import Lowered, Step
from kernlib.lowering.wgmma import multiply

LISTS = ("rows", "cols")
FIXED = (
    "u32 tiles",
    "int groups", "int steps", "int capacity", "int grid_rows",  # tiles of a batch; steps of 64
                                                                 # along the depth; slots
    *operands.SHARED,
    "int unused",
)  # fmt: skip
ROW = hopper.ROW
SLOTS = (4, 2, 1)  # of a tile
WORDS = 2  # of a stage
# Microseconds of an H100: of a launch, of a step of 64 along the depth, of each of its pieces.
START, STEP, STEP_PIECE = 3.0, 0.36, 0.03
PIECES = 4  # of 64 x 64, of rows of a or of columns of b that a stage holds at most


class SampledHopper(Kernel):
    """Tiles of neighbouring slots, which mostly share rows of a."""

    role = "sdd"
    name = "hopper"
    header = "blocksparse/sampled_hopper/sampled_hopper.cuh"
    entry = "blocksparse_sampled_hopper"
    rank = 3
    reason = (
        "blocks of 64 and 128 of a dense product, sm_90a, half types: chosen where tiles are "
        "estimated to be enough to beat `sampled`"
    )

    class Variant(NamedTuple):
        """Everything that code generation chooses besides the epilogue."""

        dtype: str
        rows: int  # of a block
        cols: int
        slots: int  # of a tile
        left_lines: bool
        right_lines: bool

    def takes(self, problem: Sdd, arch: str) -> bool:
        """Whether the kernel computes a problem."""
        blocks, values = problem.blocks, problem.values
        if blocks.rows not in hopper.SIZES or blocks.cols not in hopper.SIZES:
            return False
        if _tiles(problem, 1) > hopper.MOST_TILES or values.column != 1:
            return False
        if not operands.addressable(problem, arch):
            return False
        return tma.addressable(problem.dtype, values.alignment, _values(problem))

    def choices(self, problem: Sdd, arch: str) -> list[Choice]:
        """The slots of a tile, most first."""
        blocks = problem.blocks
        return [{"slots": slots} for slots in _slots(blocks.rows, blocks.cols)]

    def default(self, problem: Sdd, gpu: Gpu) -> Choice:
        """The choice taken untuned: the most slots, which share rows of a, unless there are so few
        that more tiles, on more multiprocessors, take less by one of these. What slots hold is not
        known here: all count."""

        def tiles(choice: Choice) -> tuple[int, int]:
            slots = int(choice["slots"])
            return _tiles(problem, slots), _pieces(problem, slots)

        return hopper.fewest_rounds(self.choices(problem, gpu.arch), tiles, gpu.multiprocessors)

    def pays(self, problem: Sdd, gpu: Gpu) -> bool:
        """Whether it takes less time by rule than the kernel for every GPU, which can share
        sums."""
        slots = int(self.default(problem, gpu)["slots"])
        rounds = ceil_div(_tiles(problem, slots), gpu.multiprocessors)
        step = STEP + STEP_PIECE * _pieces(problem, slots)
        time = START + rounds * ceil_div(problem.depth, ROW) * step
        return time <= sampled.best_microseconds(problem, hopper.ARCH, gpu.multiprocessors)

    def launch(
        self, epilogue: tuple[Epilogue, ...], problem: Sdd, gpu: Gpu, choice: Mapping[str, int]
    ) -> Lowered:
        """The launch of a problem."""
        blocks, slots = problem.blocks, int(choice["slots"])
        tiles, lines = _tiles(problem, slots), operands.lines_last(problem)
        numbers = _fixed(epilogue).values(
            **summands.values(problem.summands),
            tiles=tiles,
            groups=tiles // problem.batch,
            steps=ceil_div(problem.depth, ROW),
            capacity=blocks.capacity,
            grid_rows=blocks.grid_rows,
            **operands.shared(problem),
            unused=0,
        )
        variant = self.Variant(problem.dtype, blocks.rows, blocks.cols, slots, *lines)
        out = tma.tensor_map(problem.dtype, _values(problem), (ROW, ROW, 1, 1))
        step = Step(
            self.spec(epilogue, variant, gpu.arch),
            (min(gpu.multiprocessors, tiles), 1),
            _parameters(epilogue).pack(*numbers),
            text.pointers(("a", "b", "out", *LISTS), epilogue),
            text.scalar_count(epilogue),
            (*operands.maps(problem), out),
        )
        return Lowered((step,))

    def axes(self, epilogue: tuple[Epilogue, ...], scope) -> Mapping[str, Iterable]:
        """Of blocks of one size."""
        rows, cols = scope.block
        return {
            "dtype": hopper.halves(scope) if {rows, cols} <= set(hopper.SIZES) else (),
            "rows": [rows],
            "cols": [cols],
            "slots": _slots(rows, cols),
            "left_lines": (False, True),
            "right_lines": (False, True),
        }

    def spec(self, epilogue: tuple[Epilogue, ...], variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant."""
        dtype, rows, cols, slots, left, right = variant
        words = ["sdd", f"{rows}x{cols}", f"{slots}slots", *operands.words(left, right)]
        stage_bytes = slots * (rows + cols) * ROW * 2
        facts = {
            **text.facts(dtype, dtype, epilogue),
            **hopper.ring(stage_bytes, WORDS),
            **operands.facts(left, right),
            "ROWS": rows,
            "COLS": cols,
            "SLOTS": slots,
            "PARAMETER_BYTES": _parameters(epilogue).size,
        }
        texts = (
            _fixed(epilogue).text(),
            text.typed_finish(epilogue),
            multiply(dtype, cols, False, left, right),
        )
        source = self.source(facts, *texts, includes=hopper.INCLUDES)
        shared = hopper.shared_bytes(stage_bytes)
        return self.named_spec(source, hopper.THREADS, shared, dtype, words, epilogue)


def _fixed(epilogue: tuple[Epilogue, ...]) -> Fields:
    return Fields((*summands.members(epilogue), *FIXED))


def _parameters(epilogue: tuple[Epilogue, ...]) -> Parameters:
    """Maps, the layout's slots, the epilogue's, sizes."""
    return text.parameters(len(LISTS), _fixed(epilogue).format, epilogue, maps=3)


def _slots(rows: int, cols: int) -> list[int]:
    """Those of a tile, most first: as many as a stage has room for."""
    return [slots for slots in SLOTS if slots * max(rows, cols) <= PIECES * ROW]


def _tiles(problem: Sdd, slots: int) -> int:
    return ceil_div(problem.blocks.capacity, slots) * problem.batch


def _pieces(problem: Sdd, slots: int) -> int:
    """That come from L2 for a step, for slots of one line."""
    return problem.blocks.rows // ROW + slots * (problem.blocks.cols // ROW)


def _values(problem: Sdd) -> tma.Extent:
    blocks, values = problem.blocks, problem.values
    sizes = (blocks.cols, blocks.rows, blocks.capacity, problem.batch)
    return tma.Extent(sizes, (values.row, values.slot, values.batch))

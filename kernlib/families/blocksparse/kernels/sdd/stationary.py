"""Square blocks of 16, 32 and 64 of a product of dense matrices in half types whose depth is small,
as in attention scores, on Hopper.

A unit is 512 rows of a head and a batch beside some panels of 128 columns. The copy engine wants
strides of whole 16 bytes, and values lie slot behind slot; other layouts, and greater depths, go to
the other kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.blocksparse.kernels.sdd import operands
from kernlib.families.blocksparse.lowering import hopper, summands
from kernlib.families.blocksparse.lowering.problem import Sdd
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.kernel import Gpu, Kernel
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import Lowered, Step

LISTS = ("row_bits", "row_ranks", "counts", "out")
FIXED = (
    "i64 batch_step",  # of values, in elements; slots lie side by side
    "u32 units",
    "int groups", "int splits", "int panels",  # groups of rows, parts of a line of panels
    "int panels_a_unit",
    *operands.SIZES,
)  # fmt: skip
DEPTHS = (64, 128)  # filled up with zeros
WARPS, WARP_ROWS, PANEL = 16, 32, 128
UNIT_ROWS, THREADS = WARPS * WARP_ROWS, 32 * (WARPS + 4)
ROOM = 192 * 1024  # of stages, and of rows of blocks on their way out
MOST_UNITS = 2**31 - 1
START_PANELS = 2  # whose time the rows of a unit take, and what a unit waits for at its start

# Nanoseconds, of which only quotients count: of an H200's 132 multiprocessors together, a block by
# the other kernels at a depth of 64, as measured for densities from 0.1 to 0.5, and a third more at
# 128; of one of them a panel of a unit without blocks, and what all of its blocks add.
OTHERS_BLOCK, OTHERS_COUNT = {16: 0.92, 32: 2.4, 64: 4.2}, 132
EMPTY_PANEL, FULL_PANEL = 250.0, 3700.0


class Stationary(Kernel):
    """Rows of a stay in registers, columns of b stream past."""

    role = "sdd"
    name = "stationary"
    header = "blocksparse/stationary/stationary.cuh"
    entry = "blocksparse_stationary"
    rank = 1
    reason = (
        "blocks of a dense product of depth 128 at most, sm_90a, half types: chosen where "
        "panels hold enough blocks"
    )

    class Variant(NamedTuple):
        """Everything that code generation chooses besides the epilogue."""

        dtype: str
        block: int
        depth: int  # at most
        left_lines: bool
        right_lines: bool

    def takes(self, problem: Sdd, arch: str) -> bool:
        """Whether the kernel computes a problem."""
        return (
            problem.depth <= _depths(len(problem.summands))[-1]
            and operands.is_of_squares(problem, arch)
            and _row_groups(problem) * _panels(problem) <= MOST_UNITS
        )

    def pays(self, problem: Sdd, gpu: Gpu) -> bool:
        """Whether it takes less time than the other kernels, if all slots hold a block and these
        lie anywhere: not where panels have hardly a block each, and not where there are so few of
        them that most multiprocessors have none."""
        blocks, count = problem.blocks, gpu.multiprocessors
        a_unit = panels_a_unit(problem, count)
        units = _row_groups(problem) * ceil_div(_panels(problem), a_unit)
        panels = ceil_div(units, count) * (a_unit + START_PANELS)
        time = panels * (EMPTY_PANEL + FULL_PANEL * blocks.density)
        more = 1 + max(problem.depth - 64, 0) / 192
        others = blocks.capacity * problem.batch * OTHERS_BLOCK[blocks.rows] * more
        return time * count <= others * OTHERS_COUNT

    def launch(
        self, epilogue: tuple[Epilogue, ...], problem: Sdd, gpu: Gpu, choice: Mapping[str, int]
    ) -> Lowered:
        """The launch of a problem."""
        blocks, panels = problem.blocks, _panels(problem)
        a_unit = panels_a_unit(problem, gpu.multiprocessors)
        splits = ceil_div(panels, a_unit)
        units = _row_groups(problem) * splits
        numbers = _fixed(epilogue).values(
            **summands.values(problem.summands),
            batch_step=problem.values.batch,
            units=units,
            groups=_groups(problem),
            splits=splits,
            panels=panels,
            panels_a_unit=a_unit,
            **operands.sizes(problem),
        )
        depth = next(depth for depth in DEPTHS if problem.depth <= depth)
        lines = operands.lines_last(problem)
        step = Step(
            self.spec(epilogue, self.Variant(problem.dtype, blocks.rows, depth, *lines), gpu.arch),
            (min(gpu.multiprocessors, units), 1),
            _parameters(epilogue).pack(*numbers),
            text.pointers(("a", "b", *LISTS), epilogue),
            text.scalar_count(epilogue),
            operands.maps(problem),
        )
        return Lowered((step,))

    def axes(self, epilogue: tuple[Epilogue, ...], scope) -> Mapping[str, Iterable]:
        """Of square blocks of one size."""
        rows, cols = scope.block
        return {
            "dtype": hopper.halves(scope) if rows == cols else (),
            "block": [rows] if rows in operands.SQUARES else (),
            "depth": _depths(len(text.summands(epilogue))),
            "left_lines": (False, True),
            "right_lines": (False, True),
        }

    def spec(self, epilogue: tuple[Epilogue, ...], variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant."""
        dtype, block, depth, left, right = variant
        words = ["sdd", f"{block}x{block}", f"depth{depth}", *operands.words(left, right)]
        ring = _ring(block, depth)
        facts = {
            **text.facts(dtype, dtype, epilogue),
            **ring,
            **operands.facts(left, right),
            "BLOCK": block,
            "DEPTH": depth,
            "WARPS": WARPS,
            "PARAMETER_BYTES": _parameters(epilogue).size,
        }
        # Of a stage two barriers, and in front of all what lies before whole 1024 bytes.
        stage = ring["STAGE_BYTES"] + 2 * 8 + 4 * ring["WORDS"]
        shared = ring["STAGES"] * stage + ring["OUT_BYTES"] + 1024
        texts = _fixed(epilogue).text(), text.typed_finish(epilogue)
        source = self.source(facts, *texts, includes=("common/math.cuh", summands.HEADER))
        return self.named_spec(source, THREADS, shared, dtype, words, epilogue)


def panels_a_unit(problem: Sdd, multiprocessors: int) -> int:
    """How many panels a unit has: all, or fewer where there are so few units that some
    multiprocessors had none, or one more than others."""
    panels, row_groups = _panels(problem), _row_groups(problem)
    most = min(panels, max(1, 4 * multiprocessors // row_groups))

    def cost(a_unit: int) -> int:
        units = row_groups * ceil_div(panels, a_unit)
        return ceil_div(units, multiprocessors) * (a_unit + START_PANELS)

    return min((ceil_div(panels, splits) for splits in range(1, most + 1)), key=cost)


def _ring(block: int, depth: int) -> dict[str, int]:
    """Facts of stages, and of rows of blocks on their way out: blocks of 16 have none. Of a stage
    is said what each line of blocks stores of it, what it is, and of which batch."""
    staging, stage = 0 if block == 16 else UNIT_ROWS * block * 2, PANEL * depth * 2
    return {
        "WARPGROUPS": WARPS // 4,
        "STAGES": (ROOM - staging) // stage,
        "STAGE_BYTES": stage,
        "OUT_BYTES": staging,
        "WORDS": 2 * UNIT_ROWS // block + 4,
    }


def _fixed(epilogue: tuple[Epilogue, ...]) -> Fields:
    return Fields((*summands.members(epilogue), *FIXED))


def _parameters(epilogue: tuple[Epilogue, ...]) -> Parameters:
    """Maps, the layout's words, the result, the epilogue's, sizes."""
    return text.parameters(len(LISTS), _fixed(epilogue).format, epilogue, maps=2)


def _depths(summands: int) -> tuple[int, ...]:
    """Those of kernels: rows of a that are as deep as 128 leave no registers for the dozen that
    places of summands take."""
    return DEPTHS[:1] if summands else DEPTHS


def _groups(problem: Sdd) -> int:
    """Groups of rows of a head."""
    return ceil_div(problem.blocks.rows * problem.blocks.grid_rows, UNIT_ROWS)


def _row_groups(problem: Sdd) -> int:
    """Of all heads and batches."""
    return _groups(problem) * problem.blocks.heads * problem.batch


def _panels(problem: Sdd) -> int:
    return ceil_div(problem.blocks.cols * problem.blocks.grid_cols, PANEL)

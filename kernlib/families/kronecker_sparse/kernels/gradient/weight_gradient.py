"""Gradients of a weight in half types on Hopper, by the header of `hopper`.

The batch is their depth, long and in parts that CTAs sum on their own; split_k_sum.cuh adds those
up, in order. Left is the gradient of the result, right is x: each with the batch contiguous (batch
last), or with features contiguous and d = 1 (batch first).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.kronecker_sparse.kernels.factor import hopper
from kernlib.families.kronecker_sparse.kernels.factor.portable import Portable, tile_count
from kernlib.families.kronecker_sparse.kernels.steps import split_k_sum
from kernlib.families.kronecker_sparse.kernels.steps.split_k_sum import SplitKSum
from kernlib.families.kronecker_sparse.lowering import hopper_common
from kernlib.families.kronecker_sparse.lowering.problem import Layout, Problem, Scope, is_deep
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import tma
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.kernel import Choice, Gpu, Kernel
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import Lowered, Step
from kernlib.lowering.tma import TensorMap
from kernlib.lowering.wgmma import multiply

TILE_ROWS = hopper.TILE_ROWS
TILE_DEPTH = hopper_common.ROW_BYTES // 2
FIXED = Fields((*hopper.TILES, "int pitch", "u32 tiles"))  # of rows of sums; of all parts
PARAMETERS = Parameters(1, FIXED.format, maps=2)
COLUMNS = (16, 32, 48, 64, 96, 128, 192, 256)
WHOLE_COLUMNS = (64, 128, 192, 256)  # of several tiles, or where columns lie side by side
MIN_PART = 8  # blocks of depth; shorter parts wait more than they sum
WAVES = 2  # of CTAs at most


class WeightGradient(Kernel):
    """Sums over parts of the batch, and their sum."""

    role = "factor"
    name = "gradient"
    header = "kronecker_sparse/hopper/hopper.cuh"
    entry = "kronecker_sparse_hopper"
    rank = 3

    class Variant(NamedTuple):
        """Everything that code generation chooses."""

        dtype: str
        left_lines: bool  # whether features lie side by side, else the batch
        right_lines: bool
        columns: int

    def takes(self, problem: Problem, arch: str, mixed: bool = False) -> bool:
        """Whether the kernel computes a problem. Only who asks for ``mixed`` operands, one with the
        batch last, has kernels for them."""
        if arch != hopper_common.ARCH or not is_deep(problem) or problem.dtype == "float32":
            return False
        lines = _lines(problem)
        if lines is None or (lines[0] != lines[1] and not mixed):
            return False
        return tile_count(problem, TILE_ROWS, 16) <= hopper_common.MAX_TILES

    def choices(self, problem: Problem, arch: str) -> list[Choice]:
        """The width of tile."""
        _, lines = _lines(problem)
        return [{"columns": columns_of(problem.columns, lines)}]

    def launch(
        self, epilogue: tuple[Epilogue, ...], problem: Problem, gpu: Gpu, choice: Mapping[str, int]
    ) -> Lowered:
        """The launches of a problem. An epilogue needs whole sums: those go to the portable
        kernel."""
        if epilogue:
            return Portable().launch_untuned(epilogue, problem, gpu)
        columns = int(choice["columns"])
        variant = self.Variant(problem.dtype, *_lines(problem), columns)
        blocks, tiles = ceil_div(problem.depth, TILE_DEPTH), tile_count(problem, TILE_ROWS, columns)
        part = part_of(blocks, tiles, gpu.multiprocessors)
        parts = ceil_div(blocks, part)
        partial, one = split_k_sum.layout(problem)
        fixed = FIXED.values(
            row_tiles=ceil_div(problem.rows, TILE_ROWS),
            column_tiles=ceil_div(problem.columns, columns),
            **problem.sizes,
            split_depth=part,
            pitch=partial.row,
            tiles=tiles * parts,
        )
        main = Step(
            self.spec((), variant, gpu.arch),
            (min(gpu.multiprocessors, tiles * parts), 1),
            PARAMETERS.pack(*fixed),
            (("left", 0), ("right", 0), ("workspace", 0)),
            maps=_maps(problem, variant),
        )
        return Lowered((main, SplitKSum().step(problem, partial, one, parts)), 4 * one * parts)

    def axes(self, epilogue: tuple[Epilogue, ...], scope: Scope) -> Mapping[str, Iterable]:
        """Of weights of b x c blocks, of products of few rows and of their gradients by x."""
        is_hopper = scope.arch == hopper_common.ARCH and not epilogue
        return {
            "dtype": scope.halves if is_hopper else [],
            "left_lines": (False, True),
            "right_lines": (False, True),
            "columns": COLUMNS,
        }

    def is_legal(self, variant: Variant, epilogue: tuple[Epilogue, ...], scope: Scope) -> bool:
        """Whether such an x has such a tile; of mixed operands it is x that has the batch first."""
        b, c, _ = scope.sizes
        counts, lines = (c,) if scope.mixed else (b, c), variant.right_lines
        is_so = (
            (variant.left_lines != lines and lines) if scope.mixed else variant.left_lines == lines
        )
        return is_so and variant.columns in {columns_of(count, lines) for count in counts}

    def spec(self, epilogue: tuple[Epilogue, ...], variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant."""
        dtype, left_lines, right_lines, columns = variant
        width = round_up(columns, TILE_DEPTH) if right_lines else columns
        stages, shared = hopper_common.stages(0, (TILE_ROWS + width) * hopper_common.ROW_BYTES)
        words = [f"{TILE_ROWS}x{columns}", "batch_first" if left_lines else "batch_last"]
        if left_lines != right_lines:
            words += ["by", "batch_first" if right_lines else "batch_last"]
        facts = {
            **hopper_common.facts(dtype, "fp32", ()),
            "BATCH_LAST": left_lines,
            "OUT_LAST": left_lines,
            "TILE_COLUMNS": columns,
            "STAGES": stages,
            "OUT_PARTS": 1,
            "RESIDENT": 0,
            "PACKED": False,
            "RIGHT_LINES": right_lines,
            "PARTIAL": True,
            "PARAMETER_BYTES": PARAMETERS.size,
        }
        wgmma = multiply(dtype, columns, False, left_lines, right_lines)
        texts = FIXED.text(), hopper_common.finish(()), wgmma
        source = self.source(facts, *texts, includes=hopper_common.INCLUDES)
        return self.named_spec(source, hopper_common.THREADS, shared, dtype, words)


def columns_of(count: int, lines: bool) -> int:
    """The narrowest tile that holds all columns, else the one that pads them least."""
    widths = WHOLE_COLUMNS if lines or count > COLUMNS[-1] else COLUMNS
    if count <= widths[-1]:
        return next(columns for columns in widths if columns >= count)
    return hopper_common.by_padding(widths[1:], count)[0]


def part_of(blocks: int, tiles: int, multiprocessors: int) -> int:
    """Blocks of depth of a part, of all blocks and for so many tiles: as many parts as fill a
    device's waves best."""
    best, filled = blocks, 0.0
    for parts in range(1, max(1, WAVES * multiprocessors // tiles) + 1):
        part = ceil_div(blocks, parts)
        if part < MIN_PART and parts > 1:
            break
        # The last wave, and what uneven parts leave idle.
        waves = ceil_div(tiles * ceil_div(blocks, part), multiprocessors)
        share = tiles * blocks / (waves * multiprocessors * part)
        if share > filled + 0.02:
            best, filled = part, share
    return best


def _lines(problem: Problem) -> tuple[bool, bool] | None:
    """Whether each operand has features side by side, not the batch; None for neither, or for what
    the copy engine does not take. Both are alike where they may be."""
    sides = (problem.left, problem.rows), (problem.right, problem.columns)
    of_sides = []
    for side, count in sides:
        layouts = [
            lines
            for lines in (False, True)
            if (side.line if lines else side.depth) == 1
            and tma.addressable(problem.dtype, side.alignment, _extent(problem, side, count, lines))
        ]
        of_sides.append(layouts)
    pairs = [(left, right) for left in of_sides[0] for right in of_sides[1]]
    return min(pairs, key=lambda pair: pair[0] != pair[1], default=None)


def _extent(problem: Problem, side: Layout, count: int, lines: bool) -> tma.Extent:
    return hopper_common.extent(problem, side, count, problem.depth, lines)


def _maps(problem: Problem, variant: WeightGradient.Variant) -> tuple[TensorMap, ...]:
    """Maps of both operands."""
    dtype, *lines, columns = variant
    sides = (problem.left, problem.rows, TILE_ROWS), (problem.right, problem.columns, columns)
    boxes = [
        (_extent(problem, side, count, is_lines), TILE_DEPTH if is_lines else width)
        for (side, count, width), is_lines in zip(sides, lines, strict=True)
    ]
    return hopper_common.maps(dtype, *boxes)

"""The kernel gradients.cuh: gradients of one run of factors, whose tiles of x and of the gradient
by the result lie side by side in shared memory."""

from __future__ import annotations

import math
from functools import cached_property
from typing import NamedTuple

from kernlib.families.kronecker_product.kernels import modes
from kernlib.families.kronecker_product.kernels.base import WORDS, ProductKernel
from kernlib.families.kronecker_product.kernels.modes import warps_of
from kernlib.families.kronecker_product.kernels.sum import Matrix
from kernlib.families.kronecker_product.lowering import grouping, parameters
from kernlib.families.kronecker_product.lowering.grouping import (
    LINE,
    MOST_WARPS,
    Group,
    Mode,
    Size,
    cached,
)
from kernlib.families.kronecker_product.lowering.runs import Part, Run
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import config
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.config import Fact
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Choice, Gpu
from kernlib.lowering.steps import WORKSPACE, Lowered, Step

# Of shared memory, of each tile, if a column is not longer: with small matrices, and with others,
# whose results wait in registers beside the sums of gradients.
TILE_BYTES = (32 * 1024, 16 * 1024)
SMALL = 16  # rows and columns
MOST_STAGES = 4  # each takes those before it off x anew, as text of its own
SUMS, MOST_SUMS = 8, 64  # registers of a thread for one matrix's gradient: to aim at, and at most
REGISTERS = 96  # of a thread beside those sums, as resident blocks are counted
MOST_REGISTERS = 255
MOST_BLOCKS = 3  # of a multiprocessor, that registers are shared out for


class Fragments(NamedTuple):
    """Of a matrix's gradient what one warp sums: fragments of 16 x 8, down and across."""

    down: int
    across: int

    def registers(self, itemsize: int) -> int:
        """Of a thread."""
        return self.down * self.across * itemsize  # four elements of each fragment


class _Variant(NamedTuple):
    dtype: str
    precision: str
    source: str
    gradient: str
    target: str
    columns: int
    inside: bool
    sizes: tuple[Size, ...]
    by_x: bool = True


class Variant(_Variant):
    """Everything that code generation chooses: the factors' dtype, those of x, of the gradient that
    is given and of the one that is written, the tile's columns and whether they are its last
    dimension, sizes of the factors, and whether the gradient by x is computed."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element in shared memory."""
        return DTYPES[self.dtype].sums.bytes

    @cached_property
    def modes(self) -> tuple[Mode, ...]:
        """As they are applied to x; transposed, last to first, to the gradient."""
        return grouping.modes(self.sizes, self.columns, self.inside)

    @property
    def tiles(self) -> tuple[int, int]:
        """Elements of shared memory for x and for the gradient."""
        x, gradient = (
            max(getattr(mode, end) for mode in self.modes) for end in ("inputs", "outputs")
        )
        return round_up(x, LINE), round_up(gradient, LINE)

    @cached_property
    def warps(self) -> int:
        """Whose registers hold the results of a tile, and the sums of each matrix's gradient."""
        warps = warps_of(self.dtype, max(self.tiles) * (1 if _is_small(self.modes) else 2))
        while warps < MOST_WARPS and not all(
            fragments(mode, warps, self.itemsize) for mode in self.modes
        ):
            warps *= 2
        return warps

    @property
    def matrices(self) -> int:
        """Elements of shared memory for the matrices: all but the last as they are applied to x,
        all but perhaps the first as they are applied to the gradient."""
        each = [mode.stored(self.arithmetic) for mode in self.modes]
        return 2 * sum(each) - each[-1] - (0 if self.by_x else each[0])

    @property
    def arithmetic(self) -> str:
        """As :func:`grouping.arithmetic_of` names it."""
        return grouping.arithmetic_of(self.dtype, self.precision)

    @property
    def entries(self) -> int:
        """Of a part: of all matrices."""
        return sum(mode.rows * mode.columns for mode in self.modes)

    @cached_property
    def fragments(self) -> tuple[Fragments | None, ...]:
        """Of each mode."""
        return tuple(fragments(mode, self.warps, self.itemsize) for mode in self.modes)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a block."""
        tiles = sum(self.tiles) + self.matrices
        largest = max(mode.rows * mode.columns for mode in self.modes)  # as warps add theirs up
        return self.itemsize * max(tiles, largest)

    def resident(self, arch: str) -> int:
        """Blocks that a multiprocessor holds."""
        sums = sum(each.registers(self.itemsize) for each in self.fragments if each)
        most = min(MOST_REGISTERS, targets.REGISTERS // (32 * self.warps))
        registers = min(REGISTERS + sums, most)
        blocks = targets.resident_blocks(arch, 32 * self.warps, registers, self.shared_bytes)
        return min(blocks, MOST_BLOCKS)


class Job(NamedTuple):
    """Gradients of a run: of factors by themselves, whether all batches are one sum; whether the
    gradient by what the run reads is made; bytes of the workspace before the
    parts; and the pointers of what it reads and of the gradient that is given."""

    run: Run
    is_one_sum: bool
    by_x: bool
    at: int
    source: tuple[str, int]
    gradient: tuple[str, int]


class Gradients(ProductKernel):
    """One run of factors; its sums are in parts, which :class:`Sum` adds up."""

    role = "gradients"
    name = "gradients"
    header = "kronecker_product/gradients/gradients.cuh"
    entry = "kronecker_product_gradients"
    reason = "gradients by all factors and by x"
    Variant = Variant

    def takes(self, group: Group, arch: str) -> bool:
        """Whether a block holds a column of factors, of any dtype that a launch may read."""
        return fits(group.sizes, group.dtype, arch)

    def estimate(self, group: Group, choice: Choice, gpu: Gpu) -> float:
        """Microseconds of a group of factors, whose ends all are in device memory."""
        item, sums = DTYPES[group.dtype].bytes, DTYPES[group.dtype].sums.bytes
        ends = item if group.begins else sums, item if group.ends else sums
        is_hidden, tile = grouping.fits(group, gpu.arch, 4), group.elements  # beside another tile
        return grouping.group_time(group, group.arithmetic, ends, (0, 0), is_hidden, tile)

    def variant(self, run: Run, by_x: bool, gpu: Gpu) -> Variant:
        """The kernel of a run, whose tiles have so few columns that each multiprocessor has two of
        them, but whole sectors of 32 bytes."""
        sums = DTYPES[run.dtype].accumulator
        ends, gradient = run.dtype if run.begins else sums, run.dtype if run.ends else sums
        kind = run.dtype, run.precision, ends, gradient, ends
        variant = Variant(*kind, 1, run.inside, run.sizes, by_x)
        count = run.batch * run.outer * run.inner * run.columns
        shared = ceil_div(count, 2 * gpu.multiprocessors)
        shared = max(shared, modes.SECTOR if run.inside else 1)
        most = min(most_columns(variant, gpu.arch), run.columns, shared)
        return variant._replace(columns=1 << (most.bit_length() - 1))

    def grid(self, job: Job, variant: Variant, gpu: Gpu) -> tuple[tuple[int, int], int]:
        """Blocks of a launch, and the parts that they make of one sum."""
        run, most = job.run, variant.resident(gpu.arch) * gpu.multiprocessors
        across = min(_tiles(run, variant), most)
        if job.is_one_sum:
            down = min(run.batch, max(1, most // across))
            return (across, down), across * down
        across = min(across, max(1, ceil_div(most, run.batch)))
        return (across, min(run.batch, parameters.GRID_BATCH)), across

    def matrices(self, job: Job, gpu: Gpu, begin: int) -> tuple[list[Matrix], int]:
        """What is summed, in parts that begin at an element; and the bytes of all of them."""
        run, variant = job.run, self.variant(job.run, job.by_x, gpu)
        _, count = self.grid(job, variant, gpu)
        matrices, at = [], begin
        for mode in variant.modes:
            matrix = mode.rows, mode.columns, run.first + mode.first, mode.parts
            matrices.append(Matrix(at, variant.entries, count, *matrix))
            at += mode.rows * mode.columns
        sums = count * (1 if job.is_one_sum else run.batch)
        return matrices, sums * variant.entries * variant.itemsize

    def launch(self, subject: tuple, job: Job, gpu: Gpu, choice: Choice) -> Lowered:
        """The launch of a run, whose parts lie behind what is in the workspace."""
        run, variant = job.run, self.variant(job.run, job.by_x, gpu)
        grid, _ = self.grid(job, variant, gpu)
        turned = tuple(
            f._replace(
                rows=f.columns,
                columns=f.rows,
                row_stride=f.column_stride,
                column_stride=f.row_stride,
            )
            for f in run.factors
        )
        assert run.back is not None
        sides = run._replace(out=run.back), run._replace(x=run.out, out=run.back, factors=turned)
        numbers = []
        for side, source in zip(sides, (variant.source, variant.gradient), strict=True):
            part = Part(source, variant.target, variant.columns, run.inside, side.sizes)
            numbers.append(parameters.run_values(side, part))
        counts = run.batch, int(job.is_one_sum), _tiles(run, variant), 0
        in_place = job.source[0] == WORKSPACE
        target = job.source if in_place else ("to_x" if job.by_x else WORKSPACE, 0)
        # What slabs count in the last place is nothing here.
        ends = job.source, job.gradient, (WORKSPACE, job.at), target
        pointers = (*ends, *run.names, *run.names, (WORKSPACE, 0))
        fixed = parameters.pack((), sides, numbers, counts)
        return Lowered((Step(self.spec((), variant, gpu.arch), grid, fixed, pointers),))

    def spec(self, subject: tuple, variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant."""
        sizes = ["x".join(map(str, size)) for size in variant.sizes]
        ends = variant.source, variant.gradient, variant.target
        words = [*sizes, f"{variant.columns}c" + "i" * variant.inside, f"{variant.warps}w"]
        words += [*ends] * (ends != (variant.dtype,) * 3) + ["factors"] * (not variant.by_x)
        said = [variant.precision] * (variant.dtype == "float32") + words[-WORDS:]
        turned = [size[::-1] for size in variant.sizes]
        both = [*variant.sizes, *turned]
        facts = {
            **parameters.facts((variant.dtype, variant.target), both, 2, ()),
            **modes.arithmetic_facts(variant.arithmetic),
            "WARPS": variant.warps,
            "MIN_BLOCKS": max(1, variant.resident(arch)),
            "TILE": max(variant.tiles),
            "AHEAD": 0,
            "SOURCE_TILE": variant.tiles[0],
            "GRADIENT_TILE": variant.tiles[1],
            "ENTRIES": variant.entries,
            "WANTED": variant.by_x,
        }
        runs = [_run(variant, variant.source, 0), _run(variant, variant.gradient, 1)]
        texts = (
            parameters.fixed_text(parameters.fields(2, len(both), ())),
            text.typed_finish(()),
            *map(config.text, runs, ("X", "G")),
            f"using AllStages = StagesOf<{', '.join(_stages(variant))}>;\n",
        )
        source = self.source(facts, *texts, includes=("common/math.cuh", parameters.HEADER))
        size = 32 * variant.warps, variant.shared_bytes
        numbers = variant.dtype, variant.precision
        return self.product_spec(self.name, source, *size, numbers, words, said, arch)


GRADIENTS = Gradients()


def _is_small(modes: tuple[Mode, ...]) -> bool:
    return all(max(mode.rows, mode.columns) <= SMALL for mode in modes)


@cached
def fragments(mode: Mode, warps: int, itemsize: int) -> Fragments | None:
    """How warps share out a matrix's gradient, by the cycles of a step of 8 slices: 4 of shared
    memory for 16 rows, 2 for 8 columns, and as many of tensor cores for both as for a product. None
    where the sums take too many registers."""
    tall, wide = ceil_div(mode.rows, 16), ceil_div(mode.columns, 8)
    steps, choices = ceil_div(mode.left * mode.right, 8), []
    for down in (1 << bit for bit in range((tall - 1).bit_length() + 1)):
        for across in (1 << bit for bit in range((wide - 1).bit_length() + 1)):
            places = ceil_div(tall, down) * ceil_div(wide, across)
            share = Fragments(down, across)
            registers = share.registers(itemsize)
            if places <= warps and registers <= MOST_SUMS:
                cycles = ceil_div(steps, warps // places)
                cycles *= 4 * down + 2 * across + 4 * down * across
                choices.append((max(registers, SUMS), cycles, registers, share))
    return min(choices)[-1] if choices else None


def fits(sizes: tuple[Size, ...], dtype: str, arch: str) -> bool:
    """Whether a block holds a column of a run, of any dtype that a launch of it may read."""
    variant = Variant(dtype, "fp32", dtype, dtype, dtype, 1, False, tuple(sizes))
    return len(variant.modes) <= MOST_STAGES and _fits(variant, arch)


def most_columns(variant: Variant, arch: str) -> int:
    """The widest tile of a variant's run, in columns: a power of two."""
    widest = max(max(mode.inputs, mode.outputs) for mode in variant._replace(columns=1).modes)
    size = TILE_BYTES[0 if _is_small(variant.modes) else 1]
    most = max(size // variant.itemsize // widest, modes.SECTOR if variant.inside else 1)
    count = 1 << (min(most, modes.WIDEST_TILE).bit_length() - 1)
    while count > 1 and not _fits(variant._replace(columns=count), arch):
        count //= 2
    return count


def _fits(variant: Variant, arch: str) -> bool:
    is_narrow = max(variant.tiles) <= grouping.most_features(variant.dtype)
    return is_narrow and variant.resident(arch) > 0 and None not in variant.fragments


def _tiles(run: Run, variant: Variant) -> int:
    return run.outer * run.inner * ceil_div(run.columns, variant.columns)


def _run(variant: Variant, source: str, side: int) -> dict[str, Fact]:
    """What is read of x, or of the gradient."""
    features = math.prod(size[side] for size in variant.sizes)
    return {
        "SourceT": DTYPES[source].cuda,
        "TargetT": DTYPES[variant.target].cuda,
        "INDEX": side,
        "COLUMNS": variant.columns,
        "IN_FEATURES": features,
        "INPUTS": variant.columns * features,
        "COLUMNS_LAST": variant.inside,
        "WRITTEN_HERE": False,
        "ENDS": False,
    }


def _stages(variant: Variant) -> list[str]:
    """Each Stage; matrices lie one behind the other, the forward one first."""
    listed, at, entries, count = [], 0, 0, len(variant.modes)
    for index, (mode, share) in enumerate(zip(variant.modes, variant.fragments, strict=True)):
        left, rows, columns, right, first, parts = mode
        forward = left, rows, columns, right, first, parts, False, at
        at += mode.stored(variant.arithmetic) * (index < count - 1)
        behind = first + len(variant.sizes)
        turned = left, columns, rows, right, behind, parts, index == 0, at
        at += mode.stored(variant.arithmetic) * (variant.by_x or index > 0)
        pair = ", ".join(parameters.numbered("Mode", each) for each in (forward, turned))
        listed.append(f"Stage<{pair}, {share.down}, {share.across}, {entries}>")
        entries += rows * columns
    return listed

"""The kernels modes.cuh, of one run of factors in one pass over memory, and slabs.cuh, of several
runs in one launch: for every GPU, any sizes and any strides. Tiles stay in shared memory in the
arithmetic of their sums."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from kernlib.families.kronecker_product.kernels.base import OneRun, PartsKernel
from kernlib.families.kronecker_product.lowering import estimates, grouping
from kernlib.families.kronecker_product.lowering.grouping import (
    LINE,
    MOST_WARPS,
    SUMS,
    Group,
    Mode,
    Size,
)
from kernlib.families.kronecker_product.lowering.parameters import TICKET_BYTES
from kernlib.families.kronecker_product.lowering.problem import Problem
from kernlib.families.kronecker_product.lowering.runs import Part, Run, ends_of, split
from kernlib.families.kronecker_product.lowering.slabs import InSlabs
from kernlib.jit import targets
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.config import Fact
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Choice, Gpu

REGISTERS = 96  # of a thread, as resident blocks are counted
MOST_BLOCKS = 4  # of a multiprocessor, that registers are shared out for
TILE_BYTES = 32 * 1024  # of a tile, if a column is not longer
WIDEST_TILE = 128  # columns
SECTOR = 8  # columns that lie side by side in 32 bytes of float32
LEAST_AHEAD = 4  # of a tile the part that is worth being read ahead


class Variant(NamedTuple):
    """Everything that code generation chooses besides the epilogue: the factors' dtype, the runs,
    first to last, and the block's warps. ``ahead`` are the elements of shared memory behind a tile
    for what is read of the next; ``restaged``, whether matrices of one run take another's place."""

    dtype: str
    precision: str
    parts: tuple[Part, ...]
    warps: int
    ahead: int = 0
    restaged: bool = False

    @property
    def arithmetic(self) -> str:
        """As :func:`grouping.arithmetic_of` names it."""
        return grouping.arithmetic_of(self.dtype, self.precision)

    @property
    def itemsize(self) -> int:
        """Bytes of an element in shared memory."""
        return DTYPES[self.dtype].sums.bytes

    @property
    def powers(self) -> int:
        """How many arrays of powers of two go from run to run."""
        return 0

    @property
    def tiles(self) -> int:
        """How many tiles shared memory holds."""
        return 1

    def stored(self, mode: Mode) -> int:
        """Elements of shared memory that the matrix of a mode takes."""
        return mode.stored(self.arithmetic)

    @property
    def tile(self) -> int:
        """Elements of shared memory that a tile takes."""
        return round_up(max(mode.inputs for part in self.parts for mode in part.modes), LINE)

    @property
    def matrices(self) -> int:
        """Elements of shared memory that the matrices of all modes take."""
        sizes = [grouping.matrices(part.sizes, self.arithmetic) for part in self.parts]
        return max(sizes) if self.restaged else sum(sizes)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a block."""
        ticket = TICKET_BYTES * (len(self.parts) > 1)
        return self.itemsize * (self.tile + self.ahead + self.matrices) + ticket

    def resident(self, arch: str) -> int:
        """Blocks of a launch that a multiprocessor holds."""
        blocks = targets.resident_blocks(arch, 32 * self.warps, REGISTERS, self.shared_bytes)
        return min(blocks, MOST_BLOCKS)


class ModesKernel(PartsKernel):
    """What the kernels of one run and of several have in common."""

    Variant = Variant

    def number_facts(self, variant: Variant) -> dict[str, Fact]:
        """Facts of its numbers."""
        return arithmetic_facts(variant.arithmetic)

    def words(self, variant: Variant) -> tuple[str, list[str]]:
        """What descriptions call it, and what names say of its numbers besides the dtype."""
        return self.name, [variant.precision] * (variant.dtype == "float32")


class Modes(ModesKernel, OneRun):
    """One run of factors."""

    name = "modes"
    header = "kronecker_product/modes/modes.cuh"
    entry = "kronecker_product_modes"
    reason = (
        "any sizes, dtypes and GPUs: a launch for each run of factors, chosen where no other "
        "kernel takes the factors, and with few rows ahead of `slabs`"
    )

    def takes(self, group: Group, arch: str) -> bool:
        """Whether shared memory holds a column and all matrices."""
        return grouping.fits(group, arch)

    def estimate(self, group: Group, choice: Choice, gpu: Gpu) -> float:
        """Microseconds of a group of factors, by the widest tiles."""
        begins, ends, dtype = group.begins, group.ends, DTYPES[group.dtype]
        item, sums = dtype.bytes, dtype.sums.bytes
        return grouping.group_time(
            group,
            group.arithmetic,
            (item * begins, item * ends),
            (sums * (not begins), sums * (not ends)),
            grouping.fits(group, gpu.arch, 2),
            max(grouping.widest(group.sizes), TILE_BYTES // sums),
        )

    def default(self, run: Run, gpu: Gpu) -> Choice:
        """So few columns that each multiprocessor has two tiles."""
        return {"columns": columns_of(run, *gpu)}

    def most_columns(self, group: Group | Run, arch: str) -> int:
        """The widest tile, in columns: a power of two."""
        return most_columns(group.sizes, group.inside, group.dtype, group.precision, arch)

    def variant(self, run: Group | Run, columns: int, arch: str) -> Variant:
        """The kernel of a run, for tiles of so many columns."""
        part = Part(*ends_of(run), columns, run.inside, run.sizes)
        warps = warps_of(run.dtype, columns * grouping.widest(run.sizes))
        variant = Variant(run.dtype, run.precision, (part,), warps)
        return variant._replace(ahead=ahead_of(variant, arch))


MODES = Modes()


class Slabs(ModesKernel, InSlabs):
    """Several runs, one behind the other in slabs that stay in the L2 cache."""

    name = "slabs"
    header = "kronecker_product/modes/slabs.cuh"
    entry = "kronecker_product_slabs"
    rank = 4
    reason = (
        "all runs of `modes` in one launch: chosen where what a run hands on would not stay in "
        "the L2 cache, or where that is estimated to be faster"
    )
    of_run = MODES

    def variant_of(
        self, groups: tuple[tuple[Size, ...], ...], kind: Group, restaged: bool, blocks: int, arch
    ) -> Variant | None:
        """The kernel of runs of factors of these sizes, for so many blocks of a multiprocessor."""
        dtype, precision, arithmetic = kind.dtype, kind.precision, kind.arithmetic
        each = [grouping.matrices(sizes, arithmetic) for sizes in groups]
        matrices, sums = max(each) if restaged else sum(each), DTYPES[dtype].accumulator
        space, parts = grouping.room(dtype, arch) // blocks - LINE, []
        for index, sizes in enumerate(groups):
            if grouping.widest(sizes) + matrices > space:
                return None
            source, target = sums if index else dtype, sums if index < len(groups) - 1 else dtype
            within = kind.inside or index > 0
            others = matrices - each[index]
            columns = most_columns(sizes, within, dtype, precision, arch, others)
            parts.append(Part(source, target, columns, within, sizes))
        warps = warps_of(dtype, max(part.columns * grouping.widest(part.sizes) for part in parts))
        return Variant(dtype, precision, tuple(parts), warps, restaged=restaged)

    def time(self, problem: Problem, gpu: Gpu) -> float:
        """Microseconds, as others were measured."""
        plan = self.plan(problem, gpu)
        tickets = (problem.batch * plan.count + (len(plan.runs) - 1) * plan.lag) * plan.tickets
        groups = grouping.groups(self.of_run, grouping.product_of(problem), gpu.arch)
        runs, blocks = tuple(split(problem, groups)), min(plan.blocks, tickets)
        return estimates.kernel_time([estimates.launch(runs, plan.variant, blocks)])

    def estimate(self, problem: Problem, choice: Choice, gpu: Gpu) -> float:
        """Microseconds where such products were measured. Else zero, by rule, if what a run hands
        to the next would not stay in the L2 cache as a whole."""
        if estimates.are_known(problem, gpu) and estimates.are_ragged(problem):
            return self.time(problem, gpu)
        plan = self.plan(problem, gpu)
        return 0.0 if problem.batch * plan.count > plan.ring else inf


def arithmetic_facts(arithmetic: str) -> dict[str, Fact]:
    """What modes/tile.cuh reads."""
    return {"PRODUCTS": 3 if arithmetic == "fp32" else 1, "MOST_SPLIT": grouping.MOST_SPLIT}


def warps_of(dtype: str, tile: int) -> int:
    """Warps whose registers hold the results of a tile of so many elements."""
    limit, warps = SUMS[DTYPES[dtype].accumulator], 4
    while warps < MOST_WARPS and warps * 32 * limit // 2 < tile:
        warps *= 2
    return warps


def most_columns(
    sizes: tuple[Size, ...],
    inside: bool,
    dtype: str,
    precision: str,
    arch: str,
    others: int = 0,
) -> int:
    """The widest tile of a run of factors, in columns: a power of two. ``others`` are elements of
    shared memory that other things take."""
    widest = grouping.widest(sizes)
    matrices = others + grouping.matrices(sizes, grouping.arithmetic_of(dtype, precision))
    most = min(grouping.most_features(dtype), grouping.room(dtype, arch) - matrices) // widest
    wide = max(TILE_BYTES // DTYPES[dtype].sums.bytes // widest, SECTOR if inside else 1)
    return _power(max(1, min(wide, WIDEST_TILE, most)))


def columns_of(run: Run, arch: str, multiprocessors: int) -> int:
    """The columns of a launch's tiles: so few that each multiprocessor has two tiles, but whole
    sectors of 32 bytes."""
    count = run.batch * run.outer * run.inner * run.columns
    shared = max(ceil_div(count, 2 * multiprocessors), SECTOR if run.inside else 1)
    most = most_columns(run.sizes, run.inside, run.dtype, run.precision, arch)
    return _power(min(most, run.columns, shared))


def _power(count: int) -> int:
    """The largest power of two up to a count."""
    return 1 << (count.bit_length() - 1)


def ahead_of(variant: Variant, arch: str) -> int:
    """The elements of shared memory for what is read ahead: of float32 and float64 only, which go
    there without passing a register."""
    sums = DTYPES[variant.dtype].accumulator
    if variant.resident(arch) > 1 or variant.parts[0].source != sums:
        return 0
    free = (targets.SHARED_BYTES[arch] - variant.shared_bytes) // variant.itemsize // LINE * LINE
    ahead = min(free, variant.tile)
    return ahead if ahead * LEAST_AHEAD >= variant.tile else 0

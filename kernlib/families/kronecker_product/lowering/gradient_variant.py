"""The kernel gradients.cuh before it is text, and its text: one run of factors, whose tiles of x
and of the gradient by the result lie side by side in shared memory."""

from __future__ import annotations

import math

from kernlib.families.kronecker_product.lowering import grouping, modes
from kernlib.families.kronecker_product.lowering.grouping import Mode, Size, cached
from kernlib.families.kronecker_product.lowering.variant import (
    LINE,
    MOST_WARPS,
    parameters,
    warps_of,
)
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.names import named
from kernlib.records import NamedTuple

# Of shared memory, of each tile, if a column is not longer: with small matrices, and with others,
# whose results wait in registers beside the sums of gradients.
TILE_BYTES = (32 * 1024, 16 * 1024)
SMALL = 16  # rows and columns
MOST_STAGES = 4  # each takes those before it off x anew, as text of its own
SUMS, MOST_SUMS = 8, 64  # registers of a thread for one matrix's gradient: wanted, and at most
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


class Variant(NamedTuple):
    """Everything that code generation chooses: the factors' dtype, those of x, of the gradient that
    is given and of the one that is written, the tile's columns and whether they are its last
    dimension, sizes of the factors, and whether the gradient by x is ``wanted``."""

    dtype: str
    precision: str
    source: str
    gradient: str
    target: str
    columns: int
    inside: bool
    sizes: tuple[Size, ...]
    wanted: bool = True

    @property
    def itemsize(self) -> int:
        """Bytes of an element in shared memory."""
        return DTYPES[self.dtype].sums.bytes

    @property
    @cached
    def modes(self) -> tuple[Mode, ...]:
        """As they are applied to x; transposed, last to first, to the gradient."""
        return grouping.modes(self.sizes, self.columns, self.inside)

    @property
    def tiles(self) -> tuple[int, int]:
        """Elements of shared memory for x and for the gradient."""
        found = self.modes
        x, gradient = max(mode.inputs for mode in found), max(mode.outputs for mode in found)
        return round_up(x, LINE), round_up(gradient, LINE)

    @property
    @cached
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
        found = self.modes
        each = [mode.stored(self.arithmetic) for mode in found]
        return 2 * sum(each) - each[-1] - (0 if self.wanted else each[0])

    @property
    def arithmetic(self) -> str:
        """As :func:`grouping.arithmetic_of` names it."""
        return grouping.arithmetic_of(self.dtype, self.precision)

    @property
    def entries(self) -> int:
        """Of a part: of all matrices."""
        return sum(mode.rows * mode.columns for mode in self.modes)

    @property
    @cached
    def fragments(self) -> tuple[Fragments | None, ...]:
        """Of each mode."""
        return tuple(fragments(mode, self.warps, self.itemsize) for mode in self.modes)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a block."""
        held = sum(self.tiles) + self.matrices
        largest = max(mode.rows * mode.columns for mode in self.modes)  # as warps add theirs up
        return self.itemsize * max(held, largest)

    @cached
    def resident(self, arch: str) -> int:
        """Blocks that a multiprocessor holds."""
        sums = sum(found.registers(self.itemsize) for found in self.fragments if found)
        most = min(MOST_REGISTERS, targets.REGISTERS // (32 * self.warps))
        registers = min(REGISTERS + sums, most)
        found = targets.resident_blocks(arch, 32 * self.warps, registers, self.shared_bytes)
        return min(found, MOST_BLOCKS)


def _is_small(found: tuple[Mode, ...]) -> bool:
    return all(max(mode.rows, mode.columns) <= SMALL for mode in found)


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
            made = Fragments(down, across)
            registers = made.registers(itemsize)
            if places <= warps and registers <= MOST_SUMS:
                cycles = ceil_div(steps, warps // places)
                cycles *= 4 * down + 2 * across + 4 * down * across
                choices.append((max(registers, SUMS), cycles, registers, made))
    return min(choices)[-1] if choices else None


def fits(sizes: tuple[Size, ...], dtype: str, arch: str) -> bool:
    """Whether a block holds a column of a run, of any dtype that a launch of it may read."""
    made = Variant(dtype, "fp32", dtype, dtype, dtype, 1, False, tuple(sizes))
    return (
        len(made.modes) <= MOST_STAGES
        and max(made.tiles) <= modes.most_features(dtype)
        and made.resident(arch) > 0
        and None not in made.fragments
    )


def most_columns(made: Variant, arch: str) -> int:
    """The widest tile of a variant's run, in columns: a power of two."""
    widest = max(max(mode.inputs, mode.outputs) for mode in made._replace(columns=1).modes)
    size = TILE_BYTES[0 if _is_small(made.modes) else 1]
    wanted = max(size // made.itemsize // widest, modes.SECTOR if made.inside else 1)
    count = 1 << (min(wanted, modes.WIDEST_TILE).bit_length() - 1)
    while count > 1 and not _holds(made._replace(columns=count), arch):
        count //= 2
    return count


def _holds(made: Variant, arch: str) -> bool:
    most = modes.most_features(made.dtype)
    return max(made.tiles) <= most and made.resident(arch) > 0 and None not in made.fragments


def spec(made: Variant, arch: str) -> KernelSpec:
    """The KernelSpec of a variant."""
    sizes = ["x".join(map(str, size)) for size in made.sizes]
    ends = made.source, made.gradient, made.target
    words = [*sizes, f"{made.columns}c" + "i" * made.inside, f"{made.warps}w"]
    words += [*ends] * (ends != (made.dtype,) * 3) + ["factors"] * (not made.wanted)
    description = text.describe(
        "kronecker_product", "gradients", made.dtype, made.precision, words, ()
    )
    kernel = KernelSpec(
        "kronecker_product",
        _source(made, max(1, made.resident(arch))),
        "kronecker_product_gradients",
        32 * made.warps,
        made.shared_bytes,
        description=description,
    )
    precision = [made.precision] * (made.dtype == "float32")
    return named(kernel, made.dtype, *precision, *words[-4:])


def _source(made: Variant, blocks: int) -> str:
    """The generated CUDA text: types, constants, both runs, stages, one include."""
    rows, widths = ([size[side] for size in made.sizes] for side in (0, 1))
    count = 2 * len(made.sizes)
    runs = _run(made, "X", 0, made.source, made.target, rows)
    runs += _run(made, "G", 1, made.gradient, made.target, widths)
    return f"""{text.preamble(made.dtype, made.target, ())}
{"#define DOUBLE" if made.dtype == "float64" else ""}
constexpr int PRODUCTS = {3 if made.arithmetic == "fp32" else 1};
constexpr int MOST_SPLIT = {grouping.MOST_SPLIT};
constexpr int WARPS = {made.warps};
constexpr int MIN_BLOCKS = {blocks};
constexpr int TILE = {max(made.tiles)};
constexpr int AHEAD = 0;
constexpr int SOURCE_TILE = {made.tiles[0]};
constexpr int GRADIENT_TILE = {made.tiles[1]};
constexpr int ENTRIES = {made.entries};
constexpr bool WANTED = {str(made.wanted).lower()};
constexpr int RUNS = 2;
constexpr int SUMMANDS = 0;
constexpr int POWERS = 0;
constexpr int FACTORS = {count};
__device__ constexpr int ROWS[] = {{{", ".join(map(str, rows + widths))}}};
__device__ constexpr int WIDTHS[] = {{{", ".join(map(str, widths + rows))}}};
constexpr int PARAMETER_BYTES = {parameters(2, count, ()).size};

{runs}
#define STAGES {_stages(made)}

#include "kronecker_product/gradients/gradients.cuh"
"""


def _run(
    made: Variant, name: str, index: int, source: str, target: str, features: list[int]
) -> str:
    """The struct of what is read of x, or of the gradient."""
    wide = math.prod(features)
    return f"""struct {name} {{
    using SourceT = {DTYPES[source].cuda};
    using TargetT = {DTYPES[target].cuda};
    static constexpr int INDEX = {index}, COLUMNS = {made.columns};
    static constexpr int IN_FEATURES = {wide}, INPUTS = {made.columns * wide};
    static constexpr bool COLUMNS_LAST = {str(made.inside).lower()};
    static constexpr bool WRITTEN_HERE = false, ENDS = false;
}};
"""


def _stages(made: Variant) -> str:
    """The list of Stages; matrices lie one behind the other, the forward one first."""
    listed, at, entries, found = [], 0, 0, made.modes
    for index, (mode, own) in enumerate(zip(found, made.fragments, strict=True)):
        left, rows, columns, right, first, parts = mode
        numbers = left, rows, columns, right, first, parts, "false", at
        at += mode.stored(made.arithmetic) * (index < len(found) - 1)
        last, behind = str(index == 0).lower(), first + len(made.sizes)
        turned = left, columns, rows, right, behind, parts, last, at
        at += mode.stored(made.arithmetic) * (made.wanted or index > 0)
        pair = [f"Mode<{', '.join(map(str, each))}>" for each in (numbers, turned)]
        listed.append(f"Stage<{pair[0]}, {pair[1]}, {own.down}, {own.across}, {entries}>")
        entries += rows * columns
    return ", \\\n               ".join(listed)

"""The kernels of halves.cuh and halves/slabs.cuh: float16 and bfloat16 stay what they are between
factors, and float32 is two float16."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.kronecker_product.lowering import grouping
from kernlib.families.kronecker_product.lowering.grouping import Mode, Size, cached
from kernlib.families.kronecker_product.lowering.runs import Run
from kernlib.families.kronecker_product.lowering.variant import (
    GRID_BATCH,
    MOST_BLOCKS,
    TICKET_BYTES,
    Part,
    matrix_numbers,
    of_tickets,
    parameters,
    run_numbers,
    summand_numbers,
)
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.names import named
from kernlib.lowering.steps import Step
from kernlib.records import NamedTuple

# Half-precision numbers that one of a dtype is in shared memory.
WORDS = {"float16": 1, "bfloat16": 1, "float32": 2}
CHUNK = 8  # numbers of 16 bytes, which tensor cores and copies take
LINE = 64  # numbers: what a tile's size is a multiple of
IN_PLACE_MOST = {1: 128, 2: 64}  # columns of a matrix that one warp keeps sums of, by words
KINDS = {1: ("halves", "half_slabs"), 2: ("pairs", "pair_slabs")}
MOST_GROWTH = 13  # of numbers of two words in a run, as an exponent
TILE_BYTES = 64 * 1024  # of a tile, if a column is not longer
WIDEST_TILE = 64  # columns
LEAST_WIDE = 8192  # elements of a tile that is worth more than four warps
TILES_EACH = 3  # that a multiprocessor has at least, if there are columns enough
# Of a thread, as resident blocks are counted: for matrices of up to SMALL columns, and above.
REGISTERS, REGISTERS_LARGE, SMALL = 80, 128, 16
LEAST_AHEAD = 4  # of a tile the part that is worth being read ahead


class Halves(NamedTuple):
    """Everything that code generation chooses besides the epilogue: the dtype, the runs, first to
    last, the block's warps, elements behind a tile for what is read of the next, and whether
    matrices of one run take another's place."""

    dtype: str
    parts: tuple[Part, ...]
    warps: int
    ahead: int = 0
    restaged: bool = False

    @property
    def words(self) -> int:
        """Half-precision numbers of an element."""
        return WORDS[self.dtype]

    @property
    def itemsize(self) -> int:
        """Bytes of an element, in shared memory and of what a run hands to the next."""
        return 2 * self.words

    @property
    @cached
    def modes(self) -> tuple[Mode, ...]:
        """The modes of all runs, in the order in which they are applied."""
        return tuple(mode for part in self.parts for mode in part.modes)

    @property
    def powers(self) -> int:
        """How many arrays of powers of two go from run to run: one for each column of a tile."""
        return len(self.parts) - 1 if self.dtype == "float16" else 0

    @property
    def tile(self) -> int:
        """Elements of a tile."""
        widths = (part.columns * grouping.widest(part.sizes) for part in self.parts)
        return round_up(max(widths), LINE)

    @property
    def tiles(self) -> int:
        """How many tiles shared memory holds: a second one where results cannot take the first's
        place."""
        return 1 if all(_stays(mode, self.words, self.warps) for mode in self.modes) else 2

    @property
    def matrices(self) -> int:
        """Elements of shared memory for matrices, with zeros up to multiples of 16 columns."""
        found = [sum(map(_matrix, part.modes)) for part in self.parts]
        return max(found) if self.restaged else sum(found)

    @property
    @cached
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a block."""
        columns = max(part.columns for part in self.parts)
        scales = 4 * (columns * (3 if self.words == 2 else 1) + len(self.modes) + len(self.parts))
        ticket = TICKET_BYTES * (len(self.parts) > 1)
        elements = self.tile * self.tiles + self.ahead + self.matrices
        return self.itemsize * elements + round_up(scales, 16) + ticket

    @cached
    def resident(self, arch: str) -> int:
        """Blocks of a launch that a multiprocessor holds."""
        registers = REGISTERS if _is_small(self) else REGISTERS_LARGE
        registers = min(registers, targets.REGISTERS // (32 * self.warps))
        found = targets.resident_blocks(arch, 32 * self.warps, registers, self.shared_bytes)
        return min(found, MOST_BLOCKS)


def _is_small(made: Halves) -> bool:
    return max(mode.columns for mode in made.modes) <= SMALL


def _stays(mode: Mode, words: int, warps: int) -> bool:
    """Whether a mode's results take the tile's place, as halves/tile.cuh has it."""
    if mode.rows == mode.columns <= IN_PLACE_MOST[words]:
        return True
    if words == 1:
        return False
    tiles = ceil_div(mode.columns, 16)
    groups, slices = ceil_div(tiles, min(tiles, 2)), ceil_div(mode.left * mode.right, 8)
    own = 4 if mode.rows % 16 or ceil_div(slices, 4) * groups >= warps else 2
    return ceil_div(slices, own) * groups <= warps


def growth(modes: Sequence[Mode]) -> int:
    """What numbers of two words grow by in these modes, as an exponent."""
    return sum(max(2, (mode.rows - 1).bit_length() - 1) for mode in modes)


def _matrix(mode: Mode) -> int:
    return mode.rows * round_up(mode.columns, 16)


def runs(
    sizes: tuple[Size, ...], dtype: str, precision: str, inside: bool, elements: int, arch: str
):
    """The runs of factors that are applied in one pass each, first to last; None where the kernels
    take other numbers or other sizes."""
    if dtype not in WORDS or (dtype == "float32" and precision != "fp32"):
        return None
    item = 2 * WORDS[dtype]

    def cost(run: tuple[Size, ...], count: int, begins: bool, ends: bool) -> float | None:
        within = inside or not begins
        if not _are_chunks(grouping.modes(run, CHUNK if within else 1, within)):
            return None
        made = variant(run, dtype, within, CHUNK if within else 1, arch)
        if made.shared_bytes > targets.SHARED_BYTES[arch]:
            return None
        if made.words == 2 and growth(made.modes) > MOST_GROWTH:
            return None
        columns = most_columns(run, dtype, within, arch)
        return grouping.cycles(
            run,
            count,
            (item * begins, item * ends),
            (item * (not begins), item * (not ends)),
            "half" if made.words == 1 else "pairs",
            made.resident(arch) > 1,
            columns * grouping.widest(run),
        )

    return grouping.groups(sizes, elements, cost)


def _are_chunks(modes: Sequence[Mode]) -> bool:
    """Whether all that is read and written at once are eight neighbours."""
    return not any(
        mode.rows % CHUNK or mode.columns % CHUNK or (mode.right > 1 and mode.right % CHUNK)
        for mode in modes
    )


def _one(sizes: tuple[Size, ...], dtype: str, inside: bool, columns: int) -> Halves:
    """A kernel of one run."""
    warps = 4 if columns * grouping.widest(sizes) < LEAST_WIDE else 8
    return Halves(dtype, (Part(dtype, dtype, columns, inside, sizes),), warps)


def most_columns(
    sizes: tuple[Size, ...], dtype: str, inside: bool, arch: str, room: int | None = None
) -> int:
    """The widest tile, in columns: a power of two. ``room`` is the shared memory of a block, in
    bytes."""
    room = targets.SHARED_BYTES[arch] if room is None else room
    least, widest = CHUNK if inside else 1, grouping.widest(sizes)
    columns = max(least, min(WIDEST_TILE, TILE_BYTES // (2 * WORDS[dtype] * widest)))
    columns = 1 << (columns.bit_length() - 1)
    while columns > least and _one(sizes, dtype, inside, columns).shared_bytes > room:
        columns //= 2
    return columns


def columns_of(run: Run, dtype: str, arch: str, multiprocessors: int) -> int:
    """The columns of a launch's tiles: so few that each multiprocessor has several tiles."""
    shared = ceil_div(run.batch * run.columns, TILES_EACH * multiprocessors)
    most = min(run.columns, shared, most_columns(run.sizes, dtype, run.inside, arch))
    return max(CHUNK if run.inside else 1, 1 << (most.bit_length() - 1))


def variant(sizes: tuple[Size, ...], dtype: str, inside: bool, columns: int, arch: str) -> Halves:
    """The kernel of a launch of one run, for tiles of so many columns."""
    made = _one(sizes, dtype, inside, columns)
    if made.resident(arch) > 1:
        return made
    made = _alone(made)
    return made._replace(ahead=ahead_of(made, arch))


def _alone(made: Halves) -> Halves:
    """With warps for a block that has a multiprocessor for itself."""
    return made._replace(warps=32 if _is_small(made) else 16)


def ahead_of(made: Halves, arch: str) -> int:
    """The elements of shared memory for what is read ahead."""
    free = (targets.SHARED_BYTES[arch] - made.shared_bytes) // made.itemsize // LINE * LINE
    ahead = min(free, made.tile)
    return ahead if made.tiles == 1 and ahead * LEAST_AHEAD >= made.tile else 0


def variant_of_slabs(
    sizes: tuple[tuple[Size, ...], ...], dtype: str, inside: bool, arch: str, is_varied: bool
) -> Halves | None:
    """The kernel of several runs, as
    :func:`kernlib.families.kronecker_product.lowering.slabs.variant` has it."""
    for blocks, restaged in ((2, False), (2, True), (1, False), (1, True)):
        if restaged or not is_varied:
            parts = []
            for index, own in enumerate(sizes):
                within = inside or index > 0
                room = targets.SHARED_BYTES[arch] // blocks
                columns = most_columns(own, dtype, within, arch, room)
                parts.append(Part(dtype, dtype, columns, within, own))
            made = Halves(dtype, tuple(parts), 8, restaged=restaged)
            made = made if blocks > 1 else _alone(made)
            if made.resident(arch) >= blocks:
                return made
    return None


def spec(epilogue: tuple[Epilogue, ...], made: Halves, arch: str) -> KernelSpec:
    """The KernelSpec of a variant."""
    is_one = len(made.parts) == 1
    kind = KINDS[made.words][0 if is_one else 1]
    words = [word for part in made.parts for word in part.words]
    words += [f"{made.warps}w"] + [f"{made.ahead}a"] * bool(made.ahead)
    words += ["restaged"] * made.restaged
    description = text.describe("kronecker_product", kind, made.dtype, "fp32", words, epilogue)
    source = _source(epilogue, made, kind, max(1, made.resident(arch)))
    found = KernelSpec(
        "kronecker_product",
        source,
        f"kronecker_product_{KINDS[1][0 if is_one else 1]}",
        32 * made.warps,
        made.shared_bytes,
        description=description,
    )
    return named(found, made.dtype, *words[-4:], epilogue=epilogue)


def layout(made: Halves, factors: int, epilogue: tuple[Epilogue, ...]) -> text.Parameters:
    """The parameter struct of a launch."""
    return parameters(len(made.parts), factors, epilogue, made.powers)


def _is_scaled(made: Halves) -> bool:
    return made.words == 2 or (made.dtype == "float16" and len(made.modes) > 1)


def _source(epilogue: tuple[Epilogue, ...], made: Halves, kind: str, blocks: int) -> str:
    """The generated CUDA text: types, ``Finish``, constants, runs, one include."""
    sizes = [size for part in made.parts for size in part.sizes]
    rows, widths = (", ".join(str(size[side]) for size in sizes) for side in (0, 1))
    several = len(made.parts) > 1
    names = [f"Run{index}" if several else "Run" for index in range(len(made.parts))]
    listed = f"#define RUN_LIST {', '.join(names)}\n" * several
    listed += of_tickets(made.restaged) * several
    file = "halves" if not several else "slabs"
    return f"""{text.preamble(made.dtype, made.dtype, epilogue)}
using HalfT = {"half_t" if made.words == 2 else DTYPES[made.dtype].cuda};
using DataT = {DTYPES[made.dtype].cuda};
#define PAIRS {made.words - 1}
constexpr int WORDS = {made.words};
constexpr bool SCALED = {str(_is_scaled(made)).lower()};
constexpr int WARPS = {made.warps};
constexpr int MIN_BLOCKS = {blocks};
constexpr int TILE = {made.tile};
constexpr int TILES = {made.tiles};
constexpr int AHEAD = {made.ahead};
constexpr int MATRICES = {made.matrices};
constexpr int MODES = {len(made.modes)};
constexpr int COLUMNS_SCALED = {max(part.columns for part in made.parts)};
constexpr int RUNS = {len(made.parts)};
constexpr int POWERS = {made.powers};
constexpr int FACTORS = {len(sizes)};
constexpr int SUMMANDS = {len(text.summands(epilogue))};
__device__ constexpr int ROWS[] = {{{rows}}};
__device__ constexpr int WIDTHS[] = {{{widths}}};
constexpr int PARAMETER_BYTES = {layout(made, len(sizes), epilogue).size};

#include "kronecker_product/halves/run.cuh"

{_runs(made, names)}{listed}
#include "kronecker_product/halves/{file}.cuh"
"""


def _runs(made: Halves, names: list[str]) -> str:
    """The struct of each run."""
    lines, at, first, number = "", 0, 0, 0
    cuda = DTYPES[made.dtype].cuda
    for index, (part, name) in enumerate(zip(made.parts, names, strict=True)):
        listed, modes = [], part.modes
        at *= not made.restaged
        for mode in modes:
            left, p, q, right, own, parts = mode
            last = str(mode == modes[-1]).lower()
            numbers = left, p, q, right, first + own, parts, last, at, number
            listed.append(f"Mode<{', '.join(map(str, numbers))}>")
            at += _matrix(mode)
            number += 1
        first += len(part.sizes)
        wide, out = (math.prod(size[side] for size in part.sizes) for side in (0, 1))
        lines += f"""struct {name} {{
    using SourceT = {cuda};
    static constexpr int INDEX = {index}, COLUMNS = {part.columns};
    static constexpr int IN_FEATURES = {wide}, INPUTS = {part.columns * wide};
    static constexpr int OUT_FEATURES = {out}, OUTPUTS = {part.columns * out};
    static constexpr int GROWTH = {growth(modes)};
    static constexpr bool COLUMNS_LAST = {str(part.inside).lower()};
    static constexpr bool WRITTEN_HERE = {str(index > 0).lower()};
    static constexpr bool ENDS = {str(index == len(names) - 1).lower()};
    using Modes = List<{(", " + chr(10) + " " * 23).join(listed)}>;
}};
"""
    return lines


def step(
    epilogue: tuple[Epilogue, ...],
    run: Run,
    made: Halves,
    arch: str,
    multiprocessors: int,
    operands: tuple[tuple[str, int], ...],
) -> Step:
    """The launch of one run. ``operands`` are the pointers of x, result and factors."""
    (part,) = made.parts
    tiles = run.outer * run.inner * ceil_div(run.columns, part.columns)
    numbers = run_numbers(run, part, (run.outer, run.columns), ((0, 0), (0, 0)))
    numbers += [*matrix_numbers([run]), run.batch, 1, tiles, 0]
    numbers += summand_numbers(run, [0] * len(run.summands))
    fixed = layout(made, len(run.factors), epilogue).pack(*numbers)
    blocks = min(tiles, max(1, made.resident(arch)) * multiprocessors)
    pointers = (*operands, *text.vector_pointers(epilogue), *text.summand_pointers(epilogue))
    grid = blocks, min(run.batch, GRID_BATCH)
    scalars = text.scalar_count(epilogue)
    return Step(spec(epilogue, made, arch), grid, fixed, pointers, scalars)

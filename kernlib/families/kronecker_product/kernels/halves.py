"""The kernel halves.cuh, of one run of factors in one pass over memory: float16 and bfloat16 stay
what they are between factors, and float32 is two float16. :mod:`half_slabs` has that of several
runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar, NamedTuple

from kernlib.families.kronecker_product.kernels.base import OneRun, PartsKernel
from kernlib.families.kronecker_product.lowering import grouping
from kernlib.families.kronecker_product.lowering.grouping import Group, Mode, Size
from kernlib.families.kronecker_product.lowering.parameters import TICKET_BYTES
from kernlib.families.kronecker_product.lowering.runs import Part, Run
from kernlib.jit import targets
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.config import Fact
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Choice, Gpu

# Half-precision numbers that one of a dtype is in shared memory.
WORDS_OF = {"float16": 1, "bfloat16": 1, "float32": 2}
CHUNK = 8  # numbers of 16 bytes, which tensor cores and copies take
LINE = 64  # numbers: what a tile's size is a multiple of
IN_PLACE_MOST = {1: 128, 2: 64}  # columns of a matrix that one warp keeps sums of, by words
MOST_GROWTH = 13  # of numbers of two words in a run, as an exponent
TILE_BYTES = 64 * 1024  # of a tile, if a column is not longer
WIDEST_TILE = 64  # columns
LEAST_WIDE = 8192  # elements of a tile that is worth more than four warps
TILES_EACH = 3  # that a multiprocessor has at least, if there are columns enough
# Of a thread, as resident blocks are counted: for matrices of up to SMALL columns, and above.
REGISTERS, REGISTERS_LARGE, SMALL = 80, 128, 16
MOST_BLOCKS = 4  # of a multiprocessor, that registers are shared out for
LEAST_AHEAD = 4  # of a tile the part that is worth being read ahead


class _Variant(NamedTuple):
    dtype: str
    parts: tuple[Part, ...]
    warps: int
    ahead: int = 0
    restaged: bool = False


class Variant(_Variant):
    """Everything that code generation chooses besides the epilogue: the dtype, the runs, first to
    last, the block's warps, elements behind a tile for what is read of the next, and whether
    matrices of one run take another's place."""

    @property
    def precision(self) -> str:
        """Of float32."""
        return "fp32"

    @property
    def words(self) -> int:
        """Half-precision numbers of an element."""
        return WORDS_OF[self.dtype]

    @property
    def itemsize(self) -> int:
        """Bytes of an element, in shared memory and of what a run hands to the next."""
        return 2 * self.words

    @cached_property
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

    @staticmethod
    def stored(mode: Mode) -> int:
        """Elements of shared memory for a matrix, with zeros up to multiples of 16 columns."""
        return mode.rows * round_up(mode.columns, 16)

    @property
    def matrices(self) -> int:
        """Elements of shared memory for matrices."""
        sizes = [sum(map(self.stored, part.modes)) for part in self.parts]
        return max(sizes) if self.restaged else sum(sizes)

    @cached_property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a block."""
        columns = max(part.columns for part in self.parts)
        scales = 4 * (columns * (3 if self.words == 2 else 1) + len(self.modes) + len(self.parts))
        ticket = TICKET_BYTES * (len(self.parts) > 1)
        elements = self.tile * self.tiles + self.ahead + self.matrices
        return self.itemsize * elements + round_up(scales, 16) + ticket

    def resident(self, arch: str) -> int:
        """Blocks of a launch that a multiprocessor holds."""
        registers = REGISTERS if _is_small(self) else REGISTERS_LARGE
        registers = min(registers, targets.REGISTERS // (32 * self.warps))
        blocks = targets.resident_blocks(arch, 32 * self.warps, registers, self.shared_bytes)
        return min(blocks, MOST_BLOCKS)

    def widened(self) -> Variant:
        """With warps for a block that has a multiprocessor for itself."""
        return self._replace(warps=32 if _is_small(self) else 16)


class HalvesKernel(PartsKernel):
    """What the kernels of one run and of several have in common. ``kinds`` are what descriptions
    call them, by the words of a number."""

    Variant = Variant
    name = "halves"
    kinds: ClassVar[dict[int, str]]
    is_numbered = True

    def number_facts(self, variant: Variant) -> dict[str, Fact]:
        """Facts of its numbers."""
        count, half = variant.words, variant.dtype == "float16"
        return {
            "HalfT": "half_t" if count == 2 else DTYPES[variant.dtype].cuda,
            "DataT": DTYPES[variant.dtype].cuda,
            "WORDS": count,
            "SCALED": count == 2 or (half and len(variant.modes) > 1),
        }

    def part_facts(self, part: Part) -> dict[str, Fact]:
        """Facts of a run, beside those of every kernel."""
        _, features = part.features
        outputs = part.columns * features
        return {"OUT_FEATURES": features, "OUTPUTS": outputs, "GROWTH": growth(part.modes)}

    def words(self, variant: Variant) -> tuple[str, list[str]]:
        """What descriptions call it, and what names say of its numbers besides the dtype."""
        return self.kinds[variant.words], []


class Halves(HalvesKernel, OneRun):
    """One run of factors."""

    header = "kronecker_product/halves/halves.cuh"
    entry = "kronecker_product_halves"
    reason = (
        "half types, or float32 at fp32 as pairs of float16, of sizes that are multiples of 8: "
        "chosen ahead of `modes` where a block keeps a whole row"
    )
    kinds: ClassVar = {1: "halves", 2: "pairs"}

    def takes(self, group: Group, arch: str) -> bool:
        """Whether all that is read and written at once are eight neighbours, and shared memory
        holds the fewest columns, which do not grow too much."""
        if group.dtype not in WORDS_OF or (group.dtype == "float32" and group.precision != "fp32"):
            return False
        within = group.inside or not group.begins
        least = CHUNK if within else 1
        if not _are_chunks(grouping.modes(group.sizes, least, within)):
            return False
        variant = self._variant(group, within, least, arch)
        if variant.shared_bytes > targets.SHARED_BYTES[arch]:
            return False
        return variant.words == 1 or growth(variant.modes) <= MOST_GROWTH

    def estimate(self, group: Group, choice: Choice, gpu: Gpu) -> float:
        """Microseconds of a group of factors, by the widest tiles."""
        begins, ends, item = group.begins, group.ends, 2 * WORDS_OF[group.dtype]
        within = group.inside or not begins
        least = CHUNK if within else 1
        variant = self._variant(group, within, least, gpu.arch)
        columns = most_columns(group.sizes, group.dtype, within, gpu.arch)
        return grouping.group_time(
            group,
            "half" if variant.words == 1 else "pairs",
            (item * begins, item * ends),
            (item * (not begins), item * (not ends)),
            variant.resident(gpu.arch) > 1,
            columns * grouping.widest(group.sizes),
        )

    def default(self, run: Run, gpu: Gpu) -> Choice:
        """So few columns that each multiprocessor has several tiles."""
        return {"columns": columns_of(run, *gpu)}

    def most_columns(self, group: Group | Run, arch: str) -> int:
        """The widest tile, in columns: a power of two."""
        return most_columns(group.sizes, group.dtype, group.inside, arch)

    def variant(self, run: Group | Run, columns: int, arch: str) -> Variant:
        """The kernel of a run, for tiles of so many columns."""
        return self._variant(run, run.inside, columns, arch)

    def _variant(self, run: Group | Run, inside: bool, columns: int, arch: str) -> Variant:
        variant = _one(run.sizes, run.dtype, inside, columns)
        if variant.resident(arch) > 1:
            return variant
        variant = variant.widened()
        return variant._replace(ahead=ahead_of(variant, arch))


HALVES = Halves()


def _is_small(variant: Variant) -> bool:
    return max(mode.columns for mode in variant.modes) <= SMALL


def _stays(mode: Mode, words: int, warps: int) -> bool:
    """Whether a mode's results take the tile's place, as halves/tile.cuh has it."""
    if mode.rows == mode.columns <= IN_PLACE_MOST[words]:
        return True
    if words == 1:
        return False
    tiles = ceil_div(mode.columns, 16)
    groups, slices = ceil_div(tiles, min(tiles, 2)), ceil_div(mode.left * mode.right, 8)
    slices_a_warp = 4 if mode.rows % 16 or ceil_div(slices, 4) * groups >= warps else 2
    return ceil_div(slices, slices_a_warp) * groups <= warps


def growth(modes: Sequence[Mode]) -> int:
    """What numbers of two words grow by in these modes, as an exponent."""
    return sum(max(2, (mode.rows - 1).bit_length() - 1) for mode in modes)


def _are_chunks(modes: Sequence[Mode]) -> bool:
    """Whether all that is read and written at once are eight neighbours."""
    return not any(
        mode.rows % CHUNK or mode.columns % CHUNK or (mode.right > 1 and mode.right % CHUNK)
        for mode in modes
    )


def _one(sizes: tuple[Size, ...], dtype: str, inside: bool, columns: int) -> Variant:
    """A kernel of one run, of which a multiprocessor may hold several blocks."""
    warps = 4 if columns * grouping.widest(sizes) < LEAST_WIDE else 8
    return Variant(dtype, (Part(dtype, dtype, columns, inside, sizes),), warps)


def most_columns(
    sizes: tuple[Size, ...], dtype: str, inside: bool, arch: str, room: int | None = None
) -> int:
    """The widest tile, in columns: a power of two. ``room`` is the shared memory of a block, in
    bytes."""
    room = targets.SHARED_BYTES[arch] if room is None else room
    least, widest = CHUNK if inside else 1, grouping.widest(sizes)
    columns = max(least, min(WIDEST_TILE, TILE_BYTES // (2 * WORDS_OF[dtype] * widest)))
    columns = 1 << (columns.bit_length() - 1)
    while columns > least and _one(sizes, dtype, inside, columns).shared_bytes > room:
        columns //= 2
    return columns


def columns_of(run: Run, arch: str, multiprocessors: int) -> int:
    """The columns of a launch's tiles: so few that each multiprocessor has several tiles."""
    shared = ceil_div(run.batch * run.columns, TILES_EACH * multiprocessors)
    most = min(run.columns, shared, most_columns(run.sizes, run.dtype, run.inside, arch))
    return max(CHUNK if run.inside else 1, 1 << (most.bit_length() - 1))


def ahead_of(variant: Variant, arch: str) -> int:
    """The elements of shared memory for what is read ahead."""
    item = variant.itemsize
    free = (targets.SHARED_BYTES[arch] - variant.shared_bytes) // item // LINE * LINE
    ahead = min(free, variant.tile)
    return ahead if variant.tiles == 1 and ahead * LEAST_AHEAD >= variant.tile else 0

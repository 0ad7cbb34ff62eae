"""The kernels of kernel_sources/kronecker_product/hopper before they are text, and their text:
square factors, powers of two wide, one or two neighbours in a pass over memory."""

from __future__ import annotations

import math

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.kronecker_product.lowering.grouping import Size
from kernlib.families.kronecker_product.lowering.slabs import EXPONENT_BYTES
from kernlib.families.kronecker_product.lowering.variant import parameters
from kernlib.jit.spec import KernelSpec
from kernlib.jit.targets import SHARED_BYTES
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.names import named
from kernlib.lowering.wgmma import multiply
from kernlib.records import NamedTuple

ARCH = "sm_90a"
PANEL, WIDEST = 64, 128  # lines and columns of a tile; those of a matrix that is larger
NARROWEST = 8  # neighbours in memory, of 16 bytes
MOST_PASSES, MOST_APART, MOST_INSIDE = 3, 2, 4  # of one launch; by one each; and on the left
SLAB_BYTES = 1 << 20  # of what a pass hands to the next in one launch
WORKERS, WIDE_WORKERS = 512, 256  # threads that have a tile; where each has 64 sums of it
HELPER_REGISTERS, REGISTERS = 40, 65536  # of a thread that has none; of a multiprocessor
MOST_STAGES, SLAB_STAGES = 4, 2  # tiles that a group has under way; where they wait for others
ALIGNMENT, BARRIERS, NOTE_BYTES = 1024, 16, 32  # of a panel; bytes of a stage; of a tile under way
MORE_NOTES = 2  # tiles that are under way and have left their stage
LARGEST = 14  # exponent of float16's large numbers
BOUND_ARRAYS = 2  # as in bounds.cuh


class Pass(NamedTuple):
    """One pass: rows of the factors that are merged along a tile's lines and, if there are any,
    along its columns; and features of x as ``(left, rows, right)`` to the former, columns of x
    ``inside``, behind them, or not."""

    lines: tuple[int, ...]
    columns: tuple[int, ...]
    left: int
    right: int
    inside: bool = False

    @property
    def factors(self) -> tuple[int, ...]:
        """Rows of each."""
        return self.lines + self.columns

    @property
    def rows(self) -> int:
        """Of the matrix along lines."""
        return math.prod(self.lines)

    @property
    def tile(self) -> tuple[int, int]:
        """Lines and columns."""
        return max(PANEL, self.rows), max(PANEL, math.prod(self.columns))

    @property
    def row_tiles(self) -> int:
        """Tiles of a row of x, or of as many columns as a tile has."""
        features = self.left * self.rows * self.right
        return features // (self.tile[0] if self.inside else math.prod(self.tile))

    def tiles(self, columns: int) -> int:
        """Those of so many rows, or columns, of x."""
        across = ceil_div(columns, self.tile[1]) if self.inside else columns
        return across * self.row_tiles

    @property
    def matrices(self) -> int:
        """Numbers of its matrices."""
        return sum(size * size for size in self.tile[: 2 if self.columns else 1])


class Hopper(NamedTuple):
    """Everything that code generation chooses besides the epilogue: the dtype, words of an operand,
    passes of a launch, first to last, and the rows of a slab where there are several; launches
    ``before`` and ``behind`` it that float16 is handed on between."""

    dtype: str
    words: int
    passes: tuple[Pass, ...]
    slab: int = 0
    before: int = 0
    behind: int = 0

    @property
    def sizes(self) -> list[Size]:
        """Of the factors, as a launch has them."""
        return [(rows, rows) for each in self.passes for rows in each.factors]

    @property
    def workers(self) -> int:
        """As many as registers last for."""
        is_wide = any(each.tile[1] > PANEL for each in self.passes)
        return WIDE_WORKERS if is_wide else WORKERS

    @property
    def groups(self) -> int:
        """Tiles that a block computes at a time."""
        return self.workers // (2 * self.passes[0].tile[0])

    @property
    def threads(self) -> int:
        """With a warp for each group that copies its tiles, and one that tells of them if there are
        several passes: in whole warpgroups, which share out registers."""
        return self.workers + round_up(32 * self.groups * min(2, len(self.passes)), 128)

    @property
    def worker_registers(self) -> int:
        """What helpers leave of those that a block begins with."""
        begins = min(REGISTERS // self.threads, 255) // 8 * 8 * self.threads
        helpers = self.threads - self.workers
        return min(240, (begins - helpers * HELPER_REGISTERS) // self.workers // 8 * 8)

    @property
    def panel(self) -> int:
        """Numbers of a tile."""
        return max(math.prod(each.tile) for each in self.passes)

    @property
    def matrices(self) -> int:
        """Bytes of all matrices."""
        return 2 * self.words * sum(each.matrices for each in self.passes)

    @property
    def scales(self) -> int:
        """Columns of a tile that are scaled each for itself, or 1 for all."""
        return PANEL if self.passes[0].inside else 1

    @property
    def powers(self) -> int:
        """How many arrays of powers of two go from pass to pass."""
        return len(self.passes) - 1 if self.dtype == "float16" else 0

    @property
    def bounds(self) -> int:
        """How many arrays there are of what scales numbers that launches hand on."""
        return BOUND_ARRAYS if self.before + self.behind else 0

    @property
    def stage_bytes(self) -> int:
        """Of a tile as it arrives, and as a panel."""
        return self.panel * max(2 * self.words, DTYPES[self.dtype].bytes)

    @property
    def stages(self) -> int:
        """As many as there is room for; 0 where there is none."""
        most = SLAB_STAGES if len(self.passes) > 1 else MOST_STAGES
        return max(0, min(most, self._room // (self.groups * self._bytes_of_stage)))

    @property
    def _bytes_of_stage(self) -> int:
        powers = self.panel // PANEL * EXPONENT_BYTES * (self.powers > 0)
        return self.stage_bytes + BARRIERS + NOTE_BYTES + powers

    @property
    def _room(self) -> int:
        """For stages, beside what else there is."""
        return SHARED_BYTES[ARCH] - self._fixed_bytes

    @property
    def _fixed_bytes(self) -> int:
        numbers = 2 * len(self.passes) + 4 * self.scales * self.groups
        numbers += 2 * (1 + WIDEST) * (self.behind > 0)  # growths of matrices, sums of columns
        notes = MORE_NOTES * self.groups * NOTE_BYTES
        return self.matrices + 4 * round_up(numbers, 4) + notes + ALIGNMENT

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a block."""
        return self._fixed_bytes + self.groups * self.stages * self._bytes_of_stage


def passes(
    sizes: tuple[Size, ...], dtype: str, precision: str, inside: bool, arch: str
) -> tuple[Pass, ...]:
    """The passes of a product, first to last; none where the kernels take other numbers or
    sizes."""
    groups = _groups(sizes)
    if arch != ARCH or not _words(dtype, precision) or len(groups) < 2:
        return ()
    ends = [(group, ()) for group in reversed(groups)]
    if not inside:
        ends[:2] = [(groups[-2], groups[-1])]
    features, right = math.prod(rows for rows, _ in sizes), math.prod(ends[0][1])
    made: list[Pass] = []
    for lines, columns in ends:
        rows = math.prod(lines)
        made.append(Pass(lines, columns, features // (rows * right), right, inside))
        right *= rows
    fits = features >= max(PANEL * PANEL, math.prod(made[0].tile))
    if not inside:  # copies of a matrix have columns of their own
        fits &= all(part.right >= PANEL * part.tile[0] // part.rows for part in made[1:])
    return tuple(made) if fits and (inside or math.prod(groups[-1]) >= NARROWEST) else ()


def _words(dtype: str, precision: str) -> int:
    """Half-precision numbers that an operand is; 0 for other numbers. TF32 has as many bits as
    float16."""
    kinds = {"float16": 1, "bfloat16": 1, "float32": 1 if precision == "tf32" else 2}
    return kinds.get(dtype, 0)


def _groups(sizes: tuple[Size, ...]) -> list[tuple[int, ...]]:
    """Rows of neighbours that are merged, from the last on, up to PANEL; none where a factor is no
    power of two or not square."""
    found: list[tuple[int, ...]] = []
    for rows, columns in reversed(sizes):
        if rows != columns or rows & (rows - 1) or rows > WIDEST:
            return []
        if found and math.prod(found[0]) * rows <= PANEL:
            found[0] = (rows, *found[0])
        else:
            found.insert(0, (rows,))
    return found


def variants(
    sizes: tuple[Size, ...], dtype: str, precision: str, inside: bool, arch: str
) -> list[Hopper]:
    """The kernels of a product, in the order of their launches: one for all passes or one for each,
    on the left, where that has no room and for factors of 128, whose passes wait long for each
    other (320 x 128^3 of float16: 2.6 ms, not 3.7). None where others take it."""
    given, words = (sizes, dtype, precision, inside, arch), _words(dtype, precision)
    found = passes(*given)
    if not inside and 1 < len(found) <= MOST_PASSES:
        handed = math.prod(rows for rows, _ in sizes) * DTYPES[dtype].bytes
        whole = Hopper(dtype, words, found, max(1, SLAB_BYTES // handed))
        if all(each.tile[0] == PANEL for each in found) and whole.stages == SLAB_STAGES:
            return [whole]
    if len(found) > (MOST_INSIDE if inside else MOST_APART):
        return []
    places = [(index, len(found) - 1 - index) for index in range(len(found))]
    if dtype != "float16":
        places = [(0, 0)] * len(found)
    return [
        Hopper(dtype, words, (each,), 0, *place) for each, place in zip(found, places, strict=True)
    ]


def spec(epilogue: tuple[Epilogue, ...], made: Hopper) -> KernelSpec:
    """The KernelSpec of a launch."""
    several = len(made.passes) > 1
    words = [
        "x".join(map(str, rows))
        for part in made.passes
        for rows in (part.lines, part.columns)
        if rows
    ]
    first = made.passes[0]
    words += [f"{made.slab}s"] if several else [f"{first.left}l", f"{first.right}r"]
    words += ["i"] * first.inside
    if made.bounds:
        words.append(f"{made.before + 1}of{made.before + 1 + made.behind}")
    precision = "tf32" if made.dtype == "float32" and made.words == 1 else "fp32"
    kind = "hopper_slabs" if several else "hopper"
    description = text.describe("kronecker_product", kind, made.dtype, precision, words, epilogue)
    found = KernelSpec(
        "kronecker_product",
        _source(epilogue, made, "slabs" if several else "hopper"),
        f"kronecker_product_{kind}",
        made.threads,
        made.shared_bytes,
        description=description,
    )
    numbers = [precision] * (made.dtype == "float32")
    return named(found, made.dtype, *numbers, *words, epilogue=epilogue)


def _source(epilogue: tuple[Epilogue, ...], made: Hopper, file: str) -> str:
    """The generated CUDA text: types, ``Finish``, constants, wgmma, runs, one include."""
    half = "bfloat16" if made.dtype == "bfloat16" else "float16"
    sizes = made.sizes
    rows = ", ".join(str(rows) for rows, _ in sizes)
    several, powers = len(made.passes) > 1, made.powers + made.bounds
    layout = parameters(len(made.passes), len(sizes), epilogue, powers)
    names = [f"Run{index}" if several else "Run" for index in range(len(made.passes))]
    listed = f"#define RUN_LIST {', '.join(names)}\nconstexpr int SLAB_ROWS = {made.slab};\n"
    matrices = [f"{name}::First" for name in names]
    matrices[1:1] = [f"{names[0]}::Second"] * bool(made.passes[0].columns)
    return f"""{text.preamble(made.dtype, made.dtype, epilogue)}
using HalfT = {DTYPES[half].cuda};
constexpr int WORDS = {made.words};
constexpr bool SCALED = {str(half == "float16").lower()};
constexpr int LINES = {made.passes[0].tile[0]};
constexpr int PANEL = {made.panel};
constexpr int MATRIX_BYTES = {made.matrices};
constexpr int SCALES = {made.scales};
constexpr int THREADS = {made.threads};
constexpr int WORKERS = {made.workers};
constexpr int WORKER_REGISTERS = {made.worker_registers};
constexpr int HELPER_REGISTERS = {HELPER_REGISTERS};
constexpr int GROUPS = {made.groups};
constexpr int STAGES = {made.stages};
constexpr int STAGE_BYTES = {made.stage_bytes};
constexpr int RUNS = {len(names)};
constexpr int POWERS = {powers};
constexpr int BEFORE = {made.before}, BEHIND = {made.behind};
constexpr int FACTORS = {len(sizes)};
constexpr int SUMMANDS = {len(text.summands(epilogue))};
__device__ constexpr int ROWS[] = {{{rows}}};
__device__ constexpr int WIDTHS[] = {{{rows}}};
constexpr int PARAMETER_BYTES = {layout.size};

#include "kronecker_product/hopper/matrices.cuh"

{_multiply(made, half)}{_runs(made, names)}{listed * several}
#define MATRIX_LIST {", ".join(matrices)}
#include "kronecker_product/hopper/{file}.cuh"
"""


def _multiply(made: Hopper, half: str) -> str:
    """The wgmma of panels and, where there are any, fragments."""
    found = multiply(half, PANEL, registers=False, left_lines=True, right_lines=True)
    if any(part.columns for part in made.passes):
        found += multiply(half, PANEL, registers=True, right_lines=True)
    return found


def _runs(made: Hopper, names: list[str]) -> str:
    """The struct of each pass."""
    found, first, number, at = "", 0, 0, 0
    for index, (part, name) in enumerate(zip(made.passes, names, strict=True)):
        count, behind, (lines, columns) = len(part.lines), len(part.columns), part.tile
        most, exponent = _exponents(part)
        own = part.rows, first, count, lines, exponent
        quads = str(not part.inside and DTYPES[made.dtype].bytes == 4).lower()
        second = math.prod(part.columns), first + count, behind, columns, LARGEST, quads
        found += f"""struct {name} {{
    using SourceT = {DTYPES[made.dtype].cuda};
    using TargetT = {DTYPES[made.dtype].cuda};
    using First = Merged<{", ".join(map(str, own))}>;
    using Second = Merged<{", ".join(map(str, second))}>;
    static constexpr bool SECOND = {str(behind > 0).lower()};
    static constexpr bool INSIDE = {str(part.inside).lower()};
    static constexpr bool QUADS = {quads};
    static constexpr bool BEGINS = {str(index == 0).lower()};
    static constexpr bool ENDS = {str(index == len(names) - 1).lower()};
    using Before = {names[index - 1] if index else "void"};
    static constexpr bool HANDS = {str(made.powers > index).lower()};
    static constexpr bool TAKES = {str(0 < index <= made.powers).lower()};
    static constexpr int INDEX = {index}, COLUMNS = {columns}, ROW_TILES = {part.row_tiles};
    static constexpr int MATRIX = {number}, MATRICES = {at}, MOST_EXPONENT = {most};
{_steps(part)}
}};
"""
        first += count + behind
        number += 1 + bool(behind)
        at += 2 * made.words * part.matrices
    return found


def _exponents(part: Pass) -> tuple[int, int]:
    """Of the largest number of a tile, and of the matrix along its lines: what this makes of that
    is below 2^15 where it is multiplied again."""
    if not part.columns:
        return LARGEST, LARGEST
    both = LARGEST - 1 - (part.rows - 1).bit_length()
    return both - both // 2, both // 2


def _steps(part: Pass) -> str:
    """Where the elements of a tile lie."""
    lines, columns = part.tile
    copies, own = lines // part.rows, part.rows * part.right
    width, group_step = columns, 0
    if part.columns:
        unit_step, width, group_step = own, part.right, lines * part.right
        chunks, left_step, chunk_step = 1, lines * columns, 0
    elif not part.inside:
        unit_step, chunk_step = columns, columns * copies
        chunks, left_step = part.right // chunk_step, own
    elif part.right >= copies:
        unit_step, chunk_step, chunks, left_step = 1, copies, part.right // copies, own
    else:
        unit_step, chunk_step, chunks, left_step = own, 1, part.right, own * copies
    return f"""    static constexpr int PITCH = {part.right}, UNIT_STEP = {unit_step};
    static constexpr int WIDTH = {width}, GROUP_STEP = {group_step}, CHUNKS = {chunks};
    static constexpr int LEFT_STEP = {left_step}, CHUNK_STEP = {chunk_step};"""

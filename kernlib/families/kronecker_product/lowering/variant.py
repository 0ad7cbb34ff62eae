"""A kernel of Kronecker products before it is text, and its text: of one run of factors or several,
each applied to tiles that stay in shared memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kernlib.descriptors.epilogues import Epilogue
from kernlib.errors import UnsupportedError
from kernlib.families.kronecker_product.lowering import grouping
from kernlib.families.kronecker_product.lowering.grouping import Mode, Size, cached
from kernlib.families.kronecker_product.lowering.problem import Layout
from kernlib.families.kronecker_product.lowering.runs import Run
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.names import named
from kernlib.records import NamedTuple

LINE = 32  # elements: what a tile's size is a multiple of
MOST_WARPS = 16
SUMS = {"float32": 64, "float64": 32}  # registers of a thread for results, in elements
REGISTERS = 96  # of a thread, as resident blocks are counted
MOST_BLOCKS = 4  # of a multiprocessor, that registers are shared out for
GRID_BATCH = 65535  # of a grid's second axis; blocks take what is beyond it in turn
TICKET_BYTES = 96  # of shared memory, for what one thread finds for all


class Part(NamedTuple):
    """One run: dtypes of what it reads and writes, the tile's columns and whether they are its last
    dimension, and sizes of the factors."""

    source: str
    target: str
    columns: int
    inside: bool
    sizes: tuple[Size, ...]

    @property
    @cached
    def modes(self) -> tuple[Mode, ...]:
        """The modes of its run, in the order in which they are applied."""
        return grouping.modes(self.sizes, self.columns, self.inside)

    @property
    def words(self) -> list[str]:
        """Words that tell it from other parts, for names and descriptions."""
        sizes = ["x".join(map(str, size)) for size in self.sizes]
        return [*sizes, f"{self.columns}c" + "i" * self.inside]


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
    def tile(self) -> int:
        """Elements of shared memory that a tile takes."""
        return round_up(max(mode.inputs for part in self.parts for mode in part.modes), LINE)

    @property
    def matrices(self) -> int:
        """Elements of shared memory that the matrices of all modes take."""
        found = [grouping.matrices(part.sizes, self.arithmetic) for part in self.parts]
        return max(found) if self.restaged else sum(found)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a block."""
        ticket = TICKET_BYTES * (len(self.parts) > 1)
        return self.itemsize * (self.tile + self.ahead + self.matrices) + ticket

    def resident(self, arch: str) -> int:
        """Blocks of a launch that a multiprocessor holds."""
        found = targets.resident_blocks(arch, 32 * self.warps, REGISTERS, self.shared_bytes)
        return min(found, MOST_BLOCKS)


def warps_of(dtype: str, tile: int) -> int:
    """Warps whose registers hold the results of a tile of so many elements."""
    limit, warps = SUMS[DTYPES[dtype].accumulator], 4
    while warps < MOST_WARPS and warps * 32 * limit // 2 < tile:
        warps *= 2
    return warps


def spec(epilogue: tuple[Epilogue, ...], variant: Variant, arch: str) -> KernelSpec:
    """The KernelSpec of a variant. Raises UnsupportedError where its shared memory does not fit."""
    kind = "modes" if len(variant.parts) == 1 else "slabs"
    words = [word for part in variant.parts for word in part.words]
    words += [f"{variant.warps}w"] + [f"{variant.ahead}a"] * bool(variant.ahead)
    words += ["restaged"] * variant.restaged
    ends = variant.parts[0].source, variant.parts[-1].target
    if ends != (variant.dtype, variant.dtype):
        words += ends
    precision = [variant.precision] * (variant.dtype == "float32")
    description = text.describe(
        "kronecker_product", kind, variant.dtype, variant.precision, words, epilogue
    )
    shared = variant.shared_bytes
    if shared > targets.SHARED_BYTES[arch]:
        raise UnsupportedError(
            f"{description} needs {shared} bytes of shared memory, a block of {arch} has "
            f"{targets.SHARED_BYTES[arch]}"
        )
    source = _source(epilogue, variant, kind, max(1, variant.resident(arch)))
    made = KernelSpec(
        "kronecker_product",
        source,
        f"kronecker_product_{kind}",
        32 * variant.warps,
        shared,
        description=description,
    )
    return named(made, variant.dtype, *precision, *words[-4:], epilogue=epilogue)


def _source(epilogue: tuple[Epilogue, ...], variant: Variant, kind: str, blocks: int) -> str:
    """The generated CUDA text: types, ``Finish``, constants, runs, one include."""
    sizes = [size for part in variant.parts for size in part.sizes]
    rows, widths = (", ".join(str(size[side]) for size in sizes) for side in (0, 1))
    count, several = len(variant.parts), len(variant.parts) > 1
    names = [f"Run{index}" if several else "Run" for index in range(count)]
    listed = f"#define RUN_LIST {', '.join(names)}\n" * several
    listed += of_tickets(variant.restaged) * several
    size = parameters(count, len(sizes), epilogue).size
    return f"""{text.preamble(variant.dtype, variant.parts[-1].target, epilogue)}
{"#define DOUBLE" if variant.dtype == "float64" else ""}
constexpr int PRODUCTS = {3 if variant.arithmetic == "fp32" else 1};
constexpr int MOST_SPLIT = {grouping.MOST_SPLIT};
constexpr int WARPS = {variant.warps};
constexpr int MIN_BLOCKS = {blocks};
constexpr int TILE = {variant.tile};
constexpr int AHEAD = {variant.ahead};
constexpr int MATRICES = {variant.matrices};
constexpr int RUNS = {count};
constexpr int POWERS = 0;
constexpr int FACTORS = {len(sizes)};
constexpr int SUMMANDS = {len(text.summands(epilogue))};
__device__ constexpr int ROWS[] = {{{rows}}};
__device__ constexpr int WIDTHS[] = {{{widths}}};
constexpr int PARAMETER_BYTES = {size};

#include "kronecker_product/modes/run.cuh"

{_runs(variant, names)}{listed}
#include "kronecker_product/modes/{kind}.cuh"
"""


def of_tickets(restaged: bool) -> str:
    """What tickets.cuh asks for."""
    return f"""constexpr bool RESTAGED = {str(restaged).lower()};
constexpr int TICKET_BYTES = {TICKET_BYTES};
"""


def _runs(variant: Variant, names: list[str]) -> str:
    """The struct of each run."""
    made, at, first = "", 0, 0
    for index, (part, name) in enumerate(zip(variant.parts, names, strict=True)):
        modes = part.modes
        at *= not variant.restaged
        listed = []
        for mode in modes:
            last = str(mode == modes[-1]).lower()
            left, rows, columns, right, own, parts = mode
            numbers = left, rows, columns, right, first + own, parts, last, at
            listed.append(f"Mode<{', '.join(map(str, numbers))}>")
            at += mode.stored(variant.arithmetic)
        first += len(part.sizes)
        features = math.prod(size[0] for size in part.sizes)
        made += f"""struct {name} {{
    using SourceT = {DTYPES[part.source].cuda};
    using TargetT = {DTYPES[part.target].cuda};
    static constexpr int INDEX = {index}, COLUMNS = {part.columns};
    static constexpr int IN_FEATURES = {features}, INPUTS = {part.columns * features};
    static constexpr bool COLUMNS_LAST = {str(part.inside).lower()};
    static constexpr bool WRITTEN_HERE = {str(index > 0).lower()};
    static constexpr bool ENDS = {str(index == len(names) - 1).lower()};
    using Modes = List<{(", " + chr(10) + " " * 23).join(listed)}>;
}};
"""
    return made


def parameters(
    runs: int, factors: int, epilogue: tuple[Epilogue, ...], powers: int = 0
) -> text.Parameters:
    """The parameter struct of a launch, with so many arrays of powers."""
    pointers = 2 * runs + factors + (runs > 1) + powers
    sides = 7 * len(text.summands(epilogue))
    fixed = f"<{'26q4I' * runs}{3 * factors}q4q{6 * powers}q{sides}q"
    return text.parameters(pointers, fixed, epilogue)


def run_numbers(
    run: Run, part: Part, last: tuple[int, int], slabs: tuple[tuple[int, int], tuple[int, int]]
) -> list[int]:
    """Of the parameter struct what is a run's. ``last`` are outer indices and columns of the last
    slab, ``slabs`` how far one is behind another, and how many are in a ring or 0, in source and in
    target."""
    across = ceil_div(run.columns, part.columns)
    made = []
    for side, slab in zip((run.x, run.out), slabs, strict=True):
        made += _side(side, slab)
    made += [run.outer, run.columns, *last, run.inner, run.outer * run.inner * across, across]
    ends = (part.source, run.x), (part.target, run.out)
    reads, writes = (
        _vectors(run, side, dtype, slab)
        for (dtype, side), (slab, _) in zip(ends, slabs, strict=True)
    )
    return [*made, *run.feature, run.divisor, reads, int(_columns_first(run)), writes, 0]


def matrix_numbers(runs: list[Run]) -> list[int]:
    """Of the parameter struct what is the factors'."""
    found = [factor for run in runs for factor in run.factors]
    return [s for f in found for s in (f.row_stride, f.column_stride, f.batch_stride)]


def summand_numbers(run: Run, slabs: Sequence[int]) -> list[int]:
    """Of the parameter struct what is the summands', of the last run; ``slabs`` are the elements
    from one slab to the next of each."""
    return [n for s, slab in zip(run.summands, slabs, strict=True) for n in _side(s, (slab, 0))]


def _side(side: Layout, slab: tuple[int, int]) -> list[int]:
    return [side.batch, side.outer, side.inner, side.column, side.feature, *slab]


def _columns_first(run: Run) -> bool:
    return run.x.column < run.x.feature


def is_vectors(run: Run, part: Part) -> tuple[bool, bool]:
    """Whether a run of a launch of its own reads, and writes, aligned 16 bytes at once."""
    ends = (run.x, part.source), (run.out, part.target)
    reads, writes = (bool(_vectors(run, side, dtype, 0)) for side, dtype in ends)
    return reads, writes


def _vectors(run: Run, side: Layout, dtype: str, slab: int) -> int:
    """Whether source or target takes aligned 16-byte copies along the tile's last dimension, a slab
    so many elements behind the one before it."""
    chunk = 16 // DTYPES[dtype].bytes
    along, across = (side.column, side.feature) if run.inside else (side.feature, side.column)
    others = [across, slab, *[side.outer] * (run.outer > 1), *[side.inner] * (run.inner > 1)]
    others += [side.batch] * (run.batch > 1)
    return int(along == 1 and not any(s % chunk for s in others) and side.alignment % 16 == 0)

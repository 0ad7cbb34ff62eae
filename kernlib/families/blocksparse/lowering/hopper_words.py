"""The kernel of kernel_sources/blocksparse/hopper_words/hopper_words.cuh: float32 products at fp32
grade with blocks of 64 and 128, of operands that are packed as pairs of float16 words.

Takes any strides that leave something side by side; what little work three launches are too much
for is left to the portable kernel.
"""

from __future__ import annotations

from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.blocksparse.kernels import portable
from kernlib.families.blocksparse.lowering import hopper, order, pack_words
from kernlib.families.blocksparse.lowering.pack_words import TILE_COLUMNS, Packed
from kernlib.families.blocksparse.lowering.problem import Spmm
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import WORKSPACE, Lowered, Step
from kernlib.lowering.wgmma import multiply

KIND = "hopper_words"
PRECISION = True  # variants() takes it
STAGES, STAGE_BYTES, SCALES_BYTES = 3, 64 * 1024, 1024
BARRIER_BYTES = 128
# Scales are kept twice as long as words, and 1024 are what the swizzle's start takes.
SHARED_BYTES = STAGES * (STAGE_BYTES + 2 * SCALES_BYTES) + BARRIER_BYTES + 1024
MOST = 2**31 - 1  # CTAs of a launch, tiles, and columns that are rounded up
POINTERS = 5 + len(hopper.LISTS)
STRIDES = "7q2i"  # struct Strides

# What an H100 or H200 of 132 multiprocessors does, to tell where packing pays.
MULTIPROCESSORS = 132
WORDS_RATE = 200e6  # operations a microsecond on what is stored
PACKED_RATE = 3.5e6  # bytes a microsecond, read and written
LAUNCHES = 9.0  # microseconds of three launches


class Variant(NamedTuple):
    """Everything that code generation chooses besides the epilogue."""

    lines: int  # of a block of op(S)
    depth: int
    transposed: bool


def takes(problem: Spmm, arch: str) -> bool:
    """Whether the kernel computes a problem."""
    blocks, values = problem.blocks, problem.values
    if arch != hopper.ARCH or (problem.dtype, problem.precision) != ("float32", "fp32"):
        return False
    if blocks.rows not in hopper.SIZES or blocks.cols not in hopper.SIZES:
        return False
    if not blocks.capacity or not problem.lines or not problem.columns or not problem.batch:
        return False
    if 1 not in (values.row, values.column) or hopper.is_across(problem.dense) is None:
        return False
    counts = _tiles(problem), _packed(problem, False).squares, problem.columns + TILE_COLUMNS
    return max(counts) <= MOST


def pays(problem: Spmm, multiprocessors: int) -> bool:
    """Whether it takes less time by rule than the portable kernel, of a fifth of the rate, with the
    packing of both operands and two launches more; all slots taken for stored ones."""
    blocks, made = problem.blocks, _packed(problem, False)
    stored = blocks.capacity * blocks.rows * blocks.cols * problem.batch
    across = ceil_div(problem.columns, TILE_COLUMNS) * TILE_COLUMNS
    share = multiprocessors / MULTIPROCESSORS
    busy = min(1.0, _tiles(problem) / multiprocessors)
    own = 2 * stored * across / (WORDS_RATE * share * busy)
    own += 2 * (made.places[-1] - made.places[0]) / PACKED_RATE + LAUNCHES
    return own < portable.best_microseconds(problem, hopper.ARCH, multiprocessors)


def lower(
    epilogue: tuple[Epilogue, ...], problem: Spmm, arch: str, multiprocessors: int
) -> Lowered:
    """The launches of a problem that the kernel takes: the order of tiles where these are many, the
    packing, the product."""
    tiles = _tiles(problem)
    grid, ordered = min(multiprocessors, tiles), _is_ordered(problem, multiprocessors)
    made = _packed(problem, ordered)
    own = hopper.numbers(problem, multiprocessors, TILE_COLUMNS)
    strides = (*_strides(problem, made), made.depths, int(_in_pairs(problem)))
    fixed = parameters(epilogue).pack(*hopper.sides(problem), *strides, *own)
    main = Step(
        spec(epilogue, variant(problem)),
        (grid, 1),
        fixed,
        _pointers(epilogue, made, ordered),
        text.scalar_count(epilogue),
        overlaps=True,
    )
    first = ()
    if ordered:
        first = (order.step(tiles // _panels(problem), problem, grid),)
    pack = pack_words.step(problem, made, overlaps=ordered)
    return Lowered((*first, pack, main), made.places[-1])


def variants(
    epilogue: tuple[Epilogue, ...],
    block: tuple[int, int],
    dtypes: tuple[str, ...],
    arch: str,
    precision: str | None = None,
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for blocks of a size. ``precision`` is float32's,
    None for both."""
    if arch != hopper.ARCH or not set(block) <= set(hopper.SIZES):
        return []
    if "float32" not in dtypes or precision not in (None, "fp32"):
        return []
    own = [
        spec(epilogue, Variant(*(block[::-1] if turned else block), turned))
        for turned in (False, True)
    ]
    return [*order.variants(block), pack_words.spec(), *own]


def variant(problem: Spmm) -> Variant:
    """The kernel of a problem that it takes."""
    sizes = problem.blocks.rows, problem.blocks.cols
    return Variant(*(sizes[::-1] if problem.transposed else sizes), problem.transposed)


def spec(epilogue: tuple[Epilogue, ...], made: Variant) -> KernelSpec:
    """The KernelSpec of a variant."""
    lines, depth, transposed = made
    words = [f"{lines}x{depth}"] + ["transposed"] * transposed
    source = f"""{text.preamble("float32", "float32", epilogue)}
constexpr int LINES = {lines};
constexpr int DEPTH = {depth};
constexpr bool TRANSPOSED = {str(transposed).lower()};
constexpr int SUMMANDS = {len(text.summands(epilogue))};
constexpr int PARAMETER_BYTES = {parameters(epilogue).size};

#include "common/hopper.cuh"

{multiply("float16", TILE_COLUMNS, False)}
#include "blocksparse/hopper_words/hopper_words.cuh"
"""
    found = KernelSpec(
        "blocksparse",
        source,
        "blocksparse_words",
        hopper.THREADS,
        SHARED_BYTES,
        description=text.describe("blocksparse", KIND, "float32", "fp32", words, epilogue),
    )
    return named(found, "float32", *words, epilogue=epilogue)


def parameters(epilogue: tuple[Epilogue, ...]) -> Parameters:
    """The parameter struct: packed operands, the result, the layout's bits and ranks, the
    epilogue's, strides and sizes."""
    before = hopper.SIDE * len(text.summands(epilogue))
    return text.parameters(POINTERS, f"<{before}{STRIDES}{hopper.FIXED}", epilogue)


def _pointers(
    epilogue: tuple[Epilogue, ...], made: Packed, ordered: bool
) -> tuple[tuple[str, int], ...]:
    """Those of struct Parameters. Without an order nothing is read of what is given for it."""
    own = [(WORKSPACE, place) for place in made.places[:-1]]
    lists = [(name, 0) for name in hopper.LISTS[:-1]]
    lists.append((WORKSPACE if ordered else hopper.LISTS[0], 0))
    pointers = (*own, ("out", 0), *lists, *text.vector_pointers(epilogue))
    return pointers + text.summand_pointers(epilogue)


def _strides(problem: Spmm, made: Packed) -> tuple[int, ...]:
    """Of the result in elements, of the packed operands in pieces and panels."""
    heads = made.head_panels if made.heads > 1 else 0
    return (
        *problem.out[:4],
        made.pieces if made.piece_batches > 1 else 0,
        made.head_panels * made.heads if made.panel_batches > 1 else 0,
        heads,
    )


def _in_pairs(problem: Spmm) -> bool:
    """Whether two neighbouring columns of the result are 8 aligned bytes."""
    out = problem.out
    outer = zip(out[:3], (problem.batch, problem.blocks.heads, problem.lines), strict=True)
    even = not any(stride % 2 for stride, count in outer if count > 1)
    return out.column == 1 and even and out.alignment % 8 == 0 and problem.columns % 2 == 0


def _packed(problem: Spmm, ordered: bool) -> Packed:
    """What is packed, behind the order of tiles where there is one."""
    return pack_words.packed(problem, order.workspace(problem) if ordered else 0)


def _is_ordered(problem: Spmm, multiprocessors: int) -> bool:
    return hopper.is_ordered(problem, multiprocessors, TILE_COLUMNS)


def _panels(problem: Spmm) -> int:
    return ceil_div(problem.columns, TILE_COLUMNS) * problem.batch


def _tiles(problem: Spmm) -> int:
    groups = ceil_div(problem.lines, hopper.TILE_LINES)
    return groups * problem.blocks.heads * _panels(problem)

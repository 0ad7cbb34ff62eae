"""The k smallest or largest entries of each row of a kernel matrix that is never stored: from a
problem to kernels, grids and parameters.

Two kinds of kernel as in :mod:`kernlib.families.pairwise.lowering.reduce`, with a list of each row
in shared memory: ``small``, up to SMALL_K features, and ``tile``. The n of a row are divided among
blocks, and threads of a ``tile``; a second kernel merges their lists.

Two floors bound the choice of rows and splits. 1e10 pairs of 3 features take 7 issue slots each, or
2.4 ms of 128 lanes, 132 multiprocessors and 1.7 GHz; and each list of each split takes as long as k
units of 256 points to fill, so that few long splits are faster than many that fill the last wave.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering import reduce
from kernlib.families.pairwise.lowering.direct import (
    BIG_TILE,
    MAX_BATCH_BLOCKS,
    THREADS,
    scalar_count,
    short,
)
from kernlib.families.pairwise.lowering.reduce import OPERANDS, Problem
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.dtypes import FLOAT_SUMS
from kernlib.lowering.names import named
from kernlib.lowering.steps import WORKSPACE, Lowered, Step

# Lengths of lists, each with the threads of a block of the small kernel, so that several blocks
# have room for theirs.
LENGTHS = {2: 256, 5: 256, 10: 256, 16: 256, 32: 256, 64: 128, 128: 64}
MOST_KEPT = max(LENGTHS)
WAITING = 8  # as in topk/lists.cuh
MOST_ROWS = 4  # of a thread
REGISTERS = 128  # of one, as __launch_bounds__ promises
SHARES = 2  # threads of a row of a tile
ENTRY_BYTES, VALUE_BYTES, PLACE_BYTES = 8, 4, 8
# Features of products from which on blocks of the matrix, which tensor cores make, are sorted
# faster than tiles give their lists.
PRODUCT_FEATURES = 256


class Variant(NamedTuple):
    """Everything that code generation chooses besides the descriptor: what a reduction has, the
    length of a list, whether it takes the largest, and the threads of a block."""

    base: reduce.Variant
    kept: int
    largest: bool
    threads: int


def takes(descriptor: Pairwise, problem: Problem, arch: str) -> bool:
    """Whether the kernels take a problem of k = ``columns``, and are the fastest to do so."""
    if problem.dtype not in FLOAT_SUMS or min(problem.k, problem.m, problem.n) <= 0:
        return False
    if problem.columns > MOST_KEPT or problem.m > reduce.MAX_BLOCKS // 1024 * min(LENGTHS.values()):
        return False
    if descriptor.takes_products and problem.k > PRODUCT_FEATURES:
        return False
    return shared(variant(problem, False, arch, 1)) <= targets.SHARED_BYTES[arch]


def lower(
    descriptor: Pairwise,
    problem: Problem,
    largest: bool,
    arch: str,
    multiprocessors: int,
    scalar_strides: tuple[int, ...],
    rows: int | None = None,
) -> Lowered:
    """The kernels for a problem that :func:`takes` is true of. ``rows`` overrides the rows of a
    thread of the small kernel."""
    rows = rows or _rows(problem, arch, multiprocessors)
    made = variant(problem, largest, arch, rows)
    per_split, _ = _split(problem, made, arch, multiprocessors)
    splits = ceil_div(problem.n, per_split)
    lists = splits if made.base.k else splits * SHARES
    row_blocks = ceil_div(problem.m, _rows_of_block(made))
    entries = problem.batch * problem.m * problem.columns
    in_places = ceil_div(lists * entries * VALUE_BYTES, 16) * 16
    found = ((WORKSPACE, 0), (WORKSPACE, in_places)) if lists > 1 else (("out", 0), ("indices", 0))
    first = Step(
        spec(descriptor, made),
        (row_blocks * splits, min(problem.batch, MAX_BATCH_BLOCKS)),
        reduce.fixed_parameters(problem, per_split, row_blocks, scalar_strides),
        (*((name, 0) for name in OPERANDS[:3]), *found),
        scalar_count(descriptor),
    )
    if lists == 1:
        return Lowered((first,))
    last = Step(
        merge_spec(largest),
        (ceil_div(lists * entries, THREADS), 1),
        struct.pack("<q2i", problem.batch * problem.m, lists, problem.columns),
        (*found, ("out", 0), ("indices", 0)),
    )
    return Lowered((first, last), in_places + lists * entries * PLACE_BYTES)


def variant(problem: Problem, largest: bool, arch: str, rows: int) -> Variant:
    """The code for a problem; ``rows`` are those of a thread of the small kernel."""
    plain = problem._replace(reduction="min", columns=0, out_columns=0)
    base = reduce.variant(plain, arch, rows)  # a list takes the place of the smallest value
    kept = next(length for length in LENGTHS if length >= problem.columns)
    return Variant(base, kept, largest, LENGTHS[kept] if base.k else THREADS)


def shared(made: Variant) -> int:
    """Bytes of dynamic shared memory: lists, behind the tile kernel's stages and sums."""
    lists = (made.kept + WAITING) * max(1, made.base.rows) * made.threads * ENTRY_BYTES
    return reduce.shared(made.base) + lists


def _rows_of_block(made: Variant) -> int:
    return made.base.rows * made.threads if made.base.k else BIG_TILE


def _resident(made: Variant, arch: str) -> int:
    """Blocks of a multiprocessor."""
    stage = 0
    if made.base.k:  # in static shared memory, a line of whole 16 bytes a thread
        stage = made.threads * ceil_div(made.base.k, 4) * 16 + 16
    return targets.resident_blocks(arch, made.threads, REGISTERS, shared(made) + stage)


def _split(problem: Problem, made: Variant, arch: str, multiprocessors: int) -> tuple[int, int]:
    """The n of a block, and how long it all takes, in units of THREADS points for each row of a
    thread."""
    k, unit = problem.columns, made.threads if made.base.k else BIG_TILE
    start = k * THREADS // unit if made.base.k else 1 + 14 * k // problem.k
    slots = max(1, _resident(made, arch)) * multiprocessors
    row_blocks = ceil_div(problem.m, _rows_of_block(made))
    lists = problem if made.base.k else problem._replace(out_columns=k * SHARES)
    per_split = reduce.split(lists, row_blocks, unit, slots, start=start)
    waves = ceil_div(row_blocks * ceil_div(problem.n, per_split) * problem.batch, slots)
    return per_split, waves * (per_split // unit + start)


def _rows(problem: Problem, arch: str, multiprocessors: int) -> int:
    """Rows of a thread of the small kernel. Each read of a point serves them all, and takes as long
    as half a row; more of them leave room for fewer blocks, of which two hide each other's
    latency."""
    if problem.k > reduce.SMALL_K:
        return 1
    best, least = 1, None
    for rows in range(1, MOST_ROWS + 1):
        made = variant(problem, False, arch, rows)
        if rows > 1 and _resident(made, arch) * made.threads < 2 * min(THREADS, 2 * made.threads):
            break
        time = _split(problem, made, arch, multiprocessors)[1] * (2 * rows + 1)
        if least is None or time < least:
            best, least = rows, time
    return best


def spec(descriptor: Pairwise, made: Variant) -> KernelSpec:
    """The KernelSpec of a variant."""
    base, kind = made.base, made.base.kind
    order = "largest" if made.largest else "smallest"
    words = [f"{made.kept} {order}", kind, base.dtype]
    words += [f"K={base.k} rows={base.rows}"] if base.k else [f"{base.access_a}/{base.access_b}"]
    words += [f"p={base.inner}"] * (base.inner != "any")
    words += [flag for flag in ("long_k", "epsilon", "regularized") if getattr(base, flag)]
    specification = KernelSpec(
        "pairwise",
        source(descriptor, made),
        f"pairwise_topk_{kind}",
        made.threads,
        shared(made),
        description=" ".join([descriptor.describe(), *words]),
    )
    words[1:2] = []
    return named(specification, *short(descriptor), *words, epilogue=descriptor.epilogue)


def source(descriptor: Pairwise, made: Variant) -> str:
    """The generated CUDA text: a few defines, ``Finish``, one include."""
    base = made.base
    own = reduce.small_text(base, made.threads) if base.k else "constexpr int ROWS = 1;\n"
    own += f"constexpr int KEPT = {made.kept};\n{_order(made.largest)}"
    own += "" if base.k else reduce.tile_text(base)
    return f'{reduce.head(descriptor, base, own)}#include "pairwise/topk/{base.kind}.cuh"\n'


def _order(largest: bool) -> str:
    return f"constexpr bool LARGEST = {str(largest).lower()};\n"


def merge_spec(largest: bool) -> KernelSpec:
    """The KernelSpec of what merges lists."""
    text = f"constexpr int THREADS = {THREADS};\n{_order(largest)}"
    text += '#include "pairwise/topk/merge.cuh"\n'
    order = "largest" if largest else "smallest"
    specification = KernelSpec(
        "pairwise", text, "pairwise_topk_merge", THREADS, description=f"merge of {order}"
    )
    return named(specification, order)

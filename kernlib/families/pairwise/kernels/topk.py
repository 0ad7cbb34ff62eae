"""The k smallest or largest entries of each row of a kernel matrix that is never stored: from a
problem to kernels, grids and parameters.

Kinds of kernel as in :mod:`kernlib.families.pairwise.kernels.reduce`, with a list of each row in
shared memory: ``small``, up to SMALL_K features, and ``tile``; and products of tensor cores for up
to PRODUCT_KEPT entries, as in :mod:`kernlib.families.pairwise.kernels.split_reduce`. The n of a
row are divided among blocks, and the threads of a tile; another kernel merges their lists.

Two floors bound the choice of splits. 1e10 pairs of 3 features take 7 issue slots each, or 2.4 ms
of 128 lanes, 132 multiprocessors and 1.7 GHz; and the list of each split takes as long to fill as k
units of 256 points, so that few long splits are faster than many that fill the last wave.
"""

from __future__ import annotations

from typing import NamedTuple

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.kernels import pack as packing
from kernlib.families.pairwise.kernels import split_reduce as products
from kernlib.families.pairwise.kernels.reduce import (
    Reduction,
    code_words,
    flags,
    small_facts,
    tile_facts,
)
from kernlib.families.pairwise.lowering import pack, reduce
from kernlib.families.pairwise.lowering.finish import lists
from kernlib.families.pairwise.lowering.problem import (
    BIG_TILE,
    MAX_BATCH_BLOCKS,
    THREADS,
    scalar_count,
    short,
)
from kernlib.families.pairwise.lowering.reduce import OPERANDS, Problem
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import division
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.config import Fact
from kernlib.lowering.dtypes import FLOAT_SUMS
from kernlib.lowering.kernel import Kernel, named
from kernlib.lowering.parameters import Fields
from kernlib.lowering.steps import WORKSPACE, Lowered, Step

# Lengths of lists, each with the threads of a block of the small kernel, so that several blocks
# have room for theirs, and the entries that may wait for a place: many where a list is long to
# walk.
LENGTHS = {
    2: (256, 8), 5: (256, 8), 10: (256, 8), 16: (256, 8), 32: (256, 8), 64: (128, 16),
    128: (64, 16),
}  # fmt: skip
MOST_KEPT = max(LENGTHS)
FEWEST_WAITING = 4  # as many as are looked at together
FEWEST_ROWS = 64  # of a block
RESIDENT_THREADS = 768  # of a multiprocessor, as __launch_bounds__ promises of one row a thread
SHARES = 2  # threads of a row of a tile
FEWEST_STAGES = 2  # of products: one is given back when the next one's products have begun
ENTRY_BYTES, VALUE_BYTES, PLACE_BYTES = 8, 4, 8
# Features of products from which on blocks of the matrix, which tensor cores make, are sorted
# faster than tiles give their lists.
PRODUCT_FEATURES = 256
PRODUCT_KEPT = 16  # entries of a list that has room beside the operands of tensor cores
MERGE_FIELDS = Fields(("i64 rows", "int lists", "int k"))


class Variant(NamedTuple):
    """Everything that code generation chooses besides the descriptor: what a reduction has, the
    length of a list, what may wait for a place in it, whether it takes the largest, the threads of
    a block, and how many lists of a row and split are written."""

    base: reduce.Variant
    kept: int
    waiting: int
    largest: bool
    threads: int
    places: int = 1

    @property
    def lists(self) -> int:
        """Those of a block."""
        return max(1, self.base.rows) * self.threads

    @property
    def resident(self) -> int:
        """Blocks of a multiprocessor that its registers have room for."""
        if not self.base.k:
            return 2
        return (RESIDENT_THREADS if self.base.rows == 1 else 2 * THREADS) // self.threads


def takes(descriptor: Pairwise, problem: Problem, arch: str, precision: str | None) -> bool:
    """Whether the kernels take a problem of k = ``columns``, and are the fastest to do so;
    ``precision`` is that of products, None where they are not permitted."""
    if problem.dtype not in FLOAT_SUMS or min(problem.k, problem.m, problem.n) <= 0:
        return False
    if problem.columns > MOST_KEPT or problem.m > reduce.MAX_BLOCKS // 1024 * FEWEST_ROWS:
        return False
    if shared(variant(problem, False, arch)) > targets.SHARED_BYTES[arch]:
        return False
    few = problem.k <= PRODUCT_FEATURES or not descriptor.takes_products
    return few or by_products(descriptor, problem, arch, precision)


def by_products(descriptor: Pairwise, problem: Problem, arch: str, precision: str | None) -> bool:
    """Whether tensor cores compute the sums of a problem that the kernels take."""
    if precision is None or problem.columns > PRODUCT_KEPT or problem.k <= reduce.SMALL_K:
        return False
    plain = _without_lists(problem)
    return products.takes(descriptor, plain, arch, precision) and products.pays(plain)


def lower(
    descriptor: Pairwise,
    problem: Problem,
    largest: bool,
    arch: str,
    multiprocessors: int,
    scalar_strides: tuple[int, ...],
    precision: str | None = None,
    rows: int | None = None,
) -> Lowered:
    """The kernels for a problem that :func:`takes` is true of. ``rows`` overrides the rows of a
    thread of the small kernel."""
    if by_products(descriptor, problem, arch, precision):
        return _by_products(
            descriptor, problem, largest, arch, multiprocessors, scalar_strides, precision
        )
    made = variant(problem, largest, arch, rows)
    per_split = _split(problem, made, arch, multiprocessors)
    memory = _Memory(problem, ceil_div(problem.n, per_split) * made.places)
    results = memory.pointers if memory.lists > 1 else (("out", 0), ("indices", 0))
    first = _step(descriptor, problem, made, arch, per_split, scalar_strides, results)
    if memory.lists == 1:
        return Lowered((first,))
    return Lowered((first, _merge_step(problem, memory, largest, arch)), memory.end)


class _Memory:
    """Where the lists of all rows lie in the workspace, from ``start`` on: values, then places."""

    def __init__(self, problem: Problem, lists: int, start: int = 0):
        self.lists, self.entries = lists, lists * problem.batch * problem.m * problem.columns
        places = start + round_up(self.entries * VALUE_BYTES, pack.ALIGNMENT)
        self.pointers = ((WORKSPACE, start), (WORKSPACE, places))
        self.end = places + self.entries * PLACE_BYTES


def _step(
    descriptor: Pairwise,
    problem: Problem,
    made: Variant,
    arch: str,
    per_split: int,
    strides,
    results,
) -> Step:
    """The launch of the small or the tile kernel, which writes lists to ``results``."""
    row_blocks = ceil_div(problem.m, _rows_of_block(made))
    return Step(
        (SMALL if made.base.k else TILE).spec(descriptor, made, arch),
        (row_blocks * ceil_div(problem.n, per_split), min(problem.batch, MAX_BATCH_BLOCKS)),
        reduce.fixed_parameters(problem, per_split, row_blocks, strides),
        (*((name, 0) for name in OPERANDS[:3]), *results),
        scalar_count(descriptor),
    )


def _merge_step(problem: Problem, memory: _Memory, largest: bool, arch: str) -> Step:
    return Step(
        MERGE.spec(None, largest, arch),
        (ceil_div(memory.entries, THREADS), 1),
        MERGE_FIELDS.pack(rows=problem.batch * problem.m, lists=memory.lists, k=problem.columns),
        (*memory.pointers, ("out", 0), ("indices", 0)),
    )


def _by_products(
    descriptor, problem: Problem, largest: bool, arch: str, multiprocessors: int, strides, precision
) -> Lowered:
    """The launches of :mod:`kernlib.families.pairwise.kernels.split_reduce`, whose reducers are
    lists, and the merge."""
    behind = variant(problem, largest, arch)._replace(places=products.LISTS)
    made = products.default(descriptor, _without_lists(problem), precision)
    made = made._replace(
        reducer="Nearest", columns=BIG_TILE, warpgroups=2, kept=behind.kept, largest=largest
    )
    if made.stages < FEWEST_STAGES:  # beside lists of 16 and 129 features of one word on
        made = made._replace(resident=0)
    made = made._replace(ordered=made.resident == 2)
    place = pack.workspace(problem, made)
    row_blocks = ceil_div(problem.m, made.rows)
    values = division.Sums(problem.n, problem.m * problem.columns * products.LISTS, problem.batch)
    least = products.least_splits(made, place, multiprocessors)
    per_split = division.split(
        values, row_blocks, made.columns, multiprocessors, least, 4 * problem.columns
    )
    splits = ceil_div(problem.n, per_split)
    memory = _Memory(problem, splits * products.LISTS, round_up(place.size, pack.ALIGNMENT))
    main = products.main_step(descriptor, problem, made, place, per_split, row_blocks, strides)
    steps = (
        *packing.steps(descriptor, problem, made, place),
        main._replace(pointers=(*main.pointers[:-2], *memory.pointers)),
        pack.gated_step(
            _step(descriptor, problem, behind, arch, per_split, strides, memory.pointers), place
        ),
        _merge_step(problem, memory, largest, arch),
    )
    return Lowered(steps, memory.end)


def _without_lists(problem: Problem) -> Problem:
    """As of a reduction to one value of each row, in whose place a list is."""
    return problem._replace(reduction="min", columns=0, out_columns=0)


def variant(problem: Problem, largest: bool, arch: str, rows: int | None = None) -> Variant:
    """The code for a problem."""
    base = reduce.variant(_without_lists(problem), arch, rows or rows_of(problem))
    kept = next(length for length in LENGTHS if length >= problem.columns)
    threads, waiting = LENGTHS[kept]
    if base.k:
        return Variant(base, kept, waiting, largest, threads)
    made = Variant(base, kept, waiting, largest, THREADS, SHARES)
    fits = shared(made) <= targets.SHARED_BYTES[arch]
    return made if fits else made._replace(waiting=FEWEST_WAITING)


def rows_of(problem: Problem) -> int:
    """Rows of a thread of the small kernel: one, so that three blocks share a multiprocessor and
    each list fills once, in 4.6 ms of 1e10 pairs of 3 features; 5.6 with three rows (H100). Where
    reads of a long point take a third of the time, two: 16.0 ms of 16 features, and not 17.7."""
    return 2 if problem.k > 12 and problem.columns <= 10 else 1


def shared(made: Variant) -> int:
    """Bytes of dynamic shared memory: lists, behind the tile kernel's stages and sums."""
    return reduce.shared(made.base) + (made.kept + made.waiting) * made.lists * ENTRY_BYTES


def _rows_of_block(made: Variant) -> int:
    return made.lists if made.base.k else BIG_TILE


def _split(problem: Problem, made: Variant, arch: str, multiprocessors: int) -> int:
    """The n of a block."""
    k, stage = problem.columns, 0
    if made.base.k:  # in static shared memory, a line of whole 16 bytes a thread
        stage = made.threads * ceil_div(made.base.k, 4) * 16 + 16
        unit, start = made.threads, k * THREADS // made.threads
    else:
        unit, start = BIG_TILE, 1 + 14 * k // problem.k
    registers = targets.REGISTERS // (made.threads * made.resident) // 8 * 8
    resident = targets.resident_blocks(arch, made.threads, registers, shared(made) + stage)
    row_blocks = ceil_div(problem.m, _rows_of_block(made))
    values = division.Sums(problem.n, problem.m * k * made.places, problem.batch)
    slots = max(1, min(resident, made.resident)) * multiprocessors
    return division.split(values, row_blocks, unit, slots, start=start)


class TopK(Reduction):
    """What the kernels of lists share."""

    role = "topk"
    Variant = Variant

    def spec(self, descriptor: Pairwise, variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant."""
        base = variant.base
        order = f"{variant.kept} {'largest' if variant.largest else 'smallest'}"
        words = [base.dtype, *code_words(base)] + [f"p={base.inner}"] * (base.inner != "any")
        words += flags(base, "long_k", "epsilon", "regularized")
        facts = lists(variant.kept, variant.waiting, variant.lists, variant.largest)
        source = self.text(descriptor, base, {**facts, **self.facts(variant)})
        spec = KernelSpec(
            "pairwise", source, self.entry, variant.threads, shared(variant),
            description=" ".join([descriptor.describe(), order, base.kind, *words]),
        )  # fmt: skip
        return named(spec, *short(descriptor), order, *words, epilogue=descriptor.epilogue)


class Small(TopK):
    """Of up to SMALL_K features."""

    name = "small"
    header = "pairwise/topk/small.cuh"
    entry = "pairwise_topk_small"

    def facts(self, variant: Variant) -> dict[str, Fact]:
        return {"RESIDENT": variant.resident, **small_facts(variant.base, variant.threads)}


class Tile(TopK):
    """Of any number of features."""

    name = "tile"
    header = "pairwise/topk/tile.cuh"
    entry = "pairwise_topk_tile"
    rank = 1

    def facts(self, variant: Variant) -> dict[str, Fact]:
        return {"PLACES": variant.places, **tile_facts(variant.base)}


class Merge(Kernel):
    """The first entries of several lists of each row."""

    role = "step"
    name = "merge"
    header = "pairwise/topk/merge.cuh"
    entry = "pairwise_topk_merge"

    def spec(self, subject: None, largest: bool, arch: str) -> KernelSpec:
        """The specification for lists in one of two orders."""
        text = self.source({"THREADS": THREADS, "LARGEST": largest}, MERGE_FIELDS.text())
        word = "largest" if largest else "smallest"
        spec = KernelSpec("pairwise", text, self.entry, THREADS, description=f"merge of {word}")
        return named(spec, word)


SMALL, TILE, MERGE = Small(), Tile(), Merge()

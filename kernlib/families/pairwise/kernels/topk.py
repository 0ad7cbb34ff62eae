"""The k smallest or largest entries of each row of a kernel matrix that is never stored: from a
problem to kernels, grids and parameters.

Kinds of kernel as in :mod:`kernlib.families.pairwise.kernels.reduce`, with a list of each row in
shared memory: ``small``, up to SMALL_K features, and ``tile``; and products of tensor cores for up
to PRODUCT_ENTRIES entries, as in :mod:`kernlib.families.pairwise.kernels.split_reduce`. The n of a
row are divided among blocks, and the threads of a tile; another kernel merges their lists.

Two floors bound the choice of splits. 1e10 pairs of 3 features take 7 issue slots each, or 2.4 ms
of 128 lanes, 132 multiprocessors and 1.7 GHz; and the list of each split takes as long to fill as k
units of 256 points, so that few long splits are faster than many that fill the last wave.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    Call,
    scalar_count,
    short,
)
from kernlib.families.pairwise.lowering.reduce import OPERANDS, Problem, ReductionKernel
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import division
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.config import Fact
from kernlib.lowering.dtypes import FLOAT_SUMS
from kernlib.lowering.kernel import Gpu, Kernel, named
from kernlib.lowering.parameters import Fields
from kernlib.lowering.steps import WORKSPACE, Lowered, Step

# Lengths of lists, each with the threads of a block of the small kernel, so that several blocks
# have room for theirs, and the entries that may wait for a place: many where a list is long to
# walk.
LENGTHS = {
    2: (256, 8), 5: (256, 8), 10: (256, 8), 16: (256, 8), 32: (256, 8), 64: (128, 16),
    128: (64, 16),
}  # fmt: skip
MOST_ENTRIES = max(LENGTHS)
FEWEST_WAITING = 4  # as many as are looked at together
FEWEST_ROWS = 64  # of a block
RESIDENT_THREADS = 768  # of a multiprocessor, as __launch_bounds__ promises of one row a thread
SHARES = 2  # threads of a row of a tile
FEWEST_STAGES = 2  # of products: one is given back when the next one's products have begun
ENTRY_BYTES, VALUE_BYTES, PLACE_BYTES = 8, 4, 8
# Features of products from which on blocks of the matrix, which tensor cores make, are sorted
# faster than tiles give their lists.
PRODUCT_FEATURES = 256
PRODUCT_ENTRIES = 16  # entries of a list that has room beside the operands of tensor cores
MERGE_FIELDS = Fields(("i64 rows", "int lists", "int k"))


class Variant(NamedTuple):
    """Everything that code generation chooses besides the descriptor: what a reduction has, the
    length of a list, what may wait for a place in it, whether it takes the largest, the threads of
    a block, and how many lists of a row and split are written."""

    base: reduce.Variant
    length: int
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


class _Memory:
    """Where the lists of all rows lie in the workspace, from ``start`` on: values, then places."""

    def __init__(self, problem: Problem, lists: int, start: int = 0):
        self.lists, self.entries = lists, lists * problem.batch * problem.m * problem.columns
        places = start + round_up(self.entries * VALUE_BYTES, pack.ALIGNMENT)
        self.pointers = ((WORKSPACE, start), (WORKSPACE, places))
        self.end = places + self.entries * PLACE_BYTES


def _merge_step(problem: Problem, memory: _Memory, arch: str) -> Step:
    return Step(
        MERGE.spec(None, problem.largest, arch),
        (ceil_div(memory.entries, THREADS), 1),
        MERGE_FIELDS.pack(rows=problem.batch * problem.m, lists=memory.lists, k=problem.columns),
        (*memory.pointers, ("out", 0), ("indices", 0)),
    )


def _without_lists(problem: Problem) -> Problem:
    """As of a reduction to one value of each row, in whose place a list is."""
    return problem._replace(reduction="min", columns=0, out_columns=0)


def variant(problem: Problem, arch: str, rows: int | None = None) -> Variant:
    """The code for a problem, by the lanes."""
    base = reduce.variant(_without_lists(problem), arch, rows or rows_of(problem))
    length = next(length for length in LENGTHS if length >= problem.columns)
    threads, waiting = LENGTHS[length]
    if base.k:
        return Variant(base, length, waiting, problem.largest, threads)
    roomy = Variant(base, length, waiting, problem.largest, THREADS, SHARES)
    fits = shared(roomy) <= targets.SHARED_BYTES[arch]
    return roomy if fits else roomy._replace(waiting=FEWEST_WAITING)


def fits(problem: Problem, arch: str) -> bool:
    """Whether lists of a problem's entries have room beside its sums."""
    if problem.dtype not in FLOAT_SUMS or min(problem.k, problem.m, problem.n) <= 0:
        return False
    if problem.columns > MOST_ENTRIES or problem.m > reduce.MAX_BLOCKS // 1024 * FEWEST_ROWS:
        return False
    return shared(variant(problem, arch)) <= targets.SHARED_BYTES[arch]


def rows_of(problem: Problem) -> int:
    """Rows of a thread of the small kernel: one, so that three blocks share a multiprocessor and
    each list fills once, in 4.6 ms of 1e10 pairs of 3 features; 5.6 with three rows (H100). Where
    reads of a long point take a third of the time, two: 16.0 ms of 16 features, and not 17.7."""
    return 2 if problem.k > 12 and problem.columns <= 10 else 1


def shared(variant: Variant) -> int:
    """Bytes of dynamic shared memory: lists, behind the tile kernel's stages and sums."""
    entries = variant.length + variant.waiting
    return reduce.shared(variant.base) + entries * variant.lists * ENTRY_BYTES


def _rows_of_block(variant: Variant) -> int:
    return variant.lists if variant.base.k else BIG_TILE


def _split(problem: Problem, variant: Variant, gpu: Gpu) -> int:
    """The n of a block."""
    k, stage = problem.columns, 0
    if variant.base.k:  # in static shared memory, a line of whole 16 bytes a thread
        stage = variant.threads * ceil_div(variant.base.k, 4) * 16 + 16
        unit, start = variant.threads, k * THREADS // variant.threads
    else:
        unit, start = BIG_TILE, 1 + 14 * k // problem.k
    registers = targets.REGISTERS // (variant.threads * variant.resident) // 8 * 8
    resident = targets.resident_blocks(
        gpu.arch, variant.threads, registers, shared(variant) + stage
    )
    row_blocks = ceil_div(problem.m, _rows_of_block(variant))
    values = division.Sums(problem.n, problem.m * k * variant.places, problem.batch)
    slots = max(1, min(resident, variant.resident)) * gpu.multiprocessors
    return division.split(values, row_blocks, unit, slots, start=start)


class Lists(ReductionKernel):
    """What the ways to such lists share: one launch has the entries of all rows."""

    role = "topk"

    def passes(self, columns: int) -> list[tuple[int, int]]:
        return [(0, columns)]


class OnLanes(Lists, Reduction):
    """Of sums on the lanes."""

    Variant = Variant

    def takes(self, call: Call, arch: str) -> bool:
        """Whether lists have room, and blocks of the matrix, which tensor cores make, are not
        faster."""
        descriptor, problem = call.descriptor, call.problem
        few = problem.k <= PRODUCT_FEATURES or not descriptor.takes_products
        return few and fits(problem, arch)

    def launch(
        self, descriptor: Pairwise, call: Call, gpu: Gpu, choice: Mapping[str, int]
    ) -> Lowered:
        """The lists, and their merge where a row has several. ``rows`` may be chosen, those of a
        thread of the small kernel."""
        problem = call.problem
        code = variant(problem, gpu.arch, choice.get("rows"))
        per_split = _split(problem, code, gpu)
        memory = _Memory(problem, ceil_div(problem.n, per_split) * code.places)
        results = memory.pointers if memory.lists > 1 else (("out", 0), ("indices", 0))
        first = self.step(descriptor, call, code, gpu.arch, per_split, results)
        if memory.lists == 1:
            return Lowered((first,))
        return Lowered((first, _merge_step(problem, memory, gpu.arch)), memory.end)

    def step(
        self, descriptor: Pairwise, call: Call, code: Variant, arch: str, per_split: int, results
    ) -> Step:
        """The launch that writes lists to ``results``."""
        problem, row_blocks = call.problem, ceil_div(call.problem.m, _rows_of_block(code))
        return Step(
            self.spec(descriptor, code, arch),
            (row_blocks * ceil_div(problem.n, per_split), min(problem.batch, MAX_BATCH_BLOCKS)),
            reduce.fixed_parameters(problem, per_split, row_blocks, call.strides),
            (*((name, 0) for name in OPERANDS[:3]), *results),
            scalar_count(descriptor),
        )

    def spec(self, descriptor: Pairwise, variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant."""
        base = variant.base
        order = f"{variant.length} {'largest' if variant.largest else 'smallest'}"
        words = [base.dtype, *code_words(base)] + [f"p={base.inner}"] * (base.inner != "any")
        words += flags(base, "long_k", "epsilon", "regularized")
        facts = lists(variant.length, variant.waiting, variant.lists, variant.largest)
        source = self.text(descriptor, base, {**facts, **self.facts(variant)})
        spec = KernelSpec(
            "pairwise", source, self.entry, variant.threads, shared(variant),
            description=" ".join([descriptor.describe(), order, base.kind, *words]),
        )  # fmt: skip
        return named(spec, *short(descriptor), order, *words, epilogue=descriptor.epilogue)


class Small(OnLanes):
    """Of up to SMALL_K features."""

    name = "small"
    header = "pairwise/topk/small.cuh"
    entry = "pairwise_topk_small"
    rank = 1

    def takes(self, call: Call, arch: str) -> bool:
        return call.problem.k <= reduce.SMALL_K and super().takes(call, arch)

    def facts(self, variant: Variant) -> dict[str, Fact]:
        return {"RESIDENT": variant.resident, **small_facts(variant.base, variant.threads)}


class Tile(OnLanes):
    """Of any number of features."""

    name = "tile"
    header = "pairwise/topk/tile.cuh"
    entry = "pairwise_topk_tile"
    rank = 2

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


class Products(Lists):
    """The launches of :mod:`kernlib.families.pairwise.kernels.split_reduce`, whose reducers are
    lists, and the merge."""

    name = "products"

    def takes(self, call: Call, arch: str) -> bool:
        """Whether tensor cores compute the sums, and are the fastest to do so."""
        problem, few = call.problem, call.problem.k <= reduce.SMALL_K
        if few or problem.columns > PRODUCT_ENTRIES or not fits(problem, arch):
            return False
        plain = _without_lists(problem)
        is_product = products.KERNEL.takes(call._replace(problem=plain), arch)
        return is_product and reduce.split_pays(plain)

    def launch(
        self, descriptor: Pairwise, call: Call, gpu: Gpu, choice: Mapping[str, int]
    ) -> Lowered:
        """Products, and what waits behind their gate."""
        problem, strides = call.problem, call.strides
        behind = variant(problem, gpu.arch)._replace(places=products.LISTS)
        main = products.default(descriptor, _without_lists(problem), call.precision)
        main = main._replace(
            reducer="Nearest", columns=BIG_TILE, warpgroups=2, entries=behind.length,
            largest=problem.largest,
        )  # fmt: skip
        if main.stages < FEWEST_STAGES:  # beside lists of 16 and 129 features of one word on
            main = main._replace(resident=0)
        main = main._replace(ordered=main.resident == 2)
        place, row_blocks = pack.workspace(problem, main), ceil_div(problem.m, main.rows)
        values = division.Sums(
            problem.n, problem.m * problem.columns * products.LISTS, problem.batch
        )
        least = products.least_splits(main, place, gpu.multiprocessors)
        per_split = division.split(
            values, row_blocks, main.columns, gpu.multiprocessors, least, 4 * problem.columns
        )
        lists = ceil_div(problem.n, per_split) * products.LISTS
        memory = _Memory(problem, lists, round_up(place.size, pack.ALIGNMENT))
        step = products.main_step(descriptor, problem, main, place, per_split, row_blocks, strides)
        gated = TILE.step(descriptor, call, behind, gpu.arch, per_split, memory.pointers)
        steps = (
            *packing.steps(descriptor, problem, main, place),
            step._replace(pointers=(*step.pointers[:-2], *memory.pointers)),
            pack.gated_step(gated, place),
            _merge_step(problem, memory, gpu.arch),
        )
        return Lowered(steps, memory.end)


SMALL, TILE, MERGE = Small(), Tile(), Merge()
KERNELS: tuple[Kernel, ...] = (Products(), SMALL, TILE)

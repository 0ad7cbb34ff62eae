"""float32 products at fp32 grade with blocks of 64 and 128, on Hopper, of operands that are packed
as pairs of float16 words with scales: anew for each call, as a copy that lasts would have to know
of every way in which a tensor can change.

Takes any strides that leave something side by side; what little work three launches are too much
for is left to the portable kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.blocksparse.kernels.order import ORDER
from kernlib.families.blocksparse.kernels.spmm import portable
from kernlib.families.blocksparse.lowering import hopper, summands
from kernlib.families.blocksparse.lowering.problem import Spmm
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.kernel import Gpu, Kernel, named
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import WORKSPACE, Lowered, Step
from kernlib.lowering.wgmma import multiply

PACK_THREADS = 256
SQUARE = 64  # rows that a CTA packs, and numbers of a row
TILE_COLUMNS = 128
PACK_SHARED_BYTES = 4 * SQUARE * (SQUARE + 1)
CHUNK = 4  # elements of 16 bytes
WORD_BYTES, SCALE_BYTES = 4, 4  # of a number's two words, of a row's scale
ALIGNMENT = 256  # of what the workspace holds
PACK_FIELDS = Fields((
    "Side of_dense", "Side of_values",  # a line is a row that is packed; its columns, the depth
    "u32 squares",                      # of the dense operand; behind them those of values
    "int columns", "int column_squares",            # of a head's dense operand
    "int depth_squares", "int heads",               # of it, that are packed
    "int capacity", "int lines", "int depths",      # slots; squares of a block of op(S), down and
                                                    # across
    "int dense_whole", "int values_whole",          # whether 16 bytes can be read at a time
))  # fmt: skip
PACK_PARAMETERS = Parameters(7, PACK_FIELDS.format)

STAGES, STAGE_BYTES, SCALES_BYTES = 3, 64 * 1024, 1024
BARRIER_BYTES = 128
# Scales stand twice as long as words, and 1024 are what the swizzle's start takes.
SHARED_BYTES = STAGES * (STAGE_BYTES + 2 * SCALES_BYTES) + BARRIER_BYTES + 1024
RING = {**hopper.ring(STAGE_BYTES, 3), "OUT_BYTES": 0}
MOST = 2**31 - 1  # CTAs of a launch, tiles, and columns that are rounded up
POINTERS = 5 + len(hopper.LISTS)
STRIDES = (
    "i64 out_batch", "i64 out_head", "i64 out_line", "i64 out_column",
    "i64 piece_batch", "i64 panel_batch", "i64 panel_head",  # in pieces and panels; 0 where one
                                                             # serves all
    "int depths",  # panels of a column of tiles
    "int pairs",   # whether two columns can be written at a time
)  # fmt: skip

# What an H100 or H200 of 132 multiprocessors does, to tell where packing pays.
MULTIPROCESSORS = 132
WORDS_RATE = 200e6  # operations a microsecond on what is stored
PACKED_RATE = 3.5e6  # bytes a microsecond, read and written
LAUNCHES = 9.0  # microseconds of three launches


class Packed(NamedTuple):
    """What is made of a problem's operands: pieces of 64 x 64 of the stored blocks and panels of
    128 columns by 64 of the depth, and where their words and scales begin in the workspace."""

    pieces: int  # of a batch entry
    piece_batches: int
    depths: int  # panels of 128 columns
    columns: int  # tiles of them
    heads: int
    panel_batches: int
    start: int

    @property
    def all_pieces(self) -> int:
        return self.pieces * self.piece_batches

    @property
    def head_panels(self) -> int:
        """Of a head."""
        return self.depths * self.columns

    @property
    def all_panels(self) -> int:
        return self.head_panels * self.heads * self.panel_batches

    @property
    def squares(self) -> int:
        """CTAs that pack them."""
        return self.all_pieces + 2 * self.all_panels

    @property
    def places(self) -> tuple[int, ...]:
        """Where pieces, their scales, panels and their scales begin, and all of it ends."""
        rows = self.all_pieces * SQUARE, self.all_panels * TILE_COLUMNS
        sizes = [n * each for n in rows for each in (SQUARE * WORD_BYTES, SCALE_BYTES)]
        places = [round_up(self.start, ALIGNMENT)]
        for size in sizes:
            places.append(round_up(places[-1] + size, ALIGNMENT))
        return tuple(places)


class PackWords(Kernel):
    """A block of threads packs 64 rows by 64 of the depth."""

    role = "step"
    name = "pack"
    header = "blocksparse/hopper_words/pack.cuh"
    entry = "blocksparse_pack"
    reason = "operands of `hopper_words` as pairs of float16 words"

    class Variant(NamedTuple):
        """Nothing: one kernel packs all problems."""

    def step(self, problem: Spmm, packed: Packed, overlaps: bool) -> Step:
        """The launch that packs both operands."""
        blocks, dense, values = problem.blocks, problem.dense, problem.values
        ends = (values.row, values.column)[:: -1 if problem.transposed else 1]
        of_dense = (dense.batch, dense.head, dense.column, dense.line)
        of_values = (values.batch, values.slot, *ends)
        outer = (packed.panel_batches, packed.heads, problem.columns, packed.depths * SQUARE)
        inner = (packed.piece_batches, blocks.capacity, SQUARE, SQUARE)
        numbers = PACK_FIELDS.values(
            of_dense=of_dense,
            of_values=of_values,
            squares=packed.squares - packed.all_pieces,
            columns=problem.columns,
            column_squares=2 * packed.columns,
            depth_squares=packed.depths,
            heads=packed.heads,
            capacity=blocks.capacity,
            lines=problem.op.rows // SQUARE,
            depths=problem.op.cols // SQUARE,
            dense_whole=int(_has_chunks(of_dense, outer, dense.alignment)),
            values_whole=int(_has_chunks(of_values, inner, values.alignment)),
        )
        pieces, piece_scales, panels, panel_scales, _ = packed.places
        pointers = [(name, 0) for name in ("dense", "values", "counts")]
        pointers += [(WORKSPACE, place) for place in (panels, panel_scales, pieces, piece_scales)]
        return Step(
            self.spec((), self.Variant(), ""),
            (packed.squares, 1),
            PACK_PARAMETERS.pack(*numbers),
            tuple(pointers),
            overlaps=overlaps,
        )

    def axes(self, subject, scope) -> Mapping[str, Iterable]:
        """None."""
        return {}

    def spec(self, subject, variant: Variant, arch: str) -> KernelSpec:
        """The specification, one for all problems."""
        facts = {"THREADS": PACK_THREADS, "PARAMETER_BYTES": PACK_PARAMETERS.size}
        source = self.source(facts, PACK_FIELDS.text(), includes=(summands.HEADER,))
        line = "blocksparse pack float32 words"
        return named(
            KernelSpec(
                "blocksparse", source, self.entry, PACK_THREADS, PACK_SHARED_BYTES, description=line
            )
        )


PACK = PackWords()


class HopperWords(Kernel):
    """Three launches where tiles are many: their order, the packing, the product."""

    role = "spmm"
    name = "hopper_words"
    header = "blocksparse/hopper_words/hopper_words.cuh"
    entry = "blocksparse_words"
    rank = 3
    reason = (
        "wgmma of sm_90a, float32 at fp32, blocks of 64 and 128: chosen where three launches "
        "are estimated to take less than `portable`"
    )

    class Variant(NamedTuple):
        """Everything that code generation chooses besides the epilogue."""

        lines: int  # of a block of op(S)
        depth: int
        transposed: bool

    def takes(self, problem: Spmm, arch: str) -> bool:
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

    def pays(self, problem: Spmm, gpu: Gpu) -> bool:
        """Whether it takes less time by rule than the portable kernel, of a fifth of the rate, with
        the packing of both operands and two launches more; as if all slots were stored ones."""
        blocks, places = problem.blocks, _packed(problem, False).places
        stored = blocks.capacity * blocks.rows * blocks.cols * problem.batch
        across = ceil_div(problem.columns, TILE_COLUMNS) * TILE_COLUMNS
        share = gpu.multiprocessors / MULTIPROCESSORS
        busy = min(1.0, _tiles(problem) / gpu.multiprocessors)
        time = 2 * stored * across / (WORDS_RATE * share * busy)
        time += 2 * (places[-1] - places[0]) / PACKED_RATE + LAUNCHES
        return time < portable.best_microseconds(problem, hopper.ARCH, gpu.multiprocessors)

    def launch(
        self, epilogue: tuple[Epilogue, ...], problem: Spmm, gpu: Gpu, choice: Mapping[str, int]
    ) -> Lowered:
        """The launches of a problem."""
        count = gpu.multiprocessors
        ordered = hopper.is_ordered(problem, count, TILE_COLUMNS)
        packed, grid = _packed(problem, ordered), min(count, _tiles(problem))
        words = ((WORKSPACE, place) for place in packed.places[:-1])
        numbers = _fixed(epilogue).values(
            **_strides(problem, packed),
            **hopper.numbers(problem, count, TILE_COLUMNS),
        )
        main = Step(
            self.spec(epilogue, self.Variant(*problem.op[:2], problem.transposed), gpu.arch),
            (grid, 1),
            _parameters(epilogue).pack(*numbers),
            (*words, ("out", 0), *hopper.lists(ordered), *text.pointers((), epilogue)),
            text.scalar_count(epilogue),
            overlaps=True,
        )
        first = (ORDER.step(hopper.units_of(problem), problem, grid),) if ordered else ()
        pack = PACK.step(problem, packed, overlaps=ordered)
        return Lowered((*first, pack, main), packed.places[-1])

    def axes(self, epilogue: tuple[Epilogue, ...], scope) -> Mapping[str, Iterable]:
        """Of blocks of one size and their transposes."""
        sizes = dict.fromkeys(scope.block)
        is_single = "float32" in scope.dtypes and scope.precision in (None, "fp32")
        fits = is_single and scope.arch == hopper.ARCH and set(sizes) <= set(hopper.SIZES)
        return {
            "lines": sizes if fits else (),
            "depth": sizes,
            "transposed": (False, True),
        }

    def is_legal(self, variant: Variant, epilogue: tuple[Epilogue, ...], scope) -> bool:
        """Whether op(S) has such blocks."""
        block = (variant.lines, variant.depth)
        return (block[::-1] if variant.transposed else block) == tuple(scope.block)

    def specs(self, epilogue: tuple[Epilogue, ...], scope, arch: str) -> list[KernelSpec]:
        """The specifications of all variants of a scope, of the order and of the packing."""
        products = super().specs(epilogue, scope, arch)
        packing = [PACK.spec((), PACK.Variant(), arch)] if products else []
        return ORDER.before(packing + products, scope)

    def spec(self, epilogue: tuple[Epilogue, ...], variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant."""
        lines, depth, transposed = variant
        words = [f"{lines}x{depth}"] + ["transposed"] * transposed
        facts = {
            **text.facts("float32", "float32", epilogue),
            **hopper.walk(lines, transposed),
            **RING,
            "LINES": lines,
            "DEPTH": depth,
            "PARAMETER_BYTES": _parameters(epilogue).size,
        }
        texts = (
            _fixed(epilogue).text(),
            text.typed_finish(epilogue),
            multiply("float16", TILE_COLUMNS, False),
        )
        source = self.source(facts, *texts, includes=hopper.INCLUDES)
        return self.named_spec(
            source, hopper.THREADS, SHARED_BYTES, "float32", words, epilogue, "fp32"
        )


def _fixed(epilogue: tuple[Epilogue, ...]) -> Fields:
    return hopper.fields(epilogue, *STRIDES)


def _parameters(epilogue: tuple[Epilogue, ...]) -> Parameters:
    """Packed operands, the result, the layout's bits and ranks, the epilogue's, strides, sizes."""
    return text.parameters(POINTERS, _fixed(epilogue).format, epilogue)


def _strides(problem: Spmm, packed: Packed) -> dict[str, int]:
    """The values of STRIDES: of the result in elements, of the packed operands in pieces and
    panels."""
    out = problem.out
    return {
        "out_batch": out.batch,
        "out_head": out.head,
        "out_line": out.line,
        "out_column": out.column,
        "piece_batch": packed.pieces if packed.piece_batches > 1 else 0,
        "panel_batch": packed.head_panels * packed.heads if packed.panel_batches > 1 else 0,
        "panel_head": packed.head_panels if packed.heads > 1 else 0,
        "depths": packed.depths,
        "pairs": int(_in_pairs(problem)),
    }


def _in_pairs(problem: Spmm) -> bool:
    """Whether two neighbouring columns of the result are 8 aligned bytes."""
    out = problem.out
    outer = zip(out[:3], (problem.batch, problem.blocks.heads, problem.lines), strict=True)
    even = not any(stride % 2 for stride, count in outer if count > 1)
    return out.column == 1 and even and out.alignment % 8 == 0 and problem.columns % 2 == 0


def _packed(problem: Spmm, ordered: bool) -> Packed:
    """What is packed, behind the order of tiles where there is one."""
    op, dense, values = problem.op, problem.dense, problem.values
    return Packed(
        pieces=op.capacity * (op.rows // SQUARE) * (op.cols // SQUARE),
        piece_batches=problem.batch if values.batch else 1,
        depths=op.cols * op.grid_cols // SQUARE,
        columns=ceil_div(problem.columns, TILE_COLUMNS),
        heads=op.heads if dense.head else 1,
        panel_batches=problem.batch if dense.batch else 1,
        start=ORDER.workspace(problem) if ordered else 0,
    )


def _tiles(problem: Spmm) -> int:
    return hopper.tiles_of(problem, TILE_COLUMNS)


def _has_chunks(strides: tuple[int, ...], sizes: tuple[int, ...], alignment: int) -> bool:
    """Whether neighbours can be read 16 bytes at a time, by rows or along the depth."""
    near = strides.index(1, 2) if 1 in strides[2:] else None
    if strides[3] == 1:
        near = 3
    others = [n for i, n in enumerate(strides) if i != near and sizes[i] > 1]
    return near is not None and alignment == 16 and all(n % CHUNK == 0 for n in others)

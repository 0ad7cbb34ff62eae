"""float32 operands as pairs of float16 words with scales, on Hopper.

They are packed anew for each call, as a copy that lasts would have to know of every way in which a
tensor can change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kernlib.families.blocksparse.lowering import summands
from kernlib.families.blocksparse.lowering.problem import Spmm
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.kernel import Kernel, named
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import WORKSPACE, Step

THREADS = 256
SQUARE = 64  # rows that a CTA packs, and numbers of a row
TILE_COLUMNS = 128
SHARED_BYTES = 4 * SQUARE * (SQUARE + 1)
CHUNK = 4  # elements of 16 bytes
WORD_BYTES, SCALE_BYTES = 4, 4  # of a number's two words, of a row's scale
ALIGNMENT = 256  # of what the workspace holds
POINTERS = 7
FIELDS = Fields((
    "Side of_dense", "Side of_values",  # a line is a row that is packed; its columns, the depth
    "u32 squares",                      # of the dense operand; behind them those of values
    "int columns", "int column_squares",            # of a head's dense operand
    "int depth_squares", "int heads",               # of it, that are packed
    "int capacity", "int lines", "int depths",      # slots; squares of a block of op(S), down and
                                                    # across
    "int dense_whole", "int values_whole",          # whether 16 bytes can be read at a time
))  # fmt: skip
PARAMETERS = Parameters(POINTERS, FIELDS.format)


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


def packed(problem: Spmm, start: int) -> Packed:
    """What is made of a problem's operands behind so many bytes of the workspace."""
    blocks, dense, values = problem.blocks, problem.dense, problem.values
    depth = blocks.cols * blocks.grid_cols
    if problem.transposed:
        depth = blocks.rows * blocks.grid_rows
    return Packed(
        pieces=blocks.capacity * (blocks.rows // SQUARE) * (blocks.cols // SQUARE),
        piece_batches=problem.batch if values.batch else 1,
        depths=depth // SQUARE,
        columns=ceil_div(problem.columns, TILE_COLUMNS),
        heads=blocks.heads if dense.head else 1,
        panel_batches=problem.batch if dense.batch else 1,
        start=start,
    )


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
        ends, sizes = (values.row, values.column), (blocks.rows // SQUARE, blocks.cols // SQUARE)
        if problem.transposed:
            ends, sizes = ends[::-1], sizes[::-1]
        of_dense = (dense.batch, dense.head, dense.column, dense.line)
        of_values = (values.batch, values.slot, *ends)
        outer = (packed.panel_batches, packed.heads, problem.columns, packed.depths * SQUARE)
        inner = (packed.piece_batches, blocks.capacity, SQUARE, SQUARE)
        numbers = FIELDS.values(
            of_dense=of_dense,
            of_values=of_values,
            squares=packed.squares - packed.all_pieces,
            columns=problem.columns,
            column_squares=2 * packed.columns,
            depth_squares=packed.depths,
            heads=packed.heads,
            capacity=blocks.capacity,
            lines=sizes[0],
            depths=sizes[1],
            dense_whole=int(_whole(of_dense, outer, dense.alignment)),
            values_whole=int(_whole(of_values, inner, values.alignment)),
        )
        pieces, piece_scales, panels, panel_scales, _ = packed.places
        pointers = [(name, 0) for name in ("dense", "values", "counts")]
        pointers += [(WORKSPACE, place) for place in (panels, panel_scales, pieces, piece_scales)]
        return Step(
            self.spec((), self.Variant(), ""),
            (packed.squares, 1),
            PARAMETERS.pack(*numbers),
            tuple(pointers),
            overlaps=overlaps,
        )

    def axes(self, subject, scope) -> Mapping[str, Iterable]:
        """None."""
        return {}

    def spec(self, subject, variant: Variant, arch: str) -> KernelSpec:
        """The specification, one for all problems."""
        facts = {"THREADS": THREADS, "PARAMETER_BYTES": PARAMETERS.size}
        source = self.source(facts, FIELDS.text(), includes=(summands.HEADER,))
        line = "blocksparse pack float32 words"
        return named(
            KernelSpec("blocksparse", source, self.entry, THREADS, SHARED_BYTES, description=line)
        )


PACK = PackWords()


def _whole(strides: tuple[int, ...], sizes: tuple[int, ...], alignment: int) -> bool:
    """Whether neighbours can be read 16 bytes at a time, by rows or along the depth."""
    near = strides.index(1, 2) if 1 in strides[2:] else None
    if strides[3] == 1:
        near = 3
    others = [n for i, n in enumerate(strides) if i != near and sizes[i] > 1]
    return near is not None and alignment == 16 and all(n % CHUNK == 0 for n in others)

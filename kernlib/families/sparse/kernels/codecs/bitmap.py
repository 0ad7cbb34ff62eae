"""The kernels that count, make and undo chunks of bitmap matrices.

Of numbers they know only that the highest bit is the sign: values are integers of 16 or 32 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kernlib.families.sparse.kernels.codecs.codec import Codec, itemsizes
from kernlib.families.sparse.lowering.problem import Scope
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.config import Fact
from kernlib.lowering.dtypes import BITS
from kernlib.lowering.parameters import Fields
from kernlib.lowering.steps import Step

CHUNK_ROWS, CHUNK_COLUMNS = 16, 256


class BitmapCodec(Codec):
    """A kernel of values of some bytes; a CTA takes some ``chunks``."""

    chunks = 1

    class Variant(NamedTuple):
        """Everything that code generation chooses."""

        itemsize: int

    def axes(self, epilogue: tuple, scope: Scope) -> Mapping[str, Iterable]:
        """The sizes of a scope's dtypes."""
        return {"itemsize": itemsizes(scope.dtypes)}

    def facts(self, variant: Variant) -> dict[str, Fact]:
        """An integer as wide as values."""
        return {"BitsT": BITS[variant.itemsize]}

    def words(self, variant: Variant) -> list[str]:
        """Its bits."""
        return [f"{8 * variant.itemsize}bit"]

    def step(self, rows: int, cols: int, row_stride: int, itemsize: int, vectors: bool) -> Step:
        """The launch for a matrix whose rows may take 16-byte loads or stores, ``vectors``."""
        chunks, across = chunks_of(rows, cols)
        values = {
            "rows": rows,
            "cols": cols,
            "row_stride": row_stride,
            "chunks": chunks,
            "kchunks": across,
            "vectors": vectors,
            "unused": 0,
        }
        blocks, names = ceil_div(chunks, self.chunks), self.fixed.names
        return self.launch_of(self.Variant(itemsize), blocks, *(values[name] for name in names))


class Count(BitmapCodec):
    """Counts the entries of each chunk."""

    name = "bitmap count"
    header = "sparse/bitmap/count.cuh"
    entry = "sparse_bitmap_count"
    does = "count"
    operands = ("dense", "counts")
    fixed = Fields((
        "i64 rows", "i64 cols", "i64 row_stride",
        "u32 chunks", "int kchunks",
        "int vectors",  # whether rows take aligned 16-byte loads
        "int unused",
    ))  # fmt: skip
    threads = 256
    chunks = 8


class Encode(BitmapCodec):
    """Makes chunks at the offsets that their counts gave them."""

    name = "bitmap encode"
    header = "sparse/bitmap/encode.cuh"
    entry = "sparse_bitmap_encode"
    does = "write"
    operands = ("dense", "offsets", "data")
    fixed = Fields(("i64 rows", "i64 cols", "i64 row_stride", "int kchunks", "int vectors"))


class Decode(BitmapCodec):
    """Lays chunks out in a contiguous matrix."""

    name = "bitmap decode"
    header = "sparse/bitmap/decode.cuh"
    entry = "sparse_bitmap_decode"
    does = "read"
    operands = ("data", "offsets", "out", "data_end")
    fixed = Fields((
        "i64 rows", "i64 cols",
        "int kchunks",
        "int vectors",  # whether rows of out take aligned 16-byte stores
    ))  # fmt: skip


def chunks_of(rows: int, cols: int) -> tuple[int, int]:
    """The chunks of a matrix, and those of a slab of 16 rows."""
    across = ceil_div(cols, CHUNK_COLUMNS)
    return ceil_div(rows, CHUNK_ROWS) * across, across

"""The kernels that count and write codes of the formats u8, u4 and u2, and that read the matrix
back. Counting and writing read the dense matrix once each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kernlib.families.sparse.kernels.codecs.codec import Codec, itemsizes
from kernlib.families.sparse.lowering.codes import CODES, ROW_TYPES
from kernlib.families.sparse.lowering.problem import Scope
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.config import Fact
from kernlib.lowering.dtypes import BITS
from kernlib.lowering.parameters import Fields
from kernlib.lowering.steps import Step

READING = (
    "i64 row_stride", "i64 column_stride",
    "u32 lines", "u32 cols", "u32 width", "u32 panels",  # lines of the matrix
    "u32 slices",  # of a panel
    "u32 parts",   # into which the codes of a lane are cut
)  # fmt: skip


class SlicesCodec(Codec):
    """A kernel of a format, values of some bytes, and rows of a CUDA type; a warp an item."""

    row_types = ROW_TYPES

    class Variant(NamedTuple):
        """Everything that code generation chooses."""

        format: str
        itemsize: int
        rows: str = ROW_TYPES[0]

    def axes(self, epilogue: tuple, scope: Scope) -> Mapping[str, Iterable]:
        """The sizes of a scope's dtypes."""
        sizes = itemsizes(scope.dtypes)
        return {"format": (scope.format,), "itemsize": sizes, "rows": self.row_types}

    def facts(self, variant: Variant) -> dict[str, Fact]:
        """Unsigned numbers as wide as values and rows, and the bits of steps."""
        return {
            "BitsT": BITS[variant.itemsize],
            "RowT": variant.rows,
            "STEP_BITS": CODES[variant.format].bits,
        }

    def words(self, variant: Variant) -> list[str]:
        """The format, bits of values, and rows."""
        return [variant.format, f"{8 * variant.itemsize}bit", "rows", variant.rows]

    def step(self, variant: Variant, warps: int, sizes: tuple[int, ...]) -> Step:
        """The launch of so many warps, by the values of ``fixed`` in order."""
        return self.launch_of(variant, ceil_div(warps, self.threads // 32), *sizes)


class Count(SlicesCodec):
    """Counts the codes of each row in each panel."""

    name = "slices count"
    header = "sparse/slices/count.cuh"
    entry = "sparse_slices_count"
    does = "count"
    operands = ("dense", "lengths")
    fixed = Fields(READING)
    threads = 256
    row_types = ROW_TYPES[:1]


class Write(SlicesCodec):
    """Writes codes, and where parts of rows begin."""

    name = "slices write"
    header = "sparse/slices/write.cuh"
    entry = "sparse_slices_write"
    does = "write"
    operands = ("dense", "offsets", "rows", "data")
    fixed = Fields(READING)
    threads = 256


class Read(SlicesCodec):
    """Writes the dense matrix."""

    name = "slices read"
    header = "sparse/slices/decode.cuh"
    entry = "sparse_slices_read"
    does = "read"
    operands = ("data", "offsets", "rows", "dense")
    fixed = Fields((
        "i64 cols",
        "u32 width", "u32 panel_slices", "u32 slices",
        "u32 lines", "u32 codes",  # rows of the matrix; of a lane in data: no bytes lead beyond
        "u32 parts",               # into which a lane's codes are cut
    ))  # fmt: skip

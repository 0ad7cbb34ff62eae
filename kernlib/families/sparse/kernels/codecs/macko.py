"""The kernels that count, make and undo entries in MACKO's format. They know values by their
bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kernlib.families.sparse.kernels.codecs.codec import Codec
from kernlib.families.sparse.lowering.problem import POINTER_TYPES, Scope
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.config import Fact
from kernlib.lowering.dtypes import BITS, DTYPES
from kernlib.lowering.parameters import Fields
from kernlib.lowering.steps import Step

ROWS = 4  # of a CTA, a warp each
# All bits of a value but its sign, by its bytes; the bits of infinity.
MAGNITUDE = {2: 0x7FFF, 4: 0x7FFFFFFF}
INFINITY = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000}
READING = (
    "i64 rows", "i64 columns", "i64 row_stride",
    "u64 vectors",  # whether runs of eight columns take 16-byte loads
)  # fmt: skip


class MackoCodec(Codec):
    """A kernel of a dtype; ``wide`` where row_ptr has 64 bits."""

    takes_wide = True

    class Variant(NamedTuple):
        """Everything that code generation chooses."""

        dtype: str
        wide: bool = False

    def axes(self, epilogue: tuple, scope: Scope) -> Mapping[str, Iterable]:
        """The dtypes of a scope."""
        return {"dtype": scope.dtypes, "wide": (False, True) if self.takes_wide else (False,)}

    def facts(self, variant: Variant) -> dict[str, Fact]:
        """Bits of values, and the type of row_ptr."""
        itemsize = DTYPES[variant.dtype].bytes
        return {
            "BitsT": BITS[itemsize],
            "RowT": POINTER_TYPES[variant.wide],
            "MAGNITUDE": MAGNITUDE[itemsize],
            "INFINITE": INFINITY[variant.dtype],
        }

    def words(self, variant: Variant) -> list[str]:
        """The dtype, and whether row_ptr is wide."""
        return [variant.dtype, *["wide"] * variant.wide]

    def step(self, dtype: str, wide: bool, *sizes: int) -> Step:
        """The launch for a matrix by ``fixed``, of which the first are its rows."""
        return self.launch_of(self.Variant(dtype, wide), ceil_div(sizes[0], ROWS), *sizes)


class Count(MackoCodec):
    """Counts the entries of each row, and those that are no pads."""

    name = "macko count"
    header = "sparse/macko/count.cuh"
    entry = "sparse_macko_count"
    does = "count"
    operands = ("dense", "counts")
    fixed = Fields(READING)
    takes_wide = False


class Encode(MackoCodec):
    """Writes the entries of each row."""

    name = "macko encode"
    header = "sparse/macko/encode.cuh"
    entry = "sparse_macko_encode"
    does = "write"
    operands = ("dense", "row_ptr", "values", "deltas")
    fixed = Fields(READING)


class Decode(MackoCodec):
    """Writes entries into a matrix of zeros."""

    name = "macko decode"
    header = "sparse/macko/decode.cuh"
    entry = "sparse_macko_decode"
    does = "read"
    operands = ("values", "deltas", "row_ptr", "out", "values_end")
    fixed = Fields(("i64 rows", "i64 columns"))

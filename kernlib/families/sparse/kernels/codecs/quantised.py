"""The kernels of bitmap matrices whose values have fewer bits: they pack codes, and lay matrices
out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kernlib.families.sparse.kernels.codecs.bitmap import chunks_of
from kernlib.families.sparse.kernels.codecs.codec import Codec, itemsizes
from kernlib.families.sparse.lowering.problem import Scope
from kernlib.families.sparse.lowering.quantised import QUANTISED
from kernlib.lowering.config import Constant, Fact
from kernlib.lowering.dtypes import BITS, DTYPES
from kernlib.lowering.parameters import Fields
from kernlib.lowering.steps import Step


class QuantisedCodec(Codec):
    """A kernel of one code: the name of its values, such as "int8"."""

    includes = ("sparse/quantised/kinds.cuh",)


class Pack(QuantisedCodec):
    """Packs codes of values of some bytes, of which only zeros are told from others."""

    name = "bitmap pack"
    header = "sparse/quantised/pack.cuh"
    entry = "sparse_bitmap_pack"
    does = "write"
    operands = ("values", "codes", "scales", "offsets", "data")
    fixed = Fields(())

    class Variant(NamedTuple):
        """Everything that code generation chooses."""

        codes: str
        itemsize: int

    def axes(self, epilogue: tuple, scope: Scope) -> Mapping[str, Iterable]:
        """The sizes of a scope's dtypes."""
        codes = QUANTISED[scope.format].values
        return {"codes": (codes,), "itemsize": itemsizes(scope.dtypes)}

    def facts(self, variant: Variant) -> dict[str, Fact]:
        """The code, and an integer as wide as values."""
        return {"CODES": Constant(variant.codes.upper()), "BitsT": BITS[variant.itemsize]}

    def words(self, variant: Variant) -> list[str]:
        """The code, and bits of values."""
        return [variant.codes, f"{8 * variant.itemsize}bit"]

    def step(self, codes: str, itemsize: int, chunks: int) -> Step:
        """The launch for some chunks."""
        return self.launch_of(self.Variant(codes, itemsize), chunks)


class Unpack(QuantisedCodec):
    """Lays chunks out in a contiguous matrix."""

    name = "bitmap unpack"
    header = "sparse/quantised/unpack.cuh"
    entry = "sparse_bitmap_unpack"
    does = "read"
    operands = ("data", "offsets", "out", "data_end")
    fixed = Fields(("i64 rows", "i64 cols", "int kchunks", "int unused"))

    class Variant(NamedTuple):
        """Everything that code generation chooses."""

        codes: str
        dtype: str

    def axes(self, epilogue: tuple, scope: Scope) -> Mapping[str, Iterable]:
        """The dtypes of a scope."""
        return {"codes": (QUANTISED[scope.format].values,), "dtype": scope.dtypes}

    def facts(self, variant: Variant) -> dict[str, Fact]:
        """The code, and the storage of values."""
        return {"CODES": Constant(variant.codes.upper()), "OutputT": DTYPES[variant.dtype].cuda}

    def words(self, variant: Variant) -> list[str]:
        """The code and the dtype."""
        return list(variant)

    def step(self, codes: str, dtype: str, rows: int, cols: int) -> Step:
        """The launch for a matrix."""
        chunks, across = chunks_of(rows, cols)
        return self.launch_of(self.Variant(codes, dtype), chunks, rows, cols, across, 0)

"""The dtypes of kernels, by torch's names: their names in device code, their sizes, and the dtypes
that they are summed in."""

from __future__ import annotations

from kernlib.records import NamedTuple


class Dtype(NamedTuple):
    """The CUDA type of storage, its bytes, and the name of the dtype of the arithmetic."""

    cuda: str
    bytes: int
    accumulator: str

    @property
    def sums(self) -> Dtype:
        """The dtype of the arithmetic."""
        return DTYPES[self.accumulator]


DTYPES = {
    "float32": Dtype("float", 4, "float32"),
    "float64": Dtype("double", 8, "float64"),
    "float16": Dtype("half_t", 2, "float32"),
    "bfloat16": Dtype("bfloat16_t", 2, "float32"),
}
# Those that are summed in float32. Kernels of products and of wgmma take these alone.
FLOAT_SUMS = tuple(name for name, dtype in DTYPES.items() if dtype.accumulator == "float32")
BITS = {2: "u16", 4: "u32"}  # CUDA types of so many bytes, for kernels that only move values


def outputs(dtype: str) -> tuple[str, ...]:
    """The dtypes that results of operands of a dtype may be stored in: that, or the dtype of its
    sums."""
    return tuple(dict.fromkeys((dtype, DTYPES[dtype].accumulator)))

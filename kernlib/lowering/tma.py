"""What Hopper's copy engine (TMA) can address, and the tensor maps by which it does."""

from __future__ import annotations

from kernlib.lowering.dtypes import DTYPES
from kernlib.records import NamedTuple

MAX_SIZE = 2**31 - 1024  # kernels round sizes up to whole tiles, in an int


class TensorMap(NamedTuple):
    """A tensor of ``sizes``, innermost first, and the ``box`` that one copy takes of it.
    ``strides`` are bytes, of all dimensions but the innermost, whose elements lie side by side.
    Rows of a box are swizzled by ``swizzle`` bytes: 0, 32, 64 or 128."""

    dtype: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


class Extent(NamedTuple):
    """An operand as its map has it: sizes, innermost first, and strides, in elements, of all
    dimensions but the innermost, whose elements lie side by side."""

    sizes: tuple[int, int, int, int]
    strides: tuple[int, int, int]


def takes(dtype: str, left: int, out: int, x: Extent, y: Extent) -> bool:
    """Whether the copy engine can read the left operand, x, and write the result, y. ``left`` and
    ``out`` are the alignments of their addresses. The lines of y must end on whole 16 bytes too,
    since the copy engine would overwrite what follows."""
    whole = y.sizes[0] * DTYPES[dtype].bytes % 16 == 0
    return whole and addressable(dtype, left, x) and addressable(dtype, out, y)


def addressable(dtype: str, alignment: int, extent: Extent) -> bool:
    """Whether a tensor map can describe a tensor of this alignment and extent."""
    itemsize = DTYPES[dtype].bytes
    pairs = zip(extent.strides, extent.sizes[1:], strict=True)
    steps = [stride * itemsize for stride, size in pairs if size > 1]
    return (
        alignment % 16 == 0
        and all(0 < size < MAX_SIZE for size in extent.sizes)
        and all(0 < step < 2**40 and step % 16 == 0 for step in steps)
    )


def tensor_map(dtype: str, extent: Extent, box: tuple[int, int, int, int]) -> TensorMap:
    """The map of an addressable tensor, whose boxes have swizzled rows of 128 bytes."""
    itemsize = DTYPES[dtype].bytes
    pairs = zip(extent.strides, extent.sizes[1:], strict=True)
    # A dimension of size 1 gets any stride that a map may have.
    steps = tuple(stride * itemsize if size > 1 else 16 for stride, size in pairs)
    return TensorMap(dtype, extent.sizes, steps, box, 128)

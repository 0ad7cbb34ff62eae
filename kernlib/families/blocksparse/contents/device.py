"""The tensors of a layout on a GPU: of a mask or lists of indices there, by kernels on torch's
current stream, without waiting for it."""

from __future__ import annotations

import torch

from kernlib.families.blocksparse.kernels import layout as kernels
from kernlib.families.blocksparse.lowering.problem import Blocks
from kernlib.runtime.sequence import StepsCache

DTYPES = {torch.int32: "int32", torch.int64: "int64"}

_plans = StepsCache()


def write_mask(tensors: tuple[torch.Tensor, ...], mask: torch.Tensor, blocks: Blocks) -> None:
    """Write the contents of a contiguous mask (heads, rows, columns) of bools."""
    steps = _plans.of(
        ("mask", blocks),
        kernels.MASK_OPERANDS,
        tensors[0].device,
        lambda: kernels.lower_mask(blocks),
    )
    steps.launch([t.data_ptr() for t in (mask, *tensors)])


def write_indices(
    tensors: tuple[torch.Tensor, ...], given: dict[str, torch.Tensor], blocks: Blocks
) -> None:
    """Write the contents of contiguous lists: rows, cols and, where there are some, heads."""
    rows, cols, heads = (given.get(name) for name in ("rows", "cols", "heads"))
    indices = kernels.Indices(rows.shape[0], DTYPES[rows.dtype], heads is not None)
    steps = _plans.of(
        ("indices", blocks, indices),
        kernels.INDEX_OPERANDS,
        tensors[0].device,
        lambda: kernels.lower_indices(blocks, indices),
    )
    row_bits, counts = tensors[0], tensors[5]
    row_bits.zero_()
    counts.zero_()
    lists = rows, cols, rows if heads is None else heads
    steps.launch([t.data_ptr() for t in (*lists, *tensors)])

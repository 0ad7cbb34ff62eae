"""The formats u8, u4 and u2 on a GPU: codes counted and written, and the dense matrix, by kernels.

See :mod:`kernlib.families.sparse.formats.slices`; what a function calls ``code`` is its ``Code``.
Counting and writing read the dense matrix once each.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kernlib.families.sparse.formats.encoding import counted
from kernlib.families.sparse.formats.tiling import Tiling
from kernlib.families.sparse.kernels.codecs.slices import Count, Read, Write
from kernlib.families.sparse.launching import launch
from kernlib.families.sparse.lowering.codes import LANES, Code
from kernlib.lowering.arithmetic import ceil_div

ROW_TYPES = {torch.uint8: "u16", torch.int32: "u32"}


def count(code: Code, dense: torch.Tensor, width: int) -> torch.Tensor:
    """Codes of each (panel, row): int32, :func:`counted`."""
    rows, cols = dense.shape
    panels = ceil_div(cols, width)
    lengths = torch.empty(panels, rows, dtype=torch.int32, device=dense.device)
    if lengths.numel():
        variant = Count.Variant(code.name, dense.element_size())
        sizes = _reading(dense, Tiling(width), ceil_div(rows, 32))
        launch(Count(), (variant, panels * rows, sizes), dense, lengths)
    return counted(lengths)


def write(
    code: Code,
    dense: torch.Tensor,
    tiling: Tiling,
    offsets: torch.Tensor,
    rows: torch.Tensor,
    data: torch.Tensor,
) -> None:
    """Write all codes into ``data`` and the starts of parts into ``rows``, zero before."""
    variant = Write.Variant(code.name, dense.element_size(), ROW_TYPES[rows.dtype])
    warps, sizes = LANES * (offsets.numel() - 1), _reading(dense, tiling, rows.shape[1])
    launch(Write(), (variant, warps, sizes), dense, offsets, rows, data)


def read(
    code: Code, tensors: Mapping[str, torch.Tensor], tiling: Tiling, dense: torch.Tensor
) -> None:
    """Write the matrix into ``dense``, contiguous."""
    rows = tensors["rows"]
    variant = Read.Variant(code.name, dense.element_size(), ROW_TYPES[rows.dtype])
    slices, codes = rows.shape[0] * rows.shape[1], tensors["data"].numel()
    codes //= code.size(dense.element_size())
    (lines, cols), (width, parts) = dense.shape, tiling
    sizes = cols, width, rows.shape[1], slices, lines, codes, parts
    operands = tensors["data"], tensors["offsets"], rows, dense
    launch(Read(), (variant, slices * parts, sizes), *operands)


def _reading(dense: torch.Tensor, tiling: Tiling, slices: int) -> tuple[int, ...]:
    """What counting and writing know of a matrix."""
    (rows, cols), (width, parts) = dense.shape, tiling
    return *dense.stride(), rows, cols, width, ceil_div(cols, width), slices, parts

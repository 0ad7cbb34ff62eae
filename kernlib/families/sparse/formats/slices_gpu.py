"""The formats u8, u4 and u2 on a GPU: codes counted and written, and the dense matrix, by kernels.

See :mod:`kernlib.families.sparse.formats.slices`; what a function calls ``code`` is its ``Code``.
Counting and writing read the dense matrix once each.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import torch

from kernlib.families.sparse.formats.encoding import counted
from kernlib.families.sparse.formats.tiling import Tiling
from kernlib.families.sparse.lowering.codes import LANES, Code
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.dtypes import BITS
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import Lowered, Step
from kernlib.runtime.sequence import StepsCache

THREADS, DECODE_THREADS = 256, 128
ENCODE_FIXED = "<2q6I"  # strides of the matrix, then sizes
DECODE_FIXED = "<q6I"
ROW_TYPES = {torch.uint8: "u16", torch.int32: "u32"}

_plans = StepsCache()


def count(code: Code, dense: torch.Tensor, width: int) -> torch.Tensor:
    """Codes of each (panel, row): int32, :func:`counted`."""
    rows, cols = dense.shape
    panels = ceil_div(cols, width)
    lengths = torch.empty(panels, rows, dtype=torch.int32, device=dense.device)
    if lengths.numel():
        made = count_spec(code, dense.element_size())
        fixed = _encode_fixed(dense, Tiling(width), ceil_div(rows, 32))
        _launch(made, panels * rows, (dense, lengths), fixed)
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
    made = write_spec(code, dense.element_size(), ROW_TYPES[rows.dtype])
    fixed = _encode_fixed(dense, tiling, rows.shape[1])
    _launch(made, LANES * (offsets.numel() - 1), (dense, offsets, rows, data), fixed)


def read(
    code: Code, tensors: Mapping[str, torch.Tensor], tiling: Tiling, dense: torch.Tensor
) -> None:
    """Write the matrix into ``dense``, contiguous."""
    rows = tensors["rows"]
    made = read_spec(code, dense.element_size(), ROW_TYPES[rows.dtype])
    slices, codes = rows.shape[0] * rows.shape[1], tensors["data"].numel()
    codes //= code.size(dense.element_size())
    numbers = tiling.width, rows.shape[1], slices, dense.shape[0], codes, tiling.parts
    fixed = struct.pack(DECODE_FIXED, dense.shape[1], *numbers)
    _launch(made, slices * tiling.parts, (tensors["data"], tensors["offsets"], rows, dense), fixed)


def specs(code: Code, itemsize: int) -> list[KernelSpec]:
    """Every spec for values of ``itemsize`` bytes."""
    rows = ROW_TYPES.values()
    made = [make(code, itemsize, row) for make in (write_spec, read_spec) for row in rows]
    return [count_spec(code, itemsize), *made]


def count_spec(code: Code, itemsize: int) -> KernelSpec:
    """The KernelSpec that counts codes."""
    return _spec(code, itemsize, "u16", 2, ENCODE_FIXED, "encode", "count")


def write_spec(code: Code, itemsize: int, row: str) -> KernelSpec:
    """The KernelSpec that writes codes, for rows of CUDA type ``row``."""
    return _spec(code, itemsize, row, 4, ENCODE_FIXED, "encode", "write")


def read_spec(code: Code, itemsize: int, row: str) -> KernelSpec:
    """The KernelSpec that writes the dense matrix."""
    return _spec(code, itemsize, row, 4, DECODE_FIXED, "decode", "read", DECODE_THREADS)


def _spec(
    code: Code,
    itemsize: int,
    row: str,
    pointers: int,
    fixed: str,
    file: str,
    action: str,
    threads: int = THREADS,
) -> KernelSpec:
    source = f"""#include "common/types.cuh"

using BitsT = {BITS[itemsize]};
using RowT = {row};

#define ACTION_{action.upper()}
constexpr int STEP_BITS = {code.bits};
constexpr int THREADS = {threads};
constexpr int PARAMETER_BYTES = {Parameters(pointers, fixed).size};

#include "sparse/slices/{file}.cuh"
"""
    words = f"sparse {code.name} {action} {8 * itemsize}-bit rows {row}"
    made = KernelSpec("sparse", source, f"sparse_slices_{action}", threads, description=words)
    return named(made, code.name, f"{8 * itemsize}bit", "rows", row)


def _encode_fixed(dense: torch.Tensor, tiling: Tiling, slices: int) -> bytes:
    (rows, cols), (width, parts) = dense.shape, tiling
    numbers = rows, cols, width, ceil_div(cols, width), slices, parts
    return struct.pack(ENCODE_FIXED, *dense.stride(), *numbers)


def _launch(made: KernelSpec, warps: int, tensors: tuple[torch.Tensor, ...], fixed: bytes) -> None:
    names = tuple(f"tensor{index}" for index in range(len(tensors)))
    grid = ceil_div(warps, made.threads // 32), 1

    def lower() -> Lowered:
        return Lowered((Step(made, grid, fixed, tuple((name, 0) for name in names)),))

    found = _plans.of((made, grid, fixed), names, tensors[0].device, lower)
    found.launch([tensor.data_ptr() for tensor in tensors])

"""The kernel pack.cuh of kernel_sources/sparse: many vectors of x as the right operand of wgmma,
which a product behind it brings to shared memory by bulk copies.

For each block of 64 features there are ``padded`` rows of 128 bytes, one a vector, swizzled by 128
bytes: unit u of 16 bytes of vector n lies at ``(block * padded + n) * 128 + (u ^ n % 8) * 16``.
"""

from __future__ import annotations

from kernlib.families.sparse.lowering.problem import Problem
from kernlib.families.sparse.lowering.sum import OVERLAPPING
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.fields import Fields
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import WORKSPACE, Step

THREADS = 256
DEPTH, ROW_BYTES = 64, 128  # features of a block, and bytes that they take of one vector
ROWS = 64  # vectors of a CTA
FEATURES, FRAGMENTS = 0, 1  # orders: features in their own, or in that of bitmap/fragments.cuh
FIXED = Fields((
    "i64 x_stride",
    "u32 cols", "u32 columns",
    "u32 padded",  # vectors of a block
    "u32 tiles",   # CTAs of a block
))  # fmt: skip
PARAMETERS = Parameters(2, FIXED.format)


def takes(problem: Problem) -> bool:
    """Whether :func:`step` takes a problem's x: all of 2-byte elements."""
    return DTYPES[problem.dtype].bytes == 2 and problem.columns > 0 < problem.cols


def nbytes(problem: Problem, padded: int) -> int:
    """Bytes of the workspace that hold x."""
    return blocks(problem) * padded * ROW_BYTES


def blocks(problem: Problem) -> int:
    """Blocks of 64 features."""
    return ceil_div(problem.cols, DEPTH)


def step(problem: Problem, arch: str, padded: int, order: int = FEATURES, begin: int = 0) -> Step:
    """The launch that reads x and writes :func:`nbytes` of the workspace from byte ``begin`` on,
    a multiple of 16. ``padded``, a multiple of 8, is the vectors with those that fill up tiles.
    """
    tiles = ceil_div(padded, ROWS)
    values = FIXED.values(
        x_stride=problem.x_stride,
        cols=problem.cols,
        columns=problem.columns,
        padded=padded,
        tiles=tiles,
    )
    return Step(
        spec(arch, order),
        (tiles * blocks(problem), 1),
        PARAMETERS.pack(*values),
        (("x", 0), (WORKSPACE, begin)),
        overlaps=arch in OVERLAPPING,
    )


def spec(arch: str, order: int = FEATURES) -> KernelSpec:
    """The KernelSpec of an order, which serves every 2-byte dtype."""
    words = "fragments" if order == FRAGMENTS else "features"
    source = f"""#include "common/types.cuh"

constexpr int ORDER = {order};
#define OVERLAPS {int(arch in OVERLAPPING)}
constexpr int PARAMETER_BYTES = {PARAMETERS.size};

{FIXED.text()}
#include "sparse/pack.cuh"
"""
    description = f"sparse pack of x by {words}"
    kernel = KernelSpec("sparse", source, "sparse_pack", THREADS, description=description)
    return named(kernel, "16bit", words)


def variants(
    dtypes: tuple[str, ...], arch: str, orders: tuple[int, ...] = (FEATURES,)
) -> list[KernelSpec]:
    """Every spec that :func:`step` can choose for some dtypes and orders."""
    halves = any(DTYPES[dtype].bytes == 2 for dtype in dtypes)
    return [spec(arch, order) for order in orders if halves]

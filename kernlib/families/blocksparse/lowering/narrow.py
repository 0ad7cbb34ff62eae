"""The kernel of kernel_sources/blocksparse/narrow/narrow.cuh: products with blocks of 16 and 32 in
half types.

Operands are copied by 16 bytes; other layouts go to the portable kernel.
"""

from __future__ import annotations

from typing import NamedTuple

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.blocksparse.kernels.order import ORDER
from kernlib.families.blocksparse.lowering import hopper
from kernlib.families.blocksparse.lowering.problem import Scope, Spmm
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import Lowered
from kernlib.lowering.wgmma import multiply

KIND = "narrow"
SIZES = (16, 32)  # of square blocks
STEPS = {16: 1.07, 32: 0.96}  # microseconds of 64 along the depth, by blocks, on an H100
CHUNK = 8  # elements of 16 bytes
STRIDES = tuple(
    f"i64 {name}"
    for name in (
        *("value_batch", "value_slot", "value_row"),
        *("dense_batch", "dense_head", "dense_row"),
    )
)
POINTERS = 2 + len(hopper.LISTS)


class Variant(NamedTuple):
    """Everything that code generation chooses besides the epilogue."""

    dtype: str
    block: int
    transposed: bool
    depth_last: bool
    lines_last: bool


def takes(problem: Spmm, arch: str) -> bool:
    """Whether the kernel computes a problem."""
    blocks, values, dense = problem.blocks, problem.values, problem.dense
    if blocks.rows not in SIZES or blocks.cols != blocks.rows:
        return False
    if not hopper.is_for_tiles(problem, arch) or values.column != 1:
        return False
    steps = (values.batch, values.slot, values.row, dense.batch, dense.head, _row(problem))
    whole = all(step % CHUNK == 0 for step in steps)
    return whole and values.alignment == dense.alignment == 16


def pays(problem: Spmm, multiprocessors: int) -> bool:
    """As for larger blocks."""
    step = STEPS[problem.blocks.rows]
    return hopper.is_faster(problem, step, hopper.WIDTHS[0], multiprocessors)


def lower(
    epilogue: tuple[Epilogue, ...], problem: Spmm, arch: str, multiprocessors: int
) -> Lowered:
    """The launch of a problem that the kernel takes."""
    kernel, values, dense = spec(epilogue, variant(problem)), problem.values, problem.dense
    fields = hopper.fields(epilogue, *STRIDES)
    numbers = fields.values(
        value_batch=values.batch,
        value_slot=values.slot,
        value_row=values.row,
        dense_batch=dense.batch,
        dense_head=dense.head,
        dense_row=_row(problem),
        **hopper.numbers(problem, multiprocessors),
    )
    fixed = parameters(epilogue).pack(*numbers)
    names = ("out", "values", "dense")
    maps = (hopper.out_map(problem),)
    return hopper.launch(epilogue, problem, kernel, fixed, names, maps, multiprocessors)


def variants(
    epilogue: tuple[Epilogue, ...], block: tuple[int, int], dtypes: tuple[str, ...], arch: str
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for blocks of a size."""
    if arch != hopper.ARCH or block[0] != block[1] or block[0] not in SIZES:
        return []
    flags = (False, True)
    return ORDER.specs((), Scope(block, dtypes), arch) + [
        spec(epilogue, Variant(dtype, block[0], turned, deep, lines))
        for dtype in dtypes
        if dtype != "float32"
        for turned in flags
        for deep in flags
        for lines in flags
    ]


def variant(problem: Spmm) -> Variant:
    """The kernel of a problem that it takes."""
    deep, lines = hopper.is_across(problem.dense), hopper.is_across(problem.out)
    return Variant(problem.dtype, problem.blocks.rows, problem.transposed, bool(deep), bool(lines))


def spec(epilogue: tuple[Epilogue, ...], made: Variant) -> KernelSpec:
    """The KernelSpec of a variant."""
    dtype, block, transposed, depth_last, lines_last = made
    words = [f"{block}x{block}"] + ["transposed"] * transposed
    words += ["depth_last"] * depth_last + ["lines_last"] * lines_last
    facts = {
        **hopper.walk(block, transposed),
        **hopper.ring(hopper.stage_bytes(hopper.WIDTHS[0]), 4),
        "LINES_LAST": lines_last,
        "SUMS_ACROSS": True,
        "BY_MAPS": False,
        "SCALED": False,
        "PARAMETER_BYTES": parameters(epilogue).size,
    }
    source = f"""#include "blocksparse/side.cuh"
{text.preamble(dtype, dtype, epilogue, **facts)}
{hopper.fields(epilogue, *STRIDES).text()}
constexpr int BLOCK = {block};
constexpr bool TRANSPOSED = {str(transposed).lower()};
constexpr bool DEPTH_LAST = {str(depth_last).lower()};
constexpr bool LINES_LAST = {str(lines_last).lower()};
constexpr int SUMMANDS = {len(text.summands(epilogue))};
constexpr int PARAMETER_BYTES = {parameters(epilogue).size};

#include "common/hopper.cuh"

{multiply(dtype, block, True, right_lines=transposed)}
#include "blocksparse/narrow/narrow.cuh"
"""
    found = KernelSpec(
        "blocksparse",
        source,
        "blocksparse_narrow",
        hopper.THREADS,
        hopper.SHARED_BYTES,
        description=text.describe("blocksparse", KIND, dtype, "", words, epilogue),
    )
    return named(found, dtype, *words, epilogue=epilogue)


def parameters(epilogue: tuple[Epilogue, ...]) -> Parameters:
    """The parameter struct: the map of the result, operands, the layout's bits and ranks, the
    epilogue's, strides and sizes."""
    format = hopper.fields(epilogue, *STRIDES).format
    return text.parameters(POINTERS, format, epilogue, maps=1)


def _row(problem: Spmm) -> int:
    """The dense operand's stride that is not 1: of columns where the depth is contiguous."""
    dense = problem.dense
    return dense.column if hopper.is_across(dense) else dense.line

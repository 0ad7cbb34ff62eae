"""The kernel of kernel_sources/kronecker_sparse/hopper/pack.cuh: weights as Hopper reads them.

They are packed anew for each call: 2 us, where a copy that is kept would have to know of every way
in which a weight can change (``.data``, a replayed CUDA graph, another process).
"""

from __future__ import annotations

from kernlib.errors import UnsupportedError
from kernlib.families.kronecker_sparse.lowering.problem import MAX_BLOCKS, Problem
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import Step
from kernlib.records import NamedTuple

THREADS = 128
PARAMETERS = Parameters(2, "<5q6i")


class Packing(NamedTuple):
    """The tiles that will read the weight: columns, depth of a stage and lanes of each; in which
    order of depth; and the products that a multiplication takes, 3 for 3xTF32."""

    dtype: str
    columns: int
    depth: int
    span: int
    products: int
    order: tuple[int, ...] = (0,)

    @property
    def copies(self) -> int:
        """2 of weights that are split into high and low words."""
        return 2 if self.products == 3 else 1

    @property
    def stage_bytes(self) -> int:
        """Of one stage of one tile."""
        return self.copies * self.span * self.columns * self.depth * DTYPES[self.dtype].bytes

    @property
    def together(self) -> tuple[int, ...]:
        """Neighbouring l that a thread can read at once, most first."""
        most = 16 // DTYPES[self.dtype].bytes
        return tuple(count for count in (8, 4, 2, 1) if count <= most)

    def stages(self, problem: Problem) -> int:
        return ceil_div(problem.depth, self.depth)

    def spans(self, problem: Problem) -> int:
        return ceil_div(problem.lanes, self.span)

    def tiles(self, problem: Problem) -> int:
        """Tiles of columns."""
        return ceil_div(problem.columns, self.columns)

    def workspace(self, problem: Problem) -> int:
        """Bytes of the packed weight."""
        tiles = problem.blocks * self.spans(problem) * self.tiles(problem)
        return tiles * self.stages(problem) * self.stage_bytes


def step(problem: Problem, packing: Packing) -> Step:
    """The launch that packs ``right`` into the workspace. Raises UnsupportedError for a weight that
    no grid can hold."""
    spans, tiles, stages = packing.spans(problem), packing.tiles(problem), packing.stages(problem)
    chunks = stages * packing.depth * DTYPES[packing.dtype].bytes // 16
    together = _together(problem, packing)
    groups, lines = spans * packing.span // together, tiles * packing.columns
    total = problem.blocks * groups * (lines // 8) * ceil_div(chunks, 4) * 32
    blocks = ceil_div(total, THREADS)
    if blocks > MAX_BLOCKS:
        raise UnsupportedError(
            f"a weight of {problem.blocks} x {problem.columns} x {problem.depth} x {problem.lanes} "
            "numbers is more than one launch packs; call it on slices"
        )
    right = problem.right
    fixed = PARAMETERS.pack(
        right.block, right.lane, right.line, right.depth, total,
        problem.lanes, problem.columns, problem.depth, spans, tiles, stages,
    )  # fmt: skip
    made = spec(packing, together)
    return Step(made, (blocks, 1), fixed, (("right", 0), ("workspace", 0)))


def _together(problem: Problem, packing: Packing) -> int:
    """As many l as lie side by side, aligned, in the weight and in what is made of it."""
    right, itemsize = problem.right, DTYPES[packing.dtype].bytes
    counts = (problem.lanes, packing.spans(problem) * packing.span)
    counts += (right.block, right.line, right.depth, right.alignment // itemsize)
    known = packing.together if right.lane == 1 else (1,)
    return next(count for count in known if all(x % count == 0 for x in counts))


def chosen(problem: Problem, packing: Packing) -> KernelSpec:
    """The spec that :func:`step` takes."""
    return spec(packing, _together(problem, packing))


def specs(packing: Packing) -> list[KernelSpec]:
    """Every spec that :func:`step` can take for a packing."""
    return [spec(packing, together) for together in packing.together]


def spec(packing: Packing, together: int) -> KernelSpec:
    """The KernelSpec of a packing by threads that read ``together`` neighbouring l."""
    dtype, columns, depth, span, products, order = packing
    source = f"""#include "common/types.cuh"

using InputT = {DTYPES[dtype].cuda};

constexpr int TILE_COLUMNS = {columns};
constexpr int TILE_DEPTH = {depth};
constexpr int SPAN = {span};
constexpr int TOGETHER = {together};
constexpr int PRODUCTS = {products};
constexpr int ORDER_SIZE = {len(order)};
__device__ constexpr unsigned char ORDER[] = {{{", ".join(map(str, order))}}};
constexpr int PARAMETER_BYTES = {PARAMETERS.size};

#include "kronecker_sparse/hopper/pack.cuh"
"""
    words = f"{columns}x{depth}x{span} by {together}" + " split" * (products == 3)
    words += " reordered" * (order != tuple(range(len(order))))
    made = KernelSpec(
        "kronecker_sparse",
        source,
        "kronecker_sparse_pack",
        THREADS,
        description=f"kronecker_sparse pack {dtype} {words}",
    )
    return named(made, dtype, words)

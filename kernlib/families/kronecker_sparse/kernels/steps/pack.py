"""Weights as Hopper reads them.

They are packed anew for each call: 2 us, where a copy that is kept would have to know of every way
in which a weight can change (``.data``, a replayed CUDA graph, another process).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kernlib.errors import UnsupportedError
from kernlib.families.kronecker_sparse.lowering.problem import MAX_BLOCKS, Problem
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Kernel
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import Step

THREADS = 128
FIXED = Fields((
    "FactorStrides strides",
    "i64 total",  # threads
    "int lanes", "int columns", "int depth",  # of the weight
    "int spans", "int column_tiles", "int stages",  # of the tiles
))  # fmt: skip


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


class Pack(Kernel):
    """Packs a weight for tiles, by threads that read neighbouring l together."""

    role = "step"
    name = "pack"
    header = "kronecker_sparse/hopper/pack.cuh"
    entry = "kronecker_sparse_pack"
    reason = "the weight in the order that kernels of wgmma read, anew for each call"

    class Variant(NamedTuple):
        """Everything that code generation chooses."""

        packing: Packing
        together: int  # neighbouring l

    def step(self, problem: Problem, packing: Packing) -> Step:
        """The launch that packs ``right`` into the workspace. Raises UnsupportedError for a weight
        that no grid can hold."""
        spans, tiles = packing.spans(problem), packing.tiles(problem)
        stages = packing.stages(problem)
        chunks = stages * packing.depth * DTYPES[packing.dtype].bytes // 16
        together = together_of(problem, packing)
        groups, lines = spans * packing.span // together, tiles * packing.columns
        total = problem.blocks * groups * (lines // 8) * ceil_div(chunks, 4) * 32
        blocks = ceil_div(total, THREADS)
        if blocks > MAX_BLOCKS:
            raise UnsupportedError(
                f"a weight of {problem.blocks} x {problem.columns} x {problem.depth} x "
                f"{problem.lanes} numbers is more than one launch packs; call it on slices"
            )
        fixed = FIXED.pack(
            strides=problem.right[:4],
            total=total,
            lanes=problem.lanes,
            columns=problem.columns,
            depth=problem.depth,
            spans=spans,
            column_tiles=tiles,
            stages=stages,
        )
        spec = self.spec((), self.Variant(packing, together))
        return Step(spec, (blocks, 1), fixed, (("right", 0), ("workspace", 0)))

    def specs_of(self, packings: Iterable[Packing]) -> list[KernelSpec]:
        """Every specification that :meth:`step` can take for some packings."""
        pairs = ((each, count) for each in dict.fromkeys(packings) for count in each.together)
        return [self.spec((), self.Variant(*pair)) for pair in pairs]

    def spec(self, subject: tuple, variant: Variant, arch: str = "") -> KernelSpec:
        """The specification of a variant."""
        (dtype, columns, depth, span, products, order), together = variant
        facts = {
            "InputT": DTYPES[dtype].cuda,
            "TILE_COLUMNS": columns,
            "TILE_DEPTH": depth,
            "SPAN": span,
            "TOGETHER": together,
            "PRODUCTS": products,
            "PARAMETER_BYTES": Parameters(2, FIXED.format).size,
        }
        numbers = ", ".join(map(str, order))
        depths = f"__device__ constexpr unsigned char ORDER[] = {{{numbers}}};\n"
        needed = ("kronecker_sparse/strides.cuh",)
        source = self.source(facts, FIXED.text(), depths, includes=needed)
        words = [f"{columns}x{depth}x{span}", "by", str(together), *["split"] * (products == 3)]
        words += ["reordered"] * (order != tuple(range(len(order))))
        return self.named_spec(source, THREADS, 0, dtype, words)


def together_of(problem: Problem, packing: Packing) -> int:
    """As many l as lie side by side, aligned, in the weight and in what is made of it."""
    right, itemsize = problem.right, DTYPES[packing.dtype].bytes
    counts = (problem.lanes, packing.spans(problem) * packing.span)
    counts += (right.block, right.line, right.depth, right.alignment // itemsize)
    candidates = packing.together if right.lane == 1 else (1,)
    return next(count for count in candidates if all(x % count == 0 for x in counts))

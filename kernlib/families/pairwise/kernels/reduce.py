"""Reductions of a kernel matrix on the lanes, which store nothing of it: of few features with rows
in registers, of any number by the main loop of :mod:`kernlib.families.pairwise.kernels.direct`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering import reduce as parts
from kernlib.families.pairwise.lowering.finish import finish_reduced, takes_powers
from kernlib.families.pairwise.lowering.problem import (
    BIG_TILE,
    MAX_BATCH_BLOCKS,
    THREADS,
    TYPES,
    Call,
    accesses,
    scalar_count,
    short,
    terms,
    types,
)
from kernlib.families.pairwise.lowering.reduce import (
    OPERANDS,
    RESIDENT,
    Problem,
    ReductionKernel,
    Variant,
    fields,
    fixed_parameters,
    shared,
    stage_of,
    sums_of,
    variant,
    work_of,
)
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.config import Fact
from kernlib.lowering.division import split
from kernlib.lowering.kernel import Gpu, named
from kernlib.lowering.steps import Lowered, Step


class Reduction(ReductionKernel):
    """What the kernels of reductions on the lanes share."""

    Variant = Variant

    def text(self, descriptor: Pairwise, base: Variant, facts: dict[str, Fact]) -> str:
        """The source of a variant with further facts."""
        double = base.dtype == "float64"
        every = {
            **types(base.dtype),
            **terms(descriptor, base),
            "Reducer": base.reducer,
            "REGULARIZED": base.regularized,
            "POWERS": double and takes_powers(descriptor, base),
            "GATED": 0,  # see pack.gated
            **facts,
        }
        texts = fields(scalar_count(descriptor)).text(), finish_reduced(descriptor, base)
        names = "pairwise/access.cuh", "pairwise/reduce/kinds.cuh", "pairwise/reduce/math.cuh"
        return self.source(every, *texts, includes=(*TYPES, *names))

    def spec(self, descriptor: Pairwise, variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant."""
        words = [variant.reducer, variant.kind, variant.dtype, *code_words(variant)]
        words += [f"partners={variant.partners}"] * (variant.partners > 1)
        words += [f"p={variant.inner}"] * (variant.inner != "any")
        words += flags(variant, "long_k", "epsilon", "regularized")
        source = self.text(descriptor, variant, self.facts(variant))
        spec = KernelSpec(
            "pairwise", source, self.entry, THREADS, shared(variant),
            description=" ".join([descriptor.describe(), *words]),
        )  # fmt: skip
        words[1:2] = []
        return named(spec, *short(descriptor), *words, epilogue=descriptor.epilogue)

    def facts(self, variant: Variant) -> dict[str, Fact]:
        """Facts of a variant that others of the role lack."""
        raise NotImplementedError


class OnLanes(Reduction):
    """What the two that leave one value of each row, or products, share."""

    most_columns: ClassVar[int]  # of v, from which on storing blocks of the matrix is faster

    def takes(self, call: Call, arch: str) -> bool:
        """Whether a launch fits, of so few columns that it is the fastest way."""
        problem = self.first(call.problem)
        return call.problem.columns <= self.most_columns and parts.fits(problem, arch)

    def launch(
        self, descriptor: Pairwise, call: Call, gpu: Gpu, choice: Mapping[str, int]
    ) -> Lowered:
        """The launch of a pass."""
        return lower(descriptor, call.problem, *gpu, call.strides, **choice)


class Small(OnLanes):
    """Of up to SMALL_K features."""

    name = "small"
    header = "pairwise/reduce/small.cuh"
    entry = "pairwise_reduce_small"
    # Blocks of the matrix take as long as 60 issue slots an entry, and their products.
    most_columns = 64

    def takes(self, call: Call, arch: str) -> bool:
        return call.problem.k <= parts.SMALL_K and super().takes(call, arch)

    def facts(self, variant: Variant) -> dict[str, Fact]:
        return small_facts(variant, THREADS)


class Tile(OnLanes):
    """Of any number of features."""

    name = "tile"
    header = "pairwise/reduce/tile.cuh"
    entry = "pairwise_reduce_tile"
    rank = 1
    most_columns = 16

    def facts(self, variant: Variant) -> dict[str, Fact]:
        return tile_facts(variant)


SMALL, TILE = Small(), Tile()


def lower(
    descriptor: Pairwise,
    problem: Problem,
    arch: str,
    multiprocessors: int,
    scalar_strides: tuple[int, ...],
    per_split: int = 0,
    rows: int | None = None,
    most_rows: int | None = None,
) -> Lowered:
    """The launch for a problem of 1 feature or more. Each row gets partial results, of ``per_part``
    n each; ``per_split`` is that of another launch whose results lie side by side with this one's.
    ``rows`` overrides the rows of a thread of the small kernel, ``most_rows`` bounds those it
    chooses."""
    tile, sums = variant(problem, arch, rows), sums_of(problem)
    if tile.k:
        work = work_of(descriptor, problem, tile, multiprocessors)
        most = min(tile.rows, most_rows or tile.rows)
        cut = parts.small_cut(work, most, per_split, fixed=rows is not None)
        tile = tile._replace(rows=cut.rows, partners=cut.partners)
        row_blocks, per_split = work.row_blocks(cut), cut.per_split
    else:
        row_blocks = ceil_div(problem.m, BIG_TILE)
        per_split = per_split or split(sums, row_blocks, BIG_TILE, multiprocessors * RESIDENT)
    splits = ceil_div(problem.n, per_split)
    step = Step(
        (SMALL if tile.k else TILE).spec(descriptor, tile, arch),
        (row_blocks * splits, min(problem.batch, MAX_BATCH_BLOCKS)),
        fixed_parameters(problem, per_split, row_blocks, scalar_strides),
        tuple((name, 0) for name in OPERANDS),
        scalar_count(descriptor),
    )
    return Lowered((step,), parts=splits, per_part=per_split)


def small_facts(variant: Variant, threads: int) -> dict[str, Fact]:
    """Of the kinds with rows in registers."""
    stage = threads if variant.partners == 1 else stage_of(variant.partners, variant.line_bytes)
    return {
        "K": variant.k,
        "THREADS": threads,
        "ROWS": variant.rows,
        "PARTNERS": variant.partners,
        "STAGE": stage,
    }


def tile_facts(variant: Variant) -> dict[str, Fact]:
    """Of the kinds with tiles."""
    access = accesses(ACCESS_A=variant.access_a, ACCESS_B=variant.access_b)
    return {"TILE": BIG_TILE, "LONG_K": variant.long_k, **access}


def code_words(variant: Variant) -> list[str]:
    """What tells apart the kernels of a kind by how they read points."""
    if variant.k:
        return [f"K={variant.k} rows={variant.rows}"]
    return [f"{variant.access_a}/{variant.access_b}"]


def flags(variant: Variant, *names: str) -> list[str]:
    """Those of some members that are set."""
    return [name for name in names if getattr(variant, name)]

"""Matrices of any call, by tiles of sums (kernel_sources/pairwise/direct/direct.cuh).

Pure arithmetic on plain data: no tensor, no device. What the generated code depends on is in the
spec; sizes, strides and hyperparameters are launch arguments. Records are named tuples: five
dataclasses would cost 5 ms of the first call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from kernlib.errors import UnsupportedError
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering.finish import finish, outer_kinds
from kernlib.families.pairwise.lowering.problem import (
    BIG_TILE,
    MAX_BATCH_BLOCKS,
    MAX_TILES,
    OPERANDS,
    PROMOTE_K,
    SMALL_TILE,
    THREADS,
    TILE_K,
    TYPES,
    Call,
    PairKernel,
    Problem,
    Scope,
    access,
    accesses,
    exponents,
    fixed_values,
    inner_codes,
    scalar_count,
    shared_bytes,
    terms,
    types,
)
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.dtypes import DTYPES, outputs
from kernlib.lowering.kernel import Choice, Gpu
from kernlib.lowering.parameters import Fields
from kernlib.lowering.steps import Lowered, Step

if TYPE_CHECKING:
    from kernlib.families.pairwise.lowering.tables import Categories

SMALL_COST = 1.2  # of a pair in a small tile, beside one in a big one
LAST = 1e300  # an estimate behind those of kernels whose own rule says that they are faster


class Direct(PairKernel):
    """Sums of a tile's pairs on the lanes, which takes every call."""

    role = "matrix"
    name = "direct"
    header = "pairwise/direct/direct.cuh"
    entry = "pairwise_direct"
    rank = 2
    reason = (
        "differences or products of coordinates, by tiles of 128 or 64 points, on every GPU: "
        "chosen where `few` and `split` do not take a call or are estimated to be slower; "
        "behind `split` it computes what lies too close together for that, else ends at once"
    )

    class Variant(NamedTuple):
        """Everything that code generation chooses besides the descriptor."""

        dtype: str
        out_dtype: str
        tile: int
        long_k: bool
        access_a: str
        access_b: str
        swapped: bool
        inner: float | str
        outer: float | str
        root: bool

    def takes(self, call: Call, arch: str) -> bool:
        """Every one."""
        return True

    def choices(self, call: Call, arch: str) -> list[Choice]:
        """The largest tile first, of kernels whose shared memory fits the arch."""
        problem, categories = _rows_first(call.problem), call.descriptor.categories
        thin = min(problem.m, problem.n) <= SMALL_TILE
        tiles = _tiles(problem.dtype, problem.k > PROMOTE_K, arch, categories)
        return [{"tile": tile} for tile in tiles if tile == SMALL_TILE or not thin]

    def default(self, call: Call, gpu: Gpu) -> Choice:
        """The choice taken untuned: that whose rounds of tiles, one a multiprocessor, are the
        fewest pairs."""
        problem = call.problem

        def cost(choice: Choice) -> float:
            tile = choice["tile"]
            tiles = ceil_div(problem.m, tile) * ceil_div(problem.n, tile) * problem.batch
            pair = SMALL_COST if tile == SMALL_TILE else 1.0
            return ceil_div(tiles, gpu.multiprocessors) * tile * tile * pair

        return min(self.choices(call, gpu.arch), key=cost)

    def estimate(self, call: Call, choice: Mapping[str, int], gpu: Gpu) -> float:
        """Behind all others: what they say of themselves is beside this kernel."""
        return LAST if dict(choice) == self.default(call, gpu) else float("inf")

    def launch(
        self,
        descriptor: Pairwise,
        call: Call,
        gpu: Gpu,
        choice: Mapping[str, int],
        categories: Categories | None = None,
    ) -> Lowered:
        """The launch of a call. A result that lies column by column is the transpose of one of
        swapped operands. ``categories`` are those that the descriptor counts."""
        problem, tile = _rows_first(call.problem), choice["tile"]
        swapped = problem is not call.problem
        variant = self.Variant(
            problem.dtype, problem.out_dtype, tile, problem.k > PROMOTE_K,
            access(problem.a, problem.m, problem.k, problem.dtype),
            access(problem.b, problem.n, problem.k, problem.dtype),
            swapped and descriptor.signed, problem.inner, problem.outer, problem.root,
        )  # fmt: skip
        tiles_m, tiles_n = ceil_div(problem.m, tile), ceil_div(problem.n, tile)
        if tiles_m * tiles_n > MAX_TILES or problem.k >= 2**31 - TILE_K:
            raise UnsupportedError(
                f"a {problem.m} x {problem.n} result over {problem.k} features is more than one "
                f"launch holds ({MAX_TILES} tiles of {tile}); call it on slices"
            )
        fixed = fields(len(call.strides)).pack(
            **fixed_values(problem, call.strides),
            batch=problem.batch,
            tiles_m=tiles_m,
            tiles_n=tiles_n,
            out_vectors=_takes_vectors(problem),
        )
        operands = ("b", "a", "out") if swapped else OPERANDS
        if categories is not None:
            codes, text = categories.launched(swapped)
            operands, fixed = (*codes, *operands), fixed + text
        step = Step(
            self.spec(descriptor, variant, gpu.arch),
            (tiles_m * tiles_n, min(problem.batch, MAX_BATCH_BLOCKS)),
            fixed,
            tuple((name, 0) for name in operands),
            scalar_count(descriptor),
        )
        return Lowered((step,))

    def launch_tables(
        self,
        descriptor: Pairwise,
        problem: Problem,
        gpu: Gpu,
        strides: tuple[int, ...],
        categories: Categories,
    ) -> Lowered:
        """The launch of a call with tables of categories, which no other kernel takes."""
        call = Call(descriptor, problem, strides)
        return self.launch(descriptor, call, gpu, self.default(call, gpu), categories)

    def axes(self, descriptor: Pairwise, scope: Scope) -> Mapping[str, Iterable]:
        """All values."""
        accesses = ("features", "points", "strided")
        return {
            "dtype": scope.dtypes,
            "out_dtype": {out: None for dtype in scope.dtypes for out in outputs(dtype)},
            "tile": (BIG_TILE, SMALL_TILE),
            "long_k": (True, False),
            "access_a": accesses,
            "access_b": accesses,
            "swapped": (False, True)[: 1 + descriptor.signed],
            **exponent_axes(descriptor),
        }

    def is_legal(self, variant: Variant, descriptor: Pairwise, scope: Scope) -> bool:
        """Whether shared memory fits, and the result's dtype belongs to that of the operands."""
        tiles = _tiles(variant.dtype, variant.long_k, scope.arch, descriptor.categories)
        return variant.tile in tiles and has_legal_result(variant, descriptor)

    def spec(self, descriptor: Pairwise, variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant. Raises UnsupportedError where its shared memory does not
        fit."""
        shared = shared_bytes(variant.dtype, variant.tile, variant.long_k, descriptor.categories)
        if shared > targets.SHARED_BYTES[arch]:
            raise UnsupportedError(
                f"{descriptor.describe()} needs {shared} bytes of shared memory, a block of {arch} "
                f"has {targets.SHARED_BYTES[arch]}"
            )
        facts = {
            **types(variant.dtype, variant.out_dtype),
            **terms(descriptor, variant, variant.swapped),
            **accesses(ACCESS_A=variant.access_a, ACCESS_B=variant.access_b),
            "TILE": variant.tile,
            "LONG_K": variant.long_k,
            "SYMMETRIC": descriptor.symmetric,
            "CATEGORIES": descriptor.categories,
            "GATED": 0,  # see pack.gated
        }
        texts = [fields(scalar_count(descriptor)).text(), finish(descriptor, variant)]
        tables = Fields(())
        if descriptor.categories:
            from kernlib.families.pairwise.lowering.tables import table_fields

            tables = table_fields(descriptor.categories)
        texts.append(tables.text("Categories"))
        source = self.source(facts, *texts, includes=(*TYPES, "pairwise/access.cuh"))
        words = ["->".join(dict.fromkeys((variant.dtype, variant.out_dtype)))]
        words += [f"tile={variant.tile}", f"{variant.access_a}/{variant.access_b}"]
        words += exponents(descriptor, variant)
        words += ["long"] * variant.long_k + ["swapped"] * variant.swapped
        return self.described(descriptor, source, THREADS, shared, words)


DIRECT = Direct()


@cache
def fields(scalars: int) -> Fields:
    """What a plan fixes."""
    return Fields((
        f"i64 scalar_strides[{scalars}]",
        "View a_view", "View b_view", "View out_view",  # (batch, point, feature), (batch, m, n)
        "i64 m", "i64 n", "i64 batch",
        "i64 diagonal",  # n - m of the entries that receive the regularization
        "int k", "int tiles_m", "int tiles_n",
        "int out_vectors",  # whether out takes aligned stores of 16 bytes of accumulators
        "int accumulate", "int padding",
    ))  # fmt: skip


def exponent_axes(descriptor: Pairwise) -> dict[str, Iterable]:
    """Axes of the exponents, of which :func:`has_legal_result` has the pairs that belong
    together."""
    outers = outer_kinds(descriptor)
    return {
        "inner": inner_codes(descriptor),
        "outer": dict.fromkeys(outer for outer, _ in outers),
        "root": dict.fromkeys(root for _, root in outers),
    }


def has_legal_result(variant, descriptor: Pairwise) -> bool:
    """Whether a result of a dtype belongs to operands of another, and an outer exponent to the
    descriptor."""
    outer = variant.outer, variant.root
    return variant.out_dtype in outputs(variant.dtype) and outer in outer_kinds(descriptor)


def _rows_first(problem: Problem) -> Problem:
    """The same call, or with a and b exchanged where the result lies column by column."""
    by_columns = problem.out.rows == 1 and problem.out.columns != 1
    return problem.transposed() if by_columns else problem


def _tiles(dtype: str, long_k: bool, arch: str, categories: int) -> list[int]:
    """Tiles that fit a block of ``arch``; the small one in any case, for the spec to refuse."""
    # 64 double sums a thread, of the big tile, would take all 128 registers.
    sizes = (SMALL_TILE,) if dtype == "float64" else (BIG_TILE, SMALL_TILE)
    limit = targets.SHARED_BYTES[arch]
    return [
        t for t in sizes if t == SMALL_TILE or shared_bytes(dtype, t, long_k, categories) <= limit
    ]


def _takes_vectors(problem: Problem) -> bool:
    """Whether out takes aligned stores of one chunk (16 bytes of accumulators) along n."""
    chunk = 16 // DTYPES[problem.dtype].sums.bytes
    out = problem.out
    aligned = out.alignment % (chunk * DTYPES[problem.out_dtype].bytes) == 0
    return aligned and out.columns == 1 and out.rows % chunk == 0 and out.batch % chunk == 0

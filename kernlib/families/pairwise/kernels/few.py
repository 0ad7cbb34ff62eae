"""Few pairs of any number of features (kernel_sources/pairwise/few/few.cuh): warps that lie along
the features, where a tile of the direct kernel would leave most of a GPU idle.

One kernel takes operands and outputs of any strides, so that none is exchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.kernels.direct import exponent_axes, has_legal_result
from kernlib.families.pairwise.lowering.finish import finish
from kernlib.families.pairwise.lowering.problem import (
    OPERANDS,
    PATCH_SIDE,
    SMALL_TILE,
    THREADS,
    TYPES,
    Call,
    PairKernel,
    Problem,
    Scope,
    exponents,
    fixed_values,
    is_few,
    patches,
    scalar_count,
    terms,
    types,
)
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES, outputs
from kernlib.lowering.kernel import Gpu
from kernlib.lowering.parameters import Fields
from kernlib.lowering.steps import Lowered, Step

WARPS = THREADS // 32
LANES = 32
# Nanoseconds of a multiprocessor on an H100: a feature of the direct kernel's tile; a pair of this
# one for each warp of its patch, alone or among several, whose sums meet, and as many times as much
# where lanes take more than one feature each. Of 55 calls the rule mistakes none by over 3 %.
TILE_NS, ALONE_NS, AMONG_NS, LOOP = 64, 4.3, 5.5, 1.4
# A feature of a pair: L2 delivers the 2 bytes that it reads in 0.0475, and the rest is reserve.
# Points whose features lie apart take a sector each, of which four points share one.
PAIR_NS, APART = 0.0625, 4
TILE_EXTRA = 28  # what a launch of the direct kernel takes beside its features, in features


class Few(PairKernel):
    """Patches of pairs, each summed by some warps of a block."""

    role = "matrix"
    name = "few"
    header = "pairwise/few/few.cuh"
    entry = "pairwise_few"
    rank = 1
    reason = (
        "warps along the features of few pairs: chosen where it is estimated to end before the "
        "tiles of `direct` that the busiest multiprocessor would walk, and before `split`"
    )

    class Variant(NamedTuple):
        """Everything that code generation chooses besides the descriptor."""

        dtype: str
        out_dtype: str
        inner: float | str
        outer: float | str
        root: bool

    def takes(self, call: Call, arch: str) -> bool:
        """Whether there are few enough; a descriptor's categories are not asked for."""
        return is_few(call.problem)

    def estimate(self, call: Call, choice: Mapping[str, int], gpu: Gpu) -> float:
        """Infinite where the direct kernel is faster, whose busiest multiprocessor has so many
        tiles that are walked one after the other."""
        problem = call.problem
        tiles = ceil_div(problem.m, SMALL_TILE) * ceil_div(problem.n, SMALL_TILE) * problem.batch
        walked = ceil_div(tiles, gpu.multiprocessors) * TILE_NS * (problem.k + TILE_EXTRA)
        time_ns = _time_ns(problem, gpu.multiprocessors)
        return time_ns / 1e3 if time_ns < walked else float("inf")

    def launch(
        self, descriptor: Pairwise, call: Call, gpu: Gpu, choice: Mapping[str, int]
    ) -> Lowered:
        """The launch of a call that it takes."""
        problem = call.problem
        bits, count = slice_bits(problem.k), patches(problem)
        variant = self.Variant(
            problem.dtype, problem.out_dtype, problem.inner, problem.outer, problem.root
        )
        fixed = _fixed(len(call.strides)).pack(
            **fixed_values(problem, call.strides),
            across=ceil_div(problem.n, PATCH_SIDE),
            patches=count,
            slice_bits=bits,
        )
        step = Step(
            self.spec(descriptor, variant, gpu.arch),
            (ceil_div(count, WARPS >> bits), problem.batch),
            fixed,
            tuple((name, 0) for name in OPERANDS),
            scalar_count(descriptor),
        )
        return Lowered((step,))

    def axes(self, descriptor: Pairwise, scope: Scope) -> Mapping[str, Iterable]:
        """All values."""
        return {
            "dtype": scope.dtypes,
            "out_dtype": {out: None for dtype in scope.dtypes for out in outputs(dtype)},
            **exponent_axes(descriptor),
        }

    def is_legal(self, variant: Variant, descriptor: Pairwise, scope: Scope) -> bool:
        """Whether the result's dtype and the exponents belong together."""
        return has_legal_result(variant, descriptor)

    def spec(self, descriptor: Pairwise, variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant."""
        facts = {
            **types(variant.dtype, variant.out_dtype),
            **terms(descriptor, variant),
            "SYMMETRIC": descriptor.symmetric,
        }
        texts = _fixed(scalar_count(descriptor)).text(), finish(descriptor, variant)
        source = self.source(facts, *texts, includes=TYPES)
        words = ["->".join(dict.fromkeys((variant.dtype, variant.out_dtype)))]
        words += exponents(descriptor, variant)
        # The sums of each warp's patch, and a word that it has sampled.
        shared = WARPS * (PATCH_SIDE**2 * DTYPES[variant.dtype].sums.bytes + 4)
        return self.described(descriptor, source, THREADS, shared, words, ("few pairs",))


@cache
def _fixed(scalars: int) -> Fields:
    """What a plan fixes."""
    return Fields((
        f"i64 scalar_strides[{scalars}]",
        "View a_view", "View b_view", "View out_view",  # (batch, point, feature), (batch, m, n)
        "i64 diagonal",  # n - m of the entries that receive the regularization
        "int m", "int n", "int k",
        "int across", "int patches",  # patches along n, and all of an entry
        "int slice_bits",  # log2 of the warps that share a patch
        "int accumulate", "int padding",
    ))  # fmt: skip


def _time_ns(problem: Problem, multiprocessors: int) -> float:
    """Nanoseconds of a launch, beside those that each takes."""
    read = PAIR_NS * max(1, DTYPES[problem.dtype].bytes / 4) * round_up(problem.k, LANES)
    if any(operand.columns > 1 for operand in (problem.a, problem.b)):
        read *= APART
    warps = 1 << slice_bits(problem.k)
    summed = warps * (AMONG_NS if warps > 1 else ALONE_NS)
    if problem.k > warps * LANES:
        summed *= LOOP
    pairs = ceil_div(patches(problem) * problem.batch, multiprocessors) * PATCH_SIDE**2
    return pairs * max(read, summed)


def slice_bits(features: int) -> int:
    """Log2 of the warps that share a patch: one for each 32 features, up to those of a block."""
    return min((max(features, 1) - 1) // LANES, WARPS - 1).bit_length()

"""Few pairs of any number of features (kernel_sources/pairwise/few/few.cuh): warps that lie along
the features, where a tile of the direct kernel would leave most of a GPU idle.

One kernel takes operands and outputs of any strides, so that none is exchanged.
"""

from __future__ import annotations

import struct
from itertools import product

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering import direct
from kernlib.families.pairwise.lowering.direct import Problem
from kernlib.families.pairwise.lowering.finish import finish, is_norm, outer_kinds
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES, outputs
from kernlib.lowering.names import named
from kernlib.lowering.steps import Lowered, Step
from kernlib.records import NamedTuple

THREADS = 256
WARPS = THREADS // 32
SIDE = 4  # points of a and of b in a patch
LANES = 32
# 2000 a multiprocessor of an H100, as far as was measured, and so at most 2**14 entries of a batch;
# features whose place steps past the last one within an int.
MOST_PAIRS, MOST_FEATURES = 2**18, 2**30
# Nanoseconds of a multiprocessor on an H100: a feature of the direct kernel's tile; a pair of this
# one for each warp of its patch, alone or among several, whose sums meet, and as many times as much
# where lanes take more than one feature each. Of 55 calls the rule mistakes none by over 3 %.
TILE_NS, ALONE_NS, AMONG_NS, LOOP = 64, 4.3, 5.5, 1.4
# A feature of a pair: L2 delivers the 2 bytes that it reads in 0.0475, and the rest is reserve.
# Points whose features lie apart take a sector each, of which four points share one.
PAIR_NS, APART = 0.0625, 4
TILE_EXTRA = 28  # what a launch of the direct kernel takes beside its features, in features


class Variant(NamedTuple):
    """Everything that code generation chooses besides the descriptor."""

    dtype: str
    out_dtype: str
    inner: float | str
    outer: float | str
    root: bool


def takes(problem: Problem) -> bool:
    """Whether :func:`lower` does; a descriptor's categories are not asked for."""
    pairs = _patches(problem) * SIDE * SIDE * problem.batch
    return pairs <= MOST_PAIRS and problem.k <= MOST_FEATURES


def pays(problem: Problem, multiprocessors: int) -> bool:
    """Whether it is taken and beats the direct kernel, whose busiest multiprocessor has so many
    tiles that are walked one after the other."""
    small = direct.SMALL_TILE
    tiles = ceil_div(problem.m, small) * ceil_div(problem.n, small) * problem.batch
    walked = ceil_div(tiles, multiprocessors) * TILE_NS * (problem.k + TILE_EXTRA)
    return takes(problem) and time_ns(problem, multiprocessors) < walked


def time_ns(problem: Problem, multiprocessors: int) -> float:
    """Nanoseconds of a launch, beside those that each takes."""
    read = PAIR_NS * max(1, DTYPES[problem.dtype].bytes / 4) * round_up(problem.k, LANES)
    if any(operand.columns > 1 for operand in (problem.a, problem.b)):
        read *= APART
    warps = 1 << slice_bits(problem.k)
    summed = warps * (AMONG_NS if warps > 1 else ALONE_NS)
    if problem.k > warps * LANES:
        summed *= LOOP
    pairs = ceil_div(_patches(problem) * problem.batch, multiprocessors) * SIDE * SIDE
    return pairs * max(read, summed)


def lower(descriptor: Pairwise, problem: Problem, scalar_strides: tuple[int, ...]) -> Lowered:
    """The launch of a call that it takes."""
    bits = slice_bits(problem.k)
    made = Variant(
        problem.dtype, problem.out_dtype, problem.inner, problem.outer, problem.root
    )  # fmt: skip
    grid = (ceil_div(_patches(problem), WARPS >> bits), problem.batch)
    fixed = _fixed_parameters(problem, bits, scalar_strides)
    pointers = tuple((name, 0) for name in direct.OPERANDS)
    step = Step(spec(descriptor, made), grid, fixed, pointers, direct.scalar_count(descriptor))
    return Lowered((step,))


def slice_bits(features: int) -> int:
    """Log2 of the warps that share a patch: one for each 32 features, up to those of a block."""
    return min((max(features, 1) - 1) // LANES, WARPS - 1).bit_length()


def spec(descriptor: Pairwise, variant: Variant) -> KernelSpec:
    words = ["->".join(dict.fromkeys((variant.dtype, variant.out_dtype)))]
    words += direct.exponents(descriptor, variant)
    made = KernelSpec(
        "pairwise",
        source(descriptor, variant),
        "pairwise_few",
        THREADS,
        # The sums of each warp's patch, and a word that it has sampled.
        WARPS * (SIDE * SIDE * DTYPES[variant.dtype].sums.bytes + 4),
        description=" ".join([descriptor.describe(), "few pairs", *words]),
    )
    return named(made, *direct.short(descriptor), *words, epilogue=descriptor.epilogue)


def variants(descriptor: Pairwise, dtypes: tuple[str, ...]) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for inputs of ``dtypes``."""
    powers, outers = direct.inner_codes(descriptor), outer_kinds(descriptor)
    specs = {
        spec(descriptor, Variant(dtype, out, inner, outer, root))
        for dtype in dtypes
        for out in outputs(dtype)
        for inner, (outer, root) in product(powers, outers)
    }
    return sorted(specs, key=lambda made: made.source)


def source(descriptor: Pairwise, variant: Variant) -> str:
    """The generated CUDA text: a few defines, ``Finish``, one include."""
    operation = "Dot" if descriptor.operator == "dot" else "Difference"
    return f"""#include "common/types.cuh"
#include "common/math.cuh"

using InputT = {DTYPES[variant.dtype].cuda};
using AccT = {DTYPES[variant.dtype].sums.cuda};
using OutputT = {DTYPES[variant.out_dtype].cuda};

constexpr int SCALARS = {direct.scalar_count(descriptor)};
constexpr bool SYMMETRIC = {str(descriptor.symmetric).lower()};

#define OPERATION {operation}
#define INNER {direct.inner_codes(descriptor)[variant.inner]}
{"#define BY_NORM" * is_norm(descriptor, variant)}
{finish(descriptor, variant)}
#include "pairwise/few/few.cuh"
"""


def _patches(problem: Problem) -> int:
    """Of one entry of the batch."""
    return ceil_div(problem.m, SIDE) * ceil_div(problem.n, SIDE)


def _fixed_parameters(problem: Problem, bits: int, scalar_strides: tuple[int, ...]) -> bytes:
    views = [x for v in (problem.a, problem.b, problem.out) for x in (v.batch, v.rows, v.columns)]
    sizes = (problem.m, problem.n, problem.k, ceil_div(problem.n, SIDE), _patches(problem))
    return struct.pack(
        f"<{len(scalar_strides)}q9qq7i4x",
        *scalar_strides, *views, problem.diagonal, *sizes, bits,
        int(problem.accumulate),
    )  # fmt: skip

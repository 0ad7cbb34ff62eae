"""From a pair gradient and the layout of its tensors to a KernelSpec, a grid and parameters.

Pure arithmetic on plain data, as in :mod:`kernlib.families.pairwise.kernels.direct`. This is the
kernel of the FP32 and FP64 lanes, which takes every problem; that of the tensor cores is
:mod:`kernlib.families.pairwise.lowering.gradient_tensor`.
"""

from __future__ import annotations

import struct
from itertools import product
from typing import NamedTuple

from kernlib.errors import UnsupportedError
from kernlib.families.pairwise.lowering.layout import Layout, access
from kernlib.families.pairwise.lowering.problem import MAX_BATCH_BLOCKS, MAX_TILES, types
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import config
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.dtypes import DTYPES, outputs
from kernlib.lowering.names import named
from kernlib.lowering.steps import Lowered, Step

THREADS = 256
TILE, TILE_K = 64, 16  # queries, and features if doubled; points of a stage
# Whose addresses the parameter struct starts with, and the numbers behind them.
OPERANDS = ("x", "z", "weights", "coefficients", "out", "extremes", "scales")
SCALARS = ("p", "inner_scale", "eps")
MAX_PARTS = 32  # of the points, whose sums meet in a workspace
PART_POINTS = 256  # the fewest of a part
O_TILES = (0, 1, 2, 4)

# Slopes by what decides their code; host values of p without code of their own share "any" above 1
# and "steep" below, device tensors "device".
STAGE_SLOPES = {"Identity": "IdentitySlope", "Square": "SquareSlope", "Sqrt": "SqrtSlope"}
POWER_SLOPES = {
    0.0: "AbsSlope",  # times p
    0.5: "HalfSlope",
    1.0: "AbsSlope",
    1.5: "ThreeHalvesSlope",
    2.0: "SquareSlope",
    2.5: "FiveHalvesSlope",
    3.0: "CubeSlope",
    4.0: "FourthSlope",
    "steep": "SteepSlope",
    "any": "PowerSlope",
    "device": "DeviceSlope",
}
EXP_SLOPES = {
    1.0: "ExpAbsSlope",
    2.0: "ExpSquareSlope",
    "any": "ExpPowerSlope",
    "device": "ExpPowerSlope",
}
SLOPES = (*STAGE_SLOPES.values(), *POWER_SLOPES.values(), *EXP_SLOPES.values(), "AbsValueSlope")


class OutLayout(NamedTuple):
    """Strides of (batch, coefficients, queries, features), and the first address modulo 16."""

    batch: int
    coefficients: int
    queries: int
    features: int
    alignment: int = 16


class Problem(NamedTuple):
    """One call's shapes and layouts. ``x`` is (batch, queries, features), ``z`` (batch, points,
    features), ``weights`` (batch, queries, points), ``coefficients`` (batch, sets, points), with
    ``sets`` 0 if there are none. ``operation`` and ``slope`` are structs of
    gradient/slopes.cuh."""

    queries: int
    points: int
    features: int
    sets: int
    batch: int
    x: Layout
    z: Layout
    weights: Layout
    coefficients: Layout
    out: OutLayout
    operation: str
    slope: str
    factor: float = 1.0
    times_p: bool = False
    times_scale: bool = False
    dtype: str = "float32"
    out_dtype: str = "float32"
    accumulate: bool = False
    scalar_strides: tuple[int, int, int] = (0, 0, 0)
    extremes: int = 0  # batch stride of those of z
    scales: Layout | None = None  # (batch, queries, points), if there are any


class Variant(NamedTuple):
    """Everything that the generated code depends on."""

    dtype: str
    out_dtype: str
    operation: str
    slope: str
    o_tile: int
    access_w: str  # of the scales too
    access_z: str
    scales: bool = False


def slope_of(operator: str, stage: str, exponent: float | str | None, plain: bool) -> str:
    """The struct of an inner stage's slope; ``exponent`` is a key of the tables above."""
    if stage == "Power" or plain:
        name = POWER_SLOPES["steep" if plain and exponent == 0.0 else exponent]
    elif stage == "ExpPower":
        name = EXP_SLOPES.get(exponent, EXP_SLOPES["any"])
    else:
        name = STAGE_SLOPES.get(stage, "AbsSlope")
    return "AbsValueSlope" if name == "AbsSlope" and operator == "dot" else name


def exponent_kind(value: float | None) -> float | str:
    """The key of an exponent in the tables above; None stands for one on the device."""
    if value is None:
        return "device"
    if value in POWER_SLOPES:
        return value
    return "steep" if value < 1 else "any"


def lower(problem: Problem, arch: str, multiprocessors: int) -> Lowered:
    """The variant for a call. Sums of several parts of the points go to a workspace (parts, batch,
    sets, queries, features). Raises UnsupportedError for sizes no grid can hold."""
    o_tile = _o_tile(problem.sets)
    tiles_q = ceil_div(problem.queries, TILE)
    tiles_k = ceil_div(problem.features, TILE * feature_tiles(problem.dtype, o_tile))
    tiles_o = ceil_div(problem.sets, o_tile) if o_tile else 1
    if tiles_q * tiles_k > MAX_TILES or problem.points >= 2**31 - TILE_K:
        raise UnsupportedError(
            f"a gradient of {problem.queries} x {problem.features} coordinates over "
            f"{problem.points} points is more than one launch holds ({MAX_TILES} tiles); call it "
            "on slices"
        )
    tiles = tiles_q * tiles_k * tiles_o * problem.batch
    parts = parts_of(tiles, problem.points, multiprocessors * blocks(problem.dtype))
    per_part = max(1, ceil_div(problem.points, parts * TILE_K)) * TILE_K
    parts = max(1, ceil_div(problem.points, per_part))
    variant = Variant(
        problem.dtype,
        problem.out_dtype if parts == 1 else DTYPES[problem.dtype].accumulator,
        problem.operation,
        problem.slope,
        o_tile,
        # Lines of points, which the kernel sums over as others over features.
        _access_of_pairs(problem),
        access(problem.z.transposed(), problem.features, problem.points, problem.dtype),
        problem.scales is not None,
    )
    if parts > 1:
        problem = problem._replace(out=workspace(problem), accumulate=False)
    vectors = _out_vectors(problem, variant.out_dtype)
    fixed = fixed_parameters(problem, (tiles_q, tiles_k, tiles_o), parts, per_part, vectors)
    grid = (tiles_q * tiles_k, min(problem.batch * tiles_o * parts, MAX_BATCH_BLOCKS))
    return Lowered((step(spec(variant, arch), grid, fixed),), parts=parts, per_part=per_part)


def _access_of_pairs(problem: Problem) -> str:
    """That of the weights, and of the scales if there are any."""
    operands = [t for t in (problem.weights, problem.scales) if t is not None]
    found = {access(t, problem.queries, problem.points, problem.dtype) for t in operands}
    return found.pop() if len(found) == 1 else "strided"


def step(made: KernelSpec, grid: tuple[int, int], fixed: bytes) -> Step:
    """The launch of a kernel of pair gradients."""
    return Step(made, grid, fixed, tuple((name, 0) for name in OPERANDS), len(SCALARS))


def parts_of(tiles: int, points: int, slots: int) -> int:
    """Into how many parts the points are cut: the fewest that fill 0.9 of the waves of CTAs, else
    what fills most."""
    best, most = 1, 0.0
    for parts in range(1, max(1, min(MAX_PARTS, points // PART_POINTS)) + 1):
        full = tiles * parts / (ceil_div(tiles * parts, slots) * slots)
        if full >= 0.9:
            return parts
        if full > 1.02 * most:
            best, most = parts, full
    return best


def workspace(problem: Problem) -> OutLayout:
    """The layout of the sums of one part."""
    plane = problem.queries * problem.features
    sets = max(1, problem.sets)
    return OutLayout(sets * plane, plane, problem.features, 1)


def _o_tile(sets: int) -> int:
    return next((o for o in O_TILES if o >= sets), O_TILES[-1])


def feature_tiles(dtype: str, o_tile: int) -> int:
    """Tiles of TILE features in a CTA's: two where 32 sums and coordinates a thread fit 128
    registers."""
    return 2 if o_tile <= 1 and dtype != "float64" else 1


def blocks(dtype: str) -> int:
    """CTAs of a multiprocessor that registers permit; shared memory of 100 KB holds one."""
    return 1 if dtype == "float64" else 2


def spec(variant: Variant, arch: str) -> KernelSpec:
    """The KernelSpec of a variant. Raises UnsupportedError where its shared memory does not fit."""
    shared = shared_bytes(variant)
    if shared > targets.SHARED_BYTES[arch]:
        raise UnsupportedError(
            f"a pair gradient needs {shared} bytes of shared memory, a block of {arch} has "
            f"{targets.SHARED_BYTES[arch]}"
        )
    dtypes = "->".join(dict.fromkeys((variant.dtype, variant.out_dtype)))
    described = f"{variant.operation} {variant.slope} {dtypes} sets={variant.o_tile}"
    described += " scales" * variant.scales
    made = KernelSpec(
        "pairwise",
        source(variant),
        "pair_gradient",
        THREADS,
        shared,
        description=f"pair_gradient {described} {variant.access_w}/{variant.access_z}",
    )
    return named(made, described, f"{TILE}x{TILE}", variant.access_w, variant.access_z)


def shared_bytes(variant: Variant) -> int:
    """Two stages of the operands and the coefficients, totals of float, and the notes of what is
    not finite."""
    accumulator = DTYPES[variant.dtype].sums.bytes
    operands = 1 + feature_tiles(variant.dtype, variant.o_tile)
    line = TILE * accumulator + 16
    copied = operands + variant.scales
    stage = copied * TILE_K * line + TILE_K * variant.o_tile * accumulator
    sums = (variant.o_tile or 1) * (operands - 1) * TILE * TILE
    totals = 0 if variant.dtype == "float64" else sums * accumulator
    return 2 * stage + totals + operands * TILE * 4


def source(variant: Variant) -> str:
    """The generated CUDA text: a few defines and one include."""
    return f"""#include "common/types.cuh"
#include "pairwise/access.cuh"

{config.text({**types(variant.dtype), "TILE": TILE})}
using InputT = {DTYPES[variant.dtype].cuda};
using AccT = {DTYPES[variant.dtype].sums.cuda};
using OutputT = {DTYPES[variant.out_dtype].cuda};

constexpr int O_TILE = {variant.o_tile};
constexpr int FEATURE_TILES = {feature_tiles(variant.dtype, variant.o_tile)};
constexpr bool SCALES = {str(variant.scales).lower()};
constexpr int UNROLL = {_unroll(variant)};
constexpr int BLOCKS = {blocks(variant.dtype)};

#define OPERATION {variant.operation}
#define SLOPE {variant.slope}
#define ACCESS_W Access::{variant.access_w}
#define ACCESS_Z Access::{variant.access_z}

#include "pairwise/gradient/gradient.cuh"
"""


def _unroll(variant: Variant) -> int:
    """Points unrolled: two where a point is short, and reads of shared memory show."""
    short = variant.slope in ("AbsSlope", "SquareSlope") and variant.o_tile <= 1
    return 2 if short and variant.dtype == "float32" else 1


def variants(
    operation: str,
    slope: str,
    arch: str,
    dtypes: tuple[str, ...],
    sets: tuple[int, ...] = O_TILES,
    scales: bool = False,
) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for a slope and inputs of ``dtypes``."""
    accesses = ("features", "points", "strided")
    tiles = sorted({_o_tile(count) for count in sets})
    made = {
        spec(Variant(dtype, out, operation, slope, tile, w, z, scales), arch)
        for dtype in dtypes
        for out in outputs(dtype)
        for tile, w, z in product(tiles, accesses, accesses)
    }
    return sorted(made, key=lambda s: s.source)


def _out_vectors(problem: Problem, out_dtype: str) -> int:
    """Whether out takes aligned stores of one chunk (16 bytes of accumulators): 1 along features, 2
    along queries, 0 if neither."""
    out, chunk = problem.out, 16 // DTYPES[problem.dtype].sums.bytes
    if out.alignment % (chunk * DTYPES[out_dtype].bytes) or out.batch % chunk:
        return 0
    if out.coefficients % chunk:
        return 0
    if out.features == 1 and out.queries % chunk == 0:
        return 1
    return 2 if out.queries == 1 and out.features % chunk == 0 else 0


def fixed_parameters(
    problem: Problem, tiles: tuple[int, int, int], parts: int, per_part: int, vectors: int = 0
) -> bytes:
    """What follows the numbers in struct Parameters of gradient/parameters.cuh. ``tiles`` are those
    of queries, features and sets."""
    layouts = (problem.x, problem.z, problem.weights, problem.coefficients)
    views = [x for v in layouts for x in (v.batch, v.rows, v.columns)]
    out, scales = problem.out, problem.scales or Layout(0, 0, 0)
    part = problem.batch * out.batch if parts > 1 else 0
    flags = (vectors, problem.accumulate, problem.times_p, problem.times_scale)
    return struct.pack(
        "<3q12q5q3q3qd12i",
        *problem.scalar_strides, *views,
        out.batch, out.coefficients, out.queries, out.features, part,
        scales.batch, scales.rows, scales.columns,
        problem.extremes, problem.queries, problem.batch, problem.factor,
        problem.points, problem.features, problem.sets, *tiles, parts, per_part, *flags,
    )  # fmt: skip

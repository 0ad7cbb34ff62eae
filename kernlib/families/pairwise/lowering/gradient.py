"""Pair gradients as their kernels see them: the problem, the slope of a stage, what plans fix.

Pure arithmetic on plain data. Two kernels compute them: that of the FP32 and FP64 lanes
(:mod:`kernlib.families.pairwise.kernels.gradient`), which takes every problem, and that of the
tensor cores (:mod:`kernlib.families.pairwise.kernels.gradient_tensor`).
"""

from __future__ import annotations

from typing import NamedTuple

from kernlib.families.pairwise.lowering.problem import MAX_BATCH_BLOCKS, Layout
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import Lowered, Step

# Whose addresses the parameter struct starts with, and the numbers behind them.
OPERANDS = ("x", "z", "weights", "coefficients", "out", "extremes", "scales")
SCALARS = ("p", "inner_scale", "eps")
MAX_PARTS = 32  # of the points, whose sums meet in a workspace
PART_POINTS = 256  # the fewest of a part
OUT_VIEW = Fields((
    "i64 batch_stride", "i64 coefficient_stride", "i64 query_stride", "i64 feature_stride",
    "i64 part_stride",  # between the partial sums of parts of the points
))  # fmt: skip
FIXED = Fields(
    (
        f"i64 scalar_strides[{len(SCALARS)}]",
        "View x_view",  # (batch, query, feature)
        "View z_view",  # (batch, point, feature)
        "View weights_view",  # (batch, query, point)
        "View coefficients_view",  # (batch, coefficient, point)
        "OutView out_view",
        "View scales_view",  # (batch, query, point)
        "i64 extremes_stride",  # from one batch entry's to the next
        "i64 queries", "i64 batch",
        "double factor",  # of whole sums
        "int points", "int features", "int coefficient_count",
        "int tiles_q", "int tiles_k", "int tiles_o",
        "int parts", "int per_part",  # of the points; per_part is a whole number of stages
        "int out_vectors",  # aligned stores of CHUNK elements: 1 along features, 2 along queries
        "int accumulate",
        "int times_p", "int times_scale",  # whether p and inner_scale belong to the factor
    ),
    {"OutView": OUT_VIEW},
)  # fmt: skip
TEXTS = OUT_VIEW.text("OutView"), FIXED.text()
PARAMETER_BYTES = Parameters(len(OPERANDS), FIXED.format, len(SCALARS)).size
# Headers of the types that struct Config and struct Fixed name.
TYPES = (
    "pairwise/gradient/operations.cuh", "pairwise/gradient/slopes.cuh", "pairwise/view.cuh",
)  # fmt: skip

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


def lowered(
    problem: Problem,
    spec: KernelSpec,
    tiles: tuple[int, int, int],
    parts: int,
    per_part: int,
    vectors: int = 0,
) -> Lowered:
    """The launch of either kernel. ``tiles`` are those of queries, features and sets, ``vectors``
    as struct Fixed has them. Sums of several parts go to a workspace (parts, batch, sets, queries,
    features)."""
    out, scales = problem.out, problem.scales or Layout(0, 0, 0)
    fixed = FIXED.pack(
        scalar_strides=problem.scalar_strides,
        x_view=problem.x[:3],
        z_view=problem.z[:3],
        weights_view=problem.weights[:3],
        coefficients_view=problem.coefficients[:3],
        out_view=(*out[:4], problem.batch * out.batch if parts > 1 else 0),
        scales_view=scales[:3],
        extremes_stride=problem.extremes,
        queries=problem.queries,
        batch=problem.batch,
        factor=problem.factor,
        points=problem.points,
        features=problem.features,
        coefficient_count=problem.sets,
        tiles_q=tiles[0],
        tiles_k=tiles[1],
        tiles_o=tiles[2],
        parts=parts,
        per_part=per_part,
        out_vectors=vectors,
        accumulate=problem.accumulate,
        times_p=problem.times_p,
        times_scale=problem.times_scale,
    )
    rows = min(problem.batch * tiles[2] * parts, MAX_BATCH_BLOCKS)
    pointers = tuple((name, 0) for name in OPERANDS)
    step = Step(spec, (tiles[0] * tiles[1], rows), fixed, pointers, len(SCALARS))
    return Lowered((step,), parts=parts, per_part=per_part)


def cut(tiles: int, points: int, slots: int, stage: int) -> tuple[int, int]:
    """Parts of the points, and how many points, in whole stages, each has."""
    parts = parts_of(tiles, points, slots)
    per_part = max(1, ceil_div(points, parts * stage)) * stage
    return max(1, ceil_div(points, per_part)), per_part


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


def parted(problem: Problem) -> Problem:
    """The same with the sums of parts in a workspace in the place of the result."""
    plane = problem.queries * problem.features
    out = OutLayout(max(1, problem.sets) * plane, plane, problem.features, 1)
    return problem._replace(out=out, accumulate=False)

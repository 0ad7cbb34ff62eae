"""The kernel of pair gradients on tensor cores: gradient/tensor.cuh.

It takes float32 problems of differences, with points that lie side by side in memory for each
feature, which :mod:`kernlib.families.pairwise.gradients.points` arranges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kernlib.families.pairwise.lowering.gradient import (
    O_TILES,
    Problem,
    fixed_parameters,
    parts_of,
    step,
    workspace,
)
from kernlib.families.pairwise.lowering.layout import access
from kernlib.families.pairwise.lowering.problem import MAX_BATCH_BLOCKS, MAX_TILES, types
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import config
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES, FLOAT_SUMS
from kernlib.lowering.names import named
from kernlib.lowering.steps import Lowered

SIGN = "AbsSlope"
LINES = "features"  # of Access: points of a feature side by side
RUN = 4  # points of one 16-byte access
NARROW = 32  # features, up to which tiles of wgmma would be half empty
FEWEST = 1 << 27  # of slopes: below, a few more small kernels would cost what is won
STEP = 16  # points
CHAIN = 128  # of them, that tensor cores sum up alone; of other slopes than signs half as many


class Tile(NamedTuple):
    """What a CTA takes: warps along queries and features, queries and tiles of 16 features of each,
    and steps of 16 points of a stage. By ``wgmma`` four warps along features share their
    queries."""

    queries_a_warp: int
    feature_tiles: int
    warps_q: int
    warps_k: int
    steps: int = 1
    blocks: int = 2
    wgmma: bool = False

    @property
    def queries(self) -> int:
        return self.queries_a_warp * self.warps_q

    @property
    def features(self) -> int:
        return 16 * self.feature_tiles * self.warps_k

    @property
    def threads(self) -> int:
        return 32 * self.warps_q * self.warps_k


# Of signs and of other slopes, by tiles of 8 columns, 0 for a single coefficient.
TILES = {
    True: {
        0: (Tile(4, 3, 4, 2, 2), Tile(4, 2, 8, 1, 2), Tile(4, 1, 8, 1, 2)),
        1: (Tile(4, 2, 2, 4, 2), Tile(4, 2, 8, 1, 1), Tile(4, 1, 8, 1, 1)),
        2: (Tile(2, 2, 2, 4, 2), Tile(2, 2, 4, 2, 1), Tile(2, 2, 8, 1, 1), Tile(2, 1, 8, 1, 1)),
    },
    False: {
        1: (Tile(4, 2, 2, 4, 1), Tile(4, 2, 8, 1, 1), Tile(4, 1, 8, 1, 1)),
        2: (Tile(2, 2, 4, 2, 1), Tile(2, 2, 8, 1, 1), Tile(2, 1, 8, 1, 1)),
    },
}
# By wgmma, for sm_90a, of 256, 128 and 64 features. Of 16 columns and p = 1 these take 32.8 ms; of
# 256 features, 2 or 32 warps, or 48 columns at once for the three parts of weights, 33 to 46.
_BY_WGMMA = {
    1: (Tile(4, 2, 2, 8, 2, 1), Tile(8, 1, 1, 8, 1), Tile(8, 1, 2, 4, 1)),
    2: (Tile(4, 1, 2, 8, 2, 1), Tile(4, 1, 2, 4, 1)),
    4: (Tile(2, 1, 2, 8, 2, 1), Tile(2, 1, 2, 4, 1)),
}
WGMMA = {  # of signs and 8 columns or fewer mma.sync is as fast
    sign: {
        columns: tuple(tile._replace(wgmma=True) for tile in tiles)
        for columns, tiles in _BY_WGMMA.items()
        if columns > 1 or not sign
    }
    for sign in (True, False)
}


class Variant(NamedTuple):
    """Everything that the generated code depends on."""

    slope: str
    columns: int
    tile: Tile
    out_dtype: str = "float32"


def takes(problem: Problem) -> bool:
    """Whether the kernel computes a problem's function of its operands, however they lie."""
    if problem.dtype not in FLOAT_SUMS:
        return False
    if problem.operation != "Difference" or problem.slope == "IdentitySlope":
        return False
    return problem.slope == SIGN or problem.sets > 1


def pays(problem: Problem) -> bool:
    """Whether it is the faster one."""
    size = problem.queries * problem.points * problem.features * problem.batch
    if size < FEWEST or problem.features < 8 or problem.queries < 8:
        return False
    lies = access(problem.z.transposed(), problem.features, problem.points, problem.dtype)
    if problem.sets <= O_TILES[-1] and problem.slope != SIGN:
        return False  # two sets take 22 ms on FP32 lanes in place of 32, p = 1.5
    if problem.sets > 1 or lies != LINES:
        return True
    # One coefficient and points in lines, which the FP32 lanes read best: 12.65 ms against 14.05
    # for 768 features, by tiles of 128.
    width = _best(TILES[True][0], problem.features).features
    return 12.65 * round_up(problem.features, 128) > 14.05 * round_up(problem.features, width)


def columns_of(problem: Problem, arch: str) -> int:
    """Tiles of 8 coefficients, 0 for a single one."""
    if problem.sets <= 1:
        return 0
    most = 4 if arch == "sm_90a" and problem.features > NARROW else 2
    return next(n for n in (1, 2, 4) if 8 * n >= problem.sets or n == most)


def lower(
    problem: Problem, arch: str, multiprocessors: int, tile: Tile | None = None
) -> Lowered | None:
    """The variant for a call, None for sizes that no grid can hold."""
    columns = columns_of(problem, arch)
    tile = tile or default(problem, arch)
    tiles_q, tiles_k = (
        ceil_div(problem.queries, tile.queries),
        ceil_div(problem.features, tile.features),
    )
    tiles_o = ceil_div(problem.sets, 8 * columns) if columns else 1
    if tiles_q * tiles_k > MAX_TILES or problem.points >= 2**31 - 4 * STEP * tile.steps:
        return None
    tiles = tiles_q * tiles_k * tiles_o * problem.batch
    parts = parts_of(tiles, problem.points, multiprocessors * tile.blocks)
    stage = STEP * tile.steps
    per_part = max(1, ceil_div(problem.points, parts * stage)) * stage
    parts = max(1, ceil_div(problem.points, per_part))
    out_dtype = problem.out_dtype if parts == 1 else "float32"
    if parts > 1:
        problem = problem._replace(out=workspace(problem), accumulate=False)
    fixed = fixed_parameters(problem, (tiles_q, tiles_k, tiles_o), parts, per_part)
    grid = (tiles_q * tiles_k, min(problem.batch * tiles_o * parts, MAX_BATCH_BLOCKS))
    made = spec(Variant(problem.slope, columns, tile, out_dtype))
    return Lowered((step(made, grid, fixed),), parts=parts, per_part=per_part)


def default(problem: Problem, arch: str) -> Tile:
    """Of the tiles that fit, the one that computes fewest slopes in vain, at a price for narrow
    ones, which split the weights more often."""
    columns, features, sign = columns_of(problem, arch), problem.features, problem.slope == SIGN
    if arch == "sm_90a" and features > NARROW and columns in WGMMA[sign]:
        return _best(WGMMA[sign][columns], features)
    limit, known = targets.SHARED_BYTES[arch], TILES[sign][columns]
    fitting = [t for t in known if shared_bytes(sign, columns, t) <= limit]
    return _best(fitting or known, features)


def _best(tiles: Sequence[Tile], features: int) -> Tile:
    return min(tiles, key=lambda t: ceil_div(features, t.features) * (t.features + 16))


def shared_bytes(sign: bool, columns: int, tile: Tile) -> int:
    """Three stages of the raw operands, two of the split weights, and totals."""
    points, line = STEP * tile.steps, STEP * tile.steps + 4
    lines = tile.queries + (8 * columns or 1)
    raw = 4 * (tile.features * points + lines * line)
    terms = tile.queries * tile.steps * ((768 if sign else 1024) * columns or 128)
    totals = 4 * tile.threads * tile.queries_a_warp * tile.feature_tiles * (4 * columns or 2)
    return 3 * raw + 2 * terms + totals


def spec(variant: Variant) -> KernelSpec:
    """The KernelSpec of a variant."""
    tile = variant.tile
    described = f"{variant.slope} columns={8 * variant.columns or 1} {tile.queries}x{tile.features}"
    described += " wgmma" if tile.wgmma else ""
    made = KernelSpec(
        "pairwise",
        source(variant),
        "pair_gradient_tensor",
        tile.threads,
        shared_bytes(variant.slope == SIGN, variant.columns, tile),
        description=f"pair_gradient tensor {described} {variant.out_dtype}",
    )
    return named(made, variant.out_dtype, described)


def source(variant: Variant) -> str:
    """The generated CUDA text: a few defines and one include."""
    tile = variant.tile
    constants: Mapping[str, object] = {
        "COLUMN_TILES": variant.columns or 1,
        "QUERIES_A_WARP": tile.queries_a_warp,
        "FEATURE_TILES": tile.feature_tiles,
        "WARPS_Q": tile.warps_q,
        "WARPS_K": tile.warps_k,
        "STEPS": tile.steps,
        "BLOCKS": tile.blocks,
        "CHAIN": (CHAIN if variant.slope == SIGN else CHAIN // 2) // (STEP * tile.steps),
    }
    lines = "".join(f"constexpr int {name} = {value};\n" for name, value in constants.items())
    return f"""#include "common/types.cuh"

{config.text(types("float32"))}
using OutputT = {DTYPES[variant.out_dtype].cuda};

constexpr bool SINGLE = {str(variant.columns == 0).lower()};
{lines}
#define SLOPE {variant.slope}
#define WGMMA {int(tile.wgmma)}

{_multiply(variant) if tile.wgmma else ""}#include "pairwise/gradient/tensor.cuh"
"""


def _multiply(variant: Variant) -> str:
    """CUDA text of a wgmma of 64 features, in four registers of a thread, by tiles of 8 columns in
    shared memory, whose descriptor's upper half is 8: 128 bytes from 8 columns to the next."""
    columns, sign = variant.columns, variant.slope == SIGN
    count = 4 * columns
    sums = ", ".join(f"%{i}" for i in range(count))
    bound = ", ".join(f'"+f"(d[{i // 4}][{i % 4}])' for i in range(count))
    left = ", ".join(f"%{count + i}" for i in range(4))
    kind = "k16.f32.bf16.bf16" if sign else "k8.f32.tf32.tf32"
    return f"""__device__ __forceinline__ void multiply_64(float (&d)[{columns}][4],
                                            const u32 (&a)[4], u32 b) {{
    asm volatile("{{\\n\\t"
                 ".reg .b64 b;\\n\\t"
                 ".reg .b32 upper;\\n\\t"
                 "mov.b32 upper, 8;\\n\\t"
                 "mov.b64 b, {{%{count + 4}, upper}};\\n\\t"
                 "wgmma.mma_async.sync.aligned.m64n{8 * columns}{kind} "
                 "{{{sums}}}, {{{left}}}, b, 1, 1, 1{", 0" if sign else ""};\\n\\t"
                 "}}"
                 : {bound}
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}}

"""


def variants(slope: str, arch: str, out_dtypes: tuple[str, ...] = ("float32",)) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for a slope on the GPUs of an arch."""
    limit, sign = targets.SHARED_BYTES[arch], slope == SIGN
    tables = (TILES[sign], WGMMA[sign]) if arch == "sm_90a" else (TILES[sign],)
    made = {
        spec(Variant(slope, columns, tile, out))
        for table in tables
        for columns, tiles in table.items()
        for tile in tiles
        for out in out_dtypes
        if shared_bytes(sign, columns, tile) <= limit
    }
    return sorted(made, key=lambda s: s.source)

"""Pair gradients on tensor cores: float32 problems of differences, with points that lie side by
side in memory for each feature, which :mod:`kernlib.families.pairwise.gradients.primitive`
arranges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kernlib.errors import UnsupportedError
from kernlib.families.pairwise.kernels.gradient import O_TILES, Scope, Subject
from kernlib.families.pairwise.lowering import gradient as lowering
from kernlib.families.pairwise.lowering.gradient import Problem, cut, parted
from kernlib.families.pairwise.lowering.problem import MAX_TILES, access, types
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import FLOAT_SUMS
from kernlib.lowering.kernel import Choice, Gpu, Kernel, named
from kernlib.lowering.steps import Lowered

SIGN = "AbsSlope"
LINES = "features"  # of Access: points of a feature side by side
RUN = 4  # points of one 16-byte access
NARROW = 32  # features, up to which tiles of wgmma would be half empty
FEWEST = 1 << 27  # of slopes: below, a few more small kernels would cost what is won
STEP = 16  # points
CHAIN = 128  # of them, that tensor cores sum up alone; of other slopes than signs half as many


class Tile(NamedTuple):
    """What a block takes: warps along queries and features, queries and tiles of 16 features of
    each, and steps of 16 points of a stage. By wgmma four warps along features share their
    queries."""

    queries_a_warp: int
    feature_tiles: int
    warps_q: int
    warps_k: int
    steps: int = 1
    blocks: int = 2

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
# Of signs and 8 columns or fewer mma.sync is as fast.
WGMMA = {True: {n: tiles for n, tiles in _BY_WGMMA.items() if n > 1}, False: _BY_WGMMA}


class _Tensor(Kernel):
    """Slopes as one factor of a product, by one of two instructions."""

    role = "pair gradient"
    entry = "pair_gradient_tensor"
    unit = ""  # a word of its description
    tiles: Mapping[bool, Mapping[int, Sequence[Tile]]]

    class Variant(NamedTuple):
        """Everything that the generated code depends on besides the subject."""

        columns: int
        tile: Tile
        out_dtype: str = "float32"

    def takes(self, problem: Problem, arch: str) -> bool:
        """Whether the kernel computes a problem's function of its operands, however they lie."""
        sign = problem.slope == SIGN
        has = problem.dtype in FLOAT_SUMS and problem.operation == "Difference"
        has = has and problem.slope != "IdentitySlope" and (sign or problem.sets > 1)
        return has and columns_of(problem, arch) in self.tiles[sign]

    def choices(self, problem: Problem, arch: str) -> list[Choice]:
        """The tiles that fit, or else all."""
        sign, columns = problem.slope == SIGN, columns_of(problem, arch)
        tiles, limit = self.tiles[sign][columns], targets.SHARED_BYTES[arch]
        fitting = [tile for tile in tiles if shared_bytes(sign, columns, tile) <= limit]
        return [{"tile": tile} for tile in fitting or tiles]

    def default(self, problem: Problem, gpu: Gpu) -> Choice:
        """The choice taken untuned."""
        tiles = [choice["tile"] for choice in self.choices(problem, gpu.arch)]
        return {"tile": _best(tiles, problem.features)}

    def launch(
        self, subject: Subject, problem: Problem, gpu: Gpu, choice: Mapping[str, Any]
    ) -> Lowered:
        """The launch of a problem. Raises UnsupportedError for sizes no grid can hold."""
        columns, tile = columns_of(problem, gpu.arch), choice["tile"]
        tiles_q = ceil_div(problem.queries, tile.queries)
        tiles_k = ceil_div(problem.features, tile.features)
        tiles_o = ceil_div(problem.sets, 8 * columns) if columns else 1
        stage = STEP * tile.steps
        if tiles_q * tiles_k > MAX_TILES or problem.points >= 2**31 - 4 * stage:
            raise UnsupportedError(
                f"a gradient of {problem.queries} x {problem.features} coordinates over "
                f"{problem.points} points is more than one launch by tensor cores holds; call it "
                "on slices"
            )
        tiles, slots = tiles_q * tiles_k * tiles_o, gpu.multiprocessors * tile.blocks
        parts, per_part = cut(tiles * problem.batch, problem.points, slots, stage)
        out_dtype = problem.out_dtype if parts == 1 else "float32"
        problem = problem if parts == 1 else parted(problem)
        spec = self.spec(subject, self.Variant(columns, tile, out_dtype), gpu.arch)
        return lowering.lowered(problem, spec, (tiles_q, tiles_k, tiles_o), parts, per_part)

    def axes(self, subject: Subject, scope: Scope) -> Mapping[str, Iterable]:
        """Of results of these dtypes."""
        tables = self.tiles[subject.slope == SIGN]
        every = dict.fromkeys(tile for tiles in tables.values() for tile in tiles)
        return {"columns": tables, "tile": every, "out_dtype": scope.dtypes}

    def is_legal(self, variant: Variant, subject: Subject, scope: Scope) -> bool:
        """Whether a tile is one of so many columns, and its shared memory fits."""
        sign, (columns, tile, _) = subject.slope == SIGN, variant
        fits = shared_bytes(sign, columns, tile) <= targets.SHARED_BYTES[scope.arch]
        return fits and tile in self.tiles[sign][columns]

    def spec(self, subject: Subject, variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant."""
        columns, tile, out_dtype = variant
        sign = subject.slope == SIGN
        facts = {
            **types("float32", out_dtype),
            "Slope": subject.slope,
            "SINGLE": columns == 0,
            "COLUMN_TILES": columns or 1,
            "QUERIES_A_WARP": tile.queries_a_warp,
            "FEATURE_TILES": tile.feature_tiles,
            "WARPS_Q": tile.warps_q,
            "WARPS_K": tile.warps_k,
            "STEPS": tile.steps,
            "BLOCKS": tile.blocks,
            "CHAIN": (CHAIN if sign else CHAIN // 2) // (STEP * tile.steps),
            "PARAMETER_BYTES": lowering.PARAMETER_BYTES,
        }
        texts = *lowering.TEXTS, self.multiply(columns, sign)
        source = self.source(facts, *texts, includes=lowering.TYPES)
        line = f"{subject.slope} columns={8 * columns or 1} {tile.queries}x{tile.features}"
        line += self.unit
        spec = KernelSpec(
            "pairwise", source, self.entry, tile.threads, shared_bytes(sign, columns, tile),
            description=f"pair_gradient tensor {line} {out_dtype}",
        )  # fmt: skip
        return named(spec, out_dtype, line)

    def multiply(self, columns: int, sign: bool) -> str:
        """CUDA text of the instruction."""
        return ""


class TensorWgmma(_Tensor):
    """By wgmma, of sm_90a, which reads weights from shared memory."""

    name = "tensor wgmma"
    header = "pairwise/gradient/wgmma.cuh"
    unit = " wgmma"
    tiles = WGMMA

    def takes(self, problem: Problem, arch: str) -> bool:
        """The same of many features, on sm_90a."""
        return arch == "sm_90a" and problem.features > NARROW and super().takes(problem, arch)

    def is_legal(self, variant: _Tensor.Variant, subject: Subject, scope: Scope) -> bool:
        """The same, on sm_90a."""
        return scope.arch == "sm_90a" and super().is_legal(variant, subject, scope)

    def multiply(self, columns: int, sign: bool) -> str:
        """CUDA text of a wgmma of 64 features, in four registers of a thread, by tiles of 8 columns
        in shared memory, whose descriptor's upper half is 8: 128 bytes from 8 columns to the
        next."""
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


class TensorMma(_Tensor):
    """By mma.sync, on every GPU."""

    name = "tensor"
    header = "pairwise/gradient/mma.cuh"
    rank = 1
    tiles = TILES


KERNELS = TensorWgmma(), TensorMma()


def pays(problem: Problem) -> bool:
    """Whether tensor cores compute a problem, and faster than the lanes do."""
    if not TensorMma().takes(problem, ""):
        return False
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


def shared_bytes(sign: bool, columns: int, tile: Tile) -> int:
    """Three stages of the raw operands, two of the split weights, and totals."""
    points, line = STEP * tile.steps, STEP * tile.steps + 4
    lines = tile.queries + (8 * columns or 1)
    raw = 4 * (tile.features * points + lines * line)
    terms = tile.queries * tile.steps * ((768 if sign else 1024) * columns or 128)
    totals = 4 * tile.threads * tile.queries_a_warp * tile.feature_tiles * (4 * columns or 2)
    return 3 * raw + 2 * terms + totals


def _best(tiles: Sequence[Tile], features: int) -> Tile:
    """The one that computes fewest slopes in vain, at a price for narrow ones, which split the
    weights more often."""
    return min(tiles, key=lambda tile: ceil_div(features, tile.features) * (tile.features + 16))

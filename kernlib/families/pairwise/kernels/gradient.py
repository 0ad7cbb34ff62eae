"""Pair gradients of every kind, on the FP32 or FP64 lanes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kernlib.errors import UnsupportedError
from kernlib.families.pairwise.lowering import gradient as lowering
from kernlib.families.pairwise.lowering.gradient import Problem, cut, parted
from kernlib.families.pairwise.lowering.problem import MAX_TILES, access, accesses, types
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.dtypes import DTYPES, outputs
from kernlib.lowering.kernel import Gpu, Kernel, named
from kernlib.lowering.steps import Lowered

THREADS = 256
TILE, TILE_K = 64, 16  # queries, and features if doubled; points of a stage
O_TILES = (0, 1, 2, 4)


class Subject(NamedTuple):
    """What a stage and an operator come to: structs of gradient/operations.cuh and slopes.cuh."""

    operation: str
    slope: str


class Scope(NamedTuple):
    """What is known of gradients whose kernels are compiled ahead."""

    arch: str
    dtypes: tuple[str, ...]


class Gradient(Kernel):
    """A block has a tile of queries and features, and walks over the points."""

    role = "pair gradient"
    name = "direct"
    header = "pairwise/gradient/gradient.cuh"
    entry = "pair_gradient"
    rank = 1

    class Variant(NamedTuple):
        """Everything that the generated code depends on besides the subject."""

        dtype: str
        out_dtype: str
        o_tile: int
        access_w: str  # of the scales too
        access_z: str
        scales: bool = False

    def takes(self, problem: Problem, arch: str) -> bool:
        """Every one."""
        return True

    def launch(
        self, subject: Subject, problem: Problem, gpu: Gpu, choice: Mapping[str, Any]
    ) -> Lowered:
        """The launch of a problem. Raises UnsupportedError for sizes no grid can hold."""
        o_tile, dtype = o_tile_of(problem.sets), problem.dtype
        tiles_q = ceil_div(problem.queries, TILE)
        tiles_k = ceil_div(problem.features, TILE * feature_tiles(dtype, o_tile))
        tiles_o = ceil_div(problem.sets, o_tile) if o_tile else 1
        if tiles_q * tiles_k > MAX_TILES or problem.points >= 2**31 - TILE_K:
            raise UnsupportedError(
                f"a gradient of {problem.queries} x {problem.features} coordinates over "
                f"{problem.points} points is more than one launch holds ({MAX_TILES} tiles); call "
                "it on slices"
            )
        slots, tiles = gpu.multiprocessors * blocks(dtype), tiles_q * tiles_k * tiles_o
        parts, per_part = cut(tiles * problem.batch, problem.points, slots, TILE_K)
        out_dtype = problem.out_dtype if parts == 1 else DTYPES[dtype].accumulator
        variant = self.Variant(
            dtype, out_dtype, o_tile,
            # Lines of points, which the kernel sums over as others over features.
            _access_of_pairs(problem),
            access(problem.z.transposed(), problem.features, problem.points, dtype),
            problem.scales is not None,
        )  # fmt: skip
        problem = problem if parts == 1 else parted(problem)
        spec, vectors = self.spec(subject, variant, gpu.arch), _out_vectors(problem, out_dtype)
        tiles_of = tiles_q, tiles_k, tiles_o
        return lowering.lowered(problem, spec, tiles_of, parts, per_part, vectors)

    def axes(self, subject: Subject, scope: Scope) -> Mapping[str, Iterable]:
        """Of problems without scales."""
        accesses = ("features", "points", "strided")
        return {
            "dtype": scope.dtypes,
            "out_dtype": dict.fromkeys(out for dtype in scope.dtypes for out in outputs(dtype)),
            "o_tile": O_TILES,
            "access_w": accesses,
            "access_z": accesses,
            "scales": (False,),
        }

    def is_legal(self, variant: Variant, subject: Subject, scope: Scope) -> bool:
        """Whether a result has a dtype of its operands'."""
        return variant.out_dtype in outputs(variant.dtype)

    def spec(self, subject: Subject, variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant. Raises UnsupportedError where its shared memory does not
        fit."""
        dtype, shared = variant.dtype, shared_bytes(variant)
        if shared > targets.SHARED_BYTES[arch]:
            raise UnsupportedError(
                f"a pair gradient needs {shared} bytes of shared memory, a block of {arch} has "
                f"{targets.SHARED_BYTES[arch]}"
            )
        facts = {
            **types(dtype, variant.out_dtype),
            **accesses(ACCESS_W=variant.access_w, ACCESS_Z=variant.access_z),
            "Op": subject.operation,
            "Slope": subject.slope,
            "TILE": TILE,
            "O_TILE": variant.o_tile,
            "FEATURE_TILES": feature_tiles(dtype, variant.o_tile),
            "SCALES": variant.scales,
            "UNROLL": _unroll(subject, variant),
            "BLOCKS": blocks(dtype),
            "PARAMETER_BYTES": lowering.PARAMETER_BYTES,
        }
        includes = (*lowering.TYPES, "pairwise/access.cuh")
        source = self.source(facts, *lowering.TEXTS, includes=includes)
        dtypes = "->".join(dict.fromkeys((dtype, variant.out_dtype)))
        line = f"{subject.operation} {subject.slope} {dtypes} sets={variant.o_tile}"
        line += " scales" * variant.scales
        ways = variant.access_w, variant.access_z
        described = f"pair_gradient {line} {'/'.join(ways)}"
        spec = KernelSpec("pairwise", source, self.entry, THREADS, shared, description=described)
        return named(spec, line, f"{TILE}x{TILE}", *ways)


def o_tile_of(sets: int) -> int:
    """Coefficients of a block's tile."""
    return next((o for o in O_TILES if o >= sets), O_TILES[-1])


def feature_tiles(dtype: str, o_tile: int) -> int:
    """Tiles of TILE features in a block's: two where 32 sums and coordinates a thread fit 128
    registers."""
    return 2 if o_tile <= 1 and dtype != "float64" else 1


def blocks(dtype: str) -> int:
    """Blocks of a multiprocessor that registers permit; shared memory of 100 KB holds one."""
    return 1 if dtype == "float64" else 2


def shared_bytes(variant: Gradient.Variant) -> int:
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


def _access_of_pairs(problem: Problem) -> str:
    """That of the weights, and of the scales if there are any."""
    operands = [t for t in (problem.weights, problem.scales) if t is not None]
    ways = {access(t, problem.queries, problem.points, problem.dtype) for t in operands}
    return ways.pop() if len(ways) == 1 else "strided"


def _unroll(subject: Subject, variant: Gradient.Variant) -> int:
    """Points unrolled: two where a point is short, and reads of shared memory show."""
    short = subject.slope in ("AbsSlope", "SquareSlope") and variant.o_tile <= 1
    return 2 if short and variant.dtype == "float32" else 1


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

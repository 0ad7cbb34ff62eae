"""What lowering of pairwise calls shares: one call as its kernels see it, the facts that
descriptors and exponents are in device code, and the names of kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kernlib.families.pairwise import stages as norms
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering.finish import COMMON_SCALARS, is_norm, outer
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.config import Constant, Fact
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.kernel import Kernel, named

ARCH = "sm_90a"  # of products of tensor cores
THREADS = 256
TILE_K = 16
PROMOTE_K = 64
BIG_TILE, SMALL_TILE = 128, 64
PATCH_SIDE = 4  # points of a and of b in a patch of few pairs
# 2000 a multiprocessor of an H100, as far as was measured, and so at most 2**14 entries of a batch;
# features whose place steps past the last one within an int.
MOST_PAIRS, MOST_FEATURES = 2**18, 2**30
MAX_TILES = 2**31 - 1  # blocks of a grid's first axis
MAX_BATCH_BLOCKS = 65535
OPERANDS = ("a", "b", "out")  # whose addresses the parameter struct starts with
# Headers of the types that struct Config and struct Fixed name.
TYPES = ("common/math.cuh", "pairwise/terms.cuh", "pairwise/view.cuh")

# Host values of p with code of their own; every other value shares "any", device tensors "device".
INNER_CODE = {
    0.0: "Power0",
    0.5: "PowerHalf",
    1.0: "Abs",
    1.5: "PowerThreeHalves",
    2.0: "Square",
    2.5: "PowerFiveHalves",
    3.0: "Power3",
    4.0: "Power4",
    6.0: "Power6",
    float("inf"): "PowerInfinity",
    "any": "Power",
    "device": "PowerOnDevice",
}
EXPONENT_STAGES = {  # inner stages with an exponent: their code for its values
    norms.Power: INNER_CODE,
    norms.ExpPower: {
        1.0: "ExpPower1",
        2.0: "ExpPower2",
        "any": "ExpPower",
        "device": "ExpPowerOnDevice",
        0.0: "ExpPowerOnDevice",
    },
    norms.PowerLog: {"any": "PowerLog"},
}


class Layout(NamedTuple):
    """Strides, in elements, of (batch, points, features) or (batch, m, n), and the address of the
    first element modulo 16 (an aligned one may say 0 or 16)."""

    batch: int
    rows: int
    columns: int
    alignment: int = 16

    def transposed(self) -> Layout:
        return Layout(self.batch, self.columns, self.rows, self.alignment)


def access(layout: Layout, points: int, features: int, dtype: str) -> str:
    """How far 16-byte loads (8 bytes of a half type) of an operand of so many points and features
    can run: see Access in operand.cuh."""
    itemsize = DTYPES[dtype].bytes
    run = 4 if itemsize == 2 else 16 // itemsize
    if layout.alignment % (run * itemsize) or layout.batch % run:
        return "strided"
    if layout.columns == 1 and features % run == 0 and layout.rows % run == 0:
        return "features"
    if layout.rows == 1 and points % run == 0 and layout.columns % run == 0:
        return "points"
    return "strided"


class Problem(NamedTuple):
    """One call's shapes and layouts, as lowering sees them."""

    m: int
    n: int
    k: int
    batch: int
    a: Layout
    b: Layout
    out: Layout
    dtype: str = "float32"
    out_dtype: str = "float32"
    diagonal: int = 0  # n - m of the entries that receive the regularization
    accumulate: bool = False
    inner: float | str = "any"  # key of inner_codes(descriptor)
    outer: float | str = "any"  # key of EXPONENT_CODE or another, for outer=Power()
    root: bool = False  # outer exponent is 1 / inner exponent

    def transposed(self) -> Problem:
        """The same call with a and b exchanged: it fills out's transpose."""
        return Problem(
            self.n, self.m, self.k, self.batch, self.b, self.a, self.out.transposed(),
            self.dtype, self.out_dtype, -self.diagonal, self.accumulate,
            self.inner, self.outer, self.root,
        )  # fmt: skip


class Call(NamedTuple):
    """What a kernel of a matrix is chosen for: ``strides`` are those of the hyperparameters over
    the batch, ``precision`` what products of float32 may be, "fp32" or "tf32"."""

    descriptor: Pairwise
    problem: Problem
    strides: tuple[int, ...] = ()
    precision: str = "fp32"


class Scope(NamedTuple):
    """What is known of calls whose kernels are compiled ahead."""

    dtypes: tuple[str, ...]
    arch: str


class PairKernel(Kernel):
    """A kernel of a descriptor, whose texts behind the facts are in their arithmetic."""

    def source(self, facts: Mapping[str, Fact], *texts: str, includes: Iterable[str] = ()) -> str:
        arithmetic = "using AccT = Config::AccT;\n"
        return super().source(facts, arithmetic, *texts, includes=includes)

    def described(
        self,
        descriptor: Pairwise,
        source: str,
        threads: int,
        shared_bytes: int,
        words: list[str],
        unsaid: tuple[str, ...] = (),
    ) -> KernelSpec:
        """The specification of a source: its description is the descriptor's, then ``unsaid``, then
        ``words``, which its name has too."""
        line = " ".join([descriptor.describe(), *unsaid, *words])
        spec = KernelSpec("pairwise", source, self.entry, threads, shared_bytes, description=line)
        return named(spec, *short(descriptor), *words, epilogue=descriptor.epilogue)


def inner_codes(descriptor: Pairwise) -> dict[float | str, str]:
    """Kinds of inner exponent that have code of their own, and that code."""
    stage = type(descriptor.inner)
    return EXPONENT_STAGES.get(stage) or {"any": stage.__name__}


def scalar_count(descriptor: Pairwise) -> int:
    return len(COMMON_SCALARS) + len(descriptor.parameters)


def short(descriptor: Pairwise) -> list[str]:
    """A descriptor in a few words, for names of kernels: operator and stages."""
    stages = (type(stage).__name__ for stage in (descriptor.inner, descriptor.outer))
    return [descriptor.operator, *(name for name in stages if name != "Identity")]


def exponents(descriptor: Pairwise, variant) -> list[str]:
    """What tells apart the kernels of a descriptor by their exponents."""
    words, codes = [], inner_codes(descriptor)
    inner = next(kind for kind in codes if codes[kind] == codes[variant.inner])
    words += [f"p={inner}"] * (inner != "any")
    if isinstance(descriptor.outer, norms.Power):
        words.append("outer=" + outer(descriptor, variant)[0].replace(" ", ""))
        words += ["norm"] * is_norm(descriptor, variant)
    return words


def types(dtype: str, out_dtype: str | None = None) -> dict[str, Fact]:
    """Facts: storage, arithmetic and storage of the result."""
    storage = DTYPES[dtype]
    facts: dict[str, Fact] = {"InputT": storage.cuda, "AccT": storage.sums.cuda}
    return facts if out_dtype is None else {**facts, "OutputT": DTYPES[out_dtype].cuda}


def terms(descriptor: Pairwise, variant, swapped: bool = False) -> dict[str, Fact]:
    """Facts of the terms that a kernel sums. ``variant`` has what :func:`finish.finish` reads."""
    inner = inner_codes(descriptor)[variant.inner]
    difference = "SwappedDifference" if swapped else "Difference"
    operation = "Dot" if descriptor.operator == "dot" else difference
    return {
        "Inner": inner,
        "Term": f"{operation}<{inner}>",
        "BY_NORM": is_norm(descriptor, variant),
        "SCALARS": scalar_count(descriptor),
    }


def accesses(**kinds: str) -> dict[str, Fact]:
    """Facts of how operands are read: values of :func:`access` by name."""
    return {name: Constant(f"Access::{kind}") for name, kind in kinds.items()}


def view(layout: Layout) -> tuple[int, int, int]:
    """struct View of a tensor."""
    return layout.batch, layout.rows, layout.columns


def fixed_values(problem: Problem, strides: tuple[int, ...]) -> dict[str, Any]:
    """What the plans of all kernels that store a matrix fix."""
    return {
        "scalar_strides": strides,
        "a_view": view(problem.a),
        "b_view": view(problem.b),
        "out_view": view(problem.out),
        "diagonal": problem.diagonal,
        "m": problem.m,
        "n": problem.n,
        "k": problem.k,
        "accumulate": problem.accumulate,
        "padding": 0,
    }


def patches(problem: Problem) -> int:
    """Those of few pairs, of one entry of the batch."""
    return ceil_div(problem.m, PATCH_SIDE) * ceil_div(problem.n, PATCH_SIDE)


def is_few(problem: Problem) -> bool:
    """Whether there are few enough pairs for the kernel of that name."""
    pairs = patches(problem) * PATCH_SIDE * PATCH_SIDE * problem.batch
    return pairs <= MOST_PAIRS and problem.k <= MOST_FEATURES


def split_pays(problem: Problem) -> bool:
    """Whether products of tensor cores beat the direct kernel, by microseconds on an H200: four
    launches, the packing and the store of each pair or the products of whole tiles, against the
    store or 0.07 a million differences, those of whole tiles too. Neither is faster than a tile's
    walk along K, which no other shares."""
    k = problem.k
    padded = round_up(problem.m, SMALL_TILE) * round_up(problem.n, SMALL_TILE) * problem.batch
    differences = max(5 + padded * max(1.3e-6, 7e-8 * k), 3.5 + 0.0625 * k)
    return k >= 16 and split_us(problem) < differences


def split_us(problem: Problem) -> float:
    """The microseconds of products that :func:`split_pays` compares."""
    k, points = problem.k, problem.m + problem.n
    stored = 1.75e-6 * problem.m * problem.n * problem.batch
    multiplied = 1e-8 * k * round_up(problem.m, BIG_TILE) * round_up(problem.n, BIG_TILE)
    packed = 2e-6 * points * problem.batch * k
    return 20 + 0.025 * k + packed + max(stored, multiplied * problem.batch)


def group_bytes(tile: int) -> int:
    """Shared memory for codes and tables, of which the stages have as much."""
    return 256 * tile


def shared_bytes(dtype: str, tile: int, long_k: bool, categories: int = 0) -> int:
    """Two stages of both operands and the tile of sums, which share memory when K is short. Codes
    and tables of categories take that of the stages, or lie behind the sums."""
    accumulator = DTYPES[dtype].sums.bytes
    line = (tile + 16 // accumulator) * accumulator
    stages, sums = 2 * 2 * TILE_K * line, tile * line
    if categories and not long_k:
        sums += group_bytes(tile)
    return stages + sums if long_k else max(stages, sums)

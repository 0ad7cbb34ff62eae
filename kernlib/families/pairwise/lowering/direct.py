"""From a pairwise descriptor and the layout of its tensors to a KernelSpec, a grid and parameters.

Pure arithmetic on plain data: no tensor, no device. What the generated code depends on is in the
spec; sizes, strides and hyperparameters are launch arguments. Records are named tuples: five
dataclasses would cost 5 ms of the first call.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from itertools import product

from kernlib.errors import UnsupportedError
from kernlib.families.pairwise import stages as norms
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering.finish import (
    COMMON_SCALARS,
    finish,
    is_norm,
    outer,
    outer_kinds,
)
from kernlib.families.pairwise.lowering.layout import (
    TABLE_OPERANDS,
    Categories,
    Layout,
    access,
    group_bytes,
)
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import choice as choices
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.choice import Choice
from kernlib.lowering.dtypes import DTYPES, outputs
from kernlib.lowering.names import named
from kernlib.lowering.steps import Lowered, Step
from kernlib.records import NamedTuple

THREADS = 256
TILE_K = 16
PROMOTE_K = 64
BIG_TILE, SMALL_TILE = 128, 64
SMALL_COST = 1.2  # of a pair in a small tile, beside one in a big one
MAX_TILES = 2**31 - 1  # blocks of a grid's first axis
MAX_BATCH_BLOCKS = 65535
OPERANDS = ("a", "b", "out")  # whose addresses the parameter struct starts with

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


def inner_codes(descriptor: Pairwise) -> dict[float | str, str]:
    """Kinds of inner exponent that have code of their own, and that code."""
    stage = type(descriptor.inner)
    return EXPONENT_STAGES.get(stage) or {"any": stage.__name__}


def scalar_count(descriptor: Pairwise) -> int:
    return len(COMMON_SCALARS) + len(descriptor.parameters)


def lower(
    descriptor: Pairwise,
    problem: Problem,
    arch: str,
    multiprocessors: int,
    scalar_strides: tuple[int, ...],
    choice: Mapping[str, object] | None = None,
    categories: Categories | None = None,
) -> Lowered:
    """Choose the variant for a call: by ``choice`` if it is one of the problem's candidates (values
    may be text), else by rule. A result that lies column by column is the transpose of one of
    swapped operands. ``categories`` are those that the descriptor counts. Raises UnsupportedError
    for sizes no grid can hold."""
    swapped = problem.out.rows == 1 and problem.out.columns != 1
    if swapped:
        problem = problem.transposed()
    known = candidates(problem, arch, descriptor.categories)
    chosen = choices.named(choice, known) or default(problem, known, multiprocessors)
    variant = Variant(
        problem.dtype,
        problem.out_dtype,
        chosen["tile"],
        problem.k > PROMOTE_K,
        access(problem.a, problem.m, problem.k, problem.dtype),
        access(problem.b, problem.n, problem.k, problem.dtype),
        swapped and descriptor.signed,
        problem.inner,
        problem.outer,
        problem.root,
    )
    tiles_m, tiles_n = ceil_div(problem.m, variant.tile), ceil_div(problem.n, variant.tile)
    if tiles_m * tiles_n > MAX_TILES or problem.k >= 2**31 - TILE_K:
        raise UnsupportedError(
            f"a {problem.m} x {problem.n} result over {problem.k} features is more than one launch "
            f"holds ({MAX_TILES} tiles of {variant.tile}); call it on slices"
        )
    fixed = fixed_parameters(problem, tiles_m, tiles_n, scalar_strides)
    grid = (tiles_m * tiles_n, min(problem.batch, MAX_BATCH_BLOCKS))
    operands = ("b", "a", "out") if swapped else OPERANDS
    if categories is not None:
        fixed += (categories.transposed() if swapped else categories).pack()
        codes = ("b_codes", "a_codes", "tables") if swapped else TABLE_OPERANDS
        operands = (*codes, *operands)
    pointers = tuple((name, 0) for name in operands)
    made = spec(descriptor, variant, arch)
    return Lowered((Step(made, grid, fixed, pointers, scalar_count(descriptor)),))


def candidates(problem: Problem, arch: str, categories: int = 0) -> list[Choice]:
    """What :func:`lower` can choose for a problem, the largest tile first: each knob's value, of
    kernels whose shared memory fits the arch. There is always one."""
    thin = min(problem.m, problem.n) <= SMALL_TILE
    tiles = _tiles(problem.dtype, problem.k > PROMOTE_K, arch, categories)
    return [{"tile": tile} for tile in tiles if tile == SMALL_TILE or not thin]


def default(problem: Problem, known: list[Choice], multiprocessors: int) -> Choice:
    """Of the candidates the one taken untuned: that whose rounds of tiles, one a multiprocessor,
    are the fewest pairs."""

    def cost(choice: Choice) -> float:
        tile = int(choice["tile"])
        tiles = ceil_div(problem.m, tile) * ceil_div(problem.n, tile) * problem.batch
        pair = SMALL_COST if tile == SMALL_TILE else 1.0
        return ceil_div(tiles, multiprocessors) * tile * tile * pair

    return min(known, key=cost)


def _tiles(dtype: str, long_k: bool, arch: str, categories: int) -> list[int]:
    """Tiles that fit a block of ``arch``; the small one in any case, for :func:`spec` to refuse."""
    # 64 double sums a thread, of the big tile, would take all 128 registers.
    sizes = (SMALL_TILE,) if dtype == "float64" else (BIG_TILE, SMALL_TILE)
    limit = targets.SHARED_BYTES[arch]
    return [
        t for t in sizes if t == SMALL_TILE or shared_bytes(dtype, t, long_k, categories) <= limit
    ]


def spec(descriptor: Pairwise, variant: Variant, arch: str) -> KernelSpec:
    """The KernelSpec of a variant. Raises UnsupportedError where its shared memory does not fit."""
    shared = shared_bytes(variant.dtype, variant.tile, variant.long_k, descriptor.categories)
    if shared > targets.SHARED_BYTES[arch]:
        raise UnsupportedError(
            f"{descriptor.describe()} needs {shared} bytes of shared memory, a block of {arch} has "
            f"{targets.SHARED_BYTES[arch]}"
        )
    made = KernelSpec(
        "pairwise",
        source(descriptor, variant),
        "pairwise_direct",
        THREADS,
        shared,
        description=f"{descriptor.describe()} {_describe(descriptor, variant)}",
    )
    words = (*short(descriptor), _describe(descriptor, variant))
    return named(made, *words, epilogue=descriptor.epilogue)


def short(descriptor: Pairwise) -> list[str]:
    """A descriptor in a few words, for names of kernels: operator and stages."""
    stages = (type(stage).__name__ for stage in (descriptor.inner, descriptor.outer))
    return [descriptor.operator, *(name for name in stages if name != "Identity")]


def shared_bytes(dtype: str, tile: int, long_k: bool, categories: int = 0) -> int:
    """Two stages of both operands and the tile of sums, which share memory when K is short. Codes
    and tables of categories take that of the stages, or lie behind the sums."""
    accumulator = DTYPES[dtype].sums.bytes
    line = (tile + 16 // accumulator) * accumulator
    stages, sums = 2 * 2 * TILE_K * line, tile * line
    if categories and not long_k:
        sums += group_bytes(tile)
    return stages + sums if long_k else max(stages, sums)


def variants(descriptor: Pairwise, arch: str, dtypes: tuple[str, ...]) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for inputs of ``dtypes``."""
    powers = inner_codes(descriptor)
    accesses = ("features", "points", "strided")
    code = list(product(accesses, accesses, _swaps(descriptor), powers, outer_kinds(descriptor)))
    specs = {
        spec(descriptor, Variant(dtype, out, tile, long, a, b, swap, power, outer, root), arch)
        for dtype in dtypes
        for out in outputs(dtype)
        for long in (True, False)
        for tile in _tiles(dtype, long, arch, descriptor.categories)
        for a, b, swap, power, (outer, root) in code
    }
    return sorted(specs, key=lambda s: s.source)


def _swaps(descriptor: Pairwise) -> tuple[bool, ...]:
    return (False, True) if descriptor.signed else (False,)


def source(descriptor: Pairwise, variant: Variant) -> str:
    """The generated CUDA text: a few defines, ``Finish``, one include."""
    operation = "Dot" if descriptor.operator == "dot" else "Difference"
    return f"""#include "common/types.cuh"
#include "common/math.cuh"

using InputT = {DTYPES[variant.dtype].cuda};
using AccT = {DTYPES[variant.dtype].sums.cuda};
using OutputT = {DTYPES[variant.out_dtype].cuda};

constexpr int TILE = {variant.tile};
constexpr int SCALARS = {scalar_count(descriptor)};
constexpr bool LONG_K = {str(variant.long_k).lower()};
constexpr bool SYMMETRIC = {str(descriptor.symmetric).lower()};

#define OPERATION {"Swapped" * variant.swapped}{operation}
#define INNER {inner_codes(descriptor)[variant.inner]}
#define ACCESS_A Access::{variant.access_a}
#define ACCESS_B Access::{variant.access_b}
{"#define BY_NORM" * is_norm(descriptor, variant)}{_count(descriptor)}
{finish(descriptor, variant)}
#include "pairwise/direct/direct.cuh"
"""


def _count(descriptor: Pairwise) -> str:
    count = descriptor.categories
    return f"\n#define CATEGORIES {count}" if count else ""


def _describe(descriptor: Pairwise, variant: Variant) -> str:
    """What tells a kernel from the others of its descriptor; of an outer exponent its code, which
    several exponents of both stages may share."""
    dtypes = dict.fromkeys((variant.dtype, variant.out_dtype))
    words = ["->".join(dtypes), f"tile={variant.tile}", f"{variant.access_a}/{variant.access_b}"]
    words += exponents(descriptor, variant)
    return " ".join([*words, *["long"] * variant.long_k, *["swapped"] * variant.swapped])


def exponents(descriptor: Pairwise, variant) -> list[str]:
    """What tells apart the kernels of a descriptor by their exponents."""
    words, codes = [], inner_codes(descriptor)
    inner = next(kind for kind in codes if codes[kind] == codes[variant.inner])
    words += [f"p={inner}"] * (inner != "any")
    if isinstance(descriptor.outer, norms.Power):
        words.append("outer=" + outer(descriptor, variant)[0].replace(" ", ""))
        words += ["norm"] * is_norm(descriptor, variant)
    return words


def _takes_vectors(problem: Problem) -> bool:
    """Whether out takes aligned stores of one chunk (16 bytes of accumulators) along n."""
    chunk = 16 // DTYPES[problem.dtype].sums.bytes
    out = problem.out
    aligned = out.alignment % (chunk * DTYPES[problem.out_dtype].bytes) == 0
    return aligned and out.columns == 1 and out.rows % chunk == 0 and out.batch % chunk == 0


def fixed_parameters(
    problem: Problem, tiles_m: int, tiles_n: int, scalar_strides: tuple[int, ...]
) -> bytes:
    views = [x for v in (problem.a, problem.b, problem.out) for x in (v.batch, v.rows, v.columns)]
    sizes = (problem.m, problem.n, problem.batch, problem.diagonal)
    flags = (int(_takes_vectors(problem)), int(problem.accumulate))
    return struct.pack(
        f"<{len(scalar_strides)}q9q4q5i4x",
        *scalar_strides, *views, *sizes, problem.k, tiles_m, tiles_n, *flags,
    )  # fmt: skip

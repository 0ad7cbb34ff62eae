"""Squared distances and dot products by tensor cores (kernel_sources/pairwise/split/split.cuh),
sm_90a.

A call is four launches on one workspace: the centre of the data, both operands packed as fp16
words, the products, and the direct kernel, which does the work where a sample of pairs has shown
that too many of them are close together, and else ends at once. The device decides; the host never
waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kernlib.families.pairwise import stages as norms
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.kernels.direct import DIRECT
from kernlib.families.pairwise.lowering import pack
from kernlib.families.pairwise.lowering.finish import finish, is_norm, outer_kinds
from kernlib.families.pairwise.lowering.pack import (
    DOUBTFUL,
    INFO_BYTES,
    MAX_WORKSPACE,
    Workspace,
    centre_spec,
    constants,
    gated,
    gated_step,
    is_difference,
    is_dot,
    is_product,
    pack_spec,
    squares,
    view,
    workspace,
)
from kernlib.families.pairwise.lowering.problem import (
    Call,
    Problem,
    Scope,
    scalar_count,
    short,
)
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div, round_up
from kernlib.lowering.dtypes import DTYPES, FLOAT_SUMS, outputs
from kernlib.lowering.kernel import Gpu
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.steps import WORKSPACE, Lowered, Step
from kernlib.lowering.wgmma import multiply

ARCH = "sm_90a"
TILE_M = 128
DIRECT_TILE = 64  # the smaller of the direct kernel's
RASTER_ROWS = 16
THREADS = 384
PART_BYTES = 8 * 16 * 32 * 4  # a part of 32 columns for each of 8 warps
INFOS = 4  # tiles whose PointInfo is in shared memory
BARRIER_BYTES = 256  # at most, of static shared memory
# What the parameter struct of split/split.cuh holds behind the strides of its numbers.
FIXED = "14q6iI3i"
PRECISIONS = {"fp32": 2, "tf32": 1, "bf16": 1}  # copies: two words, or one


class Variant(NamedTuple):
    """Everything that code generation chooses besides the descriptor."""

    dtype: str
    out_dtype: str
    copies: int  # words of a number
    columns: int  # of a tile
    depth: int  # features of a stage
    promote: int  # stages whose products are summed in one go; 0 for all
    ordered: bool  # warpgroups take turns: 1.60 ms in place of 1.76 at 30000 x 30000 x 64
    inner: float | str = "any"
    outer: float | str = "any"
    root: bool = False

    @property
    def rows(self) -> int:
        return TILE_M

    @property
    def stage_bytes(self) -> int:
        return 2 * self.copies * self.depth * (TILE_M + self.columns)

    @property
    def stages(self) -> int:
        """As many as fit into shared memory."""
        limit = targets.SHARED_BYTES[ARCH] - BARRIER_BYTES
        return (limit - self._beside) // self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.stage_bytes + self._beside

    @property
    def _beside(self) -> int:
        return INFOS * (TILE_M + self.columns) * INFO_BYTES + PART_BYTES


def takes(descriptor: Pairwise, problem: Problem, arch: str, precision: str) -> bool:
    """Whether a call's sums are squared distances or dot products of a size and type that this
    kernel knows. ``precision`` is a key of PRECISIONS."""
    if arch != ARCH or not is_product(descriptor, problem):
        return False
    variant = default(descriptor, problem, precision)
    small = tile_count(descriptor, problem, variant) < 2**31
    return small and workspace(problem, variant).size <= MAX_WORKSPACE


def pays(problem: Problem) -> bool:
    """Whether it beats the direct kernel, by microseconds on an H200: four launches, the packing
    and the store of each pair or the products of whole tiles, against the store or 0.07 a million
    differences, those of whole tiles too. Neither is faster than a tile's walk along K, which no
    other shares."""
    k = problem.k
    padded = round_up(problem.m, DIRECT_TILE) * round_up(problem.n, DIRECT_TILE) * problem.batch
    differences = max(5 + padded * max(1.3e-6, 7e-8 * k), 3.5 + 0.0625 * k)
    return k >= 16 and time_us(problem) < differences


def time_us(problem: Problem) -> float:
    """The microseconds that :func:`pays` compares."""
    k, points = problem.k, problem.m + problem.n
    stored = 1.75e-6 * problem.m * problem.n * problem.batch
    multiplied = 1e-8 * k * round_up(problem.m, TILE_M) * round_up(problem.n, TILE_M)
    packed = 2e-6 * points * problem.batch * k
    return 20 + 0.025 * k + packed + max(stored, multiplied * problem.batch)


def default(descriptor: Pairwise, problem: Problem, precision: str) -> Variant:
    """The variant of a call."""
    copies = PRECISIONS[precision]
    if problem.dtype != "float32" and not is_difference(descriptor, problem):
        copies = 1  # the type's numbers are words of fp16 as they are
    return _variant(
        problem.dtype, problem.out_dtype, copies, precision == "fp32", problem.k,
        problem.inner, problem.outer, problem.root,
    )  # fmt: skip


def _variant(dtype, out_dtype, copies, exact, k, inner, outer, root) -> Variant:
    """Sums that are not added outside leave registers for a wider tile."""
    promote = (1 if k <= 32 else 2) if exact else 0
    columns, depth = (192, 32) if exact else (256, 64)
    return Variant(dtype, out_dtype, copies, columns, depth, promote, exact, inner, outer, root)


def lower(
    descriptor: Pairwise,
    problem: Problem,
    arch: str,
    multiprocessors: int,
    scalar_strides: tuple[int, ...],
    precision: str,
    choice: Mapping[str, object] | None = None,
) -> Lowered:
    """The launches of a call that :func:`takes`; their pointers name "a", "b" and "out" of the
    caller. Raises UnsupportedError as the launch of
    :class:`kernlib.families.pairwise.kernels.direct.Direct` does."""
    given, names = problem, ("a", "b")
    if problem.out.rows == 1 and problem.out.columns != 1:
        problem, names = problem.transposed(), ("b", "a")
    variant = default(descriptor, problem, precision)
    place = workspace(problem, variant)
    steps = (
        *pack.steps(descriptor, problem, variant, place, names),
        _main_step(
            descriptor, problem, variant, place, names, multiprocessors, tuple(scalar_strides)
        ),
        _direct_step(descriptor, given, arch, multiprocessors, scalar_strides, place),
    )
    return Lowered(steps, place.size)


def specs(
    descriptor: Pairwise, problem: Problem, arch: str, multiprocessors: int, precision: str
) -> list[KernelSpec]:
    """The specs that :func:`lower` takes for a call."""
    strides = (0,) * scalar_count(descriptor)
    return lower(descriptor, problem, arch, multiprocessors, strides, precision).specs


def variants(descriptor: Pairwise, arch: str, dtypes: tuple[str, ...]) -> list[KernelSpec]:
    """Every spec that :func:`lower` can choose for inputs of ``dtypes``, whatever the precision."""
    difference, dot = descriptor.operator == "difference", is_dot(descriptor)
    power = isinstance(descriptor.inner, norms.Power)
    if arch != ARCH or not (dot or (difference and (power or squares(descriptor)))):
        return []
    inner = 2.0 if power else "any"
    kinds = [
        (dtype, out, copies, exact)
        for dtype in dtypes
        if dtype in FLOAT_SUMS
        for out in outputs(dtype)
        for copies, exact in ((2 if difference or dtype == "float32" else 1, True), (1, False))
    ]
    made = [
        _variant(*kind, k, inner, outer, root)
        for kind in kinds
        for k in ((32, 64) if kind[-1] else (64,))
        for outer, root in outer_kinds(descriptor)
    ]
    found = [spec(descriptor, variant, difference) for variant in made]
    found += [centre_spec(kind[0], difference) for kind in kinds]
    found += [pack_spec(variant, difference) for variant in made]
    square = "using Inner = Square;" if difference else ""
    known = [dtype for dtype in dtypes if dtype in FLOAT_SUMS]
    whole = DIRECT.specs(descriptor, Scope(tuple(known), arch), arch) if known else []
    found += [gated(each) for each in whole if square in each.source]
    return sorted(dict.fromkeys(found), key=lambda each: each.source)


def _main_step(
    descriptor,
    problem: Problem,
    variant: Variant,
    place: Workspace,
    names,
    multiprocessors,
    strides,
) -> Step:
    tiles_m, tiles_n = ceil_div(problem.m, TILE_M), ceil_div(problem.n, variant.columns)
    tiles = tile_count(descriptor, problem, variant)
    fixed = _parameters(len(strides)).pack(
        *strides, *view(problem.a), *view(problem.b), *view(problem.out),
        place.a_stride, place.b_stride, place.a_points, place.b_points, problem.diagonal,
        problem.m, problem.n, problem.k, place.stages, tiles_m, tiles_n, tiles,
        _takes_vectors(problem), problem.accumulate, 0,
    )  # fmt: skip
    pointers = (
        (names[0], 0), (names[1], 0), ("out", 0),
        *((WORKSPACE, offset) for offset in (
            place.doubtful, place.packed_a, place.packed_b, place.a_info, place.b_info,
        )),
    )  # fmt: skip
    scalars = scalar_count(descriptor)
    made = spec(descriptor, variant, is_difference(descriptor, problem))
    return Step(made, (min(tiles, multiprocessors), 1), fixed, pointers, scalars)


def _direct_step(descriptor, problem, arch, multiprocessors, strides, place: Workspace) -> Step:
    """The direct kernel behind the gate, by as many CTAs as run at a time."""
    call, gpu = Call(descriptor, problem, tuple(strides)), Gpu(arch, multiprocessors)
    (step,) = DIRECT.launch(descriptor, call, gpu, DIRECT.default(call, gpu)).steps
    grid = (min(step.grid[0], 2 * multiprocessors), step.grid[1])
    return gated_step(step, place)._replace(grid=grid)


def tile_count(descriptor: Pairwise, problem: Problem, variant: Variant) -> int:
    """Tiles of all batch entries, as struct Walk counts them."""
    tiles_m, tiles_n = ceil_div(problem.m, TILE_M), ceil_div(problem.n, variant.columns)
    if not descriptor.symmetric:
        return tiles_m * tiles_n * problem.batch
    groups = range(0, tiles_m, RASTER_ROWS)
    each = (
        min(tiles_m - first, RASTER_ROWS) * (tiles_n - first * TILE_M // variant.columns)
        for first in groups
    )
    return sum(each) * problem.batch


def _takes_vectors(problem: Problem) -> bool:
    """Whether out takes aligned stores of 4 elements along n."""
    out, itemsize = problem.out, DTYPES[problem.out_dtype].bytes
    aligned = out.alignment % (4 * itemsize) == 0 and out.columns == 1
    return aligned and out.rows % 4 == 0 and out.batch % 4 == 0


def spec(descriptor: Pairwise, variant: Variant, difference: bool) -> KernelSpec:
    """The KernelSpec of the products."""
    made = KernelSpec(
        "pairwise",
        source(descriptor, variant, difference),
        "pairwise_split",
        THREADS,
        variant.shared_bytes,
        description=f"{descriptor.describe()} {_describe(variant)}",
    )
    words = (*short(descriptor), _describe(variant))
    return named(made, *words, epilogue=descriptor.epilogue)


def source(descriptor: Pairwise, variant: Variant, difference: bool) -> str:
    """The generated CUDA text of the products."""
    scalars = scalar_count(descriptor)
    norm = {"Inner": "Square", "Term": "Difference<Square>"}
    norm["BY_NORM"] = is_norm(descriptor, variant)
    return f"""{constants(variant.dtype, difference, _parameters(scalars).size, **norm)}
#include "common/math.cuh"
#include "pairwise/split/root.cuh"

using OutputT = {DTYPES[variant.out_dtype].cuda};

constexpr int TILE_N = {variant.columns};
constexpr int DEPTH = {variant.depth};
constexpr int STAGES = {variant.stages};
constexpr int COPIES = {variant.copies};
constexpr bool ORDERED = {str(variant.ordered).lower()};
constexpr bool SYMMETRIC = {str(descriptor.symmetric).lower()};
constexpr int SCALARS = {scalars};
constexpr int DYNAMIC_BYTES = {variant.shared_bytes};
#define PROMOTE {variant.promote}
#define GATED {DOUBTFUL}
{"#define NORMS" * is_norm(descriptor, variant)}

{multiply("float16", variant.columns, False)}
{finish(descriptor, variant, root="square_root")}
#include "pairwise/split/split.cuh"
"""


def _parameters(scalars: int) -> Parameters:
    return Parameters(8, f"<{scalars}q{FIXED}", scalars)


def _describe(variant: Variant) -> str:
    dtypes = dict.fromkeys((variant.dtype, variant.out_dtype))
    words = ["->".join(dtypes), f"split words={variant.copies} tile={TILE_M}x{variant.columns}"]
    return " ".join([*words, f"promote={variant.promote}", *["ordered"] * variant.ordered])

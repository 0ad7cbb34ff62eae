"""Squared distances and dot products by tensor cores, sm_90a.

A call is four launches on one workspace: the centre of the data, both operands packed as fp16
words, the products, and the direct kernel, which does the work where a sample of pairs has shown
that too many of them are close together, and else ends at once. The device decides; the host never
waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from math import inf
from typing import Any, NamedTuple

from kernlib.families.pairwise import stages as norms
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.kernels.direct import DIRECT
from kernlib.families.pairwise.lowering import problem as lowering
from kernlib.families.pairwise.lowering.finish import finish, is_norm, outer_kinds
from kernlib.families.pairwise.lowering.pack import (
    BARRIER_BYTES,
    INFO_BYTES,
    MAX_WORKSPACE,
    PRECISIONS,
    Workspace,
    gated,
    gated_step,
    is_difference,
    is_dot,
    is_product,
    split_facts,
    squares,
    workspace,
)
from kernlib.families.pairwise.lowering.problem import (
    ARCH,
    TYPES,
    Call,
    PairKernel,
    Problem,
    Scope,
    fixed_values,
    scalar_count,
    types,
)
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.dtypes import DTYPES, FLOAT_SUMS, outputs
from kernlib.lowering.kernel import Gpu
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import WORKSPACE, Lowered, Step
from kernlib.lowering.wgmma import multiply

WARPGROUPS = 2
TILE_M = 64 * WARPGROUPS
RASTER_ROWS = 16
THREADS = 128 * (WARPGROUPS + 1)
PART_BYTES = 8 * 16 * 32 * 4  # a part of 32 columns for each of 8 warps
INFOS = 4  # tiles whose PointInfo is in shared memory
POINTERS = 8


class Split(PairKernel):
    """Products of words, scaled and finished where they are stored."""

    role = "matrix"
    name = "split"
    header = "pairwise/split/split.cuh"
    entry = "pairwise_split"
    reason = (
        "squared distances or dot products by tensor cores of sm_90a: chosen for 16 features or "
        "more, where four launches and packing are estimated to take less than `direct`"
    )

    class Variant(NamedTuple):
        """Everything that code generation chooses besides the descriptor. Sums that are not added
        outside leave registers for a wider tile."""

        dtype: str
        out_dtype: str
        copies: int  # words of a number
        promote: int  # stages whose products are summed in one go; 0 for all
        inner: float | str = "any"
        outer: float | str = "any"
        root: bool = False

        @property
        def rows(self) -> int:
            return TILE_M

        @property
        def columns(self) -> int:
            """Of a tile."""
            return 192 if self.promote else 256

        @property
        def depth(self) -> int:
            """Features of a stage."""
            return 32 if self.promote else 64

        @property
        def ordered(self) -> bool:
            """Warpgroups take turns: 1.60 ms in place of 1.76 at 30000 x 30000 x 64."""
            return self.promote > 0

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

    def takes(self, problem: Call, arch: str) -> bool:
        """Whether a call's sums are squared distances or dot products of a size and type that the
        kernel computes."""
        descriptor, call, _, precision = problem
        if arch != ARCH or not descriptor.takes_products or not is_product(descriptor, call):
            return False
        variant = variant_of(descriptor, call, precision)
        small = tile_count(descriptor, call, variant) < 2**31
        return small and workspace(call, variant).size <= MAX_WORKSPACE

    def estimate(self, problem: Call, choice: Mapping[str, Any], gpu: Gpu) -> float:
        """Infinite where the direct kernel wins."""
        call = problem.problem
        return lowering.split_us(call) if lowering.split_pays(call) else inf

    def launch(
        self, descriptor: Pairwise, problem: Call, gpu: Gpu, choice: Mapping[str, Any]
    ) -> Lowered:
        """The launches of a call; their pointers name "a", "b" and "out" of the caller. Raises
        UnsupportedError as the direct kernel does."""
        from kernlib.families.pairwise.kernels.pack import steps  # other first calls load none

        call, names = problem.problem, ("a", "b")
        if call.out.rows == 1 and call.out.columns != 1:
            call, names = call.transposed(), ("b", "a")
        variant = variant_of(descriptor, call, problem.precision)
        place = workspace(call, variant)
        main = self._main_step(descriptor, call, variant, place, names, gpu, problem.strides)
        (direct,) = DIRECT.launch(descriptor, problem, gpu, DIRECT.default(problem, gpu)).steps
        # By as many blocks as run at a time.
        grid = (min(direct.grid[0], 2 * gpu.multiprocessors), direct.grid[1])
        behind = gated_step(direct, place)._replace(grid=grid)
        first = steps(descriptor, call, variant, place, names)
        return Lowered((*first, main, behind), place.size)

    def _main_step(
        self,
        descriptor: Pairwise,
        problem: Problem,
        variant: Variant,
        place: Workspace,
        names: tuple[str, str],
        gpu: Gpu,
        strides: tuple[int, ...],
    ) -> Step:
        tiles = tile_count(descriptor, problem, variant)
        fixed = fields(len(strides)).pack(
            **fixed_values(problem, strides),
            a_packed_stride=place.a_stride,
            b_packed_stride=place.b_stride,
            a_info_stride=place.a_points,
            b_info_stride=place.b_points,
            stages=place.stages,
            tiles_m=ceil_div(problem.m, TILE_M),
            tiles_n=ceil_div(problem.n, variant.columns),
            tiles=tiles,
            out_vectors=_takes_vectors(problem),
        )
        offsets = (place.doubtful, place.packed_a, place.packed_b, place.a_info, place.b_info)
        pointers = (
            (names[0], 0), (names[1], 0), ("out", 0),
            *((WORKSPACE, offset) for offset in offsets),
        )  # fmt: skip
        grid = (min(tiles, gpu.multiprocessors), 1)
        spec = self.spec(descriptor, variant, gpu.arch)
        return Step(spec, grid, fixed, pointers, scalar_count(descriptor))

    def axes(self, descriptor: Pairwise, scope: Scope) -> Mapping[str, Iterable]:
        """Whatever the precision."""
        power = isinstance(descriptor.inner, norms.Power)
        difference = descriptor.operator == "difference" and (power or squares(descriptor))
        is_product = scope.arch == ARCH and (difference or is_dot(descriptor))
        dtypes = [dtype for dtype in scope.dtypes if dtype in FLOAT_SUMS and is_product]
        kinds = outer_kinds(descriptor)
        return {
            "dtype": dtypes,
            "out_dtype": dict.fromkeys(out for dtype in dtypes for out in outputs(dtype)),
            "copies": (2, 1),
            "promote": (1, 2, 0),
            "inner": (2.0 if power else "any",),
            "outer": dict.fromkeys(kind for kind, _ in kinds),
            "root": dict.fromkeys(root for _, root in kinds),
        }

    def is_legal(self, variant: Variant, descriptor: Pairwise, scope: Scope) -> bool:
        """Half types' dot products have one word of a number, as do coarser precisions."""
        split = descriptor.operator == "difference" or variant.dtype == "float32"
        copies = 2 if variant.promote and split else 1
        kinds = outer_kinds(descriptor)
        has = variant.out_dtype in outputs(variant.dtype) and variant.copies == copies
        return has and (variant.outer, variant.root) in kinds

    def specs(self, descriptor: Pairwise, scope: Scope, arch: str) -> list[KernelSpec]:
        """With those of all steps."""
        from kernlib.families.pairwise.kernels.pack import Centre, Pack

        every, difference = [], descriptor.operator == "difference"
        for one in self.variants(descriptor, scope):
            pack = Pack.Variant(one.dtype, one.copies, one.depth, difference)
            centre = Centre.Variant(one.dtype, difference)
            every += [self.spec(descriptor, one, arch), Pack().spec(None, pack, arch)]
            every.append(Centre().spec(None, centre, arch))
        square = "using Inner = Square;" if difference else ""
        direct = DIRECT.specs(descriptor, scope._replace(dtypes=_float_sums(scope)), arch)
        every += [gated(each) for each in direct if every and square in each.source]
        return list(dict.fromkeys(every))

    def spec(self, descriptor: Pairwise, variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant."""
        scalars = scalar_count(descriptor)
        members = fields(scalars)
        facts = {
            **types(variant.dtype, variant.out_dtype),
            **split_facts(variant),
            "DIFFERENCE": descriptor.operator == "difference",
            "Inner": "Square",  # where sums are under a root
            "Term": "Difference<Square>",
            "BY_NORM": is_norm(descriptor, variant),
            "SCALARS": scalars,
            "WARPGROUPS": WARPGROUPS,
            "INFOS": INFOS,
            "RESIDENT": 0,
            "SYMMETRIC": descriptor.symmetric,
            "PARAMETER_BYTES": Parameters(POINTERS, members.format, scalars).size,
        }
        source = self.source(
            facts,
            members.text(),
            multiply("float16", variant.columns, False),
            f"using AccT = Config::AccT;\n{finish(descriptor, variant, root='square_root')}",
            includes=(*TYPES, "pairwise/split/root.cuh"),
        )
        dtypes = dict.fromkeys((variant.dtype, variant.out_dtype))
        words = ["->".join(dtypes), f"split words={variant.copies}"]
        words += [f"tile={TILE_M}x{variant.columns} promote={variant.promote}"]
        words += ["ordered"] * variant.ordered
        return self.described(descriptor, source, THREADS, variant.shared_bytes, words)


def variant_of(descriptor: Pairwise, problem: Problem, precision: str) -> Split.Variant:
    """That of a call."""
    copies = PRECISIONS[precision]
    if problem.dtype != "float32" and not is_difference(descriptor, problem):
        copies = 1  # the type's numbers are words of fp16 as they are
    promote = (1 if problem.k <= 32 else 2) if precision == "fp32" else 0
    return Split.Variant(
        problem.dtype, problem.out_dtype, copies, promote, problem.inner, problem.outer,
        problem.root,
    )  # fmt: skip


def tile_count(descriptor: Pairwise, problem: Problem, variant: Split.Variant) -> int:
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


@cache
def fields(scalars: int) -> Fields:
    """What a plan fixes."""
    return Fields((
        f"i64 scalar_strides[{scalars}]",
        # (batch, point, feature) of a and b, (batch, m, n) of out
        "View a_view", "View b_view", "View out_view",
        "i64 a_packed_stride", "i64 b_packed_stride",  # of batch entries
        "i64 a_info_stride", "i64 b_info_stride",
        "i64 diagonal",  # n - m of the entries that receive the regularization
        "int m", "int n", "int k", "int stages",  # stages of a tile
        "int tiles_m", "int tiles_n",
        "u32 tiles",  # in all
        "int out_vectors",  # whether out takes aligned stores of 4 elements
        "int accumulate", "int padding",
    ))  # fmt: skip


def _float_sums(scope: Scope) -> tuple[str, ...]:
    return tuple(dtype for dtype in scope.dtypes if dtype in FLOAT_SUMS)


def _takes_vectors(problem: Problem) -> bool:
    """Whether out takes aligned stores of 4 elements along n."""
    out, itemsize = problem.out, DTYPES[problem.out_dtype].bytes
    aligned = out.alignment % (4 * itemsize) == 0 and out.columns == 1
    return aligned and out.rows % 4 == 0 and out.batch % 4 == 0

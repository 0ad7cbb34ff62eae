"""First gradients of products and sums with a kernel matrix, of more features than
:mod:`kernlib.families.pairwise.kernels.backward` takes, of squared distances and dot products
(kernel_sources/pairwise/points/points.cuh). Nothing of the matrix is stored.

On sm_90a a launch of :mod:`kernlib.families.pairwise.kernels.backward` is five here: the centre
and the packing of points (pack.py), that of lines, products by tensor cores, and behind their gate
the kernel of the lanes. Elsewhere, and of a descriptor that is to be ``direct``, it is that kernel
alone. Both leave the same partial results: those of hyperparameters one for each row.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.kernels import pack as packing
from kernlib.families.pairwise.lowering.backward import OPERANDS, Problem
from kernlib.families.pairwise.lowering.backward_source import (
    Derivatives,
    SlopeSource,
    slopes,
)
from kernlib.families.pairwise.lowering.finish import finish_reduced
from kernlib.families.pairwise.lowering.points import (
    BOUNDED,
    DIRECT_RESIDENT,
    DIRECT_THREADS,
    DIRECT_TILE,
    DOUBTFUL,
    EIGHT,
    GROUP,
    IN_WORKSPACE,
    PACK_THREADS,
    POINTERS,
    SLOPES,
    TILE_N,
    Place,
    Variant,
    by_products,
    variant,
    workspace,
)
from kernlib.families.pairwise.lowering.problem import (
    TYPES,
    PairKernel,
    scalar_count,
    terms,
    types,
    view,
)
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import division
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.config import Constant, Fact
from kernlib.lowering.kernel import named
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import WORKSPACE, Lowered, Step
from kernlib.lowering.wgmma import multiply


class Gradient(PairKernel):
    """What the launches with struct PointsLaunch share. ``derivatives`` stand beside a descriptor,
    as the subject of their code."""

    role = "step"
    Variant = Variant

    def text(
        self, descriptor: Pairwise, variant: Variant, facts: dict[str, Fact], *texts: str
    ) -> str:
        """The source of a variant with further facts."""
        scalars = scalar_count(descriptor)
        every = {
            **types(variant.dtype),
            **terms(descriptor, variant),
            "BY_NORM": False,
            "DIFFERENCE": variant.difference,
            "ROLE": Constant(f"Role::{variant.role}"),
            "COLUMNS": variant.sets,
            "HYPER": variant.hyper,
            "WIDTH": variant.width,
            "V_COPIES": variant.copies,
            "COPIES": variant.copies,
            "DEPTH": variant.depth,
            "WEIGHTED": variant.weighted,
            "WANTS_POINTS": variant.points,
            "WANTS_VALUES": variant.values,
            "COUNTED": variant.counted,
            "PARAMETER_BYTES": Parameters(POINTERS, fields(scalars).format, scalars).size,
            **facts,
        }
        fixed = fields(scalars).text()
        includes = (*TYPES, "pairwise/reduce/math.cuh", "pairwise/role.cuh")
        return self.source(every, fixed, *texts, includes=includes)

    def words(self, variant: Variant) -> list[str]:
        """What sets a kernel apart from others of its descriptor."""
        leaves = [name for name in ("points", "values") if getattr(variant, name)]
        words = [f"gradient of points {self.name}", variant.role, *leaves]
        words += [*[f"hyperparameters={variant.hyper}"] * bool(variant.hyper)]
        words += [f"K={max(variant.width, variant.depth)} C={variant.sets * variant.weighted}"]
        return words + ["counted"] * variant.counted + ["epsilon"] * variant.epsilon


class Points(Gradient):
    """Products by tensor cores."""

    name = "main"
    header = "pairwise/points/points.cuh"
    entry = "pairwise_points_main"

    def spec(
        self, subject: tuple[Pairwise, Derivatives], variant: Variant, arch: str
    ) -> KernelSpec:
        """The specification of a variant."""
        facts = {
            "WARPGROUPS": variant.warpgroups,
            "STAGES": variant.stages,
            "DOUBTFUL": DOUBTFUL,
            "DYNAMIC_BYTES": variant.shared_bytes,
        }
        products = multiply("float16", variant.width, True), multiply("float16", TILE_N, False)
        functions = _functions(*subject, variant).replace(BOUNDED, "s")
        source = self.text(subject[0], variant, facts, *products, functions)
        words, threads = (
            [*self.words(variant), f"rows={variant.rows}"],
            128 * (variant.warpgroups + 1),
        )
        return self.described(subject[0], source, threads, variant.shared_bytes, words)


class Direct(Gradient):
    """Differences on the lanes, behind a gate or alone."""

    name = "direct"
    header = "pairwise/points/direct.cuh"
    entry = "pairwise_points_direct"

    class Variant(NamedTuple):
        """Everything that code generation chooses."""

        points: Variant
        gated: bool

    def spec(
        self, subject: tuple[Pairwise, Derivatives], variant: Direct.Variant, arch: str
    ) -> KernelSpec:
        """The specification of a variant."""
        each = variant.points
        facts = {"GATED": variant.gated, "DYNAMIC_BYTES": each.direct_bytes}
        source = self.text(subject[0], each, facts, _functions(*subject, each))
        words = [*self.words(each), *["gated"] * variant.gated]
        return self.described(subject[0], source, DIRECT_THREADS, each.direct_bytes, words)


class Pack(Gradient):
    """The packing of lines, which no epilogue changes."""

    name = "points pack"
    header = "pairwise/points/pack.cuh"
    entry = "pairwise_points_pack"

    def spec(self, descriptor: Pairwise, variant: Variant, arch: str) -> KernelSpec:
        """The specification of a variant."""
        source = self.text(descriptor, variant._replace(values=False, hyper=0), {})
        words = [variant.role, f"K={variant.width} C={variant.sets * variant.weighted}"]
        words += ["numbers"] * (not variant.points) + ["dot"] * (not variant.difference)
        words += ["counted"] * variant.counted
        words.append(f"scalars={scalar_count(descriptor)}")
        line = f"pairwise points pack {' '.join(words)}"
        spec = KernelSpec("pairwise", source, self.entry, PACK_THREADS, description=line)
        return named(spec, *words)


MAIN, DIRECT, PACK = Points(), Direct(), Pack()


def _functions(descriptor: Pairwise, derivatives: Derivatives, variant: Variant) -> str:
    """Finish and Slopes."""
    text = finish_reduced(descriptor, variant, SlopeSource)
    return f"{text}\n{slopes(descriptor, derivatives, variant.root)}"


def _step(
    kernel: Gradient,
    spec: KernelSpec,
    problem: Problem,
    strides: tuple[int, ...],
    place: Place | None,
    variant: Variant,
    per_split: int,
) -> Step:
    """One of the launches that have struct PointsLaunch."""
    splits = ceil_div(problem.n, per_split)
    row_blocks = ceil_div(problem.m, variant.rows if kernel is MAIN else DIRECT_TILE)
    grid = (row_blocks * splits * problem.batch, 1)
    if kernel is PACK:
        parts = (variant.width // EIGHT if variant.points else 0) + 1
        grid = (ceil_div(problem.n, GROUP) * parts, problem.batch)
    fixed = fixed_parameters(problem, place, per_split, row_blocks, strides)
    return Step(spec, grid, fixed, _pointers(place), len(strides))


def _pointers(place: Place | None) -> tuple[tuple[str, int], ...]:
    """Those of struct PointsLaunch; where there is no workspace nobody reads its own."""
    operands = tuple((name, 0) for name in OPERANDS)
    if place is None:
        return (("a", 0),) * IN_WORKSPACE + operands
    points = place.points
    offsets = (points.doubtful, points.packed_a, points.packed_b, points.a_info, points.b_info)
    offsets += place.lines, points.centre
    return (*((WORKSPACE, offset) for offset in offsets), *operands)


@cache
def fields(scalars: int) -> Fields:
    """What a plan fixes."""
    return Fields((
        f"i64 scalar_strides[{scalars}]",
        "View a_view", "View b_view",  # of rows, of lines
        "View g_view", "View v_view",  # of the caller's g and v
        "i64 m", "i64 n", "i64 batch",
        "i64 per_split",  # n of a block, less for the last one
        # Strides of batch entries: bytes, points, bytes, numbers.
        "i64 a_packed_stride", "i64 b_packed_stride", "i64 a_info_stride", "i64 b_info_stride",
        "i64 lines_stride", "i64 centre_stride",
        "double factor",  # of the inner stage's slope
        "int k", "int columns",  # columns: of g and v that exist
        "int row_blocks", "int splits",
    ))  # fmt: skip


def fixed_parameters(
    problem: Problem,
    place: Place | None,
    per_split: int,
    row_blocks: int,
    scalar_strides: tuple[int, ...],
) -> bytes:
    """Its bytes."""
    names = ("a_packed", "b_packed", "a_info", "b_info", "lines", "centre")
    strides = [0] * len(names)
    if place is not None:
        points = place.points
        strides = [points.a_stride, points.b_stride, points.a_points, points.b_points]
        strides += [place.lines_stride, points.centre_pitch if points.centres > 1 else 0]
    # Rows and lines are in the order of their difference here, whichever is whose.
    factor = problem.factor if problem.slope == SLOPES["dot"] else abs(problem.factor)
    return fields(len(scalar_strides)).pack(
        scalar_strides=scalar_strides,
        a_view=view(problem.a),
        b_view=view(problem.b),
        g_view=view(problem.g),
        v_view=view(problem.v),
        m=problem.m,
        n=problem.n,
        batch=problem.batch,
        per_split=per_split,
        **{f"{name}_stride": stride for name, stride in zip(names, strides, strict=True)},
        factor=factor,
        k=problem.k,
        columns=problem.columns,
        row_blocks=row_blocks,
        splits=ceil_div(problem.n, per_split),
    )


def lower(
    descriptor: Pairwise,
    derivatives: Derivatives,
    problem: Problem,
    arch: str,
    multiprocessors: int,
    scalar_strides: tuple[int, ...],
    warpgroups: int | None = None,
) -> Lowered:
    """The launches for a problem that the kernels take. Each row gets ``parts`` partial sums."""
    hyper = len(derivatives.others)
    tile = variant(problem, hyper, warpgroups)
    products = by_products(descriptor, problem, arch)
    rows, unit = (tile.rows, GROUP) if products else (DIRECT_TILE, DIRECT_TILE)
    slots = multiprocessors * (1 if products else DIRECT_RESIDENT)
    sums = tile.points * problem.k + tile.values * problem.columns + hyper
    shape = division.Sums(problem.n, problem.m * max(1, sums), problem.batch)
    per_split = division.split(shape, ceil_div(problem.m, rows), unit, slots)
    place = workspace(problem, tile) if products else None
    subject, behind = (descriptor, derivatives), Direct.Variant(tile, place is not None)
    rest = problem, tuple(scalar_strides), place, tile, per_split
    steps = [_step(DIRECT, DIRECT.spec(subject, behind, arch), *rest)]
    if place is not None:
        steps = [
            *packing.steps(descriptor, problem, tile, place.points),
            _step(PACK, PACK.spec(descriptor, tile, arch), *rest),
            _step(MAIN, MAIN.spec(subject, tile, arch), *rest),
            *steps,
        ]
    parts = ceil_div(problem.n, per_split)
    return Lowered(tuple(steps), place.size if place else 0, parts=parts, per_part=per_split)

"""First gradients of products and sums with a kernel matrix, of few features on the lanes."""

from __future__ import annotations

from functools import cache

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering import backward as lowering
from kernlib.families.pairwise.lowering.backward import Problem, Variant, stage_of
from kernlib.families.pairwise.lowering.backward_source import (
    Derivatives,
    SlopeSource,
    is_curved,
    slopes,
)
from kernlib.families.pairwise.lowering.finish import finish_reduced
from kernlib.families.pairwise.lowering.problem import (
    MAX_BATCH_BLOCKS,
    THREADS,
    TYPES,
    PairKernel,
    scalar_count,
    terms,
    types,
)
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.config import Constant
from kernlib.lowering.parameters import Fields, Parameters
from kernlib.lowering.steps import Lowered, Step


class Backward(PairKernel):
    """Rows in registers, as of a reduction."""

    role = "gradient of a reduction"
    name = "small"
    header = "pairwise/reduce/gradient.cuh"
    entry = "pairwise_reduce_gradient"
    Variant = Variant

    def spec(
        self, subject: tuple[Pairwise, Derivatives], variant: Variant, arch: str
    ) -> KernelSpec:
        """The specification of a variant."""
        descriptor, derivatives = subject
        scalars, hyper = scalar_count(descriptor), len(derivatives.others)
        members = fields(scalars)
        pointers = len(lowering.OPERANDS)
        swapped = variant.role == "second" and descriptor.operator != "dot"
        facts = {
            **types(variant.dtype),
            **terms(descriptor, variant, swapped),
            "BY_NORM": False,
            "K": variant.k,
            "THREADS": THREADS,
            "ROWS": variant.rows,
            "PARTNERS": variant.partners,
            "STAGE": stage_of(variant, hyper),
            "ROLE": Constant(f"Role::{variant.role}"),
            "Slope": variant.slope,
            "COLUMNS": variant.columns,
            "WEIGHTED": variant.weighted,
            "POINTS": variant.points,
            "VALUES": variant.values,
            "HYPER": hyper,
            "CURVED": is_curved(derivatives),
            "DOT": descriptor.operator == "dot",
            "PARAMETER_BYTES": Parameters(pointers, members.format, scalars).size,
        }
        texts = [members.text(), finish_reduced(descriptor, variant, SlopeSource)]
        texts.append(slopes(descriptor, derivatives, variant.root))
        headers = "pairwise/gradient/slopes.cuh", "pairwise/reduce/math.cuh", "pairwise/role.cuh"
        source = self.source(facts, *texts, includes=(*TYPES, *headers))
        words = ["gradient", variant.role]
        words += [name for name in ("points", "values") if getattr(variant, name)]
        words += [f"hyperparameters={hyper}"] * bool(hyper)
        words += [f"K={variant.k} C={variant.columns * variant.weighted} rows={variant.rows}"]
        words += [f"partners={variant.partners}"] * (variant.partners > 1)
        words += [f"p={variant.inner}"] * (variant.inner != "any") + ["epsilon"] * variant.epsilon
        return self.described(descriptor, source, THREADS, 0, words)


KERNEL = Backward()


def lower(
    descriptor: Pairwise,
    derivatives: Derivatives,
    problem: Problem,
    arch: str,
    multiprocessors: int,
    scalar_strides: tuple[int, ...],
    rows: int | None = None,
) -> Lowered:
    """The launch for a problem of 1 feature or more. Each row gets ``parts`` partial sums, and each
    block leaves totals of the hyperparameters, one after the other. ``rows`` overrides the rows of
    a thread."""
    hyper = len(derivatives.others)
    variant = lowering.variant(problem, hyper, rows)
    work = lowering.work_of(problem, variant, hyper, multiprocessors)
    cut = lowering.cut_of(work, variant, fixed=rows is not None)
    variant = variant._replace(rows=cut.rows, partners=cut.partners)
    row_blocks, per_split = work.row_blocks(cut), cut.per_split
    splits = ceil_div(problem.n, per_split)
    step = Step(
        KERNEL.spec((descriptor, derivatives), variant, arch),
        (row_blocks * splits, min(problem.batch, MAX_BATCH_BLOCKS)),
        fixed_parameters(problem, per_split, row_blocks, scalar_strides),
        tuple((name, 0) for name in lowering.OPERANDS),
        scalar_count(descriptor),
    )
    return Lowered((step,), parts=splits, per_part=per_split)


@cache
def fields(scalars: int) -> Fields:
    """What a plan fixes."""
    return Fields((
        f"i64 scalar_strides[{scalars}]",
        # of rows, of lines, and of the caller's g and v
        "View a_view", "View b_view", "View g_view", "View v_view",
        "i64 m", "i64 n", "i64 batch",
        "i64 per_split",  # n of a block, less for the last one
        "double factor",  # of the inner stage's slope
        "int row_blocks", "int columns",  # columns: of g and v that exist
        "int times_p", "int times_scale",  # whether p and inner_scale belong to the factor
    ))  # fmt: skip


def fixed_parameters(
    problem: Problem, per_split: int, row_blocks: int, scalar_strides: tuple[int, ...]
) -> bytes:
    """Its bytes."""
    return fields(len(scalar_strides)).pack(
        scalar_strides=scalar_strides,
        a_view=problem.a[:3],
        b_view=problem.b[:3],
        g_view=problem.g[:3],
        v_view=problem.v[:3],
        m=problem.m,
        n=problem.n,
        batch=problem.batch,
        per_split=per_split,
        factor=problem.factor,
        row_blocks=row_blocks,
        columns=problem.columns,
        times_p=problem.times_p,
        times_scale=problem.times_scale,
    )

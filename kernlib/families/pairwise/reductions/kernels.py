"""Reductions of a kernel matrix by the kernels that never store it: which calls they take, and
their launches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from kernlib.families.pairwise import checks
from kernlib.families.pairwise.lowering import reduce as lowering
from kernlib.families.pairwise.lowering.problem import ARCH, Call, Layout
from kernlib.families.pairwise.matrix import Scalars, precision
from kernlib.families.pairwise.reductions.arguments import Nearest, Request, Shape
from kernlib.families.pairwise.request import layout_of, scalar_strides
from kernlib.lowering import kernel
from kernlib.lowering.dtypes import DTYPES, FLOAT_SUMS
from kernlib.lowering.kernel import Gpu
from kernlib.lowering.steps import Lowered
from kernlib.runtime.devices import arch_of, build, lower_on, model
from kernlib.runtime.dtypes import DTYPE_NAMES
from kernlib.runtime.plan import Plan
from kernlib.runtime.rehearsal import on_gpu
from kernlib.runtime.sequence import Silence, Steps, load_lowered


class ReductionPlan(NamedTuple):
    """What a call of one signature launches."""

    scalars: Scalars
    # Each with the bytes by which its columns begin further on: in v, and in the values.
    launches: tuple[tuple[Plan | Steps | Silence, int, int], ...]
    splits: int


def choose(call: Call, arch: str) -> lowering.ReductionKernel | None:
    """The kernel of a reduction. None where blocks of the matrix are faster, or the only way."""
    option = kernel.choose(kernels_of(call, arch), call, Gpu(arch, 0))
    return option and option.kernel


def kernels_of(call: Call, arch: str) -> Sequence[kernel.Kernel]:
    """Those that may compute a reduction, by preference: a first call loads no others."""
    descriptor, problem, _, precision = call
    if problem.reduction == "topk":
        from kernlib.families.pairwise.kernels import topk

        return topk.KERNELS
    if problem.dtype not in FLOAT_SUMS:
        from kernlib.families.pairwise.kernels import double

        return double.KERNELS
    from kernlib.families.pairwise.kernels import reduce

    among: list[kernel.Kernel] = [reduce.SMALL, reduce.TILE]
    if precision is not None and arch == ARCH and lowering.split_pays(problem):
        from kernlib.families.pairwise.kernels import split_reduce

        among.insert(0, split_reduce.KERNEL)
    if arch == ARCH and lowering.product_pays(descriptor, problem):
        from kernlib.families.pairwise.kernels import product

        among.insert(0, product.KERNEL)
    return among


def plan(reduction: str | Nearest, request: Request, shape: Shape) -> ReductionPlan | None:
    """The plan of a checked call, its kernels loaded. None where no kernel computes it."""
    v, no_columns = request.v, request.v is not None and shape.columns == 0
    if not on_gpu(request.a.device) or no_columns or 0 in (shape.m, shape.n, shape.k, shape.batch):
        return None
    descriptor, device = request.descriptor, request.a.get_device()
    strides = scalar_strides(descriptor, request.hyperparameters, request.a)
    problem, arch = problem_of(reduction, request, shape), arch_of(device)
    call = Call(descriptor, problem, strides, precision(descriptor))
    chosen = choose(call, arch)
    if chosen is None:
        return None
    parts, knobs = [], {}
    wide = DTYPES[problem.dtype].sums.bytes
    for column, width in chosen.passes(problem.columns):
        part = call._replace(problem=problem._replace(columns=width))
        lower = partial(_launched, chosen, part, arch, knobs)
        of_lists = isinstance(reduction, Nearest)
        lowered = lower_on(lower, device) if of_lists else lower(model(device).multiprocessors)
        knobs = {"per_split": lowered.per_part}
        in_v = 0 if v is None else column * v.stride(-1) * v.element_size()
        parts.append((lowered, in_v, column * wide))
    build([spec for lowered, *_ in parts for spec in lowered.specs], device)
    return ReductionPlan(
        scalars=Scalars.of(descriptor, request.hyperparameters),
        launches=tuple(
            (load_lowered(lowered, lowering.OPERANDS, request.a.device), *offsets)
            for lowered, *offsets in parts
        ),
        splits=lowered.parts,
    )


def _launched(
    chosen: lowering.ReductionKernel, call: Call, arch: str, knobs: dict, multiprocessors: int
) -> Lowered:
    """The launches of a pass."""
    return chosen.launch(call.descriptor, call, Gpu(arch, multiprocessors), knobs)


def problem_of(reduction: str | Nearest, request: Request, shape: Shape) -> lowering.Problem:
    """A checked request as lowering sees it, of all columns of v or as many as entries of a row are
    the nearest."""
    descriptor, a, b, v, row_offset, col_offset, numbers = request
    name, columns, largest = reduction, shape.columns, False
    if isinstance(reduction, Nearest):
        name, (columns, largest) = "topk", reduction
    return lowering.Problem(
        name,
        shape.m,
        shape.n,
        shape.k,
        shape.batch,
        layout_of(a, shape.batch),
        layout_of(b, shape.batch),
        Layout(0, 0, 0) if v is None else layout_of(v, shape.batch),
        columns,
        columns,
        DTYPE_NAMES[a.dtype],
        row_offset - col_offset,
        *checks.exponents(descriptor, numbers),
        checks.follows_inner(descriptor, numbers),
        "epsilon" in numbers,
        "regularization" in numbers,
        largest,
    )

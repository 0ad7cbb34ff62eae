"""Reductions of a kernel matrix by the kernels that never store it: which calls they take, and
their launches."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

from kernlib.families.pairwise import checks
from kernlib.families.pairwise.kernels import product, reduce
from kernlib.families.pairwise.kernels import split_reduce as products
from kernlib.families.pairwise.lowering import reduce as lowering
from kernlib.families.pairwise.lowering.problem import Layout
from kernlib.families.pairwise.matrix import Scalars, precision
from kernlib.families.pairwise.reductions.arguments import Nearest, Request, Shape
from kernlib.families.pairwise.request import layout_of, scalar_strides
from kernlib.lowering.dtypes import DTYPES, FLOAT_SUMS
from kernlib.lowering.steps import Lowered
from kernlib.runtime.devices import arch_of, build, lower_on, model
from kernlib.runtime.dtypes import DTYPE_NAMES
from kernlib.runtime.plan import Plan
from kernlib.runtime.rehearsal import on_gpu
from kernlib.runtime.sequence import Silence, Steps, load_lowered

# Of v's columns one launch by tensor cores takes 8: 18 ms for 1e10 pairs of 64 features, and 16 in
# one go 54, as each value then waits for its share of reads of v.
PRODUCT_COLUMNS = 8
# Columns of v up to which computing the matrix once for every 16 of them is faster than storing
# blocks of it, which takes as long as 60 issue slots an entry, and multiplying them.
SMALL_COLUMNS, TILE_COLUMNS = 64, 16


def _double() -> ModuleType:
    """The float64 kernel's module, which first calls of other types do not load."""
    from kernlib.families.pairwise.kernels import double

    return double


def _nearest() -> ModuleType:
    """The module of the k nearest's kernel, which first calls of other reductions do not load."""
    from kernlib.families.pairwise.kernels import topk

    return topk


class ReductionPlan(NamedTuple):
    """What a call of one signature launches."""

    scalars: Scalars
    # Each with the bytes by which its columns begin further on: in v, and in the values.
    launches: tuple[tuple[Plan | Steps | Silence, int, int], ...]
    splits: int


def takes(reduction: str | Nearest, request: Request, shape: Shape) -> bool:
    """Whether the kernels compute a reduction, and are the fastest to do so."""
    if not on_gpu(request.a.device):
        return False
    empty = 0 in (shape.m, shape.n, shape.k, shape.batch)
    empty = empty or (request.v is not None and shape.columns == 0)
    if empty:
        return False
    descriptor, nearest = request.descriptor, isinstance(reduction, Nearest)
    if DTYPE_NAMES[request.a.dtype] not in FLOAT_SUMS:
        full = problem_of(reduction, request, shape, shape.columns)
        return not nearest and _double().takes(descriptor, full)
    arch = arch_of(request.a.get_device())
    if nearest:
        problem = problem_of(reduction, request, shape)
        return _nearest().takes(descriptor, problem, arch, precision(descriptor))
    if by_columns(reduction, request, shape, arch):
        return True
    small = shape.k <= lowering.SMALL_K
    if shape.columns > (SMALL_COLUMNS if small else TILE_COLUMNS):
        return False
    width = min(shape.columns, lowering.WIDTHS[-1])
    return lowering.fits(problem_of(reduction, request, shape, width), arch)


def by_products(reduction: str, request: Request, shape: Shape, arch: str) -> bool:
    """Whether tensor cores compute the sums of a reduction that the kernels take."""
    if shape.columns > TILE_COLUMNS or not request.descriptor.takes_products:
        return False
    problem = problem_of(reduction, request, shape, min(shape.columns, PRODUCT_COLUMNS))
    permitted = precision(request.descriptor)
    return products.takes(request.descriptor, problem, arch, permitted) and products.pays(problem)


def by_columns(reduction: str, request: Request, shape: Shape, arch: str) -> bool:
    """Whether tensor cores multiply values of the matrix by many columns of v."""
    if reduction != "matmul":
        return False
    full = problem_of(reduction, request, shape, shape.columns)
    problem = full._replace(columns=min(shape.columns, product.WIDTHS[-1]))
    permitted = precision(request.descriptor)
    pays = product.pays(request.descriptor, full)
    return pays and product.takes(request.descriptor, problem, arch, permitted)


def plan(
    reduction: str | Nearest, request: Request, shape: Shape, rows: int | None = None
) -> ReductionPlan:
    """The plan of a checked call, its kernels loaded. ``rows`` is as for
    :func:`kernlib.families.pairwise.kernels.reduce.lower`."""
    descriptor, device = request.descriptor, request.a.get_device()
    numbers = request.hyperparameters
    strides = scalar_strides(descriptor, numbers, request.a)
    if isinstance(reduction, Nearest):
        parts = [(_lowered_nearest(reduction, request, shape, strides, rows), 0, 0)]
    else:
        parts = _lowered(reduction, request, shape, strides, rows)
    build([spec for lowered, *_ in parts for spec in lowered.specs], device)
    return ReductionPlan(
        scalars=Scalars.of(descriptor, numbers),
        launches=tuple(
            (load_lowered(lowered, lowering.OPERANDS, request.a.device), *offsets)
            for lowered, *offsets in parts
        ),
        splits=1 if isinstance(reduction, Nearest) else parts[-1][0].parts,
    )


def _lowered_nearest(
    reduction: Nearest, request: Request, shape: Shape, strides: tuple, rows: int | None
) -> Lowered:
    """The launch that keeps the nearest beside the distances."""
    descriptor, problem = request.descriptor, problem_of(reduction, request, shape)
    device, permitted = request.a.get_device(), precision(request.descriptor)
    arch, largest, lower = arch_of(device), reduction.largest, _nearest().lower
    return lower_on(
        lambda count: lower(descriptor, problem, largest, arch, count, strides, permitted, rows),
        device,
    )


def _lowered(
    reduction: str, request: Request, shape: Shape, strides: tuple, rows: int | None
) -> list[tuple[Lowered, int, int]]:
    """The launches of a reduction, each with the bytes by which its columns begin further on: in v,
    and in the values."""
    descriptor, v, device = request.descriptor, request.v, request.a.get_device()
    arch, count = arch_of(device), model(device).multiprocessors
    launches, per_split = [], 0
    wide = DTYPES[DTYPE_NAMES[request.a.dtype]].sums
    double = wide.cuda == "double"
    many = rows is None and not double and by_columns(reduction, request, shape, arch)
    few = rows is None and not (double or many) and by_products(reduction, request, shape, arch)
    for column, width in _parts(shape, double, many, few):
        problem = problem_of(reduction, request, shape, width)
        if double:
            lowered = _double().lower(descriptor, problem, count, strides, per_split)
        elif many or few:
            lowered = (product if many else products).lower(
                descriptor, problem, arch, count, strides, precision(descriptor), per_split
            )
        else:
            lowered = reduce.lower(descriptor, problem, arch, count, strides, per_split, rows)
        per_split = lowered.per_part
        in_v = 0 if v is None else column * v.stride(-1) * v.element_size()
        launches.append((lowered, in_v, column * wide.bytes))
    return launches


def _parts(shape: Shape, double: bool, many: bool, few: bool) -> list[tuple[int, int]]:
    """The launches of a plan by the kernel that takes them: first column, count."""
    if double:
        return passes(shape.columns, _double().WIDTH)
    if many:
        return product.widths(shape.columns)
    return passes(shape.columns, PRODUCT_COLUMNS if few else lowering.WIDTHS[-1])


def passes(columns: int, widest: int = lowering.WIDTHS[-1]) -> list[tuple[int, int]]:
    """The launches for so many columns of v: first column, count. One for none."""
    starts = range(0, max(1, columns), widest)
    return [(start, min(widest, columns - start)) for start in starts]


def problem_of(
    reduction: str | Nearest, request: Request, shape: Shape, width: int = 0
) -> lowering.Problem:
    """A checked request as lowering sees it, for ``width`` columns of v or of the nearest."""
    descriptor, a, b, v, row_offset, col_offset, numbers = request
    name, out_columns = reduction, shape.columns
    if isinstance(reduction, Nearest):
        name, width, out_columns = "topk", reduction.k, reduction.k
    return lowering.Problem(
        name,
        shape.m,
        shape.n,
        shape.k,
        shape.batch,
        layout_of(a, shape.batch),
        layout_of(b, shape.batch),
        Layout(0, 0, 0) if v is None else layout_of(v, shape.batch),
        width,
        out_columns,
        DTYPE_NAMES[a.dtype],
        row_offset - col_offset,
        *checks.exponents(descriptor, numbers),
        checks.follows_inner(descriptor, numbers),
        "epsilon" in numbers,
        "regularization" in numbers,
    )

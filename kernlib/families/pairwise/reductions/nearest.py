"""The k smallest or largest entries of each row by the kernels that never store the matrix: which
calls they take, and their launches."""

from __future__ import annotations

from kernlib.families.pairwise import checks
from kernlib.families.pairwise.lowering import topk as lowering
from kernlib.families.pairwise.lowering.direct import scalar_count
from kernlib.families.pairwise.lowering.reduce import OPERANDS, Problem
from kernlib.families.pairwise.plans import precision
from kernlib.families.pairwise.reductions import kernels
from kernlib.families.pairwise.reductions.arguments import Nearest, Request, Shape
from kernlib.families.pairwise.reductions.kernels import ReductionPlan
from kernlib.families.pairwise.request import scalar_strides
from kernlib.lowering.dtypes import FLOAT_SUMS
from kernlib.runtime.devices import arch_of, build, lower_on
from kernlib.runtime.dtypes import DTYPE_NAMES
from kernlib.runtime.rehearsal import on_gpu
from kernlib.runtime.sequence import load_lowered


def takes(reduction: Nearest, request: Request, shape: Shape) -> bool:
    """Whether the kernels compute a reduction, and are the fastest to do so."""
    if not on_gpu(request.a.device) or DTYPE_NAMES[request.a.dtype] not in FLOAT_SUMS:
        return False
    if 0 in (shape.m, shape.n, shape.k, shape.batch):
        return False
    arch = arch_of(request.a.get_device())
    problem = _problem_of(reduction, request, shape)
    return lowering.takes(request.descriptor, problem, arch, precision(request.descriptor))


def plan(
    reduction: Nearest, request: Request, shape: Shape, rows: int | None = None
) -> ReductionPlan:
    """The plan of a checked call, its kernels loaded. ``rows`` is that of
    :func:`kernlib.families.pairwise.lowering.topk.lower`."""
    descriptor, numbers = request.descriptor, request.hyperparameters
    device = request.a.get_device()
    call = checks.check_call(descriptor, request.a, request.b, None, False, 0, 0, numbers)
    problem = _problem_of(reduction, request, shape)
    given = descriptor, problem, reduction.largest, arch_of(device)
    rest = scalar_strides(descriptor, numbers, call), precision(descriptor), rows
    lowered = lower_on(lambda count: lowering.lower(*given, count, *rest), device)
    build(lowered.specs, device)
    return ReductionPlan(
        slots=checks.slots(descriptor),
        count=scalar_count(descriptor),
        root=checks.follows_inner(descriptor, numbers),
        positive=descriptor.positive,
        launches=((load_lowered(lowered, OPERANDS, request.a.device), 0, 0),),
        splits=1,
    )


def _problem_of(reduction: Nearest, request: Request, shape: Shape) -> Problem:
    """A checked request as lowering sees it."""
    problem = kernels.problem_of("topk", request, shape, reduction.k)
    return problem._replace(out_columns=reduction.k)

"""First gradients of products and sums with a kernel matrix by kernels that store no entry of it,
of few features (:mod:`kernlib.families.pairwise.kernels.backward`) or of many
(:mod:`kernlib.families.pairwise.kernels.points`): which calls they take, and their launches.
Memory is O(M + N), and that of partial sums, 128 MB at most."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from kernlib.descriptors.expression import VALUE
from kernlib.families.pairwise import checks, stages, units
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.gradients import backward, norms, weights
from kernlib.families.pairwise.gradients.arguments import Kind
from kernlib.families.pairwise.gradients.backward import DECIDING, Call, Route
from kernlib.families.pairwise.gradients.formula import Sums
from kernlib.families.pairwise.gradients.primitive import constant_of
from kernlib.families.pairwise.kernels import backward as few_points
from kernlib.families.pairwise.kernels import points as many_points
from kernlib.families.pairwise.lowering import backward as lowering
from kernlib.families.pairwise.lowering import gradient as pair_gradient
from kernlib.families.pairwise.lowering import points as many
from kernlib.families.pairwise.lowering.backward_source import Derivatives
from kernlib.families.pairwise.lowering.finish import EXACT_SUMS
from kernlib.families.pairwise.lowering.problem import Layout
from kernlib.families.pairwise.lowering.reduce import MAX_BLOCKS, SMALL_K
from kernlib.families.pairwise.matrix import Scalars, kind_of_number, numbers_of
from kernlib.families.pairwise.reductions.arguments import Request, Shape
from kernlib.families.pairwise.request import layout_of, scalar_strides
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.steps import Lowered
from kernlib.runtime import devices
from kernlib.runtime.devices import allocator, arch_of, build, model
from kernlib.runtime.numbers import host_value
from kernlib.runtime.plan import Plan, PlanCache
from kernlib.runtime.sequence import Silence, Steps, load_lowered
from kernlib.runtime.tensors import is_lazy, materialised, signature

# Columns of v up to which computing the matrix once for every few of them is faster than storing
# blocks of it.
MOST_COLUMNS = 16
# Points of a side: each takes a thread, and a grid has room for 1024 times as many blocks.
MOST_POINTS = MAX_BLOCKS // 1024 * lowering.THREADS
# Of norms whose slopes are taken from sums of powers, which are right from 1e-9 to 1e9 then; others
# from norms, by blocks.
LARGEST_EXPONENT = 4


class Role(NamedTuple):
    """The role whose points are rows, one of :data:`lowering.ROLES`, and the results of its
    launch."""

    name: str
    points: bool
    values: bool
    totals: bool


class Launch(NamedTuple):
    """One launch: some columns of g and v, and what it leaves."""

    plan: Plan | Steps | Silence
    columns: slice
    role: str
    # For points, values and totals a function that makes the new tensor, None for a result that the
    # launch does not write. Results in parts have a first dimension for these.
    outputs: tuple[Callable[[], torch.Tensor] | None, ...]
    in_parts: bool  # points and values


class Gradients(NamedTuple):
    """The plan of the gradients of one signature."""

    scalars: Scalars
    hyper: tuple[str, ...]  # hyperparameters, in the order of their totals
    launches: tuple[Launch, ...]


_plans = PlanCache()


def gradients(
    request: Request, shape: Shape, names: list[str], grad: torch.Tensor, shared: bool
) -> dict[str, torch.Tensor] | None:
    """The gradients of the tensors ``names`` of a product, or of a sum if there is no v, from that
    of its result, (L, M, C) or (L, M): (L, M, K) of a, (L, N, K) of b, (L, N, C) of v and (L,) of
    hyperparameters. None where the kernels do not take them; a hyperparameter on which nothing
    depends, and v of norms whose sums leave float's range, are left out. Of one x that is a and b,
    ``shared``, the gradient is that of a. All tensors have one dtype and are on one device."""
    request, unit = _in_unit(request)
    grad = grad[..., None] if request.v is None else grad
    grad = materialised(grad) if is_lazy(grad) else grad
    plan = _plan(request, shape, tuple(names), grad, shared)
    if plan is None:
        return None
    if grad.is_meta or devices.current_device() == grad.get_device():
        grads = _launched(plan, request, grad)
    else:
        with torch.cuda.device(grad.get_device()):
            grads = _launched(plan, request, grad)
    if unit is not None:
        grads = {name: t / unit if name in ("a", "b") else t for name, t in grads.items()}
    _regularize(grads, request, shape, names, grad)
    return grads


def takes(request: Request, shape: Shape) -> bool:
    """Whether sizes, type and device are those of a kernel: a GPU's, or meta in a rehearsal."""
    if request.a.dtype != torch.float32 or request.a.device.type not in ("cuda", "meta"):
        return False
    columns = 1 if request.v is None else shape.columns
    if 0 in (shape.m, shape.n, shape.k, shape.batch) or not 1 <= columns <= MOST_COLUMNS:
        return False
    return shape.k <= many.MOST_FEATURES and max(shape.m, shape.n) <= MOST_POINTS


def _in_unit(request: Request) -> tuple[Request, float | torch.Tensor | None]:
    """With points and a bandwidth near 1, where the square of a number that is one would leave
    float's range, and what they were divided by."""
    descriptor, a, b, _, _, _, values = request
    bandwidth = values.get("bandwidth")
    if bandwidth is None or isinstance(bandwidth, torch.Tensor):
        return request, None
    if units.LEAST_USUAL <= bandwidth < units.MOST_USUAL:
        return request, None
    unit = units.unit_of(descriptor, values, a.dtype)
    if unit is None:
        return request, None
    a, b, values, unit = units.in_unit(unit, a, b, values)
    return request._replace(a=a, b=b, hyperparameters=values), unit


def _plan(request: Request, shape: Shape, names: tuple, grad, shared: bool) -> Gradients | None:
    """The cached plan of a signature, None where no kernel takes the call. The plan of meta tensors
    belongs to a rehearsal and is not cached."""
    if request.a.is_meta:
        return _new_plan(request, shape, names, grad, shared)
    v = None if request.v is None else signature(request.v)
    tensors = signature(grad), signature(request.a), signature(request.b), v
    key = request.descriptor.text, names, shared, shape, *tensors
    for name, value in request.hyperparameters.items():
        key += (name, kind_of_number(name, value))
        key += (value,) if name in DECIDING and not isinstance(value, torch.Tensor) else ()
    missing = object()
    plan = _plans.plans.get(key, missing)
    if plan is missing:
        plan = _new_plan(request, shape, names, grad, shared)
        _plans.keep(key, plan)
    return plan


def _new_plan(request: Request, shape: Shape, names: tuple, grad, shared: bool) -> Gradients | None:
    """The plan of a signature, its kernels loaded."""
    if not takes(request, shape):
        return None
    route = route_of(request, names)
    points = "a" in names, "b" in names
    terms = None if route is None else derivatives_of(request, route, any(points))
    if terms is None:
        return None
    hyper, derivatives = terms
    descriptor, problem = request.descriptor, problem_of(request, shape, points, grad)
    odd = problem.root and problem.inner not in (*EXACT_SUMS, 2.0)
    values = "v" in names and not odd
    roles = _roles(descriptor, points, values, bool(hyper), shared and shape.m == shape.n)
    columns = max(1, shape.columns)
    arch = arch_of(request.a.get_device())
    at_once = _columns(descriptor, problem, roles, len(hyper), columns, arch)
    if not at_once:
        return None
    lowered = _lowered(request, problem, derivatives, roles, columns, at_once)
    build([spec for part, *_ in lowered for spec in part.specs], request.a.get_device())
    return Gradients(
        scalars=Scalars.of(descriptor, request.hyperparameters),
        hyper=hyper,
        launches=tuple(
            _launch(
                load_lowered(part, lowering.OPERANDS, request.a.device), columns, role,
                _sizes(shape, role, columns, len(hyper)), part.parts, blocks, request.a,
            )
            for part, columns, role, blocks in lowered
        ),
    )  # fmt: skip


def _sizes(shape: Shape, role: Role, columns: slice, hyper: int) -> tuple[tuple[int, ...], ...]:
    """Sizes of a launch's results: points, values and totals."""
    m = shape.n if role.name == "second" else shape.m
    count = columns.stop - columns.start
    return (shape.batch, m, shape.k), (shape.batch, m, count), (shape.batch, hyper)


def _launch(
    plan, columns: slice, role: Role, sizes: tuple, splits: int, blocks: int, a: torch.Tensor
) -> Launch:
    parts = () if splits == 1 else (splits,)
    leaves = role.points, role.values, role.totals
    outputs = tuple(
        allocator((*front, *size), a.dtype, a.device) if on else None
        for on, front, size in zip(leaves, (parts, parts, (blocks,)), sizes, strict=True)
    )
    return Launch(plan, columns, role.name, outputs, splits > 1)


def _columns(
    descriptor: Pairwise,
    problem: lowering.Problem,
    roles: list[Role],
    hyper: int,
    columns: int,
    arch: str,
) -> int:
    """Columns of g and v that a launch takes, 0 where kernels do not take them or are slower than
    blocks of the matrix."""
    launches = [_of_role(problem, role, slice(0, 1), descriptor.operator) for role in roles]
    at_once = min([lowering.COLUMNS, *(_columns_of(launch, hyper) for launch in launches)])
    launches = [launch._replace(columns=min(columns, at_once)) for launch in launches]
    if problem.k <= SMALL_K:
        counts = (hyper * role.totals for role in roles)
        fits = all(map(lowering.fits, launches, counts))
    else:
        fits = all(many.takes(descriptor, launch, arch) for launch in launches)
        count = len(launches) * ceil_div(columns, at_once)
        fits = fits and all(many.pays(descriptor, first, arch, count) for first in launches[:1])
    return at_once if fits else 0


def _columns_of(problem: lowering.Problem, hyper: int) -> int:
    few = problem.k <= SMALL_K
    return lowering.COLUMNS if few else many.columns_of(problem, hyper)


def _lowered(
    request: Request,
    problem: lowering.Problem,
    derivatives: Derivatives,
    roles: list[Role],
    columns: int,
    each: int,
) -> list[tuple[Lowered, slice, Role, int]]:
    """The launches, every role of some columns after the other, each with how many parts of the
    hyperparameters' gradients it leaves."""
    descriptor, values, device = request.descriptor, request.hyperparameters, request.a.get_device()
    arch, count = arch_of(device), model(device).multiprocessors
    strides = scalar_strides(descriptor, values, request.a)
    few = problem.k <= SMALL_K
    lower = few_points.lower if few else many_points.lower
    launches = []
    for first in range(0, columns, each):
        some = slice(first, min(first + each, columns))
        for role in roles:
            launch = _of_role(problem, role, some, descriptor.operator)
            terms = derivatives._replace(others=derivatives.others * role.totals)
            lowered = lower(descriptor, terms, launch, arch, count, strides)
            parts = lowered.steps[0].grid[0] if few else lowered.parts * launch.m
            launches.append((lowered, some, role, parts))
    return launches


def route_of(request: Request, names: tuple) -> Route | None:
    """The route to derivatives of the stages behind the sums. None where the kernel lacks one of
    them or a slope of the sums, or the sums are powers that leave float32 too soon."""
    p = request.hyperparameters.get("p", request.hyperparameters.get("inner_p"))
    large = p is not None and not isinstance(p, torch.Tensor) and p > LARGEST_EXPONENT
    if large and norms.are_values(request.descriptor, request.hyperparameters):
        return None
    tensors = {k: t for k, t in request.tensors().items() if k not in ("a", "b", "v")}
    numbers = {k: t for k, t in request.hyperparameters.items() if k not in tensors}
    call = Call(request.descriptor, 0, 0, numbers, tuple(tensors))
    needs = tuple(name in names for name in ("a", "b", *tensors))
    route = backward.route_of(call, needs, (request.a, request.b, *tensors.values()), scaled=False)
    arguments = {name: request.hyperparameters[source] for name, source in route.arguments}
    can_derive = route.plain or route.finish is not None
    can_derive = can_derive and not backward.by_formula(Sums(route.sums, arguments))
    return route if can_derive and not route.inner else None


def derivatives_of(
    request: Request, route: Route, points: bool
) -> tuple[tuple[str, ...], Derivatives] | None:
    """Hyperparameters with gradients, and the derivatives of what follows the sums; None where
    points need a derivative by the sums and there is none."""
    values, weight = request.hyperparameters, None
    if route.finish is not None:
        weight = weights.slope_of(route.sums, route.finish, VALUE, route.wide)
    if points and weight is None and not route.plain:
        return None
    by_sum = None if weight is None else weight.kernel.epilogue[0]
    by_name = {name: slope.kernel.epilogue[0] for name, slope in route.slopes}
    if "bandwidth" in by_name and by_sum and units.is_of_quotients(request.descriptor, values):
        by_name["bandwidth"] = _degree(route.sums)
    return tuple(by_name), Derivatives(by_sum, tuple(by_name.values()))


def _degree(sums) -> str:
    """Text of the power of a distance that the sums are."""
    powers = {stages.Abs: "AccT(1)", stages.Square: "AccT(2)"}
    return powers.get(type(sums.inner), "read(0)")


def problem_of(request: Request, shape: Shape, points: tuple, gradient) -> lowering.Problem:
    """A request as lowering sees it, but for the role: of rows of a."""
    descriptor, a, b, v, _, _, values = request
    p = values.get("p", values.get("inner_p"))
    stage = type(descriptor.inner).__name__
    exponent = pair_gradient.exponent_kind(host_value("p", p)) if p is not None else None
    kind = Kind(descriptor.operator, descriptor.inner, False, False)
    factor, times_p, times_scale = constant_of(kind, exponent)
    return lowering.Problem(
        "first", shape.m, shape.n, shape.k, shape.batch,
        layout_of(a, shape.batch), layout_of(b, shape.batch), layout_of(gradient, shape.batch),
        Layout(0, 0, 0) if v is None else layout_of(v, shape.batch),
        1, v is not None, points[0], False,
        pair_gradient.slope_of(descriptor.operator, stage, exponent, False),
        factor, times_p, times_scale,
        *checks.exponents(descriptor, values), checks.follows_inner(descriptor, values),
        "epsilon" in values,
    )  # fmt: skip


def _roles(
    descriptor: Pairwise, points: tuple, values: bool, totals: bool, shared: bool
) -> list[Role]:
    """The roles of the launches of some columns."""
    alike = shared and not descriptor.signed and points[0] == points[1]
    if alike and (points[0] or values):
        return [Role("both", points[0], values, totals)]
    first = [Role("first", points[0], False, totals)] * (points[0] or totals)
    return first + [Role("second", points[1], values, False)] * (points[1] or values)


def _of_role(
    problem: lowering.Problem, role: Role, columns: slice, operator: str
) -> lowering.Problem:
    """The problem of a launch."""
    count = columns.stop - columns.start
    launch = problem._replace(role=role.name, columns=count, points=role.points, values=role.values)
    if role.name == "second":
        return launch._replace(m=launch.n, n=launch.m, a=launch.b, b=launch.a)
    # By a the slope of b - a has the other sign.
    return launch._replace(factor=-launch.factor) if operator == "difference" else launch


def _launched(plan: Gradients, request: Request, grad: torch.Tensor) -> dict:
    """The sums of all launches, on the current device."""
    a, b, v, values = request.a, request.b, request.v, request.hyperparameters
    numbers, converted = numbers_of(plan.scalars, a, values) if values else (None, None)
    grads: dict[str, torch.Tensor] = {}
    parts_of_v = []
    of_grad, grad_column = grad.data_ptr(), grad.stride(-1) * grad.element_size()
    of_v, v_column = (0, 0) if v is None else (v.data_ptr(), v.stride(-1) * v.element_size())
    for launch in plan.launches:
        rows, lines = (b, a) if launch.role == "second" else (a, b)
        outputs = [None if new is None else new() for new in launch.outputs]
        first = launch.columns.start
        pointers = (
            rows.data_ptr(), lines.data_ptr(), of_grad + first * grad_column,
            of_v + first * v_column, *[0 if t is None else t.data_ptr() for t in outputs],
        )  # fmt: skip
        launch.plan.launch(pointers, numbers)
        points, values_of_v, totals = outputs
        if points is not None:
            points = points.sum(0) if launch.in_parts else points
            name = "b" if launch.role == "second" else "a"
            grads[name] = grads[name] + points if name in grads else points
        if values_of_v is not None:
            parts_of_v.append(values_of_v.sum(0) if launch.in_parts else values_of_v)
        if totals is not None:
            totals = totals.sum(0)
            for place, name in enumerate(plan.hyper):
                total = totals[:, place]
                grads[name] = grads[name] + total if name in grads else total
    del converted  # the stream orders the reuse of their memory behind the launches
    if parts_of_v:
        grads["v"] = parts_of_v[0] if len(parts_of_v) == 1 else torch.cat(parts_of_v, -1)
    return grads


def _regularize(grads: dict, request: Request, shape: Shape, names: list[str], grad) -> None:
    """Adds the regularization's part of v's gradient, and its own gradient, to ``grads``."""
    value = request.hyperparameters.get("regularization")
    if value is None:
        return
    diagonal = request.row_offset - request.col_offset
    first = max(0, -diagonal)
    last = max(first, min(shape.m, shape.n - diagonal))
    rows, lines = slice(first, last), slice(first + diagonal, last + diagonal)
    if "v" in grads:
        scale = value[:, None, None] if isinstance(value, torch.Tensor) and value.dim() else value
        grads["v"][..., lines, :] += scale * grad[..., rows, :]
    if "regularization" in names:
        products = grad[..., rows, :]
        products = products if request.v is None else products * request.v[..., lines, :]
        grads["regularization"] = products.sum((-2, -1))

"""The primitive of pair gradients: the key of a call, its plan, its numbers, its launch. A request
is (kind, operands, out, accumulate, values).

One of three ways computes a call: ``direct`` is the kernel of the FP32 or FP64 lanes, which takes
everything; ``tensor`` that of the tensor cores, for large calls in float32; ``products`` are matrix
products.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from kernlib.errors import UnsupportedError
from kernlib.families.pairwise import stages
from kernlib.families.pairwise.gradients import arguments, products, reference
from kernlib.families.pairwise.gradients.arguments import Call, Kind, Operands
from kernlib.families.pairwise.kernels import gradient_tensor
from kernlib.families.pairwise.kernels.gradient import Gradient, Subject
from kernlib.families.pairwise.lowering import gradient as lowering
from kernlib.families.pairwise.lowering.problem import Layout
from kernlib.families.pairwise.request import layout_of, scalar_stride
from kernlib.lowering.arithmetic import ceil_div
from kernlib.lowering.kernel import Gpu, choose
from kernlib.lowering.steps import Lowered
from kernlib.runtime import operation, rehearsal
from kernlib.runtime.devices import arch_of, lower_on
from kernlib.runtime.dtypes import DTYPE_NAMES, accumulator
from kernlib.runtime.numbers import check_kind, host_value, on_device, plain
from kernlib.runtime.operation import KERNELS, REFERENCE, Operation
from kernlib.runtime.precision import without_autocast
from kernlib.runtime.rehearsal import on_gpu
from kernlib.runtime.sequence import load_lowered
from kernlib.runtime.tensors import (
    LOWEST_ADDRESS,
    UNREADABLE,
    is_lazy,
    materialised,
    ranges_meet,
    refuse_any_overlap,
    refuse_overlap,
    refuse_transforms,
    signature,
    span,
)


def key_of(kind: Kind, operands: Operands, out, accumulate, values: dict) -> tuple:
    """All that a plan depends on: shapes, strides, dtypes, device, alignment, kinds of numbers."""
    key = (kind, accumulate)
    try:
        for t in operands:
            key += (None,) if t is None else signature(t)
        if out is not None:
            key += signature(out)
    except UNREADABLE:
        arguments.check_tensors(kind, operands, out)
        named = dict(zip(kind.names, operands, strict=True))
        refuse_transforms(arguments.NO_TRANSFORMS, **named, out=out)
        raise
    for name, value in values.items():
        key += (name, _kind(name, value))
    return key


def _kind(name: str, value: object):
    """The kind of a number; the value of an exponent that has code of its own."""
    if isinstance(value, torch.Tensor):
        try:
            return value.shape, value.stride(), value.dtype, value.get_device()
        except (RuntimeError, NotImplementedError):  # raised by tensors that are not dense
            check_kind(name, value)
            raise
    if name != "p":
        return None
    number = value if type(value) is float else host_value(name, value)  # this saves a call
    if not number >= 0:
        arguments.check_host(name, number)
    return lowering.exponent_kind(number)


def _way(call: Call, *request) -> str:
    return REFERENCE if call.device.type in ("cpu", "meta") else KERNELS


class GradientPlan(NamedTuple):
    """What a call of one signature needs besides its pointers and numbers. ``compute(operands,
    out, numbers)`` is None for an output without elements."""

    out_shape: tuple[int, ...]
    out_dtype: torch.dtype
    wide: torch.dtype  # of the arithmetic
    device: torch.device
    spans: tuple[int, ...]  # bytes from first to last element of each operand
    out_span: int
    compute: Callable | None


def make_plan(call: Call, kind: Kind, operands, out, accumulate, values: dict) -> GradientPlan:
    """The plan of a checked call. Raises UnsupportedError for devices that have no backend."""
    if not on_gpu(operands.x.device):
        raise UnsupportedError(
            f"kernlib computes on CUDA and CPU tensors, {kind.names[0]} is on {call.device}; move "
            "it to one of them"
        )
    arch_of(operands.x.get_device())  # an old device is refused for an empty out too
    target = out
    if out is None:
        target = torch.empty(call.out_shape, dtype=call.out_dtype, device="meta")
    compute = None
    if not call.empty:
        compute = _computed_by(kind, call, operands, target, accumulate, values)
    return GradientPlan(
        call.out_shape, call.out_dtype, accumulator(call.dtype), call.device,
        tuple(0 if t is None else span(t) for t in operands), span(target), compute,
    )  # fmt: skip


def _computed_by(
    kind: Kind, call: Call, operands, target, accumulate: bool, values: dict
) -> Callable:
    """What computes a call."""
    problem = problem_of(kind, call, operands, target, accumulate, values)
    way, device = rule(problem), operands.x.get_device()
    if way == "products":
        return _products(kind, call, problem)
    compute = _tensor(kind, call, problem, operands, device) if way == "tensor" else None
    return _direct(kind, call, problem, device) if compute is None else compute


def rule(problem: lowering.Problem) -> str:
    """The way of a problem: "products", "tensor" or "direct"."""
    if problem.operation == "Dot" and problem.slope == "IdentitySlope":
        return "products"
    if problem.scales is not None:
        return "direct"
    size = problem.queries * problem.points * problem.features
    square = problem.operation == "Difference" and problem.slope == "SquareSlope"
    if square and problem.dtype != "float64" and size >= products.FEWEST:
        return "products"
    return "tensor" if gradient_tensor.pays(problem) else "direct"


def _products(kind: Kind, call: Call, problem: lowering.Problem) -> Callable:
    """By matrix products; sums of half types in float32."""
    wide = accumulator(call.dtype)

    def compute(operands: Operands, out: torch.Tensor, numbers: list) -> None:
        x, z, weights, coefficients, _ = (
            t if t is None else t.to(wide) for t in operands.transposed(kind)
        )
        target = sums = arguments.transposed_out(kind, out, call.sets)
        add = problem.accumulate
        if out.dtype != wide:
            sums, add = torch.empty(target.shape, dtype=wide, device=out.device), False
        if problem.operation == "Dot":
            products.weighted_dots(sums, z, weights, coefficients, add)
        else:
            products.weighted_squares(sums, x, z, weights, coefficients, problem.factor, add)
        if sums is not target:
            put(target, sums, problem.accumulate)

    return compute


def _tensor(
    kind: Kind, call: Call, problem: lowering.Problem, operands: Operands, device: int
) -> Callable | None:
    """By the kernel of tensor cores, None where it cannot."""
    sign = problem.slope == gradient_tensor.SIGN
    x, z, weights, c, _ = arranged(kind, operands)
    problem = problem._replace(
        x=layout_of(x, call.batch),
        z=layout_of(z, call.batch),
        weights=layout_of(weights, call.batch),
        coefficients=problem.coefficients if c is None else layout_of(c, call.batch),
        extremes=2 * call.features if z.dim() == 3 and z.shape[0] > 1 else 0,
    )
    subject, arch = Subject(problem.operation, problem.slope), arch_of(device)

    def launch(count: int) -> Lowered:
        gpu = Gpu(arch, count)
        option = choose(gradient_tensor.KERNELS, problem, gpu)
        return option.kernel.launch(subject, problem, gpu, option.knobs)

    try:
        lowered = lower_on(launch, device)
    except UnsupportedError:  # that of the lanes may have room
        return None
    plan = load_lowered(lowered, lowering.OPERANDS, call.device)
    shape = (lowered.parts, call.batch, max(1, call.sets), call.queries, call.features)

    def compute(operands: Operands, out: torch.Tensor, numbers: list) -> None:
        placed = arranged(kind, operands)
        extremes = torch.stack(torch.aminmax(placed.z, dim=-2), -2) if sign else None
        is_one = lowered.parts == 1
        sums = out if is_one else torch.empty(shape, dtype=torch.float32, device=call.device)
        plan.launch(_pointers(placed, sums, extremes), numbers)
        if not is_one:
            put(arguments.transposed_out(kind, out, call.sets), sums.sum(0), problem.accumulate)

    return compute


def arranged(kind: Kind, operands: Operands) -> Operands:
    """Operands (L, Q, K) and so on as tensor cores take them: float32, z with the points of each
    feature in aligned lines of whole runs, for a copy of a part of one reads all of it."""
    x, z, weights, coefficients, _ = (
        t if t is None else t.to(torch.float32) for t in operands.transposed(kind)
    )
    lines = z.mT
    steps = [s for s, n in zip(lines.stride()[:-1], lines.shape[:-1], strict=True) if n > 1]
    aligned = lines.data_ptr() % 16 == 0
    in_runs = all(n % gradient_tensor.RUN == 0 for n in (lines.shape[-1], *steps))
    if lines.stride(-1) != 1 or not (aligned and in_runs):
        length = ceil_div(lines.shape[-1], gradient_tensor.RUN) * gradient_tensor.RUN
        padded = torch.empty((*lines.shape[:-1], length), dtype=z.dtype, device=z.device)
        z = padded[..., : lines.shape[-1]].copy_(lines).mT
    return Operands(x, z, weights, coefficients)


def _direct(kind: Kind, call: Call, problem: lowering.Problem, device: int) -> Callable:
    """By the kernel of the FP32 or FP64 lanes."""
    subject, arch = Subject(problem.operation, problem.slope), arch_of(device)
    lowered = lower_on(
        lambda count: Gradient().launch(subject, problem, Gpu(arch, count), {}), device
    )
    plan = load_lowered(lowered, lowering.OPERANDS, call.device)
    if lowered.parts == 1:
        return lambda operands, out, numbers: plan.launch(_pointers(operands, out), numbers)
    shape = (lowered.parts, call.batch, max(1, call.sets), call.queries, call.features)
    wide = accumulator(call.dtype)

    def compute(operands: Operands, out: torch.Tensor, numbers: list) -> None:
        sums = torch.empty(shape, dtype=wide, device=call.device)
        plan.launch(_pointers(operands, sums), numbers)
        put(arguments.transposed_out(kind, out, call.sets), sums.sum(0), problem.accumulate)

    return compute


def put(target: torch.Tensor, result: torch.Tensor, accumulate: bool) -> None:
    """Write a result, or add it."""
    if accumulate:
        target.add_(result)
    else:
        target.copy_(result)


def _pointers(operands: Operands, out: torch.Tensor, extremes=None) -> tuple[int, ...]:
    x, z, weights, coefficients, scales = operands
    c = 0 if coefficients is None else coefficients.data_ptr()
    e = 0 if extremes is None else extremes.data_ptr()
    s = 0 if scales is None else scales.data_ptr()
    return x.data_ptr(), z.data_ptr(), weights.data_ptr(), c, out.data_ptr(), e, s


def problem_of(kind: Kind, call: Call, operands, target, accumulate, values) -> lowering.Problem:
    """A checked call as lowering sees it."""
    x, z, weights, coefficients, scales = operands.transposed(kind)
    p = values.get("p")
    exponent = None
    if p is not None:
        exponent = lowering.exponent_kind(host_value("p", p))
    stage = type(kind.inner).__name__
    factor, times_p, times_scale = constant_of(kind, exponent)
    slope = lowering.slope_of(kind.operator, stage, exponent, kind.plain)
    out = arguments.transposed_out(kind, target, call.sets)
    return lowering.Problem(
        call.queries, call.points, call.features, call.sets, call.batch,
        *(layout_of(t, call.batch) for t in (x, z, weights)),
        Layout(0, 0, 0) if coefficients is None else layout_of(coefficients, call.batch),
        out_layout(out),
        operation_of(kind),
        slope,
        factor=factor,
        times_p=times_p,
        times_scale=times_scale,
        dtype=DTYPE_NAMES[call.dtype],
        out_dtype=DTYPE_NAMES[call.out_dtype],
        accumulate=accumulate,
        scalar_strides=tuple(scalar_stride(values.get(name), call) for name in lowering.SCALARS),
        scales=None if scales is None else layout_of(scales, call.batch),
    )  # fmt: skip


def operation_of(kind: Kind) -> str:
    """The struct of gradient/slopes.cuh. An even stage has the slope of x - z either way."""
    if kind.operator == "dot":
        return "Dot"
    swapped = kind.first and isinstance(kind.inner, stages.Sqrt)
    return "SwappedDifference" if swapped else "Difference"


def constant_of(kind: Kind, exponent: float | str | None) -> tuple[float, bool, bool]:
    """The factor of sums of slopes, of a kind of exponent, and whether p and the inner scale belong
    to it."""
    power = isinstance(kind.inner, stages.Power)
    exponential = isinstance(kind.inner, stages.ExpPower)
    without_p = kind.plain or kind.scaled
    square = power and exponent == 2.0 and not without_p  # whose factor p is a constant
    factor = 2.0 * factor_of(kind) if square else factor_of(kind)
    times_p = (power or exponential) and not (without_p or square)
    return factor, times_p, exponential


def factor_of(kind: Kind) -> float:
    """The constant in front of the slopes."""
    sign = -1.0 if kind.first and kind.operator == "difference" else 1.0
    if isinstance(kind.inner, stages.Identity):
        return sign
    if isinstance(kind.inner, stages.Sqrt):
        return 0.5 * sign
    return 2.0 if isinstance(kind.inner, stages.Square) else 1.0


def out_layout(out: torch.Tensor) -> lowering.OutLayout:
    """Strides of (L, O, Q, K), those of single entries 0."""
    strides = [s if n > 1 else 0 for s, n in zip(out.stride(), out.shape, strict=True)]
    if out.shape[3] == 1 and strides[2] != 1:
        strides[3] = 1
    address = out.storage_offset() * out.element_size() if out.is_meta else out.data_ptr()
    return lowering.OutLayout(*strides, address & 15)


def _numbers(plan: GradientPlan, kind: Kind, x, values: dict) -> tuple[list, list]:
    """A number and a pointer for each of SCALARS, and tensors to keep until the launch."""
    wide, numbers, tensors = plan.wide, [], []
    for name in lowering.SCALARS:
        value = values.get(name)
        if name == "eps":
            numbers += [max(value or 0.0, arguments.SMALLEST[wide]), 0]
            continue
        number = 0.0 if value is None else value
        if type(number) is not float:  # else it would be a call for nothing
            number = host_value(name, number)
        if number is not None:
            if value is not None and not 0 < number < math.inf:
                arguments.check_host(name, number)
            numbers += [number, 0]
            continue
        if value.device.type == "cpu":
            arguments.check_number(kind, name, value, x.device)
        tensor = on_device(name, value, x.device, wide)
        address = tensor.data_ptr()
        # The number of a zero tensor, which has no memory, is 0.
        has_memory = address >= LOWEST_ADDRESS or not tensor._is_zerotensor()
        numbers += [0.0, address if has_memory else 0]
        tensors.append(tensor)
    return numbers, tensors


def _launch(plan: GradientPlan, kind: Kind, operands: Operands, out, accumulate, values: dict):
    numbers, converted = _numbers(plan, kind, operands.x, values)
    if out is None:
        out = torch.empty(plan.out_shape, dtype=plan.out_dtype, device=plan.device)
    else:
        _refuse_overlap(kind, operands, out, plan.spans, plan.out_span, values)
    if plan.compute is not None:
        plan.compute(operands, out, numbers)
    del converted  # the stream orders the reuse of their memory behind the launch
    return out


def _refuse_overlap(
    kind: Kind, operands: Operands, out, spans, out_span: int, values: dict
) -> None:
    """Raises ValueError when a given ``out`` shares memory with an operand or a number; else counts
    a version of it."""
    refuse_overlap(out, **{k: v for k, v in values.items() if isinstance(v, torch.Tensor)})
    ranges = [
        (t.data_ptr(), length) for t, length in zip(operands, spans, strict=True) if t is not None
    ]
    if ranges_meet(out.data_ptr(), out_span, ranges):
        named = zip(kind.names, operands, strict=True)
        refuse_overlap(out, **{name: t for name, t in named if t is not None})
    if not out.is_inference():  # inference tensors have no version
        torch.autograd.graph.increment_version(out)


def _materialised(kind: Kind, operands: Operands, out, accumulate, values: dict) -> tuple | None:
    if not any(is_lazy(t) for t in operands if t is not None):
        return None
    refuse_any_overlap(out, **dict(zip(kind.names, operands, strict=True)))
    read = Operands(*(t if t is None else materialised(t) for t in operands))
    return kind, read, out, accumulate, values


def _reference(call: Call, kind: Kind, operands: Operands, out, accumulate, values: dict):
    if call.device.type == "meta":
        return operands.x.new_empty(call.out_shape) if out is None else out
    wide = accumulator(call.dtype)
    wide_operands = [
        None if t is None else (t if t.dim() == 3 else t[None]).expand(call.batch, -1, -1).to(wide)
        for t in operands.transposed(kind)
    ]
    if out is None:
        out = torch.empty(call.out_shape, dtype=call.out_dtype, device=call.device)
    else:
        spans = [0 if t is None else span(t) for t in operands]
        _refuse_overlap(kind, operands, out, spans, span(out), values)
    if call.empty:
        return out
    options = {name: plain(name, values[name]) for name in ("p", "inner_scale") if name in values}
    without_p = kind.plain or kind.scaled
    options |= {"first": kind.first, "plain": without_p, "eps": values.get("eps", 0.0)}
    with without_autocast(call.device):
        result = reference.pair_gradient(kind.operator, kind.inner, *wide_operands, **options)
    target = arguments.transposed_out(kind, out, call.sets)
    target.copy_(target.to(wide) + result if accumulate else result)
    return out


def rehearsed(kind: Kind, operands: Operands, out, accumulate, values: dict) -> torch.Tensor:
    """A call of meta tensors, which notes its kernels in a rehearsal."""
    request = kind, operands, out, accumulate, values
    kind, operands, *_ = request = _materialised(*request) or request
    call = arguments.check_call(*request)
    if rehearsal.current() is None:
        return _reference(call, *request)
    plan = make_plan(call, *request)
    if out is None:
        out = torch.empty(plan.out_shape, dtype=plan.out_dtype, device=plan.device)
    if plan.compute is not None:
        plan.compute(operands, out, [])
    return out


PAIR_GRADIENT = Operation(
    name="pair_gradient",
    operators=None,
    key=key_of,
    check=arguments.check_call,
    way=_way,
    reference=_reference,
    plan=make_plan,
    launch=_launch,
    tensors=lambda *request: (),  # those without memory have no key
    materialised=_materialised,
    on_meta=rehearsed,
)
execute = operation.bind(PAIR_GRADIENT).execute

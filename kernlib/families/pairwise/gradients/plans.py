"""Plans of pair gradients: which of three ways computes a call, and what it launches.

``direct`` is the kernel of the FP32 or FP64 lanes, which takes everything; ``tensor`` that of the
tensor cores, for large calls in float32; ``products`` are matrix products.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from kernlib.errors import UnsupportedError
from kernlib.families.pairwise import stages
from kernlib.families.pairwise.gradients import arguments
from kernlib.families.pairwise.gradients import point_products as products
from kernlib.families.pairwise.gradients.arguments import Call, Kind, Operands
from kernlib.families.pairwise.lowering import gradient as lowering
from kernlib.families.pairwise.lowering import gradient_tensor
from kernlib.families.pairwise.lowering.layout import Layout
from kernlib.lowering.arithmetic import ceil_div
from kernlib.runtime.devices import arch_of, lower_on
from kernlib.runtime.dtypes import DTYPE_NAMES, accumulator
from kernlib.runtime.numbers import host_value
from kernlib.runtime.rehearsal import on_gpu
from kernlib.runtime.sequence import load_lowered
from kernlib.runtime.tensors import span


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
    arch_of(operands.x.get_device())  # one too old is refused for an empty out as well
    target = out
    if out is None:
        target = torch.empty(call.out_shape, dtype=call.out_dtype, device="meta")
    compute = None
    if not call.empty:
        compute = _way(kind, call, operands, target, accumulate, values)
    return GradientPlan(
        call.out_shape, call.out_dtype, accumulator(call.dtype), call.device,
        tuple(0 if t is None else span(t) for t in operands), span(target), compute,
    )  # fmt: skip


def _way(kind: Kind, call: Call, operands, target, accumulate: bool, values: dict) -> Callable:
    """What computes a call."""
    problem = problem_of(kind, call, operands, target, accumulate, values)
    if rule(problem) == "products":
        return _products(kind, call, problem)
    device = operands.x.get_device()
    if rule(problem) == "tensor":
        found = _tensor(kind, call, problem, operands, device)
        if found is not None:
            return found
    return _direct(kind, call, problem, device)


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
    return (
        "tensor" if gradient_tensor.takes(problem) and gradient_tensor.pays(problem) else "direct"
    )


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
            products.dot(sums, z, weights, coefficients, add)
        else:
            products.square(sums, x, z, weights, coefficients, problem.factor, add)
        if sums is not target:
            put(target, sums, problem.accumulate)

    return compute


def _tensor(
    kind: Kind, call: Call, problem: lowering.Problem, operands: Operands, device: int
) -> Callable | None:
    """By the kernel of tensor cores, None where it cannot."""
    sign = problem.slope == gradient_tensor.SIGN
    x, z, weights, coefficients, _ = given = arranged(kind, operands)
    problem = problem._replace(
        x=layout(x, call.batch),
        z=layout(z, call.batch),
        weights=layout(weights, call.batch),
        coefficients=problem.coefficients if coefficients is None else layout(given[3], call.batch),
        extremes=2 * call.features if z.dim() == 3 and z.shape[0] > 1 else 0,
    )
    arch = arch_of(device)
    lowered = lower_on(lambda count: gradient_tensor.lower(problem, arch, count), device)
    if lowered is None:
        return None
    plan = load_lowered(lowered, lowering.OPERANDS, call.device)
    shape = (lowered.parts, call.batch, max(1, call.sets), call.queries, call.features)

    def compute(operands: Operands, out: torch.Tensor, numbers: list) -> None:
        given = arranged(kind, operands)
        extremes = torch.stack(torch.aminmax(given.z, dim=-2), -2) if sign else None
        whole = lowered.parts == 1
        sums = out if whole else torch.empty(shape, dtype=torch.float32, device=call.device)
        plan.launch(_pointers(given, sums, extremes), numbers)
        if not whole:
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
    whole = all(n % gradient_tensor.RUN == 0 for n in (lines.shape[-1], *steps))
    if lines.stride(-1) != 1 or not (aligned and whole):
        length = ceil_div(lines.shape[-1], gradient_tensor.RUN) * gradient_tensor.RUN
        made = torch.empty((*lines.shape[:-1], length), dtype=z.dtype, device=z.device)
        z = made[..., : lines.shape[-1]].copy_(lines).mT
    return Operands(x, z, weights, coefficients)


def _direct(kind: Kind, call: Call, problem: lowering.Problem, device: int) -> Callable:
    """By the kernel of the FP32 or FP64 lanes."""
    arch = arch_of(device)
    lowered = lower_on(lambda count: lowering.lower(problem, arch, count), device)
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
        *(layout(t, call.batch) for t in (x, z, weights)),
        Layout(0, 0, 0) if coefficients is None else layout(coefficients, call.batch),
        out_layout(out),
        operation_of(kind),
        slope,
        factor=factor,
        times_p=times_p,
        times_scale=times_scale,
        dtype=DTYPE_NAMES[call.dtype],
        out_dtype=DTYPE_NAMES[call.out_dtype],
        accumulate=accumulate,
        scalar_strides=tuple(
            _scalar_stride(values.get(name), call) for name in lowering.SCALARS
        ),
        scales=None if scales is None else layout(scales, call.batch),
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


def layout(t: torch.Tensor, batch: int) -> Layout:
    """Strides with those of single entries out of the way of alignment."""
    rows, columns = (s if n > 1 else 0 for s, n in zip(t.stride()[-2:], t.shape[-2:], strict=True))
    if t.shape[-1] == 1:
        columns = 1 if rows != 1 else columns
    step = t.stride(0) if t.dim() == 3 and t.shape[0] == batch and batch > 1 else 0
    return Layout(step, rows, columns, t.data_ptr() & 15)


def out_layout(out: torch.Tensor) -> lowering.OutLayout:
    """Strides of (L, O, Q, K), those of single entries 0."""
    strides = [s if n > 1 else 0 for s, n in zip(out.stride(), out.shape, strict=True)]
    if out.shape[3] == 1 and strides[2] != 1:
        strides[3] = 1
    address = out.storage_offset() * out.element_size() if out.is_meta else out.data_ptr()
    return lowering.OutLayout(*strides, address & 15)


def _scalar_stride(value, call: Call) -> int:
    if not isinstance(value, torch.Tensor) or value.dim() != 1 or value.shape[0] == 1:
        return 0
    # One that must be copied to the device or converted arrives contiguous.
    same = value.device == call.device and value.dtype == accumulator(call.dtype)
    return value.stride(0) if same else 1

"""The primitive of the family: the matrix of a distance or kernel as it is asked for, without a map
of features and without a record of gradients.

A request is ``(descriptor, a, b, out, accumulate, row_offset, col_offset, values)``, the last being
the hyperparameters. CPU tensors are computed by torch (:mod:`kernlib.families.pairwise.cpu`).
In order: the key of a call, its check, its plan, its numbers, its launch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from kernlib.families.pairwise import checks
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering import problem as lowering
from kernlib.families.pairwise.lowering.finish import EXPONENT_CODE
from kernlib.families.pairwise.request import Request, is_empty, problem_of, tuning_signature
from kernlib.lowering.steps import Lowered
from kernlib.runtime import operation, rehearsal, tuned
from kernlib.runtime.devices import arch_of, lower_on, model
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.numbers import check_kind, host_value, on_device
from kernlib.runtime.operation import KERNELS, OPERATOR, REFERENCE, Operation
from kernlib.runtime.plan import Plan
from kernlib.runtime.precision import float32_precision
from kernlib.runtime.sequence import Steps, load_lowered
from kernlib.runtime.tensors import (
    LOWEST_ADDRESS,
    UNREADABLE,
    is_lazy,
    is_mapped,
    refuse_any_overlap,
    refuse_overlap,
    refuse_transforms,
    signature,
    span,
    stand_ins,
)


def key_of(descriptor, a, b, out, accumulate, row_offset, col_offset, values: dict) -> tuple:
    """All that a plan depends on: shapes, strides, dtypes, device, alignment, kinds of numbers."""
    try:  # signature(a), signature(b), in 0.2 us less
        key = (
            descriptor.text,  # a str is hashed once
            a.shape, a.stride(), a.dtype, a.get_device(),
            p & 15 if (p := a.data_ptr()) >= LOWEST_ADDRESS else ~p, a.is_neg(),
            None if b is None else (
                b.shape, b.stride(), b.dtype, b.get_device(),
                p & 15 if (p := b.data_ptr()) >= LOWEST_ADDRESS else ~p, b.is_neg(),
            ),
            None if out is None else signature(out),
            accumulate, row_offset, col_offset,
            float32_precision() if descriptor.takes_products else None,
        )  # fmt: skip
        for name, value in values.items():
            key += (name, kind_of_number(name, value))
    except UNREADABLE:
        checks.check_tensors(a, b, out)
        if stand_ins(a, b, out, *values.values()) or _is_mapped(a, b, out, values):
            return None
        tensors = {k: v for k, v in values.items() if isinstance(v, torch.Tensor)}
        refuse_transforms(checks.MAPPED_ALONE, a=a, b=b, out=out, **tensors)
        raise
    return key


def _is_mapped(a, b, out, values: dict) -> bool:
    """Whether torch.vmap maps over a call without an ``out``, which is the operator's then."""
    return out is None and is_mapped(a, b, *values.values())


_EXPONENTS = frozenset(("p", "inner_p", "outer_p"))


def kind_of_number(name: str, value: object):
    """The kind of a number; the value of an exponent that has code of its own."""
    if isinstance(value, torch.Tensor):
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            raise RuntimeError(f"{name} is inside a transform, and has no memory")
        try:
            return value.shape, value.stride(), value.dtype, value.get_device()
        except (RuntimeError, NotImplementedError):  # raised by tensors that are not dense
            check_kind(name, value)
            raise
    if name not in _EXPONENTS:
        return None
    number = host_value(name, value)
    codes = EXPONENT_CODE if name == "outer_p" else lowering.INNER_CODE
    return number if number in codes else "any"


def _check(descriptor, a, b, out, accumulate, row_offset, col_offset, values: dict):
    """Raises ValueError and TypeError; the operator does for what is mapped over."""
    if _is_mapped(a, b, out, values):
        return None
    offsets = row_offset, col_offset
    return checks.check_call(descriptor, a, b, out, accumulate, *offsets, values)


def _way(call: checks.Call | None, descriptor, a, *rest) -> str:
    if call is None or (a.is_meta and not rehearsal.on_gpu(a.device)):
        return OPERATOR  # which knows as much of meta tensors
    # By the plan of an empty call a fake tensor would be found: neither has an address.
    empty = 0 in (call.m, call.n, call.k, call.batch)
    return REFERENCE if empty and a.device.type == "cpu" else KERNELS


def _reference(call: checks.Call, *request) -> torch.Tensor:
    from kernlib.families.pairwise.cpu import plans as cpu  # only CPU tensors need it

    return cpu.plan(call, *request).compute(*request)


class Scalars(NamedTuple):
    """How the kernels of one signature take hyperparameters."""

    slots: dict[str, int]  # of a hyperparameter's number
    count: int  # of hyperparameters
    root: bool  # the outer exponent follows from the inner one
    positive: frozenset[str]  # hyperparameters that must be greater than zero

    @classmethod
    def of(cls, descriptor: Pairwise, hyperparameters: dict) -> Scalars:
        root = checks.follows_inner(descriptor, hyperparameters)
        count = lowering.scalar_count(descriptor)
        return cls(checks.slots(descriptor), count, root, descriptor.positive)


class PairwisePlan(NamedTuple):
    """What a call of one signature needs besides its pointers and numbers."""

    out_shape: tuple[int, ...]
    out_dtype: torch.dtype
    out_device: torch.device
    scalars: Scalars
    spans: tuple[int, int, int]  # bytes from first to last element of a, b, out
    swapped: bool  # its launch takes b ahead of a
    # Bandwidths by which points may be divided, from and up to; None where they are not.
    usual: tuple[float, float] | None
    launch: Plan | Steps | None  # None for an output without elements


def _plan(call: checks.Call, descriptor, a, *rest):
    """The plan of a checked call. Raises UnsupportedError for devices that have no backend."""
    if a.device.type == "cpu":
        from kernlib.families.pairwise.cpu import plans as cpu  # only CPU tensors need it

        return cpu.plan(call, descriptor, a, *rest)
    request = Request(descriptor, a, *rest)
    device = request.device()
    arch_of(device)  # an old device is refused for an empty out too
    lowered = None if is_empty(call) else lower(request, call, device)
    return loaded_plan(request, call, lowered)


def loaded_plan(request: Request, call: checks.Call, lowered: Lowered | None) -> PairwisePlan:
    """The plan of a checked call, its kernel loaded; ``lowered`` is None for an empty out."""
    descriptor, swapped = request.descriptor, False
    if lowered is not None and len(lowered.steps) == 1:
        swapped = lowered.steps[0].pointers[0][0] == "b"
    operands = ("b", "a", "out") if swapped else lowering.OPERANDS
    return PairwisePlan(
        out_shape=call.out_shape,
        out_dtype=call.out_dtype,
        out_device=request.a.device,
        scalars=Scalars.of(descriptor, request.hyperparameters),
        spans=tuple(span(t) for t in (request.a, request.second, request.target(call))),
        swapped=swapped,
        usual=_usual_bandwidths(descriptor, request.hyperparameters),
        launch=None if lowered is None else load_lowered(lowered, operands, request.a.device),
    )


def _usual_bandwidths(descriptor: Pairwise, values: dict) -> tuple[float, float] | None:
    """Those beside which points need no other unit, of a kernel of their quotients; else None."""
    if not descriptor.epilogue:
        return None
    from kernlib.families.pairwise import units  # plans of distances need none

    usual = units.LEAST_USUAL, units.MOST_USUAL
    return usual if units.is_of_quotients(descriptor, values) else None


def lower(request: Request, call: checks.Call, device: int) -> Lowered:
    """The kernels for a call on a device: the tuned ones, else by rule."""
    from kernlib.families.pairwise.lowering import choose  # reductions need none

    problem, strides = problem_of(request, call)
    descriptor, arch = request.descriptor, arch_of(device)
    permitted, choice = precision(descriptor) or "fp32", None
    arguments = descriptor, problem, arch, permitted
    if tuned.is_trial() or choose.are_several(*arguments):
        tuning = tuning_signature(descriptor, problem)
        candidates = partial(choose.candidates, *arguments)
        choice = tuned.choice(descriptor.family, model(device), tuning, candidates)
    return lower_on(
        lambda n: choose.lower(descriptor, problem, arch, n, strides, permitted, choice), device
    )


def precision(descriptor: Pairwise) -> str | None:
    """The precision of a kernel's products of float32 tensors: "fp32" or "tf32". Kernels take
    "bf16" as "tf32", which it permits."""
    if not descriptor.takes_products:
        return None
    permitted = descriptor.precision or float32_precision()
    return "fp32" if permitted == "fp32" else "tf32"


def numbers_of(scalars: Scalars, a, hyperparameters) -> tuple[list, list]:
    """A number and a pointer for each hyperparameter, and tensors to keep until the launch."""
    numbers, tensors = [0.0, 0] * scalars.count, []
    for name, value in hyperparameters.items():
        slot = scalars.slots[name]
        number = host_value(name, value)
        if number is not None:
            if not number > 0:  # as all but NaN mostly are: it saves two calls
                checks.check_host(name, number, scalars.positive)
            numbers[slot] = number
            if scalars.root and slot == checks.INNER_SLOT:
                numbers[checks.OUTER_SLOT] = 1.0 / number if number else 1.0
            continue
        if value.device.type == "cpu":
            checks.check_tensor(name, value, scalars.positive)
        tensor = on_device(name, value, a.device, accumulator(a.dtype))
        if tensor.is_neg() and tensor.numel():  # memory holds the values without their sign
            tensor = _positive(tensor)
        address = tensor.data_ptr()
        if address >= LOWEST_ADDRESS or not tensor._is_zerotensor():  # else its number is 0
            numbers[slot + 1] = address
        tensors.append(tensor)
    return numbers, tensors


def _positive(value: torch.Tensor) -> torch.Tensor:
    """A negated view's values in memory of their own, by the strides that the plan knows."""
    count = 1 + sum(s * (n - 1) for s, n in zip(value.stride(), value.shape, strict=True))
    memory = value._neg_view().as_strided((count,), (1,)).neg()
    return memory.as_strided(value.shape, value.stride(), 0)


def _launch(
    plan: PairwisePlan, descriptor, a, b, out, accumulate, row_offset, col_offset, values: dict
) -> torch.Tensor:
    if type(plan) is not PairwisePlan:
        return plan.run(descriptor, a, b, out, accumulate, row_offset, col_offset, values)
    numbers = converted = None
    if values:
        numbers, converted = numbers_of(plan.scalars, a, values)
    second = a if b is None else b
    has_out = out is not None
    if not has_out:
        out = torch.empty(plan.out_shape, dtype=plan.out_dtype, device=plan.out_device)
    pointers = a.data_ptr(), second.data_ptr(), out.data_ptr()
    if has_out:
        if checks.ranges_meet(pointers, plan.spans):
            refuse_overlap(out, a=a, b=second)
        if converted:
            refuse_overlap(out, **{k: v for k, v in values.items() if isinstance(v, torch.Tensor)})
        if not out.is_inference():  # inference tensors have no version
            torch.autograd.graph.increment_version(out)
    if plan.launch is None:
        return out
    usual = plan.usual
    if usual is not None:
        bandwidth = values["bandwidth"]
        if type(bandwidth) is not float or not usual[0] <= bandwidth < usual[1]:
            from kernlib.families.pairwise.units import in_unit, unit_of  # the plan has loaded it

            unit = unit_of(descriptor, values, accumulator(a.dtype))
            if unit is not None:  # which leaves a bandwidth near 1, or a tensor on the device
                a, b, values, _ = in_unit(unit, a.detach(), b, values)
                offsets = row_offset, col_offset
                return calls.execute(descriptor, a, b, out, accumulate, *offsets, values)
    if plan.swapped:
        pointers = pointers[1], pointers[0], pointers[2]
    plan.launch.launch(pointers, numbers)
    del converted  # the stream orders the reuse of their memory behind the launch
    return out


def _tensors(descriptor, a, b, out, accumulate, row_offset, col_offset, values: dict) -> tuple:
    return a, b, out, *values.values()


def _materialised(descriptor, a, b, out, *rest) -> tuple | None:
    if not (is_lazy(a) or (b is not None and is_lazy(b))):
        return None
    refuse_any_overlap(out, a=a, b=b)
    return tuple(Request(descriptor, a, b, out, *rest).readable())


def _rehearsed(plan: PairwisePlan, descriptor, a, b, out, *rest) -> torch.Tensor:
    if out is not None:
        return out
    return torch.empty(plan.out_shape, dtype=plan.out_dtype, device=plan.out_device)


MATRIX = Operation(
    name="pairwise",
    operators="kernlib.families.pairwise.operators",
    key=key_of,
    check=_check,
    way=_way,
    reference=_reference,
    plan=_plan,
    launch=_launch,
    tensors=_tensors,
    materialised=_materialised,
    rehearsed=_rehearsed,
)
calls = operation.bind(MATRIX)


def matrix(descriptor: Pairwise, a, b, /, **values) -> torch.Tensor:
    """The matrix of a descriptor and its hyperparameters, a new tensor without a record."""
    return calls.execute(descriptor, a, b, None, False, 0, 0, values)


def repeated(plan: PairwisePlan, call: checks.Call, request: tuple, shared) -> Callable[[], None]:
    """Launch the kernels of a call into what its candidates share, and return a function that
    launches them again: for tuning alone."""
    request = Request(*request)
    numbers = converted = None
    if request.hyperparameters:
        numbers, converted = numbers_of(plan.scalars, request.a, request.hyperparameters)
    like = request.target(call)
    shape = like.shape, like.stride()
    out = shared.out(partial(request.a.new_empty_strided, *shape, dtype=like.dtype))
    tensors = [request.a, request.second, out]
    if plan.swapped:
        tensors[:2] = tensors[1::-1]

    plan.launch.launch(tuple(t.data_ptr() for t in tensors), numbers)

    def again(_held=(tensors, converted)) -> None:
        plan.launch.repeat()

    return again

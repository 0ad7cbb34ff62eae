"""The primitive of the family: the matrix of a distance or kernel as it is asked for, without a map
of features and without a record of gradients.

A request is ``(descriptor, a, b, out, accumulate, row_offset, col_offset, values)``, the last being
the hyperparameters. CPU tensors are computed by torch (:mod:`kernlib.families.pairwise.cpu`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kernlib.families.pairwise import checks, plans
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering import direct as lowering
from kernlib.families.pairwise.lowering.finish import EXPONENT_CODE
from kernlib.families.pairwise.plans import PairwisePlan
from kernlib.families.pairwise.request import Request
from kernlib.families.pairwise.units import LEAST_USUAL, MOST_USUAL, in_unit, unit_of
from kernlib.runtime import operation, rehearsal
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.numbers import check_kind, host_value
from kernlib.runtime.operation import KERNELS, OPERATOR, REFERENCE, Operation
from kernlib.runtime.precision import float32_precision
from kernlib.runtime.tensors import (
    LOWEST_ADDRESS,
    UNREADABLE,
    is_lazy,
    is_mapped,
    materialised,
    refuse_any_overlap,
    refuse_overlap,
    refuse_transforms,
    signature,
    stand_ins,
)


def key_of(descriptor, a, b, out, accumulate, row_offset, col_offset, values: dict) -> tuple:
    """All that a plan depends on: shapes, strides, dtypes, device, alignment, kinds of numbers."""
    try:  # signature(a), signature(b), in 0.2 us less
        key = (
            descriptor.text,  # which a str hashes once
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
    """Of a number only its kind; of an exponent the value, where it has code of its own."""
    if isinstance(value, torch.Tensor):
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            raise RuntimeError(f"{name} is inside a transform, and has no memory")
        try:
            return value.shape, value.stride(), value.dtype, value.get_device()
        except (RuntimeError, NotImplementedError):  # of what is not dense
            check_kind(name, value)
            raise
    if name not in _EXPONENTS:
        return None
    number = host_value(name, value)
    own = EXPONENT_CODE if name == "outer_p" else lowering.INNER_CODE
    return number if number in own else "any"


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
    from kernlib.families.pairwise.cpu import plans as cpu  # which calls on GPUs do without

    return cpu.plan(call, *request).compute(*request)


def _plan(call: checks.Call, descriptor, a, *rest):
    if a.device.type == "cpu":
        from kernlib.families.pairwise.cpu import plans as cpu  # which calls on GPUs do without

        return cpu.plan(call, descriptor, a, *rest)
    return plans.plan(Request(descriptor, a, *rest), call)


def _launch(
    plan: PairwisePlan, descriptor, a, b, out, accumulate, row_offset, col_offset, values: dict
) -> torch.Tensor:
    if type(plan) is not PairwisePlan:
        return plan.run(descriptor, a, b, out, accumulate, row_offset, col_offset, values)
    numbers = kept = None
    if values:
        numbers, kept = plans.numbers_of(plan, a, values)
    second = a if b is None else b
    given = out is not None
    if not given:
        out = torch.empty(plan.out_shape, dtype=plan.out_dtype, device=plan.out_device)
    pointers = a.data_ptr(), second.data_ptr(), out.data_ptr()
    if given:
        if checks.ranges_meet(pointers, plan.spans):
            refuse_overlap(out, a=a, b=second)
        if kept:
            refuse_overlap(out, **{k: v for k, v in values.items() if isinstance(v, torch.Tensor)})
        if not out.is_inference():  # those have no version to count
            torch.autograd.graph.increment_version(out)
    if plan.launch is None:
        return out
    if plan.quotients:
        bandwidth = values["bandwidth"]
        if type(bandwidth) is not float or not LEAST_USUAL <= bandwidth < MOST_USUAL:
            unit = unit_of(descriptor, values, accumulator(a.dtype))
            if unit is not None:  # which leaves a bandwidth near 1, or a tensor on the device
                a, b, values, _ = in_unit(unit, a.detach(), b, values)
                offsets = row_offset, col_offset
                return calls.execute(descriptor, a, b, out, accumulate, *offsets, values)
    if plan.swapped:
        pointers = pointers[1], pointers[0], pointers[2]
    plan.launch.launch(pointers, numbers)
    del kept  # converted tensors: the stream orders the reuse of their memory behind the launch
    return out


def _tensors(descriptor, a, b, out, accumulate, row_offset, col_offset, values: dict) -> tuple:
    return a, b, out, *values.values()


def _materialised(descriptor, a, b, out, *rest) -> tuple | None:
    if not (is_lazy(a) or (b is not None and is_lazy(b))):
        return None
    refuse_any_overlap(out, a=a, b=b)
    return tuple(readable(Request(descriptor, a, b, out, *rest)))


def readable(request: Request) -> Request:
    """A request with inputs that a kernel may read, zero tensors among them. Raises TypeError for
    what is no dense tensor."""
    made = request.readable()
    b = made.b if made.b is None else materialised(made.b)
    return made._replace(a=materialised(made.a), b=b)


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
        numbers, converted = plans.numbers_of(plan, request.a, request.hyperparameters)
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

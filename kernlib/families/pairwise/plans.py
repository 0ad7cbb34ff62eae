"""Plans of pairwise calls: what a call of one signature needs besides its pointers and numbers."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernlib.families.pairwise import checks
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering import choose
from kernlib.families.pairwise.lowering import direct as lowering
from kernlib.families.pairwise.request import Request, is_empty, problem_of, tuning_signature
from kernlib.families.pairwise.units import is_of_quotients
from kernlib.lowering.steps import Lowered
from kernlib.runtime import tuned
from kernlib.runtime.devices import arch_of, lower_on, model
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.numbers import host_value, on_device
from kernlib.runtime.plan import Plan
from kernlib.runtime.precision import float32_precision
from kernlib.runtime.sequence import Steps, load_lowered
from kernlib.runtime.tensors import LOWEST_ADDRESS, span


class PairwisePlan(NamedTuple):
    """What a call of one signature needs besides its pointers and numbers."""

    out_shape: tuple[int, ...]
    out_dtype: torch.dtype
    out_device: torch.device
    slots: dict[str, int]  # of a hyperparameter's number
    spans: tuple[int, int, int]  # bytes from first to last element of a, b, out
    count: int  # of hyperparameters
    root: bool  # the outer exponent follows from the inner one
    positive: frozenset[str]  # hyperparameters that must be greater than zero
    swapped: bool  # its launch takes b ahead of a
    quotients: bool  # of points by a bandwidth
    launch: Plan | Steps | None  # None for an output without elements


def plan(request: Request, call: checks.Call) -> PairwisePlan:
    """The plan of a checked call. Raises UnsupportedError for devices that have no backend."""
    device = request.device()
    arch_of(device)  # one too old is refused for an empty out as well
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
        slots=checks.slots(descriptor),
        spans=tuple(span(t) for t in (request.a, request.second, request.target(call))),
        count=lowering.scalar_count(descriptor),
        root=checks.follows_inner(descriptor, request.hyperparameters),
        positive=descriptor.positive,
        swapped=swapped,
        quotients=is_of_quotients(descriptor, request.hyperparameters),
        launch=None if lowered is None else load_lowered(lowered, operands, request.a.device),
    )


def lower(request: Request, call: checks.Call, device: int) -> Lowered:
    """The kernels for a call on a device: the tuned ones, else by rule."""
    problem, strides = problem_of(request, call)
    descriptor, arch = request.descriptor, arch_of(device)
    permitted, choice = precision(descriptor) or "fp32", None
    candidates = choose.candidates(descriptor, problem, arch, permitted)
    if len(candidates) > 1 or tuned.is_trial():
        signature = tuning_signature(descriptor, problem)
        choice = tuned.choice(descriptor.family, model(device), signature, lambda: candidates)
    return lower_on(
        lambda n: choose.lower(descriptor, problem, arch, n, strides, permitted, choice), device
    )


def precision(descriptor: Pairwise) -> str | None:
    """What the products of float32 tensors may be, where a kernel takes products: "fp32" or "tf32";
    "bf16" permits "tf32" too, which is what the kernels make of it."""
    if not descriptor.takes_products:
        return None
    permitted = descriptor.precision or float32_precision()
    return "fp32" if permitted == "fp32" else "tf32"


def numbers_of(plan: PairwisePlan, a, hyperparameters) -> tuple[list, list]:
    """A number and a pointer for each hyperparameter, and tensors to keep until the launch."""
    numbers, kept = [0.0, 0] * plan.count, []
    for name, value in hyperparameters.items():
        slot = plan.slots[name]
        number = host_value(name, value)
        if number is not None:
            if not number > 0:  # as all but NaN mostly are: it saves two calls
                checks.check_host(name, number, plan.positive)
            numbers[slot] = number
            if plan.root and slot == checks.INNER_SLOT:
                numbers[checks.OUTER_SLOT] = 1.0 / number if number else 1.0
            continue
        if value.device.type == "cpu":
            checks.check_tensor(name, value, plan.positive)
        tensor = on_device(name, value, a.device, accumulator(a.dtype))
        if tensor.is_neg() and tensor.numel():  # memory holds the values without their sign
            tensor = _positive(tensor)
        address = tensor.data_ptr()
        if address >= LOWEST_ADDRESS or not tensor._is_zerotensor():  # else its number is 0
            numbers[slot + 1] = address
        kept.append(tensor)
    return numbers, kept


def _positive(value: torch.Tensor) -> torch.Tensor:
    """A negated view's values in memory of their own, by the strides that the plan knows."""
    count = 1 + sum(s * (n - 1) for s, n in zip(value.stride(), value.shape, strict=True))
    memory = value._neg_view().as_strided((count,), (1,)).neg()
    return memory.as_strided(value.shape, value.stride(), 0)

"""Products whose epilogues finish each value: their requests, their plans, and how a plan launches.

A request is ``(descriptor, operands, out, parameters)``: the operands in the order in which
run_kernel takes them, and the parameters of the epilogue by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch.autograd import forward_ad

from kernlib.descriptors.epilogues import Product as Descriptor
from kernlib.lowering.steps import Lowered
from kernlib.runtime import devices, operation, rehearsal
from kernlib.runtime.arguments import (
    apart_of,
    check_device,
    no_autocast,
    parameter_ranges,
    parameters_of,
    readable,
)
from kernlib.runtime.devices import allocator
from kernlib.runtime.operation import Bound, Operation
from kernlib.runtime.plan import Plan
from kernlib.runtime.sequence import launcher, load_steps
from kernlib.runtime.tensors import (
    is_lazy,
    ranges_meet,
    refuse_any_overlap,
    refuse_overlap,
    refuse_partial_overlap,
    span,
)


class Call(NamedTuple):
    """A checked call. ``batch`` is how many vectors of features x holds: the product of the sizes
    of its other dimensions."""

    batch: int
    out_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Product(NamedTuple):
    """A family's functions for its product. The first four functions are those of
    :class:`kernlib.runtime.operation.Operation`."""

    name: str  # its operator is kernlib::name
    operators: str
    key: Callable
    check: Callable  # makes a Call
    way: Callable
    plan: Callable
    reference: Callable  # of descriptor, operands and parameters
    tensors: Callable  # of the operands, x first
    names: Callable  # of the operands: what errors call those tensors
    check_operands: Callable  # of descriptor and operands: raises for a wrong number or kind
    cast: Callable  # operands and parameters as autocast casts them


class ProductPlan(NamedTuple):
    """What a call of one signature needs besides its pointers and numbers."""

    index: int  # of the device
    dtype: torch.dtype
    device: torch.device
    place: Callable  # of the operands: their addresses, and what to keep until the launch
    vectors: tuple[str, ...]  # names of parameters
    scalars: tuple[str, ...]
    summands: tuple[tuple[str, tuple | None], ...]  # name; shape of a copy that is read
    spans: tuple[int, ...]  # bytes from first to last element of the operands' tensors as given
    vector_spans: tuple[int, ...]
    out_span: int
    apart: bool  # whether a given out is written by a copy
    shape: tuple[int, ...]  # of the result
    result: Callable[[], torch.Tensor]  # makes a new one
    steps: tuple[tuple[Plan, Callable, int], ...]  # see kernlib.runtime.sequence.Loaded
    launch: Callable[..., None]  # launches the steps, given addresses: operands, out, vectors
    workspace: int  # bytes
    # Computes the call in place of a launch, from descriptor, operands, parameters and where to
    # write; None where kernels do.
    compute: Callable | None


def make_plan(
    tensors: tuple[torch.Tensor, ...],
    call: Call,
    request: tuple,
    place: Callable,
    names: tuple[str, ...],
    lowered: Lowered | None,
    apart: bool,
    compute: Callable | None = None,
    copies: tuple[tuple[int, ...] | None, ...] = (),
) -> ProductPlan:
    """The plan of a described call by given kernels, which it loads, or by ``compute`` where
    ``lowered`` is None. ``tensors`` are those of the operands, x first. ``names`` are what the
    kernels call the addresses that ``place`` returns. ``copies`` has, for each summand, the shape
    of the copy that is read in its place, or None."""
    descriptor, _, out, parameters = request
    vectors, device = descriptor.vectors, tensors[0].device
    summands = tuple(zip(descriptor.summands, copies, strict=True))
    not_scalars = {*vectors, *descriptor.summands}
    lowered = lowered or Lowered(())
    pointers = (*names, "out", *(f"vector{index}" for index in range(len(vectors))))
    pointers += tuple(f"summand{index}" for index in range(len(summands)))
    steps, inner = load_steps(lowered.steps, pointers, tensors[0].get_device())
    return ProductPlan(
        index=tensors[0].get_device(),
        dtype=call.dtype,
        device=device,
        place=place,
        vectors=vectors,
        scalars=tuple(name for name in descriptor.parameters if name not in not_scalars),
        summands=summands,
        spans=tuple(map(span, tensors)),
        vector_spans=tuple(span(parameters[name]) for name in vectors),
        out_span=0 if out is None else span(out),
        apart=apart,
        shape=call.out_shape,
        result=allocator(call.out_shape, call.dtype, device),
        steps=steps,
        launch=launcher(steps, inner, device, lowered.workspace),
        workspace=lowered.workspace,
        compute=compute,
    )


def is_on_gpu(device: torch.device) -> bool:
    """Whether kernels compute the calls of a device: not on CPUs, nor on meta but in a rehearsal.
    Raises UnsupportedError for devices that have no backend."""
    check_device(device)
    return rehearsal.on_gpu(device)


def bind(product: Product, on_meta: Callable | None = None) -> Bound:
    """The calls of a product. ``on_meta`` is what a rehearsal makes of a recorded call, where that
    is more than the product."""

    def launch(plan: ProductPlan, descriptor, operands: tuple, out, parameters: dict):
        if devices.current_device() != plan.index:
            with torch.cuda.device(plan.index):
                return launch(plan, descriptor, operands, out, parameters)
        addresses, copies = plan.place(operands)
        vectors = numbers = converted = ()
        if parameters:
            vectors, numbers, converted = parameters_of(plan, descriptor, parameters)
            if plan.summands:
                vectors += summands_of(plan, parameters)
        target = None
        if out is not None:
            target = _target(product, plan, descriptor, operands, out, parameters)
        if plan.compute is not None:
            values = _values(plan, vectors, numbers, converted)
            y = plan.compute(descriptor, operands, values, target)
            return y if out is None or y is out else out.copy_(y)
        if target is None:
            target = plan.result()
        addresses.append(target.data_ptr())
        for vector in vectors:
            addresses.append(vector.data_ptr())
        plan.launch(addresses, numbers)
        del copies, converted  # their memory is reused on the same stream, so behind the launch
        return target if out is None or out is target else out.copy_(target)

    def tensors(descriptor, operands, out, parameters) -> tuple:
        return *product.tensors(operands), out, *parameters.values()

    def materialised(descriptor, operands, out, parameters) -> tuple | None:
        values = (*operands, *parameters.values())
        if not any(is_lazy(value) for value in values if isinstance(value, torch.Tensor)):
            return None
        apart = apart_of(descriptor, out, parameters)
        refuse_any_overlap(out, **named(product, operands), **apart)
        operands, parameters = readable(operands, parameters)
        return descriptor, operands, out, parameters

    def reference(call, descriptor, operands, out, parameters) -> torch.Tensor:
        return by_reference(product, descriptor, operands, out, parameters)

    def rehearsed(plan, descriptor, operands, out, parameters) -> torch.Tensor:
        return plan.result() if out is None else out

    own = product.key, product.check, product.way, reference, product.plan
    return operation.bind(
        Operation(
            product.name, product.operators, *own, launch, tensors, materialised, rehearsed, on_meta
        )
    )


def requires_gradient(values: Iterable, *tensors) -> bool:
    """Whether one of a call's tensors requires a gradient; others than tensors do not."""
    for group in (tensors, values):  # any() over a generator would double the time
        for value in group:
            if getattr(value, "requires_grad", False) is True:  # no Proxy is
                return True
    return False


def front_door(product: Product, bound: Bound, recorded: Callable) -> Callable:
    """``run(descriptor, *operands, out=None, **parameters)`` of a product: a call as a user makes
    it. Autocast casts its operands, and ``recorded`` answers it where its gradient is recorded or
    in forward mode."""
    key_of, launch, first, cache = product.key, bound.launch, bound.first, bound.plans

    def run(descriptor, *operands, out=None, **parameters) -> torch.Tensor:
        if torch._C._is_any_autocast_enabled():
            product.check_operands(descriptor, operands)
            if out is not None:  # before casts, which would hide it
                apart = apart_of(descriptor, out, parameters)
                refuse_any_overlap(out, **named(product, operands), **apart)
            operands, parameters = product.cast(operands, parameters)
        if forward_ad._current_level >= 0 or (
            torch.is_grad_enabled() and requires_gradient(parameters.values(), *operands, out)
        ):
            return recorded(descriptor, operands, out, parameters)
        key = key_of(descriptor, operands, out, parameters)  # this unpacks the operands
        plan = cache.plans.get(key)
        if plan is None:
            return first(key, descriptor, operands, out, parameters)
        return launch(plan, descriptor, operands, out, parameters)

    return run


def by_reference(product: Product, descriptor: Descriptor, operands, out, parameters: dict):
    """A checked call by torch's own operators, which are differentiable as they are."""
    if out is not None and not out.is_meta:
        apart = apart_of(descriptor, out, parameters)
        refuse_overlap(out, **named(product, operands), **apart)
    with no_autocast(product.tensors(operands)[0]):
        y = product.reference(descriptor, operands, parameters)
    return y if out is None else out.copy_(y)


def named(product: Product, operands: tuple) -> dict[str, torch.Tensor]:
    """The operands' tensors by what errors call them."""
    return dict(zip(product.names(operands), product.tensors(operands), strict=True))


def _target(
    product: Product, plan: ProductPlan, descriptor, operands: tuple, out, parameters: dict
):
    """Where the kernel writes: ``out``, or None for a new tensor if the kernel cannot write the
    strides of ``out``. Raises ValueError for an ``out`` that shares memory with an argument as it
    was given, even if the kernel reads a copy of that."""
    pairs = zip(product.tensors(operands), plan.spans, strict=True)
    ranges = [(t.data_ptr(), length) for t, length in pairs]
    if parameters:
        ranges += parameter_ranges(plan, plan.vector_spans, parameters)
    if ranges_meet(out.data_ptr(), plan.out_span, ranges):
        apart = apart_of(descriptor, out, parameters)
        refuse_overlap(out, **named(product, operands), **apart)
    if plan.summands:
        refuse_partial_overlap(out, **{name: parameters[name] for name, _ in plan.summands})
    if plan.apart:
        return None
    if not out.is_inference():  # tensors of inference mode have no version
        torch.autograd.graph.increment_version(out)
    return out


def summands_of(plan: ProductPlan, parameters: dict) -> list[torch.Tensor]:
    """The summands as kernels read them: as they were given, or contiguous copies."""
    pairs = [(parameters[name], shape) for name, shape in plan.summands]
    return [y if shape is None else y.expand(shape).contiguous() for y, shape in pairs]


def _values(plan: ProductPlan, vectors, numbers, converted) -> dict:
    """The parameters by name: vectors, summands, and scalars as tensors on the device or
    numbers."""
    tensors = iter(converted)  # scalars that have an address, in order
    names = (*plan.vectors, *(name for name, _ in plan.summands))
    values = dict(zip(names, vectors, strict=True))
    for index, name in enumerate(plan.scalars):
        values[name] = next(tensors) if numbers[2 * index + 1] else numbers[2 * index]
    return values

"""Gradients of a product by x and by all factors at once, which are not themselves recorded: an
operation with plans of its own.

What kernels do not take is computed by the function ``apart`` of
:mod:`kernlib.families.kronecker_product.gradients`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from kernlib.families.kronecker_product import plans
from kernlib.families.kronecker_product.descriptor import KroneckerProduct
from kernlib.families.kronecker_product.lowering import gradients as lowering
from kernlib.families.kronecker_product.lowering.gradients import Gradients
from kernlib.families.kronecker_product.lowering.problem import Layout
from kernlib.families.kronecker_product.product import PRODUCT
from kernlib.runtime import devices
from kernlib.runtime.devices import allocator, arch_of
from kernlib.runtime.dtypes import DTYPE_NAMES
from kernlib.runtime.operation import KERNELS, REFERENCE, Operation
from kernlib.runtime.precision import float32_precision
from kernlib.runtime.products import Call
from kernlib.runtime.sequence import launcher, load_steps
from kernlib.runtime.tensors import is_lazy, is_wrapped, materialised, signature

NAME = "kronecker_product_gradients"


class Plan(NamedTuple):
    """What the gradients of one signature need besides their pointers."""

    index: int  # of the device
    place: Callable  # of gradient and operands: their addresses, and what to keep until the launch
    results: tuple[Callable[[], torch.Tensor] | None, ...]  # make new ones: by x, and by factors
    shapes: tuple[tuple[int, ...] | None, ...]  # that larger results are summed to, else None
    launch: Callable[..., None]


def problem_of(
    descriptor: KroneckerProduct, call: Call, grad: torch.Tensor, operands: tuple, wanted: bool
) -> tuple[Gradients, tuple]:
    """The gradients of a checked call as lowering sees them, and for the incoming gradient and each
    operand the shape of the copy that is read in its place, or None."""
    problem, copies, apart = plans.problem_of(call, descriptor, operands, grad, {})
    rows, features = problem.columns, problem.in_features
    strides = (1, rows) if problem.inside else (features, 1)
    turned = tuple(flag != problem.inside for flag in descriptor.transposed)
    one = all(math.prod(factor.shape[:-2]) == 1 for factor in operands[1:])
    given = Gradients(problem, Layout(rows * features, 0, *strides), wanted, turned, one)
    return given, (call.out_shape if apart else None, *copies)


def takes(descriptor: KroneckerProduct, dtype: torch.dtype, arch: str) -> bool:
    """Whether kernels compute the gradients by the factors."""
    inside = descriptor.side == "left"
    sizes = tuple(shape[::-1] if inside else shape for shape in descriptor.shapes)
    return lowering.takes(sizes, DTYPE_NAMES[dtype], arch)


def _key(descriptor: KroneckerProduct, grad, operands: tuple, needs: tuple) -> tuple | None:
    try:
        permitted = float32_precision() if descriptor.precision is None else None
        return descriptor.text, permitted, needs, *map(signature, (grad, *operands))
    except (AttributeError, RuntimeError, NotImplementedError):  # tensors without memory
        return None


def _check(descriptor: KroneckerProduct, grad, operands: tuple, needs: tuple) -> Call:
    return PRODUCT.check(descriptor, operands, None, {})


def _way(call: Call, descriptor: KroneckerProduct, grad, operands: tuple, needs: tuple) -> str:
    """Who computes the gradients: kernels, for what they take on CUDA."""
    if is_wrapped(grad) or PRODUCT.way(call, descriptor, operands, None, {}) == REFERENCE:
        return REFERENCE
    arch = arch_of(operands[0].get_device())
    return KERNELS if call.batch and takes(descriptor, call.dtype, arch) else REFERENCE


def _plan(call: Call, descriptor: KroneckerProduct, grad, operands: tuple, needs: tuple) -> Plan:
    """The plan of a checked call on CUDA tensors, its kernels loaded."""
    x, *factors = operands
    device = x.get_device()
    given, copies = problem_of(descriptor, call, grad, operands, needs[0])
    arch = arch_of(device)
    lowered = devices.lower_on(lambda count: lowering.lower(given, arch, count), device)
    numbers = range(len(factors))
    names = ("grad", "x", *(f"factor{index}" for index in numbers))
    results = (*["to_x"] * needs[0], *(f"to_factor{index}" for index in numbers))
    steps, inner = load_steps(lowered.steps, (*names, *results), device)
    lead = call.out_shape[:-2]
    shapes = [(*lead, *x.shape[-2:])]
    for factor in factors:
        shapes.append(tuple(factor.shape) if given.is_one_sum else (*lead, *factor.shape[-2:]))
    makers = [allocator(shape, call.dtype, x.device) for shape in shapes]
    return Plan(
        device,
        partial(plans.place, copies),
        tuple(makers) if needs[0] else (None, *makers[1:]),
        tuple(
            tuple(t.shape) if tuple(t.shape) != shape else None
            for t, shape in zip(operands, shapes, strict=True)
        ),
        launcher(steps, inner, x.device, lowered.workspace),
    )


def _launch(plan: Plan, descriptor, grad, operands: tuple, needs: tuple) -> list:
    if devices.current_device() != plan.index:
        with torch.cuda.device(plan.index):
            return _launch(plan, descriptor, grad, operands, needs)
    addresses, kept = plan.place((grad, *operands))
    made = [None if new is None else new() for new in plan.results]
    addresses += [t.data_ptr() for t in made if t is not None]
    plan.launch(addresses)
    del kept  # its memory is reused on the same stream, so behind the launch
    return [
        t if shape is None or t is None else t.sum_to_size(shape)
        for t, shape in zip(made, plan.shapes, strict=True)
    ]


def _rehearsed(plan: Plan, descriptor, grad, operands: tuple, needs: tuple) -> list:
    return [torch.empty_like(t) for t in operands]


def _materialised(descriptor, grad, operands: tuple, needs: tuple) -> tuple | None:
    if not any(map(is_lazy, (grad, *operands))):
        return None
    return descriptor, materialised(grad), tuple(map(materialised, operands)), needs


def operation(apart: Callable) -> Operation:
    """Gradients by ``(descriptor, grad, operands, needs)``, of x and of the factors; ``apart``
    computes what kernels do not take."""
    return Operation(
        name=NAME,
        operators=PRODUCT.operators,
        key=_key,
        check=_check,
        way=_way,
        reference=lambda call, *request: apart(*request),
        plan=_plan,
        launch=_launch,
        tensors=lambda descriptor, grad, operands, needs: (grad, *operands),
        materialised=_materialised,
        rehearsed=_rehearsed,
    )

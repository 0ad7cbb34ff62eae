"""Preparing, compiling and tuning of Kronecker products: which kernels a call uses, and its plan
with these loaded."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from kernlib.families.kronecker_product import backward, checks, plans
from kernlib.families.kronecker_product.descriptor import KroneckerProduct
from kernlib.families.kronecker_product.gradients import adjoint, parts
from kernlib.families.kronecker_product.lowering import choose, gradients
from kernlib.families.kronecker_product.product import PRODUCT, calls
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.steps import Lowered
from kernlib.runtime import ahead
from kernlib.runtime.ahead import Request
from kernlib.runtime.arguments import autocast, check_names, readable
from kernlib.runtime.candidates import Candidates
from kernlib.runtime.devices import arch_of, load, model
from kernlib.runtime.dtypes import DTYPE_NAMES
from kernlib.runtime.operation import REFERENCE
from kernlib.runtime.products import Call


def _request(descriptor: KroneckerProduct, tensors: tuple, arguments: dict) -> Request:
    """The request of a call, cast by autocast, and with a vector as a matrix."""
    rest = dict(arguments)
    out = rest.pop("out", None)
    check_names(descriptor, rest)
    checks.check_kinds(descriptor, tensors)
    if tensors[0].dim() == 1:
        tensors, out, rest = checks.as_matrix(descriptor, tensors, out, rest)
    operands, parameters = readable(*autocast(tensors, rest))
    return Request(descriptor, operands, out, parameters)


def prepare(descriptor: KroneckerProduct, *tensors, **arguments) -> None:
    """Build the plan of a call, compiling and loading its kernels, and load those of the gradients
    that would be recorded; see :func:`kernlib.prepare`."""
    request = _request(descriptor, tensors, arguments)
    call = request.check(PRODUCT)
    if PRODUCT.way(call, *request) == REFERENCE:
        return
    plan = ahead.plan_of(calls, parts, request, call)
    device = request.operands[0].get_device()
    lowerings = _lowerings(request, call, arch_of(device), device)[1:]
    with torch.no_grad():
        if plan.compute is not None:  # run it once, as cuBLAS must not be loaded during a capture
            calls.launch(plan, *request.fused(parts)._replace(out=None))
        for lower in lowerings:
            lowered = lower(model(device).multiprocessors)
            for spec in lowered.specs if lowered else ():
                load(spec, device)
            if lowered is None:  # the gradient by x
                grad = torch.zeros(call.out_shape, dtype=call.dtype, device=call.device)
                calls.execute(adjoint(request.descriptor), (grad, *request.operands[1:]), None, {})


def prepared(descriptor: KroneckerProduct, *tensors, **arguments) -> bool:
    """Whether nothing is left to prepare: the plan of the call is there, or torch computes it.
    Always False for a call whose gradient would be recorded: its kernels are looked for each
    time."""
    request = _request(descriptor, tensors, arguments)
    call = request.check(PRODUCT)
    if PRODUCT.way(call, *request) == REFERENCE:
        return True
    return ahead.prepared(calls, parts, request)


def specs(
    descriptor: KroneckerProduct,
    arch: str,
    tensors: tuple,
    arguments: dict,
    device: int | None = None,
) -> list[KernelSpec]:
    """The kernels that a call with these tensors (``meta`` ones will do) uses on the GPUs of an
    arch, untuned, or on ``device`` alone, as it is tuned, if it is given; with those of the
    gradients that would be recorded. None where torch computes it."""
    request = _request(descriptor, tensors, arguments)
    call = request.check(PRODUCT)
    takes = choose.takes(descriptor.shapes, DTYPE_NAMES[call.dtype], arch)
    if not call.batch or not takes:
        return []
    fewest, most = targets.MULTIPROCESSORS[arch]
    if device is not None:
        fewest = most = model(device).multiprocessors
    made = (
        lower(count)
        for lower in _lowerings(request, call, arch, device)
        for count in range(fewest, most + 1)
    )
    return list(dict.fromkeys(spec for lowered in made if lowered for spec in lowered.specs))


def _lowerings(
    request: Request, call: Call, arch: str, device: int | None
) -> list[Callable[[int], Lowered | None]]:
    """Functions that return launches for a number of multiprocessors, or None if torch computes
    them: first those of the call. Where a gradient is recorded, those of all gradients that kernels
    compute follow, for a contiguous gradient of the result."""
    fused = request.fused(parts)
    descriptor, operands = fused.descriptor, fused.operands

    def product(descriptor, operands, out, parameters, call: Call) -> Callable:
        problem = plans.problem_of(call, descriptor, operands, out, parameters)[0]
        copied = plans.is_copied(descriptor, out)
        if device is not None:
            return lambda _: plans.lower(descriptor, problem, device, copied)
        passes = plans.torch_passes(descriptor, problem, copied)
        return lambda count: choose.lower(descriptor.epilogue, problem, arch, count, None, passes)

    found = [product(*fused, call)]
    if not request.recorded() or not call.batch:
        return found
    by_x, *by_factors = (t.requires_grad for t in request.operands)
    grad = torch.empty(call.out_shape, dtype=call.dtype, device="meta")
    if any(by_factors) and backward.takes(descriptor, call.dtype, arch):
        given, _ = backward.problem_of(descriptor, call, grad, operands, by_x)
        return [*found, lambda count: gradients.lower(given, arch, count)]
    if not by_x:
        return found
    lead, rows = call.out_shape[:-2], call.out_shape[-3 - descriptor.axis]
    ends = (rows, descriptor.in_features)
    shape = (*lead, *(ends if descriptor.axis == -1 else ends[::-1]))
    back = call._replace(batch=math.prod(lead) * rows, out_shape=shape)
    return [*found, product(adjoint(descriptor), (grad, *operands[1:]), None, {}, back)]


def variants(
    descriptor: KroneckerProduct, arch: str, dtypes: tuple[torch.dtype, ...]
) -> list[KernelSpec]:
    """Every kernel that lowering can choose, untuned, for a descriptor, its gradients included, and
    inputs of ``dtypes``. Raises KeyError for dtypes that a call does not take."""
    names, given = [DTYPE_NAMES[dtype] for dtype in dtypes], ("fp32", "tf32")
    if descriptor.precision is not None:
        given = (plans.kernel_precision(descriptor.precision, torch.float32),)
    kinds = [(n, each) for n in names for each in (given if n == "float32" else ("fp32",))]
    inside, found = descriptor.side == "left", []
    for made in (descriptor, parts(descriptor).product, adjoint(descriptor)):
        sizes = tuple(shape[::-1] if inside else shape for shape in made.shapes)
        found += choose.variants(made.epilogue, sizes, inside, kinds, arch)
    sizes = tuple(shape[::-1] if inside else shape for shape in descriptor.shapes)
    return list(dict.fromkeys([*found, *gradients.variants(sizes, inside, kinds, arch)]))


def candidates(descriptor: KroneckerProduct, *tensors, **arguments) -> Candidates:
    """The kernels that could compute a call, none for an empty result; see :func:`kernlib.tune`.

    Raises what a call raises, and UnsupportedError for tensors that are on no GPU or for factors
    that no kernel takes.
    """
    from kernlib.families.kronecker_product.candidates import candidates as candidates_of

    return candidates_of(_request(descriptor, tensors, arguments))

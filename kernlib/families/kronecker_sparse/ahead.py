"""What is done with Kronecker-sparse calls before anybody makes them: which kernels they use, and
their plans with those loaded."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernlib.families.kronecker_sparse import checks, operation, plans
from kernlib.families.kronecker_sparse.descriptor import KroneckerSparse
from kernlib.families.kronecker_sparse.gradients import parts
from kernlib.families.kronecker_sparse.lowering import choose
from kernlib.jit.spec import KernelSpec
from kernlib.runtime.arguments import (
    autocast,
    check_names,
    positive,
    refuse_out_of_recorded,
    requires_gradient,
)
from kernlib.runtime.devices import load
from kernlib.runtime.dtypes import KERNEL_TYPES
from kernlib.runtime.tensors import check_dense


class Request(NamedTuple):
    """One product as it was asked for, alone or as a factor of a chain."""

    descriptor: KroneckerSparse
    x: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor | None
    parameters: dict

    def check(self) -> checks.Call:
        """Raises what a call raises."""
        if self.recorded():
            refuse_out_of_recorded(self.out)
        return checks.check_call(*self)

    def recorded(self) -> bool:
        """Whether a gradient would be recorded."""
        return torch.is_grad_enabled() and requires_gradient(self.parameters.values(), *self[1:4])

    def precision(self) -> str | None:
        """What float32 products may be, as a plan knows it."""
        return operation.precision_of(self.descriptor.precision, self.x)

    def fused(self) -> Request:
        """What the kernel of the product itself computes: with a gradient recorded, no activation;
        and never the lazy negation of a view, which is not in its memory."""
        descriptor, parameters = self.descriptor, self.parameters
        if self.recorded():
            made = parts(descriptor)
            descriptor, parameters = made.product, made.operands(parameters)
        (x, weight), parameters = positive((self.x, self.weight), parameters)
        return Request(descriptor, x, weight, self.out, parameters)


def requests(descriptor, tensors: tuple, arguments: dict) -> list[Request]:
    """The products of a call, as autocast would have them. Raises TypeError for tensors that are
    too few or too many."""
    rest = dict(arguments)
    out = rest.pop("out", None)
    checks.check_weights(descriptor, tensors[1:])
    check_names(descriptor, rest)
    x, found = tensors[0], []
    for factor, weight in zip(descriptor.factors, tensors[1:], strict=True):
        if found:
            x = _result(found[-1])
        check_dense(("x", "weight"), x=x, weight=weight)
        own = {name: rest[name] for name in factor.parameters}
        (x, weight), own = autocast((x, weight), own)
        found.append(Request(factor, x, weight, None, own))
    return [*found[:-1], found[-1]._replace(out=out)]


def _result(request: Request) -> torch.Tensor:
    """A tensor like the one that a request returns."""
    shape = request.check().out_shape
    made = torch.empty(shape, dtype=request.x.dtype, device=request.x.device)
    return made.requires_grad_(request.recorded())


def prepare(request: Request) -> None:
    """Build the plan of a request, its kernels loaded, and load those of its gradient."""
    call = request.check()
    if operation.by_reference(call, *request[1:]):
        return
    if operation.find_plan(*request.fused()) is None:
        operation.make_plan(*request.fused(), call)
    device = request.x.get_device()
    for epilogue, problem in _backward(request, call):
        for step in plans.lower(epilogue, problem, device).steps:
            load(step.spec, device)


def prepared(request: Request) -> bool:
    """Whether the plan of a request is there, and no other is needed."""
    return not request.recorded() and operation.find_plan(*request.fused()) is not None


def specs(request: Request, arch: str, device: int | None) -> list[KernelSpec]:
    """The kernels of a request on an arch, or on one device."""
    call = request.check()
    if call.dtype not in KERNEL_TYPES or not call.batch:
        return []
    fused = request.fused()
    problem = plans.problem_of(fused.descriptor, call, *fused[1:4], request.precision())
    found = []
    for epilogue, each in [(fused.descriptor.epilogue, problem), *_backward(request, call)]:
        if device is not None:
            found += [step.spec for step in plans.lower(epilogue, each, device).steps]
            continue
        for choice in choose.defaults(each, arch):
            found += choose.specs_for(epilogue, each, arch, choice)
    return found


def _backward(request: Request, call: checks.Call) -> list[tuple[tuple, choose.Problem]]:
    """The problems of the gradients that are asked for, of a contiguous gradient of the result."""
    if not request.recorded() or not call.batch:
        return []
    descriptor, x, weight = request.descriptor, request.x, request.weight
    last, precision = descriptor.batch_last, request.precision()
    found = []
    grad = torch.empty(call.out_shape, dtype=call.dtype, device="meta")
    if x.requires_grad:
        turned = descriptor.transposed()
        back = checks.Call(call.batch, tuple(x.shape), call.dtype, call.device)
        swapped = weight.transpose(1, 2)
        found.append(((), plans.problem_of(turned, back, grad, swapped, None, precision)))
    if weight.requires_grad:
        pattern, kind = descriptor.pattern, plans.kernel_precision(precision)
        seen, _ = plans.gradient_views(grad, x, pattern, call.batch, last)
        found.append(((), plans.gradient_problem(pattern, call.batch, *seen, call.dtype, kind)))
    return found


def variants(descriptor, arch: str, dtypes: tuple[torch.dtype, ...]) -> list[KernelSpec]:
    """What :func:`kernlib.families.kronecker_sparse.operation.variants` documents."""
    wanted = (dtype for dtype in dtypes if dtype != torch.float64)
    names = tuple(KERNEL_TYPES[dtype] for dtype in wanted)
    found = []
    for factor in descriptor.factors:
        given = factor.precision and plans.kernel_precision(factor.precision)
        found += choose.variants(
            factor.epilogue, factor.pattern, factor.batch_last, arch, names, given
        )
    return list(dict.fromkeys(found))

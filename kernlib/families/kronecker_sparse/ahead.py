"""What is done with Kronecker-sparse calls before anybody makes them: which kernels they use, and
their plans with those loaded."""

from __future__ import annotations

import torch

from kernlib.families.kronecker_sparse import checks, plans
from kernlib.families.kronecker_sparse.descriptor import KroneckerSparseChain
from kernlib.families.kronecker_sparse.gradients import parts
from kernlib.families.kronecker_sparse.lowering import choose
from kernlib.families.kronecker_sparse.product import PRODUCT, calls
from kernlib.jit.spec import KernelSpec
from kernlib.runtime import ahead
from kernlib.runtime.ahead import Request
from kernlib.runtime.arguments import autocast, check_names
from kernlib.runtime.candidates import Candidates
from kernlib.runtime.devices import load
from kernlib.runtime.dtypes import KERNEL_TYPES
from kernlib.runtime.operation import REFERENCE
from kernlib.runtime.products import Call, ProductPlan
from kernlib.runtime.tensors import check_dense


def _requests(descriptor, tensors: tuple, arguments: dict) -> list[Request]:
    """The products of a call, as autocast would have them. Raises TypeError for tensors that are
    too few or too many."""
    rest = dict(arguments)
    out = rest.pop("out", None)
    checks.check_kinds(descriptor, tensors)
    check_names(descriptor, rest)
    x, found = tensors[0], []
    for factor, weight in zip(descriptor.factors, tensors[1:], strict=True):
        if found:
            x = _result(found[-1])
        check_dense(("x", "weight"), x=x, weight=weight)
        own = {name: rest[name] for name in factor.parameters}
        operands, own = autocast((x, weight), own)
        found.append(Request(factor, operands, None, own))
    return [*found[:-1], found[-1]._replace(out=out)]


def _result(request: Request) -> torch.Tensor:
    """A tensor like the one that a request returns."""
    call = request.check(PRODUCT)
    made = torch.empty(call.out_shape, dtype=call.dtype, device=call.device)
    return made.requires_grad_(request.recorded())


def prepare(descriptor, *tensors, **arguments) -> None:
    """Build the plans of a call, compiling and loading its kernels, and load those of its gradient
    where one would be recorded; see :func:`kernlib.prepare`."""
    for request in _requests(descriptor, tensors, arguments):
        call = request.check(PRODUCT)
        if PRODUCT.way(call, *request) == REFERENCE:
            continue
        plan = ahead.plan_of(calls, parts, request, call)
        if plan.compute is not None and not torch.cuda.is_current_stream_capturing():
            _run_once(plan, request.fused(parts))
        device = request.operands[0].get_device()
        for epilogue, problem in _backward(request, call):
            for spec in plans.lower(epilogue, problem, device).specs:
                load(spec, device)


def _run_once(plan: ProductPlan, request: Request) -> None:
    """A call that torch computes, into an output like its own for nobody to read: a capture may not
    load cuBLAS."""
    out = request.out
    scratch = None if out is None else out.new_empty_strided(out.shape, out.stride())
    with torch.no_grad():
        calls.launch(plan, *request._replace(out=scratch))


def prepared(descriptor, *tensors, **arguments) -> bool:
    """Whether the plans of a call are there, so that it needs nothing but its launches. One whose
    gradient would be recorded is never: its kernels are looked for each time."""
    requests = _requests(descriptor, tensors, arguments)
    return all(ahead.prepared(calls, parts, request) for request in requests)


def specs(
    descriptor, arch: str, tensors: tuple, arguments: dict, device: int | None = None
) -> list[KernelSpec]:
    """The kernels that a call with these tensors (``meta`` ones will do) uses on the GPUs of an
    arch, untuned; on ``device`` alone, if it is given, as it is tuned. Those of its gradient are
    among them where one would be recorded, and those of a call that torch computes, which stand in
    for it where a stream captures what its thread has no plan of."""
    requests = _requests(descriptor, tensors, arguments)
    return list(dict.fromkeys(spec for each in requests for spec in _specs(each, arch, device)))


def _specs(request: Request, arch: str, device: int | None) -> list[KernelSpec]:
    call = request.check(PRODUCT)
    if call.dtype not in KERNEL_TYPES or not call.batch:
        return []
    epilogue, found = request.fused(parts).descriptor.epilogue, []
    for own, problem in [(epilogue, problem_of(request, call)), *_backward(request, call)]:
        if device is not None:
            found += plans.lower(own, problem, device).specs
            continue
        for choice in choose.defaults(problem, arch):
            found += choose.specs_for(own, problem, arch, choice)
    return found


def problem_of(request: Request, call: Call) -> choose.Problem:
    """The problem of the kernels of a request's product."""
    descriptor, (x, weight), out, _ = request.fused(parts)
    precision = plans.precision_of(descriptor.precision, x)
    return plans.problem_of(descriptor, call, x, weight, out, precision)


def _backward(request: Request, call: Call) -> list[tuple[tuple, choose.Problem]]:
    """The problems of the gradients that are asked for, of a contiguous gradient of the result."""
    if not request.recorded() or not call.batch:
        return []
    descriptor, (x, weight), _, _ = request
    last, precision = descriptor.batch_last, plans.precision_of(descriptor.precision, x)
    found = []
    grad = torch.empty(call.out_shape, dtype=call.dtype, device="meta")
    if x.requires_grad:
        turned = descriptor.transposed()
        back = Call(call.batch, tuple(x.shape), call.dtype, call.device)
        swapped = weight.transpose(1, 2)
        found.append(((), plans.problem_of(turned, back, grad, swapped, None, precision)))
    if weight.requires_grad:
        pattern, permitted = descriptor.pattern, plans.kernel_precision(precision)
        seen, _ = plans.gradient_views(grad, x, pattern, call.batch, last)
        problem = plans.gradient_problem(pattern, call.batch, *seen, call.dtype, permitted)
        found.append(((), problem))
    return found


def variants(descriptor, arch: str, dtypes: tuple[torch.dtype, ...]) -> list[KernelSpec]:
    """Every kernel that lowering can choose for a descriptor, its gradient included, and inputs of
    ``dtypes``; none for float64, which torch computes. Raises KeyError for other dtypes."""
    names = tuple(KERNEL_TYPES[dtype] for dtype in dtypes if dtype != torch.float64)
    found = []
    for factor in descriptor.factors:
        given = factor.precision and plans.kernel_precision(factor.precision)
        found += choose.variants(
            factor.epilogue, factor.pattern, factor.batch_last, arch, names, given
        )
    return list(dict.fromkeys(found))


def candidates(descriptor, *tensors, **arguments) -> Candidates:
    """The kernels that could compute a call, none for an empty result; see :func:`kernlib.tune`.

    Raises what a call raises, UnsupportedError for tensors that are on no GPU, and TypeError for a
    chain, of which one factor is tuned at a time.
    """
    from kernlib.families.kronecker_sparse.candidates import candidates as candidates_of

    if type(descriptor) is KroneckerSparseChain:
        raise TypeError(
            f"{descriptor.describe()} is several kernels: tune its factors one at a time"
        )
    (request,) = _requests(descriptor, tensors, arguments)
    return candidates_of(request)

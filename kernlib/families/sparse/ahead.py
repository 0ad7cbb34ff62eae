"""What is done with products of compressed matrices before anybody makes them: which kernels they
use, their plans with those loaded, and what tuning times."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from kernlib.canonical import encode
from kernlib.errors import UnsupportedError
from kernlib.families.sparse import checks, operation, plans
from kernlib.families.sparse.descriptor import SparseMatmul
from kernlib.families.sparse.gradients import PLAIN, parts, transpose_for
from kernlib.families.sparse.lowering import choose
from kernlib.families.sparse.matrix import SparseMatrix
from kernlib.jit.spec import KernelSpec
from kernlib.runtime.arguments import autocast, positive, refuse_out_of_recorded, requires_gradient
from kernlib.runtime.candidates import Candidate, Candidates
from kernlib.runtime.devices import arch_of, model
from kernlib.runtime.dtypes import KERNEL_TYPES

MULTIPROCESSORS = 132  # that lowering is told of where no GPU is named; no spec depends on it


class Request(NamedTuple):
    """One product as it was asked for."""

    descriptor: SparseMatmul
    w: SparseMatrix
    x: torch.Tensor
    out: torch.Tensor | None
    parameters: dict

    def check(self) -> checks.Call:
        """Raises what a call raises."""
        if self.recorded():
            refuse_out_of_recorded(self.out)
        return checks.check_call(*self)

    def recorded(self) -> bool:
        """Whether a gradient would be recorded."""
        values = self.parameters.values()
        return torch.is_grad_enabled() and requires_gradient(values, self.x, self.out)

    def fused(self) -> Request:
        """What the product itself computes: with a gradient recorded, no activation; and never the
        lazy negation of a view, which is not in its memory."""
        descriptor, parameters = self.descriptor, self.parameters
        if self.recorded():
            made = parts(descriptor)
            descriptor, parameters = made.product, made.operands(parameters)
        (x,), parameters = positive((self.x,), parameters)
        return Request(descriptor, self.w, x, self.out, parameters)


def request(descriptor: SparseMatmul, tensors: tuple, arguments: dict) -> Request:
    """The product of a call, as autocast would have it. Raises TypeError for operands of another
    kind or number."""
    rest = dict(arguments)
    out = rest.pop("out", None)
    if len(tensors) != 2:
        raise TypeError(f"{descriptor.describe()} takes w and x, got {len(tensors)} operands")
    w, x = tensors
    checks.check_matrix(w)
    checks.check_dense(("x",), x=x, out=out)
    (x,), rest = autocast((x,), rest, w.dtype)
    return Request(descriptor, w, x, out, rest)


def prepare(request: Request) -> None:
    """Build the plan of a request, its kernels loaded, and load those of its gradient."""
    call = request.check()
    if call.device.type == "meta":
        raise UnsupportedError("tensors on meta are on no GPU to prepare: see kernlib.compile")
    if operation.by_reference(call, request.x, request.parameters):
        return
    fused = request.fused()
    if operation.find_plan(*fused) is None:
        operation.make_plan(*fused, call)
    if operation.find_plan(*fused).launch is None and request.w.format != "dense" and call.columns:
        request.w.to_dense()  # which loads the kernel that lays it out
    if request.recorded() and request.x.requires_grad and call.columns:
        back, grad = _gradient(request, call)
        if back is not None and operation.find_plan(PLAIN, back, grad, None, {}) is None:
            operation.make_plan(
                PLAIN, back, grad, None, {}, checks.check_call(PLAIN, back, grad, None, {})
            )


def _gradient(request: Request, call: checks.Call) -> tuple[SparseMatrix | None, torch.Tensor]:
    """The transpose that multiplies a gradient of the result, and such a gradient."""
    grad = torch.empty(call.out_shape, dtype=call.dtype, device=call.device)
    return transpose_for(request.w, grad), grad


def prepared(request: Request) -> bool:
    """Whether the plan of a request is there, and no other is needed."""
    return not request.recorded() and operation.find_plan(*request.fused()) is not None


def specs(request: Request, arch: str, device: int | None) -> list[KernelSpec]:
    """The kernels of a request on an arch, or on one device."""
    call, fused = request.check(), request.fused()
    count = MULTIPROCESSORS if device is None else model(device).multiprocessors
    found = _steps(fused.descriptor.epilogue, call, request.w, fused.x, request.out, arch, count)
    back = request.w.known_transpose()
    if request.recorded() and request.x.requires_grad and back is not None:
        grad = torch.empty(call.out_shape, dtype=call.dtype, device="meta")
        turned = checks.Call(call.columns, tuple(request.x.shape), call.dtype, call.device)
        found += _steps((), turned, back, grad, None, arch, count)
    return list(dict.fromkeys(found))


def _steps(epilogue: tuple, call: checks.Call, w, x, out, arch: str, count: int) -> list:
    problem = plans.problem_of(call, w, x, out)
    lowered = plans.lower(epilogue, call, w, problem, arch, count)
    return [] if lowered is None else [step.spec for step in lowered.steps]


def variants(
    descriptor: SparseMatmul, arch: str, dtypes: tuple[torch.dtype, ...]
) -> list[KernelSpec]:
    """What :func:`kernlib.families.sparse.operation.variants` documents."""
    names = tuple(KERNEL_TYPES[dtype] for dtype in dtypes if dtype != torch.float64)
    made = parts(descriptor)
    found = []
    for epilogue in (descriptor.epilogue, made.product.epilogue, ()):
        for name in choose.FORMATS:
            found += choose.variants(name, epilogue, names, arch)
    return list(dict.fromkeys(found))


def choices(request: Request) -> Candidates:
    """What :func:`kernlib.families.sparse.operation.choices` documents."""
    call = request.check()
    if call.device.type != "cuda":
        raise UnsupportedError(
            f"kernels are timed on the GPU that will run them, and x is on {call.device}; move w "
            "and x to a CUDA device"
        )
    device, fused = request.x.get_device(), request.fused()
    arch, count = arch_of(device), model(device).multiprocessors
    problem = plans.problem_of(call, request.w, fused.x, request.out)
    lowered = plans.lower(fused.descriptor.epilogue, call, request.w, problem, arch, count)
    if lowered is None:
        return Candidates(device, b"", [])
    main = max((step.spec for step in lowered.steps), key=lambda spec: spec.shared_bytes)
    trial = Candidate({}, main, partial(_trial, fused, call))
    return Candidates(device, encode((plans.FAMILY, problem)), [trial])


def _trial(request: Request, call: checks.Call):
    """Launch a call's kernels into an output of its own, and return what does so again."""
    out = request.out
    scratch = request.x.new_empty(call.out_shape)
    if out is not None:
        scratch = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device)
    run = partial(operation.execute, *request[:3], scratch, request.parameters)
    run()
    return run

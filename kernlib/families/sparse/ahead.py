"""Preparing, compiling and tuning of products with compressed matrices: which kernels a call uses,
its plan with these loaded, and what tuning times."""

from __future__ import annotations

from functools import partial

import torch

from kernlib.canonical import encode
from kernlib.errors import UnsupportedError
from kernlib.families.sparse import checks, plans
from kernlib.families.sparse.descriptor import SparseMatmul
from kernlib.families.sparse.gradients import parts, transpose_for
from kernlib.families.sparse.lowering import choose
from kernlib.families.sparse.matrix import SparseMatrix
from kernlib.families.sparse.product import PLAIN, PRODUCT, calls
from kernlib.jit.spec import KernelSpec
from kernlib.runtime import ahead
from kernlib.runtime.ahead import Request
from kernlib.runtime.candidates import Candidate, Candidates
from kernlib.runtime.devices import arch_of, model
from kernlib.runtime.dtypes import KERNEL_TYPES
from kernlib.runtime.operation import REFERENCE
from kernlib.runtime.products import Call

MULTIPROCESSORS = 132  # what lowering is told where no GPU is named; no spec depends on it


def _request(descriptor: SparseMatmul, tensors: tuple, arguments: dict) -> Request:
    """The request of a call, cast by autocast. Raises TypeError for a wrong kind or number of
    operands."""
    rest = dict(arguments)
    out = rest.pop("out", None)
    checks.check_kinds(descriptor, tensors)
    checks.check_dense(("x",), x=tensors[1], out=out)
    operands, rest = PRODUCT.cast(tensors, rest)
    return Request(descriptor, operands, out, rest)


def prepare(descriptor: SparseMatmul, *tensors, **arguments) -> None:
    """Make the plan of a call, with its kernels compiled and loaded. Where a gradient would be
    recorded, make the matrix's transpose and load the kernels of the gradient too; see
    :func:`kernlib.prepare`."""
    request = _request(descriptor, tensors, arguments)
    call = request.check(PRODUCT)
    if call.device.type == "meta":
        raise UnsupportedError("tensors on meta are on no GPU to prepare: see kernlib.compile")
    if PRODUCT.way(call, *request) == REFERENCE:
        return
    w, x = request.operands
    plan = ahead.plan_of(calls, parts, request, call)
    if plan.compute is not None and w.format != "dense" and call.batch:
        w.to_dense()  # to load the kernel that lays it out
    if request.recorded() and x.requires_grad and call.batch:
        grad = torch.empty(call.out_shape, dtype=call.dtype, device=call.device)
        back = transpose_for(w, grad)
        if back is not None:
            turned = Request(PLAIN, (back, grad), None, {})
            ahead.plan_of(calls, parts, turned, turned.check(PRODUCT))


def prepared(descriptor: SparseMatmul, *tensors, **arguments) -> bool:
    """Whether the plan of a call is there, so that nothing is left to prepare. Always False for a
    call whose gradient would be recorded: its kernels are looked for each time."""
    return ahead.prepared(calls, parts, _request(descriptor, tensors, arguments))


def specs(
    descriptor: SparseMatmul, arch: str, tensors: tuple, arguments: dict, device: int | None = None
) -> list[KernelSpec]:
    """The kernels that a call with these tensors (``w.to("meta")`` and ``meta`` ones will do) uses
    on the GPUs of an arch, or on ``device`` alone. Those of its gradient are among them where one
    would be recorded and the transpose is known."""
    request = _request(descriptor, tensors, arguments)
    call, fused = request.check(PRODUCT), request.fused(parts)
    count = MULTIPROCESSORS if device is None else model(device).multiprocessors
    w, x = request.operands
    found = _specs(fused.descriptor.epilogue, call, *fused.operands, fused.out, arch, count)
    back = w.known_transpose()
    if request.recorded() and x.requires_grad and back is not None:
        grad = torch.empty(call.out_shape, dtype=call.dtype, device="meta")
        turned = Call(call.batch, tuple(x.shape), call.dtype, call.device)
        found += _specs((), turned, back, grad, None, arch, count)
    return list(dict.fromkeys(found))


def _specs(epilogue: tuple, call: Call, w: SparseMatrix, x, out, arch: str, count: int) -> list:
    problem = plans.problem_of(call, w, x, out)
    lowered = plans.lower(epilogue, call, w, problem, arch, count)
    return [] if lowered is None else lowered.specs


def variants(
    descriptor: SparseMatmul, arch: str, dtypes: tuple[torch.dtype, ...]
) -> list[KernelSpec]:
    """Every kernel that lowering can choose for a descriptor, matrices of ``dtypes`` and any
    format; none for float64. Raises KeyError for other dtypes."""
    names = tuple(KERNEL_TYPES[dtype] for dtype in dtypes if dtype != torch.float64)
    made = parts(descriptor)
    found = []
    for epilogue in (descriptor.epilogue, made.product.epilogue, ()):
        for name in choose.FORMATS:
            found += choose.variants(name, epilogue, names, arch)
    return list(dict.fromkeys(found))


def candidates(descriptor: SparseMatmul, *tensors, **arguments) -> Candidates:
    """The one kernel of a call, none where cuBLAS computes it; see :func:`kernlib.tune`. Raises
    what a call raises, and UnsupportedError for tensors that are on no GPU."""
    request = _request(descriptor, tensors, arguments)
    call = request.check(PRODUCT)
    if call.device.type != "cuda":
        raise UnsupportedError(
            f"kernels are timed on the GPU that will run them, and x is on {call.device}; move w "
            "and x to a CUDA device"
        )
    fused = request.fused(parts)
    w, x = fused.operands
    device = x.get_device()
    arch, count = arch_of(device), model(device).multiprocessors
    problem = plans.problem_of(call, w, x, request.out)
    lowered = plans.lower(fused.descriptor.epilogue, call, w, problem, arch, count)
    if lowered is None:
        return Candidates(device, b"", [])
    main = max(lowered.specs, key=lambda spec: spec.shared_bytes)
    trial = Candidate({}, main, partial(_trial, fused, call))
    return Candidates(device, encode((plans.FAMILY, problem)), [trial])


def _trial(request: Request, call: Call):
    """Launch a call's kernels into an output of its own, and return a function that does so
    again."""
    out = request.out
    scratch = request.operands[1].new_empty(call.out_shape)
    if out is not None:
        scratch = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=out.device)
    run = partial(calls.execute, *request._replace(out=scratch))
    run()
    return run

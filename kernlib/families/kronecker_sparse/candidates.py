"""The kernels that could compute a Kronecker-sparse call, each ready to be timed: for tuning
alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch

from kernlib.errors import UnsupportedError
from kernlib.families.kronecker_sparse import plans
from kernlib.families.kronecker_sparse.gradients import parts
from kernlib.families.kronecker_sparse.lowering import choose
from kernlib.families.kronecker_sparse.product import PRODUCT
from kernlib.runtime.ahead import Request
from kernlib.runtime.arguments import parameters_of
from kernlib.runtime.candidates import Candidate, Candidates
from kernlib.runtime.devices import allocator, arch_of, model
from kernlib.runtime.dtypes import KERNEL_TYPES
from kernlib.runtime.products import Call


def candidates(request: Request) -> Candidates:
    """What :func:`kernlib.families.kronecker_sparse.ahead.candidates` documents."""
    call = request.check(PRODUCT)
    if call.device.type != "cuda" or call.dtype not in KERNEL_TYPES:
        raise UnsupportedError(
            f"kernels are timed on the GPU that will run them, and x is {call.dtype} on "
            f"{call.device}; move the tensors to a CUDA device, in one of "
            f"{', '.join(KERNEL_TYPES.values())}"
        )
    fused = request.fused(parts)
    descriptor, (x, weight), out, _ = fused
    device = x.get_device()
    arch, count = arch_of(device), model(device).multiprocessors
    if not call.batch:
        return Candidates(device, b"", [])
    precision = plans.precision_of(descriptor.precision, x)
    problem = plans.problem_of(descriptor, call, x, weight, out, precision)
    known = choose.candidates(problem, arch)
    made = [choose.lower(descriptor.epilogue, problem, arch, count, choice) for choice in known]
    # One of each for all candidates, which run one after the other: some need a GiB of workspace.
    most = max(lowered.workspace for lowered in made)
    workspace = cache(allocator((most,), torch.uint8, call.device))
    scratch = cache(partial(scratch_for, fused, call))

    def candidate(choice: choose.Choice, lowered: choose.Lowered) -> Candidate:
        main = max(lowered.specs, key=lambda spec: spec.shared_bytes)
        return Candidate(choice, main, partial(_trial, fused, call, lowered, scratch, workspace))

    return Candidates(device, plans.signature(problem), list(map(candidate, known, made)))


def scratch_for(request: Request, call: Call) -> torch.Tensor:
    """An output like the caller's for nobody to read."""
    out = request.out
    if out is None or plans.view_of(out, request.descriptor.batch_last) is None:
        return request.operands[0].new_empty(call.out_shape)
    return request.operands[0].new_empty_strided(out.shape, out.stride())


def _trial(
    request: Request,
    call: Call,
    lowered: choose.Lowered,
    scratch: Callable,
    workspace: Callable,
) -> Callable[[], None]:
    """Launch the kernels of a call into ``scratch()``, with ``workspace()`` between them, and
    return what launches them again."""
    descriptor, operands, _, parameters = request
    plan = plans.loaded_plan(call, request, lowered)
    vectors, numbers, converted = parameters_of(plan, descriptor, parameters)
    addresses, kept = plan.place(operands)
    out, shared = scratch(), workspace() if lowered.workspace else None
    plan.launch([*addresses, *(t.data_ptr() for t in (out, *vectors))], numbers, shared)

    def again(_held=(operands, out, vectors, converted, kept, shared)) -> None:
        for step, *_ in plan.steps:
            step.repeat()

    return again

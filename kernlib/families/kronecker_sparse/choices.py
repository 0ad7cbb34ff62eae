"""The kernels that could compute a Kronecker-sparse call, each ready to be timed: for tuning
alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch

from kernlib.errors import UnsupportedError
from kernlib.families.kronecker_sparse import checks, operation, plans
from kernlib.families.kronecker_sparse.ahead import Request
from kernlib.families.kronecker_sparse.lowering import choose
from kernlib.runtime.candidates import Candidate, Candidates
from kernlib.runtime.devices import arch_of, model
from kernlib.runtime.dtypes import KERNEL_TYPES


def choices(request: Request) -> Candidates:
    """What :func:`kernlib.families.kronecker_sparse.operation.choices` documents."""
    call = request.check()
    if request.x.device.type != "cuda" or call.dtype not in KERNEL_TYPES:
        raise UnsupportedError(
            f"kernels are timed on the GPU that will run them, and x is {call.dtype} on "
            f"{request.x.device}; move the tensors to a CUDA device, in one of "
            f"{', '.join(KERNEL_TYPES.values())}"
        )
    fused, device = request.fused(), request.x.get_device()
    arch, count = arch_of(device), model(device).multiprocessors
    if not call.batch:
        return Candidates(device, b"", [])
    problem = plans.problem_of(fused.descriptor, call, *fused[1:4], fused.precision())
    known = choose.candidates(problem, arch)
    made = [
        choose.lower(fused.descriptor.epilogue, problem, arch, count, choice) for choice in known
    ]
    # One of each for all candidates, which run one after the other: some need a GiB of workspace.
    most = max(lowered.workspace for lowered in made)
    workspace = cache(plans.allocator((most,), torch.uint8, request.x.device))
    scratch = cache(partial(scratch_for, fused, call))

    def candidate(choice: choose.Choice, lowered: choose.Lowered) -> Candidate:
        main = max((step.spec for step in lowered.steps), key=lambda spec: spec.shared_bytes)
        return Candidate(choice, main, partial(_trial, fused, call, lowered, scratch, workspace))

    return Candidates(device, plans.signature(problem), list(map(candidate, known, made)))


def scratch_for(request: Request, call: checks.Call) -> torch.Tensor:
    """An output like the caller's for nobody to read."""
    out = request.out
    if out is None or plans.view_of(out, request.descriptor.batch_last) is None:
        return request.x.new_empty(call.out_shape)
    return request.x.new_empty_strided(out.shape, out.stride())


def _trial(
    request: Request,
    call: checks.Call,
    lowered: choose.Lowered,
    scratch: Callable,
    workspace: Callable,
) -> Callable[[], None]:
    """Launch the kernels of a call into ``scratch()``, with ``workspace()`` between them, and
    return what launches them again."""
    descriptor, x, weight, _, parameters = request
    plan = plans.loaded_plan(descriptor, call, *request[1:], lowered)
    vectors, numbers, kept = operation.parameters_of(plan, descriptor, x, parameters)
    left, out = x if plan.left is None else x.reshape(plan.left), scratch()
    shared = workspace() if lowered.workspace else None
    plan.launch([t.data_ptr() for t in (left, weight, out, *vectors)], numbers, shared)

    def again(_held=(left, weight, out, vectors, kept, shared)) -> None:
        for step, *_ in plan.steps:
            step.repeat()

    return again

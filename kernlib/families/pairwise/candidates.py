"""The kernels that could compute a pairwise call, each ready to be timed: for tuning alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch

from kernlib.errors import UnsupportedError
from kernlib.families.pairwise import checks, plans
from kernlib.families.pairwise.lowering import choose
from kernlib.families.pairwise.request import Request, is_empty, problem_of, tuning_signature
from kernlib.lowering.choice import Choice
from kernlib.lowering.steps import Lowered
from kernlib.runtime.candidates import Candidate, Candidates
from kernlib.runtime.devices import arch_of, model


def candidates(request: Request) -> Candidates:
    """What :func:`kernlib.families.pairwise.ahead.candidates` documents."""
    request = request.readable()
    call = checks.check_call(*request)
    if request.a.device.type != "cuda":
        raise UnsupportedError(
            f"kernels are timed on the GPU that will run them, and a is on {request.a.device}; "
            "move the tensors to a CUDA device"
        )
    descriptor, device = request.descriptor, request.a.get_device()
    arch, count = arch_of(device), model(device).multiprocessors
    problem, strides = problem_of(request, call)
    scratch = cache(partial(scratch_for, request, call))

    def candidate(choice: Choice) -> Candidate:
        lowered = choose.lower(descriptor, problem, arch, count, strides, permitted, choice)
        main = max(lowered.specs, key=lambda spec: spec.shared_bytes)
        return Candidate(choice, main, partial(_trial, request, call, lowered, scratch))

    permitted = plans.precision(descriptor) or "fp32"
    known = [] if is_empty(call) else choose.candidates(descriptor, problem, arch, permitted)
    signature = tuning_signature(descriptor, problem)
    return Candidates(device, signature, [candidate(choice) for choice in known])


def scratch_for(request: Request, call: checks.Call) -> torch.Tensor:
    """An output like the caller's for nobody to read."""
    target = request.target(call)
    return request.a.new_empty_strided(target.shape, target.stride(), dtype=target.dtype)


def _trial(
    request: Request, call: checks.Call, lowered: Lowered, scratch: Callable
) -> Callable[[], None]:
    """Launch one kernel of a call into ``scratch()``, and return what launches it again."""
    plan = plans.loaded_plan(request, call, lowered)
    numbers = kept = None
    if request.hyperparameters:
        numbers, kept = plans.numbers_of(plan, request.a, request.hyperparameters)
    tensors = [request.a, request.second, scratch()]
    if plan.swapped:
        tensors[:2] = tensors[1::-1]

    plan.launch.launch(tuple(t.data_ptr() for t in tensors), numbers)

    def again(_held=(tensors, kept)) -> None:
        plan.launch.repeat()

    return again

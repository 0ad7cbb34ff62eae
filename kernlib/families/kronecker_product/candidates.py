"""The kernels that could compute a product with a Kronecker product, each ready to be timed: for
tuning alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch

from kernlib.errors import UnsupportedError
from kernlib.families.kronecker_product import plans
from kernlib.families.kronecker_product.gradients import parts
from kernlib.families.kronecker_product.lowering import choose
from kernlib.families.kronecker_product.lowering.problem import Problem
from kernlib.families.kronecker_product.product import PRODUCT
from kernlib.lowering.choice import Choice
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.steps import Lowered
from kernlib.runtime.ahead import Request
from kernlib.runtime.candidates import Candidate, Candidates
from kernlib.runtime.devices import allocator, arch_of, model
from kernlib.runtime.operation import REFERENCE
from kernlib.runtime.products import Call
from kernlib.runtime.trials import trial

LEAST_WORKSPACE = 1 << 30  # bytes of workspace that a candidate may always take


def candidates(request: Request) -> Candidates:
    """What :func:`kernlib.families.kronecker_product.ahead.candidates` documents."""
    call = request.check(PRODUCT)
    if call.device.type != "cuda" or PRODUCT.way(call, *request) == REFERENCE:
        raise UnsupportedError(
            f"kernels are timed on the GPU that will run them, and torch computes this product of "
            f"{call.dtype} on {call.device}; move the tensors to a CUDA device, or take factors "
            "that fit a block's shared memory"
        )
    fused = request.fused(parts)
    device = fused.operands[0].get_device()
    if not call.batch:
        return Candidates(device, b"", [])
    problem, copies, _ = plans.problem_of(call, *fused)
    count = model(device).multiprocessors
    made = choose.candidates(fused.descriptor.epilogue, problem, arch_of(device), count)
    made = [each for each in made if each[1].workspace <= _most_workspace(problem)] or made
    # One workspace and one output for all candidates, which run one after the other.
    most = max(lowered.workspace for _, lowered in made)
    room = cache(allocator((max(most, 1),), torch.uint8, call.device))
    scratch = cache(partial(scratch_for, fused, call))

    def candidate(choice: Choice, lowered: Lowered) -> Candidate:
        main = max(lowered.specs, key=lambda spec: spec.shared_bytes)
        ready = partial(_ready, fused, call, lowered, copies, lambda: (scratch(), room()))
        return Candidate(choice, main, ready)

    known = [candidate(*each) for each in made]
    return Candidates(device, plans.signature(problem), known)


def _most_workspace(problem: Problem) -> int:
    """The largest workspace of a candidate, in bytes: that of x and result together, or
    LEAST_WORKSPACE."""
    features = problem.in_features + problem.out_features
    item = DTYPES[problem.dtype].bytes
    return max(LEAST_WORKSPACE, problem.batch * problem.columns * features * item)


def scratch_for(request: Request, call: Call) -> torch.Tensor:
    """An output with the strides of the caller's, which nobody reads."""
    out = request.out
    if out is None or plans.problem_of(call, *request)[2]:
        return request.operands[0].new_empty(call.out_shape)
    return request.operands[0].new_empty_strided(out.shape, out.stride())


def _ready(
    request: Request, call: Call, lowered: Lowered, copies: tuple, scratch: Callable
) -> Callable[[], None]:
    """Launch the kernels of a call, and return a function that launches them again."""
    plan = plans.loaded_plan(call, request, lowered, copies, False)
    return trial(plan, *request[:2], request.parameters, scratch)

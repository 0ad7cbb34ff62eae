"""The kernels that could compute a block-sparse product, each ready to be timed: for tuning
alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch

from kernlib.errors import UnsupportedError
from kernlib.families.blocksparse import plans
from kernlib.families.blocksparse.gradients import parts
from kernlib.families.blocksparse.lowering import choose
from kernlib.families.blocksparse.product import PRODUCT
from kernlib.lowering.choice import Choice
from kernlib.lowering.steps import Lowered
from kernlib.runtime.ahead import Request
from kernlib.runtime.candidates import Candidate, Candidates
from kernlib.runtime.devices import allocator, arch_of, model
from kernlib.runtime.operation import REFERENCE
from kernlib.runtime.products import Call
from kernlib.runtime.trials import trial


def candidates(request: Request) -> Candidates:
    """What :func:`kernlib.families.blocksparse.ahead.candidates` documents."""
    call = request.check(PRODUCT)
    if call.device.type != "cuda" or PRODUCT.way(call, *request) == REFERENCE:
        raise UnsupportedError(
            f"kernels are timed on the GPU that will run them, and torch computes this product of "
            f"{call.dtype} on {call.device}; move the tensors to a CUDA device"
        )
    fused = request.fused(parts)
    device = fused.operands[1].get_device()
    problem, read = plans.problem_of(call, *fused)
    if not plans.is_for_kernels(call, problem):
        return Candidates(device, b"", [])
    count = model(device).multiprocessors
    arch, epilogue = arch_of(device), fused.descriptor.epilogue
    made = [
        (choice, choose.lower(epilogue, problem, arch, count, choice))
        for choice in choose.candidates(problem, arch)
    ]
    # One of each for all candidates, which run one after the other.
    most = max(lowered.workspace for _, lowered in made)
    room = cache(allocator((max(most, 1),), torch.uint8, call.device))
    scratch = cache(partial(_scratch, fused, call, read.apart))

    def candidate(choice: Choice, lowered: Lowered) -> Candidate:
        main = max(lowered.specs, key=lambda spec: spec.shared_bytes)
        ready = partial(_ready, fused, call, lowered, read, lambda: (scratch(), room()))
        return Candidate(choice, main, ready)

    return Candidates(device, plans.signature(problem), [candidate(*each) for each in made])


def _scratch(request: Request, call: Call, apart: bool) -> torch.Tensor:
    """An output like the caller's for nobody to read."""
    out, a = request.out, request.operands[1]
    if out is None or apart:
        return a.new_empty(call.out_shape)
    return a.new_empty_strided(out.shape, out.stride())


def _ready(
    request: Request, call: Call, lowered: Lowered, read: plans.Read, scratch: Callable
) -> Callable[[], None]:
    """Launch the kernels of a call, and return what launches them again."""
    plan = plans.loaded_plan(call, request, lowered, read._replace(apart=False))
    return trial(plan, *request[:2], request.parameters, scratch)

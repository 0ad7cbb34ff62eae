"""What is done with pairwise calls before anybody makes them: which kernels they use, and their
plans with those loaded."""

from __future__ import annotations

import torch

from kernlib.families.pairwise import checks, plans
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering import choose
from kernlib.families.pairwise.matrix import calls, readable
from kernlib.families.pairwise.request import Request, is_empty, problem_of
from kernlib.jit.spec import KernelSpec
from kernlib.runtime.candidates import Candidates
from kernlib.runtime.dtypes import DTYPE_NAMES


def prepared(descriptor: Pairwise, a, b=None, *more, **arguments) -> bool:
    """Whether the plan of a call is there, so that it needs nothing but its launch."""
    request = Request.of(descriptor, a, b, arguments, more)
    return calls.find(*request) is not None


def prepare(descriptor: Pairwise, a, b=None, *more, **arguments) -> None:
    """Build the plan of a call, compiling and loading its kernel; see :func:`kernlib.prepare`."""
    request = readable(Request.of(descriptor, a, b, arguments, more))
    if request.a.device.type == "cpu":
        checks.check_call(*request)
    elif calls.find(*request) is None:
        calls.make(checks.check_call(*request), *request)


def specs(
    descriptor: Pairwise, arch: str, tensors: tuple, arguments: dict, device: int | None = None
) -> list[KernelSpec]:
    """The kernels that a call with these tensors (``meta`` ones will do) uses on the GPUs of an
    arch, untuned; on ``device`` alone, if it is given, as it is tuned."""
    if len(tensors) > 2:
        raise TypeError(f"specs must be the tensors of one call, got {len(tensors)}: {tensors!r}")
    request = readable(Request.of(descriptor, *(*tensors, None)[:2], arguments))
    call = checks.check_call(*request)
    if is_empty(call):
        return []
    if device is not None:
        return plans.lower(request, call, device).specs
    problem, strides = problem_of(request, call)
    permitted = plans.precision(descriptor) or "fp32"
    return choose.specs(descriptor, problem, arch, strides, permitted)


def variants(descriptor: Pairwise, arch: str, dtypes: tuple[torch.dtype, ...]) -> list[KernelSpec]:
    """Every kernel that lowering can choose for a descriptor and inputs of ``dtypes``."""
    return choose.variants(descriptor, arch, tuple(DTYPE_NAMES[dtype] for dtype in dtypes))


def candidates(descriptor: Pairwise, a, b=None, *more, **arguments) -> Candidates:
    """The kernels that could compute a call, none for an empty out; see :func:`kernlib.tune`.

    Raises what a call raises, and UnsupportedError for tensors that are on no GPU.
    """
    # Which calls themselves do without.
    from kernlib.families.pairwise.candidates import candidates as candidates_of

    return candidates_of(readable(Request.of(descriptor, a, b, arguments, more)))

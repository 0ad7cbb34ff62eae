"""What is done with pairwise calls before anybody makes them: which kernels they use, and their
plans with those loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kernlib.descriptors.base import shown
from kernlib.families.pairwise import checks, operation, plans, rehearsal
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.functions import reductions
from kernlib.families.pairwise.lowering import choose
from kernlib.families.pairwise.matrix import calls, readable
from kernlib.families.pairwise.request import Request
from kernlib.jit.spec import KernelSpec
from kernlib.runtime.candidates import Candidates
from kernlib.runtime.dtypes import DTYPE_NAMES
from kernlib.runtime.products import requires_gradient
from kernlib.runtime.tensors import check_layout, is_lazy, span, stand_ins

_FUNCTIONS = (
    reductions.kernel_matmul,
    reductions.kernel_sum,
    reductions.kernel_logsumexp,
    reductions.kernel_min,
    reductions.kernel_argmin,
    reductions.kernel_topk,
)
REDUCTIONS: dict[str, Callable] = {function.__name__: function for function in _FUNCTIONS}


def prepared(descriptor: Pairwise, a, b=None, *more, **arguments) -> bool:
    """Whether the plan of a call is there, so that it needs nothing but its launch. A reduction,
    and a call whose gradient would be recorded, never is: their kernels are looked for each
    time."""
    if "reduction" in arguments or _is_recorded((a, b), arguments):
        return False
    request = Request.of(descriptor, a, b, arguments, more)
    return calls.find(*request) is not None


def prepare(descriptor: Pairwise, a, b=None, *more, **arguments) -> None:
    """Build the plan of a call, compiling and loading its kernel; see :func:`kernlib.prepare`. A
    reduction makes its own where it is called, of the kernels that are loaded."""
    if "reduction" in arguments:
        # Of tensors on a GPU the specs were asked for before.
        if not (isinstance(a, torch.Tensor) and a.device.type == "cuda"):
            tensors = (a, *more) if b is None else (a, b, *more)
            specs(descriptor, "sm_80", tensors, arguments)
        return
    request = readable(Request.of(descriptor, a, b, arguments, more))
    if request.a.device.type == "cpu":
        checks.check_call(*request)
    elif calls.find(*request) is None:
        calls.make(checks.check_call(*request), *request)


def specs(
    descriptor: Pairwise, arch: str, tensors: tuple, arguments: dict, device: int | None = None
) -> list[KernelSpec]:
    """The kernels that a call with these tensors (``meta`` ones will do) uses on the GPUs of an
    arch, untuned; on ``device`` alone, if it is given, as it is tuned; with those of the gradients
    that would be recorded. A ``reduction`` among the arguments names one of :data:`REDUCTIONS`,
    which is the call then."""
    reduced = "reduction" in arguments
    if not reduced and len(tensors) > 2:
        raise TypeError(f"specs must be the tensors of one call, got {len(tensors)}: {tensors!r}")
    if not reduced and not _is_recorded(tensors, arguments):
        request = readable(Request.of(descriptor, *(*tensors, None)[:2], arguments))
        return plans.specs(request, checks.check_call(*request), arch, device)
    found = _StandIns()
    given = {name: found.of(value) for name, value in arguments.items()}
    with rehearsal.rehearse(arch, device) as noted:
        made = _call(descriptor, tuple(map(found.of, tensors)), given)()
        _backward(made, found.leaves)
    return noted.specs


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


def _is_recorded(tensors: tuple, arguments: dict) -> bool:
    """Whether a gradient would be recorded."""
    return torch.is_grad_enabled() and requires_gradient(arguments.values(), *tensors)


# Rehearsed calls.


class _StandIns:
    """A meta tensor in the place of each tensor of a call, one for all places of one, and those of
    which gradients are wanted."""

    def __init__(self) -> None:
        self._made: dict[int, torch.Tensor] = {}

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [t for t in self._made.values() if t.requires_grad]

    def of(self, value):
        """What stands for an argument; what is no dense tensor is there itself, for calls to
        refuse."""
        if not isinstance(value, torch.Tensor):
            return value
        try:
            check_layout("", value)
        except TypeError:
            return value
        if id(value) not in self._made:
            self._made[id(value)] = stand_in(value)
        return self._made[id(value)]


def stand_in(t: torch.Tensor) -> torch.Tensor:
    """A meta tensor of a tensor's sizes, strides and alignment, or of those of what is made of a
    lazy one for a kernel to read."""
    if is_lazy(t):
        made = torch.empty_like(t, device="meta")
    else:
        without = t.is_meta or stand_ins(t)  # memory
        address = t.storage_offset() * t.element_size() if without else t.data_ptr()
        offset = (address & 15) // t.element_size()
        memory = torch.empty(offset + span(t) // t.element_size(), dtype=t.dtype, device="meta")
        made = memory.as_strided(t.shape, t.stride(), offset)
    return made.requires_grad_(t.requires_grad)


def _call(descriptor: Pairwise, tensors: tuple, arguments: dict) -> Callable:
    """The call that is meant. Raises TypeError and ValueError for another ``reduction`` and for
    tensors that are not its own."""
    if "reduction" not in arguments:
        return partial(operation.run, descriptor, *tensors, **arguments)
    name = arguments.pop("reduction")
    name = getattr(name, "__name__", name)
    if not isinstance(name, str) or name not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {shown(name)}")
    names = operands_of(descriptor, name)
    if len(tensors) != len(names):
        raise TypeError(
            f"{name} of {descriptor.describe()} takes {', '.join(names)}, got {len(tensors)} "
            "tensors; k, largest, out and the rest go by name"
        )
    points = tensors if "b" in names else (tensors[0], None, *tensors[1:])
    return partial(REDUCTIONS[name], descriptor, *points, **arguments)


def operands_of(descriptor: Pairwise, reduction: str) -> tuple[str, ...]:
    """The tensors that a reduction takes by place; those of a symmetric descriptor have no b."""
    return (*descriptor.operands, *["v"] * (reduction == "kernel_matmul"))


def _backward(made, leaves: list[torch.Tensor]) -> None:
    """The backward pass of a result, if it has one: of a gradient that lies as the result does, and
    of one whose elements are all one, as ``sum()`` makes it."""
    for out in made if isinstance(made, tuple) else (made,):
        if not out.requires_grad:
            continue
        one = torch.empty((), dtype=out.dtype, device=out.device)
        for gradient in (torch.empty_like(out), one.expand(out.shape)):
            options = {"retain_graph": True, "allow_unused": True}
            torch.autograd.grad(out, leaves, gradient, **options)

"""Calls before anybody makes them: their plans, made without a launch, and the kernels among which
tuning chooses. The module ``operation`` of each family says what of a call has a plan:
:class:`Planned`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes, is_in_torch_dispatch_mode

from kernlib.descriptors.epilogues import Product as Descriptor
from kernlib.errors import UnsupportedError
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.kernel import Choice
from kernlib.runtime import devices, tuned
from kernlib.runtime.arguments import check_names, parameters_of, readable, refuse_out_of_recorded
from kernlib.runtime.devices import allocator
from kernlib.runtime.operation import REFERENCE, Bound, Operation
from kernlib.runtime.products import Call, Product, ProductPlan, requires_gradient, summands_of
from kernlib.runtime.tensors import check_layout, is_lazy, span, stand_ins
from kernlib.runtime.tuned import Trial


class Planned(NamedTuple):
    """A part of a call that has a plan. ``repeated(plan, call, fused, shared)`` launches a plan of
    it into an output of its own, and returns a function that does so again."""

    operation: Operation | Product  # whose check, way and plan are asked
    calls: Bound
    request: tuple  # what is checked
    fused: tuple  # what the plan computes: without activation where a gradient is recorded
    recorded: bool  # whether a gradient would be
    repeated: Callable


def planned_product(
    product: Product,
    calls: Bound,
    parts: Callable | None,
    descriptor: Descriptor,
    tensors: tuple,
    arguments: dict,
) -> Planned:
    """A product as autocast would have it. ``parts`` is that of the family's recording, or None for
    products that record nothing. Raises TypeError for a wrong kind or number of operands."""
    parameters = dict(arguments)
    out = parameters.pop("out", None)
    check_names(descriptor, parameters)
    product.check_operands(descriptor, tensors)
    tensors, parameters = product.cast(tensors, parameters)
    recorded = is_recorded(out, *tensors, *parameters.values())
    request = descriptor, tensors, out, parameters
    if recorded and parts is not None:
        linear = parts(descriptor)
        descriptor, parameters = linear.product, linear.operands(parameters)
    tensors, parameters = readable(tensors, parameters)
    fused = descriptor, tensors, out, parameters
    return Planned(product, calls, request, fused, recorded, repeated_product)


def planned_operation(
    operation: Operation, calls: Bound, request: tuple, recorded: bool
) -> Planned:
    """A request, as autocast would have it, of an operation whose plan is the same whether a
    gradient is recorded or not."""
    request = operation.materialised(*request) or request
    repeated = partial(repeated_launch, operation.launch)
    return Planned(operation, calls, request, request, recorded, repeated)


def is_recorded(out, *values) -> bool:
    """Whether a gradient would be recorded. Raises RuntimeError for an ``out`` then."""
    recorded = torch.is_grad_enabled() and requires_gradient(values, out)
    if recorded:
        refuse_out_of_recorded(out)
    return recorded


def is_prepared(planned: Planned) -> bool:
    """Whether a plan is there, or torch computes the call. Where a gradient would be recorded the
    answer is False, since the kernels of gradients are looked for each time."""
    if not planned.recorded and planned.calls.find(*planned.fused) is not None:
        return True
    call = planned.operation.check(*planned.request)
    on_meta = call.device.type == "meta"
    return not on_meta and planned.operation.way(call, *planned.request) == REFERENCE


def prepare(planned: Planned) -> None:
    """Make the plan of a kernels' call, with its kernels compiled and loaded. A call of cuBLAS is
    run once: it must not be loaded while a CUDA graph is captured."""
    call = planned.operation.check(*planned.request)
    if planned.operation.way(call, *planned.request) == REFERENCE or call.device.type == "cpu":
        return
    plan = planned.calls.find(*planned.fused)
    if plan is None:
        plan = planned.calls.make(call, *planned.fused)
    if getattr(plan, "compute", None) is None or torch.cuda.is_current_stream_capturing():
        return
    descriptor, operands, out, parameters = planned.fused
    scratch = None if out is None else out.new_empty_strided(out.shape, out.stride())
    with torch.no_grad():
        planned.calls.launch(plan, descriptor, operands, scratch, parameters)


# Stand-ins.


@contextmanager
def unseen() -> Iterator[None]:
    """In this block calls of stand-ins are hidden from dispatch modes, hooks of saved tensors and
    the detection of anomalies."""
    with ExitStack() as stack:
        if is_in_torch_dispatch_mode():  # else it would import half a second of torch for nothing
            stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        if torch._C._autograd._saved_tensors_hooks_is_enabled():
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is))
        yield


def _as_it_is(t: torch.Tensor) -> torch.Tensor:
    return t


class StandIns:
    """Meta tensors for the tensors of a call, one for all places of a tensor, and layouts and
    matrices on meta for those of the call. ``leaves`` are the meta tensors whose gradients are
    needed. ``device`` is that of the first tensor, None without one."""

    def __init__(self) -> None:
        # By the value's id, with the value, lest another one gets that id.
        self._pairs: dict[int, tuple[object, object]] = {}
        self.leaves: list[torch.Tensor] = []
        self.device: torch.device | None = None

    def of(self, value):
        """The stand-in of a value, or of all in a tuple or dict. Anything but a dense tensor stands
        for itself, for calls to refuse."""
        if isinstance(value, dict):
            return {name: self.of(item) for name, item in value.items()}
        if isinstance(value, tuple):
            parts = map(self.of, value)
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if id(value) not in self._pairs:
            self._pairs[id(value)] = value, self._stand_in(value)
        return self._pairs[id(value)][1]

    def _stand_in(self, value):
        if not isinstance(value, torch.Tensor):
            return value.to("meta") if hasattr(value, "tensors") else value
        try:
            check_layout("", value)
        except TypeError:
            return value
        self.device = self.device or value.device
        tensor = stand_in(value)
        if tensor.requires_grad:
            self.leaves.append(tensor)
        return tensor


def stand_in(t: torch.Tensor) -> torch.Tensor:
    """A meta tensor of a tensor's sizes, strides and alignment. Of a lazy tensor, those of the copy
    that a kernel would read."""
    if is_lazy(t):
        return torch.empty_like(t, device="meta").requires_grad_(t.requires_grad)
    without = t.is_meta or stand_ins(t)  # memory
    address = t.storage_offset() * t.element_size() if without else t.data_ptr()
    offset = (address & 15) // t.element_size()
    memory = torch.empty(offset + span(t) // t.element_size(), dtype=t.dtype, device="meta")
    return memory.as_strided(t.shape, t.stride(), offset).requires_grad_(t.requires_grad)


# Tuning.


class Candidate(NamedTuple):
    """One of the kernels that could compute a call. ``ready()`` loads it, launches it, and returns
    a function that launches it again: into an output that the call's candidates share and the
    caller does not see."""

    choice: dict[str, int]  # what sets it apart, as the family's lowering takes it
    spec: KernelSpec
    ready: Callable[[], Callable[[], None]]


class Candidates(NamedTuple):
    """All kernels for one call on a device, and the bytes under which the fastest is kept, which
    calls of the same speed share."""

    device: int
    signature: bytes
    kernels: list[Candidate]


class Shared:
    """An output and a workspace that all candidates of a call use, one after the other: some need a
    GiB of it."""

    def __init__(self, device: torch.device, workspace: int):
        self._device, self._workspace = device, workspace
        self._out: torch.Tensor | None = None
        self._room: torch.Tensor | None = None

    def out(self, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The output, which ``make()`` makes for the first."""
        if self._out is None:
            self._out = make()
        return self._out

    def room(self) -> torch.Tensor:
        """The workspace."""
        if self._room is None:
            self._room = allocator((self._workspace,), torch.uint8, self._device)()
        return self._room


def candidates(planned: Planned) -> Candidates:
    """The kernels that could compute a call, none for a result without elements or where cuBLAS
    computes it. Raises what a call raises, and UnsupportedError for what torch computes."""
    operation = planned.operation
    call = operation.check(*planned.request)
    if call.device.type != "cuda" or operation.way(call, *planned.request) == REFERENCE:
        raise UnsupportedError(
            "kernels are timed on the GPU that will run them, and torch computes this call of "
            f"{call.dtype} on {call.device}; move the tensors to a CUDA device, in a dtype and in "
            "sizes that kernels take"
        )
    device, fused = call.device.index, StandIns().of(planned.fused)
    on_meta = operation.check(*fused)

    @contextmanager
    def rehearsed(trial: Trial) -> Iterator[tuple]:
        with devices.rehearse(devices.arch_of(device), device) as noted, tuned.trying(trial):
            yield operation.plan(on_meta, *fused), noted.specs

    listing = Trial(None)
    with rehearsed(listing) as (plan, specs):
        by_kernels = bool(specs) and getattr(plan, "compute", None) is None
        kinds = listing.candidates or [{"kind": operation.name}] * by_kernels
    mains, workspace = [], 0
    for choice in kinds:
        with rehearsed(Trial(choice)) as (plan, specs):
            mains.append(max(specs, key=lambda spec: spec.shared_bytes))
            workspace = max(workspace, getattr(plan, "workspace", 0))
    shared = Shared(call.device, workspace)

    def ready(choice: Choice) -> Callable[[], None]:
        with tuned.trying(Trial(choice)):
            plan = operation.plan(call, *planned.fused)
        return planned.repeated(plan, call, planned.fused, shared)

    kernels = [
        Candidate(choice, main, partial(ready, choice))
        for choice, main in zip(kinds, mains, strict=True)
    ]
    return Candidates(device, listing.signature, kernels)


def repeated_product(
    plan: ProductPlan, call: Call, request: tuple, shared: Shared
) -> Callable[[], None]:
    """Launch the kernels of a product into what its candidates share, and return a function that
    launches them again."""
    descriptor, operands, out, parameters = request
    vectors, numbers, converted = parameters_of(plan, descriptor, parameters)
    beside = summands_of(plan, parameters)
    addresses, copies = plan.place(operands)
    if out is None or plan.apart:
        target = shared.out(plan.result)
    else:
        target = shared.out(partial(out.new_empty_strided, out.shape, out.stride()))
    room = shared.room() if plan.workspace else None
    pointers = [t.data_ptr() for t in (target, *vectors, *beside)]
    plan.launch([*addresses, *pointers], numbers, room)

    def again(_held=(operands, target, vectors, beside, converted, copies, room)) -> None:
        for step, *_ in plan.steps:
            step.repeat()

    return again


def repeated_launch(
    launch: Callable, plan, call, request: tuple, shared: Shared
) -> Callable[[], object]:
    """:func:`repeated` for an operation by its own ``launch``, into an output with the caller's
    strides."""
    descriptor, operands, out, *rest = request
    if out is None:
        target = shared.out(allocator(call.shape, call.dtype, call.device))
    else:
        target = shared.out(partial(out.new_empty_strided, out.shape, out.stride()))
    again = partial(launch, plan, descriptor, operands, target, *rest)
    again()
    return again

"""What an operation must provide, and the mechanism by which it is called.

In the steady state a call makes its key, finds its plan in a dict and launches. Everything else
(checks, lowering, loading) happens when a key is new. A request is the tuple of all arguments of a
call, in the order that its family has them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch

from kernlib import events
from kernlib.descriptors.base import whole
from kernlib.errors import UnsupportedError
from kernlib.runtime import rehearsal
from kernlib.runtime.plan import PlanCache
from kernlib.runtime.tensors import UNREADABLE, stand_ins

# Ways to compute a checked call.
KERNELS = "kernels"
REFERENCE = "reference"  # by torch's own operators, which are differentiable as they are
OPERATOR = "operator"  # by its operator of torch.library, which tracers and transforms can see


class Operation(NamedTuple):
    """What the mechanism asks of an operation. Each function takes a request as its arguments; a
    "described call" is what ``check`` has returned for it, and comes before the request."""

    name: str  # its operator is kernlib::name
    operators: str | None  # the module that registers it, whose BY_NAME holds what calls it
    key: Callable  # all that a plan depends on; None where there can be no plan
    check: Callable  # describes a request that has no plan, or raises its error
    way: Callable  # of a described call and its request: KERNELS, REFERENCE or OPERATOR
    reference: Callable  # the result of a described call and its request
    plan: Callable  # of a described call on CUDA tensors and its request, its kernels loaded
    launch: Callable  # by a plan, whose request it is
    tensors: Callable  # all tensors of a request, and perhaps other values among them
    materialised: Callable  # the request with copies of its lazy tensors; None if it has none
    # In a rehearsal what a launch would return, on meta: by a plan, whose request it is.
    rehearsed: Callable | None = None
    # In a rehearsal the result of a request of meta tensors, where ``execute`` does not take these.
    on_meta: Callable | None = None


class Bound(NamedTuple):
    """The ways into an operation, without autocast and without a record of gradients."""

    execute: Callable  # the result of a request
    launch: Callable  # of a request by its plan, given first
    first: Callable  # the result of a request for whose key, given first, there is no plan
    find: Callable  # the plan of a request if it is kept, else None
    make: Callable  # the plan of a described call, given first, and its request; and keep it
    plans: PlanCache


def bind(operation: Operation) -> Bound:
    """The calls of an operation. They are closures, so that a hot call looks up no attributes."""
    key_of, check, launch = operation.key, operation.check, operation.launch
    cache = PlanCache()

    def execute(*request) -> torch.Tensor:
        key = key_of(*request)
        try:
            plan = cache.plans.get(key)
        except TypeError:  # an argument cannot be hashed: the check says which one is wrong
            plain = _with_ints(request)
            if plain is not None:
                return execute(*plain)
            check(*request)
            raise
        return first(key, *request) if plan is None else launch(plan, *request)

    def first(key, *request) -> torch.Tensor:
        try:
            tensors = operation.tensors(*request)
        except UNREADABLE:  # for a class in the place of an operand, or too few operands
            check(*request)
            raise
        if stand_ins(*tensors):
            return by_operator(operation, request)
        call = check(*request)
        way = operation.way(call, *request)
        if way != OPERATOR:
            tell(call, request)
        if way == REFERENCE:
            if events.listening():
                device = _device(operation, call, request)
                message = f"{operation.name} on {device}: no kernel, computed by torch"
                events.emit("torch", "", "", message)
            return operation.reference(call, *request)
        if way == OPERATOR:
            return by_operator(operation, request)
        readable = operation.materialised(*request)
        if readable is not None:
            return execute(*readable)
        plan = _planned(operation, call, request)
        if rehearsal.current() is not None and _is_meta(tensors):
            return operation.rehearsed(plan, *request)
        if key is not None:
            cache.keep(key, plan)
        return launch(plan, *request)

    def find(*request):
        key = key_of(*request)
        try:
            return cache.plans.get(key)
        except TypeError:  # as in execute
            plain = _with_ints(request)
            if plain is not None:
                return find(*plain)
            check(*request)
            raise

    def make(call, *request):
        tell(call, request)
        plan = _planned(operation, call, request)
        cache.keep(key_of(*request), plan)
        return plan

    def tell(call, request: tuple) -> None:
        if rehearsal.recorders:
            device = _device(operation, call, request)
            if device.type == "cuda":
                rehearsal.note_call(operation.on_meta or execute, request, device.index)

    return Bound(execute, launch, first, find, make, cache)


def _is_meta(values: tuple) -> bool:
    """Whether a request's tensors have no memory."""
    return any(isinstance(value, torch.Tensor) and value.is_meta for value in values)


def _with_ints(request: tuple) -> tuple | None:
    """A request whose arrays of no dimensions, which cannot be hashed, are ints; None without."""
    plain = tuple(value if whole(value) is None else whole(value) for value in request)
    changed = any(value is not before for value, before in zip(plain, request, strict=True))
    return plain if changed else None


def _planned(operation: Operation, call, request: tuple):
    """The plan of a described call. Raises UnsupportedError for a size that has no place in the
    parameters of a kernel, as an expanded tensor of 2^40 rows may have."""
    try:
        return operation.plan(call, *request)
    except struct.error as error:
        tensors = operation.tensors(*request)
        shapes = [str(tuple(t.shape)) for t in tensors if isinstance(t, torch.Tensor)]
        raise UnsupportedError(
            f"{operation.name}: tensors of shapes {', '.join(shapes)} have more than a kernel "
            f"counts ({error}); call it on slices"
        ) from error


def _device(operation: Operation, call, request: tuple) -> torch.device:
    """Where a call's tensors are: not every description of a call says it, and an operation without
    an operator lists no tensors."""
    tensors = operation.tensors(*request)
    return tensors[0].device if tensors else call.device


def by_operator(operation: Operation, request: tuple) -> torch.Tensor:
    """The result of a request by the operator of its operation. Raises TypeError for a tensor whose
    own dispatcher does not take it."""
    function = operators_of(operation).BY_NAME[operation.name]
    try:
        return function(*request)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        from kernlib.runtime.operators import refuse_dispatcher  # loaded with the function

        refuse_dispatcher(operation.name, function, request, error)
        raise


def operators_of(operation: Operation) -> ModuleType:
    """The module of an operation's operators, which registers them when it is imported. It is known
    by its name only: it imports all other modules of a family, and most processes need none of its
    operators."""
    return import_module(operation.operators)

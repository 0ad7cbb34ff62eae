"""Calls of several launches: their kernels loaded, and what launches them one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter

import torch

from kernlib.lowering.steps import NUMBER, WORKSPACE, Lowered, Step
from kernlib.runtime import devices, rehearsal
from kernlib.runtime.devices import allocator, build, load
from kernlib.runtime.plan import Plan, PlanCache, start_all

# Plans, each with the function that picks its pointers from all addresses, and the count of its
# scalars.
Loaded = tuple[tuple[Plan, Callable, int], ...]


def load_steps(
    steps: tuple[Step, ...], operands: tuple[str, ...], device: int
) -> tuple[Loaded, tuple[tuple[int, int], ...]]:
    """The steps with their kernels loaded, and the further addresses that they take behind those of
    ``operands`` and the workspace. Each is the index of one of these and an offset in bytes."""
    places = {name: place for place, name in enumerate((*operands, WORKSPACE))}
    pointers = [[(places[name], at) for name, at in step.pointers] for step in steps]
    inner = tuple(dict.fromkeys(pair for pairs in pointers for pair in pairs if pair[1]))
    addresses = [*((place, 0) for place in range(len(places))), *inner]
    build([step.spec for step in steps], device)
    if rehearsal.of(device) is not None:
        return (), inner
    loaded = tuple(
        (_plan(step, device), picker([addresses.index(pair) for pair in pairs]), step.scalars)
        for step, pairs in zip(steps, pointers, strict=True)
    )
    return loaded, inner


def launcher(
    loaded: Loaded, inner: tuple[tuple[int, int], ...], device: torch.device, workspace: int
) -> Callable[..., None]:
    """A function that launches steps on the current stream of their device, which must be current.
    It takes a list of the operands' addresses, which it extends; the scalars, or None for those of
    the last call; and a workspace, unless it is to make one. It is a closure, because each field of
    a plan that it read would take 20 ns."""
    scratch = allocator((workspace,), torch.uint8, device) if workspace else None
    index = device.index

    def launch(addresses: list[int], numbers: Sequence | None = None, given=None) -> None:
        address = 0
        if scratch is not None:
            shared = scratch() if given is None else given
            address = shared.data_ptr()
        addresses.append(address)
        for place, offset in inner:
            addresses.append(addresses[place] + offset)
        start_all(loaded, index, addresses, numbers)

    return launch


class Silence:
    """In the place of a plan's launches in a rehearsal."""

    def launch(self, pointers: tuple[int, ...], numbers: list | None = None) -> None:
        """Nothing."""


def load_lowered(
    lowered: Lowered, operands: tuple[str, ...], device: torch.device
) -> Plan | Steps | Silence:
    """A function that launches a call on a device for the addresses of ``operands``, with its
    kernels loaded. For a single launch that takes just these addresses it is the plan itself, so
    that a hot call need not walk a sequence."""
    if device.type == "meta" and (rehearsed := rehearsal.current()) is not None:
        rehearsed.note(lowered.specs)
        return Silence()
    only = lowered.steps[0] if len(lowered.steps) == 1 and not lowered.workspace else None
    if only is not None and only.pointers == tuple((name, 0) for name in operands):
        return _plan(only, device.index)
    return Steps(lowered, operands, device)


class Steps:
    """Several launches, with the methods of a :class:`kernlib.runtime.plan.Plan`."""

    __slots__ = ("_last", "_launch", "device", "plans")

    def __init__(self, lowered: Lowered, operands: tuple[str, ...], device: torch.device):
        self.device = device.index
        loaded, inner = load_steps(lowered.steps, operands, self.device)
        self.plans = tuple(plan for plan, *_ in loaded)
        self._launch = launcher(loaded, inner, device, lowered.workspace)
        self._last: tuple = ()

    def launch(self, pointers: Sequence[int], numbers: Sequence | None = None) -> None:
        """Launch all on torch's current stream of their device, in a new workspace."""
        self._last = pointers, numbers
        if devices.current_device() == self.device:
            self.repeat()
        else:
            with torch.cuda.device(self.device):
                self.repeat()

    def repeat(self) -> None:
        """Launch with what the last call was given; the device must be current."""
        pointers, numbers = self._last
        self._launch([*pointers], numbers)


class StepsCache(PlanCache):
    """The launches of calls that are no :class:`kernlib.runtime.operation.Operation`, by keys of
    what they depend on."""

    def of(
        self, key: tuple, operands: tuple[str, ...], device: torch.device, lower: Callable
    ) -> Plan | Steps | Silence:
        """The launches of a key on a device. If they are not there yet, they are loaded from what
        ``lower()`` returns. In a rehearsal they are noted."""
        if device.type == "meta" and rehearsal.current() is not None:
            return load_lowered(lower(), operands, device)
        key = (*key, device.index)
        steps = self.plans.get(key)
        if steps is None:
            rehearsal.note_lowering(lower, device.index)
            steps = Steps(lower(), operands, device)
            self.keep(key, steps)
        return steps


def _plan(step: Step, device: int) -> Plan:
    count = len(step.pointers) - len(step.maps)
    numbers = NUMBER * step.scalars
    kernel = load(step.spec, device)
    return Plan(kernel, device, step.grid, count, numbers, step.fixed, step.maps, step.overlaps)


def picker(indices: list[int]) -> Callable[[list[int]], tuple[int, ...]]:
    """A function that takes these entries of a list, as a tuple: in 0.1 us, where a comprehension
    takes 0.3."""
    if len(indices) == 1:
        (only,) = indices
        return lambda addresses: (addresses[only],)
    return itemgetter(*indices)

"""Arguments of operators of ``torch.library``.

Families write the functions of an operator over arguments as the rest of kernlib knows them: a
descriptor, a layout, parameters by name. Torch has no types for these, so the operator itself has
several fields in the place of such an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from kernlib.descriptors.text import from_text
from kernlib.runtime.numbers import host_value

# Names of arguments that a backward pass reads: always, or where a field of some needs a gradient.
Saves = tuple[str, ...] | dict[str, tuple[str, ...]]


class Kind(NamedTuple):
    """An argument of no type of torch's, and what carries it."""

    name: str
    fields: tuple[str, ...]  # of the operator: a type and a name each
    flatten: Callable[[Any], Sequence]  # the values of the fields
    restore: Callable[..., Any]  # the argument, from the values of the fields
    refusal: str = ""  # why torch.vmap cannot map over it; empty where it can


def flattened(parameters: dict, dimensions: int) -> tuple[str, list, list]:
    """Names, those of the numbers first, numbers and tensors. The names are one text with spaces,
    as torch.jit.trace takes no list of str. Dynamo can trace it. Raises TypeError for what is
    neither number nor tensor, and says that a tensor may have so many ``dimensions``."""
    tensors = {k: v for k, v in parameters.items() if isinstance(v, torch.Tensor)}
    numbers = {k: _number(k, v, dimensions) for k, v in parameters.items() if k not in tensors}
    return " ".join([*numbers, *tensors]), [*numbers.values()], [*tensors.values()]


def _number(name: str, value: Any, dimensions: int) -> float:
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return torch.sym_float(value)
    return host_value(name, value, dimensions)


def _by_name(names: str, numbers: list, tensors: list) -> dict:
    return dict(zip(names.split(), (*numbers, *tensors), strict=True))


_NAMED = "str names", "float[] numbers", "Tensor[] tensors"
DESCRIPTOR = Kind("descriptor", ("str descriptor",), lambda d: (d.text,), from_text)
# Numbers and tensors of shape (), vectors and summands among them.
PARAMETERS = Kind("parameters", _NAMED, lambda p: flattened(p, 0), _by_name)
# Numbers and tensors of shape (), or (L,) for a batch.
HYPERPARAMETERS = Kind("parameters", _NAMED, lambda p: flattened(p, 1), _by_name)


def placed(value: Any, device: torch.device) -> Any:
    """A tensor on the device of a call. So the copy of a host tensor is recorded, and a CUDA graph
    can leave it out. The operator itself would have to refuse a host tensor during a capture."""
    if isinstance(value, torch.Tensor) and value.device != device:
        return value.to(device)
    return value


def all_placed(parameters: dict, device: torch.device) -> dict:
    """:func:`placed` of each parameter."""
    return {name: placed(value, device) for name, value in parameters.items()}


class Schema:
    """The arguments of an operator: each a :class:`Kind`, or a type of torch's and a name, as in
    ``"Tensor? bias"``, perhaps with a default of None."""

    def __init__(self, *arguments: str | Kind):
        fields: list[str] = []
        self._parts: list[tuple[str, Kind | None, slice]] = []  # name, and places of its fields
        for argument in arguments:
            kind = argument if isinstance(argument, Kind) else None
            names = (argument,) if isinstance(argument, str) else argument.fields
            name = _name(argument) if isinstance(argument, str) else argument.name
            self._parts.append((name, kind, slice(len(fields), len(fields) + len(names))))
            fields += names
        self.text = f"({', '.join(fields)})"
        self.names = [_name(field) for field in fields]
        self._lists = [place for place, field in enumerate(fields) if "[]" in field]
        self._kinds = any(kind is not None for _, kind, _ in self._parts)

    def flatten(self, values: Sequence) -> list:
        """The operator's arguments, from the function's."""
        flat: list = []
        for value, (_, kind, _) in zip(values, self._parts, strict=True):
            flat += (value,) if kind is None else kind.flatten(value)
        return flat

    def filled(self, flat: Sequence) -> list:
        """All that the operator takes: torch leaves out what has its default, and AOTInductor hands
        over None for an empty list."""
        values = [*flat, *[None] * (len(self.names) - len(flat))]
        for place in self._lists:
            values[place] = values[place] or []
        return values

    def restore(self, flat: Sequence) -> Sequence:
        """The arguments, from what the operator takes."""
        if len(flat) != len(self.names):
            flat = self.filled(flat)
        for place in self._lists:
            if flat[place] is None:
                flat = self.filled(flat)
        if not self._kinds:
            return flat
        return [
            flat[at.start] if kind is None else kind.restore(*flat[at])
            for _, kind, at in self._parts
        ]

    def named(self, flat: Sequence) -> SimpleNamespace:
        """torch's value for each field, such as the mapped axis, by the field's name."""
        values = [*flat, *[None] * (len(self.names) - len(flat))]
        return SimpleNamespace(**dict(zip(self.names, values, strict=True)))

    def refuse_mapped(self, dims: Sequence) -> None:
        """Raises NotImplementedError where torch.vmap maps over an argument that is one for all
        calls."""
        for _, kind, at in self._parts:
            if kind is not None and kind.refusal and any(map(is_mapped, dims[at])):
                raise NotImplementedError(kind.refusal)

    # What a backward pass needs.

    def save(self, ctx, inputs: Sequence, outputs: Sequence, saves: Saves) -> None:
        """Save outputs, some arguments, and all that is neither tensor nor list of tensors."""
        values = self.filled(inputs)
        ctx.outputs = len(outputs)
        ctx.counts = [_count(value) for value in values]
        ctx.constants = [v if n is None else None for v, n in zip(values, ctx.counts, strict=True)]
        ctx.shapes = [
            v.shape if n == _SINGLE else None for v, n in zip(values, ctx.counts, strict=True)
        ]
        # Torch has not grouped them by lists yet.
        flat, tensors = iter(ctx.needs_input_grad), []
        counts = (1 if n in (None, _SINGLE) else n for n in ctx.counts)
        needs = self.named([any([*islice(flat, count)]) for count in counts])
        for place, fields in self._saved(saves):
            count, value = ctx.counts[place], values[place]
            if count == _SINGLE:
                is_read = not fields or any(getattr(needs, field) for field in fields)
                tensors.append(value if is_read else None)
            elif count:
                tensors += value
        ctx.save_for_backward(*outputs, *tensors)

    def saved(self, ctx, saves: Saves) -> SimpleNamespace:
        """The arguments by their names. Beside them ``outputs`` and, by the names of the fields,
        ``needs``, whether a gradient is needed, and ``shapes`` of all that are tensors."""
        unpacked, values = ctx.saved_tensors, [*ctx.constants]
        outputs, tensors = unpacked[: ctx.outputs], iter(unpacked[ctx.outputs :])
        for place, _ in self._saved(saves):
            count = ctx.counts[place]
            if count is not None:
                values[place] = next(tensors) if count == _SINGLE else [*islice(tensors, count)]
        arguments = {
            name: values[at.start] if kind is None else kind.restore(*values[at])
            for name, kind, at in self._parts
            if name in saves or (kind is None and ctx.counts[at.start] is None)
        }
        needs, shapes = self.named(ctx.needs_input_grad), self.named(ctx.shapes)
        return SimpleNamespace(outputs=outputs, needs=needs, shapes=shapes, **arguments)

    def _saved(self, saves: Saves) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Places of the fields that are saved, and the fields whose gradients read them."""
        for name, _, at in self._parts:
            if name in saves:
                fields = saves[name] if isinstance(saves, dict) else ()
                yield from ((place, fields) for place in range(at.start, at.stop))

    def gradients(self, ctx, grads: dict) -> tuple:
        """The gradients by all fields in torch's order, from some by their names."""
        counts = zip(self.names, ctx.counts, strict=True)
        none = {name: None if n in (None, _SINGLE) else [None] * n for name, n in counts}
        return tuple((none | grads).values())


_SINGLE = -1


def _count(value: Any) -> int | None:
    """How many tensors a list has; None for what has none. An empty list counts as one of tensors,
    as torch takes it."""
    if isinstance(value, torch.Tensor):
        return _SINGLE
    if isinstance(value, (list, tuple)) and all(isinstance(t, torch.Tensor) for t in value):
        return len(value)
    return None


def _name(argument: str) -> str:
    return argument.partition("=")[0].split()[-1]


def is_mapped(dim: Any) -> bool:
    """Whether torch.vmap maps over an argument with this axis, or over one of a list."""
    return any(map(is_mapped, dim)) if isinstance(dim, (list, tuple)) else dim is not None

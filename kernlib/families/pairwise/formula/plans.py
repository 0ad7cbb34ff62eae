"""Reductions of formulas of pairs, without a record of gradients: by kernels on GPUs, by torch on a
CPU.

A request is ``(tensors, numbers, text, sizes)``. The text is that of a spec, or a :func:`headline`
of a formula, whose spec depends on the tensors' dtypes. Tensors are those of the inputs that are
not on the host, in their order, each with a batch in front; behind them, of a spec that is
``ranged``, rows (P, M, 2) and columns (Q, N, 2) of :class:`kernlib.Pairs`. ``sizes`` are batch,
rows, columns and features.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from kernlib import events
from kernlib.descriptors.expression import Name, Node, Number, Operation
from kernlib.descriptors.score.kinds import BOOL, FLOAT, INT, KINDS, LONG
from kernlib.descriptors.text import from_text as descriptor_from_text
from kernlib.families.pairwise.formula import grammar, spec
from kernlib.families.pairwise.formula.spec import (
    AXES,
    COL,
    FEATURE,
    LEAST,
    LOGSUMEXP,
    ROW,
    TOTAL,
    Input,
    Spec,
)
from kernlib.lowering.kernel import Gpu
from kernlib.runtime import devices, rehearsal
from kernlib.runtime.dtypes import DTYPE_NAMES
from kernlib.runtime.numbers import on_device
from kernlib.runtime.plan import PlanCache
from kernlib.runtime.precision import without_autocast
from kernlib.runtime.sequence import load_lowered
from kernlib.runtime.tensors import is_lazy, materialised

if TYPE_CHECKING:
    from kernlib.lowering.steps import Lowered
    from kernlib.runtime.plan import Plan
    from kernlib.runtime.sequence import Silence, Steps

# Of a headline. The smallest of the negated score; the sum of exponentials over a number of each
# row, which is the last input but one; how many scores are at most the last input.
GREATEST, SOFTMAX, COUNT = "max", "softmax", "count"
_NAMES = {torch.int32: "int32", torch.int64: "int64", torch.bool: "bool"} | DTYPE_NAMES
_ON_DEVICE = {INT: torch.int32, LONG: torch.int64, BOOL: torch.bool}


# Texts.


def headline(reduction: str, text: str, on_host: str, weighted: str, ranged: bool) -> str:
    """The text of a reduction of the formula ``text``. ``on_host`` are the names of numbers of the
    host, with spaces between; ``weighted`` is "" or, where the last input is one that scores are
    multiplied by, its last axis."""
    return "\n".join((reduction, on_host, weighted, "ranged" * ranged, text))


def spec_of(text: str, tensors: Sequence[torch.Tensor]) -> Spec:
    """The spec that a text and the dtypes of tensors make."""
    return spec_of_dtypes(text, tuple([t.dtype for t in tensors]))


def spec_of_dtypes(text: str, dtypes: tuple[torch.dtype, ...]) -> Spec:
    if text.startswith("("):
        return spec.from_text(text)
    return _constant(text, tuple([_NAMES[dtype] for dtype in dtypes]))


def _constant(text: str, dtypes: tuple[str, ...]) -> Spec:
    return _spec_of(text, dtypes)


# As torch.compiler.assume_constant_result says, which loads Dynamo: it cannot trace a parser.
_constant._dynamo_marked_constant = True


@lru_cache(maxsize=1024)
def _spec_of(text: str, dtypes: tuple[str, ...]) -> Spec:
    reduction, on_host, weighted, ranged, formula = text.split("\n", 4)
    descriptor, hosts, following = descriptor_from_text(formula), on_host.split(), iter(dtypes)
    kinds, inputs, places = {}, [], {}
    for i, (name, axes, bounds) in enumerate(descriptor.reads):
        host = name in hosts
        kinds[name] = FLOAT if host else KINDS[next(following)]
        places[name, bounds] = f"t{i}"
        inputs.append(Input(tuple(sorted(axes, key=AXES.index)), kinds[name], host))
    score = grammar.placed(descriptor.tree(tuple(kinds.items())), places)
    if reduction in (SOFTMAX, COUNT):
        reduction, score = TOTAL, _special(reduction, score, inputs)
    unit = None
    if weighted:
        place = Name(f"t{len(inputs)}")
        axes = (COL,) if weighted == COL else (COL, FEATURE)
        inputs.append(Input(axes, FLOAT))
        unit = place if weighted == FEATURE else None
        score = Operation("*", (score, place)) if unit is None else score
    if reduction == GREATEST:
        reduction, score = LEAST, Operation("neg", (score,))
    return spec.new_spec(reduction, score, tuple(inputs), unit, bool(ranged))


def _special(reduction: str, score: Node, inputs: list[Input]) -> Node:
    """The score of a reduction that has one more input, which is added to these."""
    more = Name(f"t{len(inputs)}")
    if reduction == COUNT:
        inputs.append(Input((), FLOAT))
        return Operation("where", (Operation("<=", (score, more)), Number(1.0), Number(0.0)))
    inputs.append(Input((ROW,), FLOAT))
    share = Operation("exp", (Operation("-", (score, more)),))
    is_empty = Operation("==", (more, Number(float("-inf"))))
    return Operation("where", (is_empty, Number(0.0), share))


def arithmetic(tensors: Sequence[torch.Tensor], inputs: Sequence[Input]) -> torch.dtype:
    """float64 where a tensor that has axes has it, else float32."""
    pairs = zip(tensors, (each for each in inputs if not each.on_host), strict=False)
    is_wide = any(t.dtype is torch.float64 and each.axes for t, each in pairs)
    return torch.float64 if is_wide else torch.float32


# Calls.


def execute(tensors: list, numbers: list, text: str, sizes: Sequence[int]):
    """The result of a request in the arithmetic's dtype: (batch, rows, columns) of a matrix,
    (batch, rows, features) of sums, (batch, rows) of others; of the smallest also places."""
    if is_lazy(*tensors):
        tensors = [materialised(t) for t in tensors]
    device = tensors[0].device
    key = (text, *sizes, *[(t.shape, t.stride(), t.dtype) for t in tensors], device)
    call = _calls.find(key)
    if call is None:
        call = _new_call(tensors, text, sizes, device)
        if device.type == "cuda":
            _calls.keep(key, call)
    if not call.plan.ranged:
        return _computed(call, tensors, numbers, None)
    parts = [_computed(call, tensors, numbers, ranges) for ranges in tensors[-2]]
    return parts[0] if len(parts) == 1 else _JOINED[call.plan.reduction](parts)


class Call(NamedTuple):
    """What a request of one signature needs besides its tensors and numbers."""

    plan: Spec
    wide: torch.dtype
    device: torch.device
    sizes: tuple[int, ...]
    shape: tuple[int, ...]  # of the result
    pointers: tuple[int, ...]  # places among the tensors of those that have axes
    # Of each number: its place among the numbers of the host and None, or its place among the
    # tensors and the dtype that kernels read.
    scalars: tuple[tuple[int, torch.dtype | None], ...]
    launches: Plan | Steps | Silence | None  # None where torch computes it


_calls = PlanCache()


def _new_call(tensors: list, text: str, sizes: Sequence[int], device: torch.device) -> Call:
    plan = spec_of(text, tensors)
    wide = arithmetic(tensors, plan.inputs)
    pointers, scalars, hosts, place = [], [], 0, 0
    for each in plan.inputs:
        if each.on_host:
            scalars.append((hosts, None))
            hosts += 1
            continue
        if each.axes:
            pointers.append(place)
        else:
            scalars.append((place, _ON_DEVICE.get(each.kind, wide)))
        place += 1
    call = Call(
        plan, wide, device, tuple(sizes), plan.shape(sizes), tuple(pointers), tuple(scalars), None
    )
    values = values_of(plan, tensors, [0.0] * hosts)
    if not rehearsal.on_gpu(device) or _is_trivial(plan, values, sizes):
        return call
    return call._replace(launches=_loaded(call, values))


def _computed(call: Call, tensors: list, numbers: list, ranges: torch.Tensor | None):
    """Of one range of columns of each row, (M, 2), or of all columns."""
    if call.launches is not None:
        return _launched(call, tensors, numbers, ranges)
    plan, wide, device = call.plan, call.wide, call.device
    if 0 in call.sizes[:2]:
        none = torch.zeros(call.shape, dtype=wide, device=device)
        return (none, none.long()) if plan.reduction == LEAST else none
    from kernlib.families.pairwise.formula import reference  # GPUs need none

    if device.type != "meta" and events.listening():
        events.emit("torch", "", "", f"formula on {device}: no kernel, computed by torch")
    values = values_of(plan, tensors, numbers)
    with torch.no_grad(), without_autocast(device):
        return reference.compute(plan, values, call.sizes, wide, ranges)


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _least(parts: list[tuple]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ranges of a row follow each other, so the first of equal entries is that of the first."""
    least, place = parts[0]
    for value, at in parts[1:]:
        better = (value < least) | (value.isnan() & ~least.isnan())
        least, place = torch.where(better, value, least), torch.where(better, at, place)
    return least, place


_JOINED = {
    TOTAL: _sum,
    LOGSUMEXP: lambda parts: torch.stack(parts).logsumexp(0),
    LEAST: _least,
}


def values_of(plan: Spec, tensors: list, numbers: list) -> list:
    """The inputs in the order of a spec."""
    on_device_, on_host = iter(tensors), iter(numbers)
    return [next(on_host if each.on_host else on_device_) for each in plan.inputs]


def _is_trivial(plan: Spec, values: list, sizes: Sequence[int]) -> bool:
    """Whether there is a size of 0, for which nothing is launched."""
    places = [i for tree in plan.terms for i in plan.features_of(tree)]
    return 0 in sizes or any(values[i].shape[-1] == 0 for i in places)


def _loaded(call: Call, values: list) -> Plan | Steps | Silence:
    """The launches of a call, their kernels loaded."""
    from kernlib.families.pairwise.formula.lowering import choose  # a CPU needs none
    from kernlib.families.pairwise.formula.lowering.problem import Problem

    plan, device = call.plan, call.device
    problem = Problem(
        plan,
        tuple(
            _NAMES[t.dtype] if each.axes else ""
            for t, each in zip(values, plan.inputs, strict=True)
        ),
        _NAMES[call.wide],
        *call.sizes,
        tuple(values[plan.features_of(term)[0]].shape[-1] for term in plan.terms),
        tuple(_strides(t, each) for t, each in zip(values, plan.inputs, strict=True)),
    )
    names = [f"t{i}" for i, each in enumerate(plan.inputs) if each.axes]
    names += ["ranges"] * plan.ranged + ["out"] + ["indices"] * (plan.reduction == LEAST)
    index = device.index if device.type == "cuda" else -1

    def lower() -> Lowered:
        return devices.lower_on(
            lambda count: choose.lower(problem, Gpu(devices.arch_of(index), count)), index
        )

    rehearsal.note_lowering(lower, index)
    return load_lowered(lower(), tuple(names), device)


def _launched(call: Call, tensors: list, numbers: list, ranges: torch.Tensor | None):
    """A request by kernels."""
    out = torch.empty(call.shape, dtype=call.wide, device=call.device)
    pointers = [tensors[place].data_ptr() for place in call.pointers]
    if ranges is not None:
        pointers.append(ranges.data_ptr())
    pointers.append(out.data_ptr())
    indices = None
    if call.plan.reduction == LEAST:
        indices = torch.empty(call.shape, dtype=torch.int64, device=call.device)
        pointers.append(indices.data_ptr())
    scalars, converted = [], []
    for place, dtype in call.scalars:
        if dtype is None:
            scalars += (numbers[place], 0)
            continue
        number = on_device("a number of the formula", tensors[place], call.device, dtype)
        converted.append(number)  # the stream orders the reuse of its memory
        scalars += (0.0, number.data_ptr())
    call.launches.launch(tuple(pointers), scalars)
    return out if indices is None else (out, indices)


def _strides(t, each: Input) -> tuple[int, int, int, int]:
    """Of batch, rows, columns and features, 0 where there is no step."""
    if not isinstance(t, torch.Tensor):
        return 0, 0, 0, 0
    strides = dict(zip(("batch", *each.axes), t.stride(), strict=True))
    strides["batch"] = 0 if t.shape[0] == 1 else strides["batch"]
    return tuple(strides.get(axis, 0) for axis in ("batch", *AXES))

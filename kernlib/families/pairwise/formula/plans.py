"""Reductions of formulas of pairs, without a record of gradients: by kernels on GPUs, by torch on a
CPU.

A request is ``(tensors, numbers, text, sizes)``. The text is that of a spec, or a :func:`headline`
of a formula, whose spec depends on the tensors' dtypes. Tensors are those of the inputs that are
not on the host, in their order, each with a batch in front; behind them, of a spec that is
``ranged``, (M, 2) of rows and (N, 2) of columns. ``sizes`` are batch, rows, columns and features.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from kernlib import events
from kernlib.descriptors.expression import Name, Operation
from kernlib.descriptors.score.kinds import BOOL, FLOAT, INT, KINDS, LONG
from kernlib.descriptors.text import from_text as descriptor_from_text
from kernlib.families.pairwise.formula import grammar, spec
from kernlib.families.pairwise.formula.spec import (
    AXES,
    COL,
    FEATURE,
    LEAST,
    LOGSUMEXP,
    MATRIX,
    Input,
    Spec,
)
from kernlib.lowering.kernel import Gpu
from kernlib.runtime import devices, rehearsal
from kernlib.runtime.dtypes import DTYPE_NAMES
from kernlib.runtime.numbers import on_device
from kernlib.runtime.precision import without_autocast
from kernlib.runtime.sequence import StepsCache

if TYPE_CHECKING:
    from kernlib.lowering.steps import Lowered

GREATEST = "max"  # of a headline: the smallest of the negated score
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
    if text.startswith("("):
        return spec.from_text(text)
    return _constant(text, tuple([_NAMES[t.dtype] for t in tensors]))


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


def arithmetic(tensors: Sequence[torch.Tensor], inputs: Sequence[Input]) -> torch.dtype:
    """float64 where a tensor that has axes has it, else float32."""
    pairs = zip(tensors, (each for each in inputs if not each.on_host), strict=False)
    is_wide = any(t.dtype is torch.float64 and each.axes for t, each in pairs)
    return torch.float64 if is_wide else torch.float32


# Calls.


def execute(tensors: list, numbers: list, text: str, sizes: Sequence[int]):
    """The result of a request in the arithmetic's dtype: (batch, rows, columns) of a matrix,
    (batch, rows, features) of sums, (batch, rows) of others; of the smallest also places."""
    plan = spec_of(text, tensors)
    wide, first = arithmetic(tensors, plan.inputs), tensors[0]
    values, ranges = values_of(plan, tensors, numbers), tensors[-2] if plan.ranged else None
    if rehearsal.on_gpu(first.device) and not _is_trivial(plan, values, sizes):
        return _launched(plan, values, ranges, sizes, wide)
    from kernlib.families.pairwise.formula import reference  # GPUs need none

    if events.listening():
        events.emit("torch", "", "", f"formula on {first.device}: no kernel, computed by torch")
    with torch.no_grad(), without_autocast(first.device):
        return reference.compute(plan, values, sizes, wide, ranges)


def values_of(plan: Spec, tensors: list, numbers: list) -> list:
    """The inputs in the order of a spec."""
    on_device_, on_host = iter(tensors), iter(numbers)
    return [next(on_host if each.on_host else on_device_) for each in plan.inputs]


def _is_trivial(plan: Spec, values: list, sizes: Sequence[int]) -> bool:
    """Whether there is a size of 0, for which nothing is launched."""
    places = [i for tree in plan.terms for i in plan.features_of(tree)]
    return 0 in sizes or any(values[i].shape[-1] == 0 for i in places)


_launches = StepsCache()


def _launched(plan: Spec, values: list, ranges, sizes, wide: torch.dtype):
    """A request by kernels."""
    from kernlib.families.pairwise.formula.lowering import choose  # a CPU needs none
    from kernlib.families.pairwise.formula.lowering.problem import Problem

    device = next(t.device for t in values if isinstance(t, torch.Tensor))
    values, scalars = _with_scalars(plan, values, device, wide)
    pairs = zip(values, plan.inputs, strict=True)
    problem = Problem(
        plan,
        tuple("" if each.on_host else _NAMES[t.dtype] for t, each in pairs),
        _NAMES[wide],
        *sizes,
        tuple(values[plan.features_of(term)[0]].shape[-1] for term in plan.terms),
        tuple(_strides(t, each) for t, each in zip(values, plan.inputs, strict=True)),
    )
    named = {f"t{i}": t for i, t in enumerate(values) if plan.inputs[i].axes}
    out = torch.empty(_shape(plan, sizes), dtype=wide, device=device)
    named |= {"ranges": ranges} if plan.ranged else {}
    named["out"] = out
    if plan.reduction == LEAST:
        named["indices"] = torch.empty(out.shape, dtype=torch.int64, device=device)
    index = values_device(named)

    def lower() -> Lowered:
        return devices.lower_on(
            lambda count: choose.lower(problem, Gpu(devices.arch_of(index), count)), index
        )

    steps = _launches.of((problem,), tuple(named), device, lower)
    if device.type == "cuda":
        steps.launch([t.data_ptr() for t in named.values()], scalars)
    return (out, named["indices"]) if plan.reduction == LEAST else out


def values_device(named: dict[str, torch.Tensor]) -> int:
    return named["out"].get_device()


def _with_scalars(plan: Spec, values: list, device, wide: torch.dtype) -> tuple[list, list]:
    """The inputs, those without axes on the device in the dtype that kernels read, and the latter
    as kernels take numbers: a value, and an address that is 0 for those of the host."""
    values, scalars = list(values), []
    for i, each in enumerate(plan.inputs):
        if each.axes:
            continue
        if each.on_host:
            scalars += (values[i], 0)
            continue
        dtype = _ON_DEVICE.get(each.kind, wide)
        values[i] = on_device("a number of the formula", values[i], device, dtype)
        scalars += (0.0, values[i].data_ptr())
    return values, scalars


def _strides(t, each: Input) -> tuple[int, int, int, int]:
    """Of batch, rows, columns and features, 0 where there is no step."""
    if not isinstance(t, torch.Tensor):
        return 0, 0, 0, 0
    strides = dict(zip(("batch", *each.axes), t.stride(), strict=True))
    strides["batch"] = 0 if t.shape[0] == 1 else strides["batch"]
    return tuple(strides.get(axis, 0) for axis in ("batch", *AXES))


def _shape(plan: Spec, sizes: Sequence[int]) -> tuple[int, ...]:
    """Of the result."""
    batch, rows, cols, features = sizes
    if plan.reduction == MATRIX:
        return batch, rows, cols
    return (batch, rows) if plan.reduction in (LOGSUMEXP, LEAST) else (batch, rows, features)

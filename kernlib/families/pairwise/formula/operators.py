"""Formulas as operators of ``torch.library``, by which gradients are recorded and calls traced.

``formula`` is a matrix or a sum, ``formula_logsumexp`` a log-sum-exp, whose gradient reads its
result, and ``formula_least`` the smallest of each row and its place, without a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch._C._functorch import is_legacy_batchedtensor
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kernlib.families.pairwise.formula import plans
from kernlib.families.pairwise.formula.slopes import GRAD, RESULT, slopes
from kernlib.families.pairwise.formula.spec import (
    COL,
    FEATURE,
    LEAST,
    LOGSUMEXP,
    MATRIX,
    ROW,
    TOTAL,
)
from kernlib.runtime import rehearsal
from kernlib.runtime.operators import register
from kernlib.runtime.schema import Schema

_SCHEMA = Schema("Tensor[] tensors", "float[] numbers", "str text", "SymInt[] sizes", "bool debug")
LARGEST = "largest"
_execute = torch.compiler.disable(plans.execute)


@torch.compiler.disable
def _topk(*request):
    from kernlib.families.pairwise.formula import blocks  # other calls need none

    return blocks.topk(*request)


def _compute(tensors, numbers, text, sizes, debug):
    return _execute(list(tensors), list(numbers), text, [int(size) for size in sizes])


def _computed(tensors, numbers, text, sizes, debug):
    return plans.execute(tensors, numbers, text, sizes)


def _is_rehearsed() -> bool:
    """Whether kernels are looked for, of tensors without memory, for GPUs that need not be here."""
    return rehearsal.current() is not None and not is_in_torch_dispatch_mode()


def _wide(tensors, text) -> torch.dtype:
    return plans.arithmetic(tensors, plans.spec_of(text, tensors).inputs)


def _fake(tensors, numbers, text, sizes, debug):
    if _is_rehearsed():
        return _compute(tensors, numbers, text, sizes, debug)
    batch, rows, cols, features = sizes
    last = cols if _reduction(text, tensors) == MATRIX else features
    return tensors[0].new_empty((batch, rows, last), dtype=_wide(tensors, text))


def _reduction(text, tensors) -> str:
    return plans.spec_of(text, tensors).reduction


def _fake_of_rows(tensors, numbers, text, sizes, debug):
    if _is_rehearsed():
        return _compute(tensors, numbers, text, sizes, debug)
    return tensors[0].new_empty(tuple(sizes[:2]), dtype=_wide(tensors, text))


def _fake_least(tensors, numbers, text, sizes, debug):
    if _is_rehearsed():
        return _compute(tensors, numbers, text, sizes, debug)
    shape = tuple(sizes[:2])
    places = tensors[0].new_empty(shape, dtype=torch.int64)
    return tensors[0].new_empty(shape, dtype=_wide(tensors, text)), places


def _backward(saved, grad) -> dict:
    return gradients(saved, grad, _call)


def _call(name: str, tensors, numbers, text, sizes, debug):
    """A formula of a gradient: by its operator where it is recorded or traced in turn."""
    if debug or torch.is_grad_enabled() or rehearsal.is_traced():
        return BY_NAME[name](tensors, numbers, text, sizes, debug)
    return plans.execute(tensors, numbers, text, [int(size) for size in sizes])


@lru_cache(maxsize=4096)
def _slopes(text: str, dtypes: tuple, place: int, wide: torch.dtype) -> tuple[tuple, ...]:
    """The summands of a gradient and their texts, by texts: trees take long to hash."""
    plan = plans.spec_of_dtypes(text, dtypes)
    every = slopes(plan, place, torch.finfo(wide).tiny)
    return tuple((slope, slope.spec.canonical()) for slope in every)


def gradients(saved, grad, call: Callable) -> dict:
    """The gradient by each tensor, a sum of formulas of the same tensors, of the gradient and of
    the result, each by a ``call`` of the operator of a name."""
    if not is_dynamo_compiling() and is_legacy_batchedtensor(grad):
        raise RuntimeError(
            "gradients of a formula are taken one at a time: is_grads_batched, which "
            "jacobian(vectorize=True) sets, is not known of them; use torch.func.jacrev"
        )
    plan = plans.spec_of(saved.text, saved.tensors)
    wide = plans.arithmetic(saved.tensors, plan.inputs)
    values = plans.values_of(plan, saved.tensors, saved.numbers)
    if plan.reduction == TOTAL and plan.unit is None:
        grad = grad.squeeze(-1)  # one feature
    dtypes = tuple([t.dtype for t in saved.tensors])
    more = {GRAD: grad, RESULT: saved.outputs[0] if saved.outputs else None}
    places = [i for i, each in enumerate(plan.inputs) if not each.on_host]
    grads = []
    for place, t, needs in zip(places, saved.tensors, saved.needs.tensors, strict=False):
        if not needs:
            grads.append(None)
            continue
        total = None
        for slope, text in _slopes(saved.text, dtypes, place, wide):
            axes = plan.inputs[place].axes
            part = _summand(slope, text, axes, values, more, saved, t, call)
            total = part if total is None else total + part
        if total is None:
            total = torch.zeros(t.shape, dtype=wide, device=t.device)
        grads.append(total.to(t.dtype))
    return {"tensors": grads + [None] * (len(saved.tensors) - len(grads))}


def _summand(slope, text: str, axes, values: list, more: dict, saved, t, call) -> torch.Tensor:
    """A summand of the gradient by ``t``, of its shape."""
    named = [more[i] if i < 0 else values[i] for i in slope.places]
    if slope.turned:
        of = slope.spec.inputs
        named = [x.mT if {ROW, COL} <= set(of[i].axes) else x for i, x in enumerate(named)]
    hosts = [each.on_host for each in slope.spec.inputs]
    tensors = [x for x, host in zip(named, hosts, strict=True) if not host]
    numbers = [x for x, host in zip(named, hosts, strict=True) if host]
    batch, rows, cols, _ = saved.sizes
    features = t.shape[-1] if slope.spec.unit is not None else 1
    ranges = list(saved.tensors[-2:]) if slope.spec.ranged else []
    if slope.turned:
        rows, cols, ranges = cols, rows, ranges[::-1]
    sizes = [batch, rows, cols, features]
    result = call("formula", tensors + ranges, numbers, text, sizes, saved.debug)
    if {ROW, COL} <= set(axes):
        return result.sum_to_size(t.shape)
    if ROW not in axes and COL not in axes:
        result = result.sum(1, keepdim=True)
    if FEATURE not in axes:
        result = result.squeeze(-1)
    if ROW not in axes and COL not in axes:
        result = result.squeeze(1)
    return result.sum_to_size(t.shape)


# Of the k smallest: a first line of the text says which, and the last size is k.


def nearest_text(text: str, largest: bool) -> str:
    """The text of the k largest or smallest scores of a matrix's ``text``."""
    return f"{LARGEST if largest else 'smallest'}\n{text}"


def _compute_nearest(tensors, numbers, text, sizes, debug):
    which, _, text = text.partition("\n")
    *shape, k = (int(size) for size in sizes)
    return _topk(list(tensors), list(numbers), text, shape, k, which == LARGEST)


def _fake_nearest(tensors, numbers, text, sizes, debug):
    if _is_rehearsed():
        return _compute_nearest(tensors, numbers, text, sizes, debug)
    batch, rows, _, k = sizes
    wide = _wide(tensors, text.partition("\n")[2])
    places = tensors[0].new_empty((batch, rows, k), dtype=torch.int64)
    return tensors[0].new_empty((batch, rows, k), dtype=wide), places


_SAVES = ("tensors", "numbers")
formula = register(
    "formula", _SCHEMA, "Tensor", _compute, _fake, saves=_SAVES, outputs=0, backward=_backward
)
formula_logsumexp = register(
    "formula_logsumexp", _SCHEMA, "Tensor", _compute, _fake_of_rows, saves=_SAVES, outputs=1,
    backward=_backward,
)  # fmt: skip
formula_least = register("formula_least", _SCHEMA, "(Tensor, Tensor)", _compute, _fake_least)
formula_nearest = register(
    "formula_nearest", _SCHEMA, "(Tensor, Tensor)", _compute_nearest, _fake_nearest
)
BY_NAME = {
    "formula": formula,
    "formula_logsumexp": formula_logsumexp,
    "formula_least": formula_least,
    "formula_nearest": formula_nearest,
}
# What they compute, for eager calls.
COMPUTED = {**dict.fromkeys(BY_NAME, _computed), "formula_nearest": _compute_nearest}
OF_REDUCTION = {
    MATRIX: "formula",
    TOTAL: "formula",
    LOGSUMEXP: "formula_logsumexp",
    LEAST: "formula_least",
    plans.GREATEST: "formula_least",
    plans.SOFTMAX: "formula",
    plans.COUNT: "formula",
}

"""Calls of formulas: what :mod:`kernlib.families.pairwise.functions.reductions` documents, of the
scores of a :class:`kernlib.Formula`. ``values`` are its tensors and numbers by name; ``pairs`` say
which pairs there are."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch._C import _are_functorch_transforms_active
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from kernlib.descriptors.base import shown
from kernlib.families.pairwise.checks import check_result
from kernlib.families.pairwise.formula import arguments, plans
from kernlib.families.pairwise.formula.arguments import Call
from kernlib.families.pairwise.formula.descriptor import Formula
from kernlib.families.pairwise.formula.pairs import Pairs
from kernlib.families.pairwise.formula.plain import plain_of
from kernlib.families.pairwise.formula.spec import (
    COL,
    FEATURE,
    LEAST,
    LOGSUMEXP,
    MATRIX,
    ROW,
    TOTAL,
)
from kernlib.run import run_kernel
from kernlib.runtime.numbers import check_host, check_tensor, host_value, on_device
from kernlib.runtime.tensors import check_dense, check_memory, refuse_any_overlap

MOST_COUNTED = 1 << 24  # columns whose number float32 holds

if TYPE_CHECKING:
    from kernlib.jit.spec import KernelSpec
    from kernlib.runtime.ahead import Planned


def reduced(reduction: str, formula: Formula, v, values: dict, **options) -> torch.Tensor:
    """The result of a function that reduces rows, by the name of what it does."""
    if reduction == "matmul":
        return matmul(formula, v, values, **options)
    return {"sum": total, "logsumexp": logsumexp}[reduction](formula, values, **options)


def columns_of(formula: Formula, values: dict) -> int:
    """How many columns a call has."""
    return arguments.checked(formula, values).cols


def mapped(formula: Formula, a, b, values: dict) -> dict:
    """The tensors of a call with its points, which a ``feature_map`` or a ``lengthscale`` among
    them changes first. Raises TypeError for points by place that the formula has not."""
    values = dict(values)
    feature_map, lengthscale = (values.pop(x, None) for x in ("feature_map", "lengthscale"))
    for name, t in (("a", a), ("b", b)):
        if t is not None and name not in formula.names:
            with_points(formula, (a, b))
        values |= {} if t is None else {name: t}
    if feature_map is None and lengthscale is None:
        return values
    if not formula.operands or not {"a", "b"} <= values.keys():
        name = "lengthscale" if feature_map is None else "feature_map"
        raise TypeError(f"{name} is of points a and b, which {formula.describe()} has not")
    from kernlib.families.pairwise import feature_map as maps  # most calls need none

    if lengthscale is not None and feature_map is not None:
        raise ValueError("lengthscale and feature_map exclude each other: multiply them")
    by = feature_map if lengthscale is None else 1 / lengthscale
    values["a"], values["b"] = maps.apply(by, values["a"], values["b"], None)
    return values


def run(formula: Formula, /, *points, out=None, debug: bool = False, **values) -> torch.Tensor:
    """The scores of all pairs, (M, N), or (L, M, N) where a tensor has a batch of L. ``points`` are
    a and b."""
    placed = with_points(formula, points)
    for name in placed.keys() & values.keys():
        raise TypeError(f"{name} is passed by place and by name: leave one out")
    values = mapped(formula, None, None, placed | values)
    call = arguments.checked(formula, values)
    if (plain := plain_of(formula.text, values)) is not None:
        return run_kernel(plain.descriptor, plain.a, plain.b, out=out, debug=debug, **plain.values)
    return _written(_reduced(MATRIX, formula, call, debug), call, out, values)


def matmul(formula: Formula, v, values: dict, out=None, debug=False, pairs: Pairs | None = None):
    """``sum_n score(m, n) v[n,c]``: (M, C), or (M,) of v (N,)."""
    check_dense(("v",), v=v)
    axes = (COL, FEATURE) if v.dim() > 1 else (COL,)
    call = arguments.checked(formula, values, v, axes)
    result = _reduced(TOTAL, formula, call, debug, axes[-1], pairs)
    result = result if FEATURE in axes else result.squeeze(-1)
    return _written(result, call, out, {**values, "v": v})


def total(formula: Formula, values: dict, debug=False, pairs: Pairs | None = None):
    """``sum_n score(m, n)``, (M,)."""
    call = arguments.checked(formula, values)
    return _written(_reduced(TOTAL, formula, call, debug, "", pairs).squeeze(-1), call)


def logsumexp(formula: Formula, values: dict, debug=False, pairs: Pairs | None = None):
    """``log sum_n exp(score(m, n))``, (M,)."""
    call = arguments.checked(formula, values)
    return _written(_reduced(LOGSUMEXP, formula, call, debug, "", pairs), call)


def softmax_matmul(formula: Formula, v, values: dict, debug=False, pairs: Pairs | None = None):
    """``sum_n p(m, n) v[n,c]`` with ``p(m, n) = exp(score(m, n)) / sum_n exp(score(m, n))``."""
    plain = arguments.checked(formula, values)
    normalizer = _reduced(LOGSUMEXP, formula, plain, debug, "", pairs)
    check_dense(("v",), v=v)
    axes = (COL, FEATURE) if v.dim() > 1 else (COL,)
    call = arguments.checked(formula, values, v, axes)
    result = _reduced(plans.SOFTMAX, formula, call, debug, axes[-1], pairs, normalizer)
    return _written(result if FEATURE in axes else result.squeeze(-1), call)


def count(
    formula: Formula, values: dict, threshold: float, debug=False, pairs: Pairs | None = None
) -> torch.Tensor:
    """How many scores of each row are at most ``threshold``, int64, (M,)."""
    call = _detached(arguments.checked(formula, values))
    if call.cols > MOST_COUNTED:
        raise ValueError(f"counts are of {MOST_COUNTED} columns at most, got {call.cols}")
    limit = _threshold(formula, call, threshold)
    counts = _reduced(plans.COUNT, formula, call, debug, "", pairs, limit).squeeze(-1)
    counts = counts.round().long()
    return counts if call.is_batched else counts[0]


def neighbors(
    formula: Formula, values: dict, threshold: float, pairs: Pairs | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Splits (M + 1,), columns and scores of the pairs whose score is at most ``threshold``."""
    from kernlib.families.pairwise.formula import blocks  # other calls need none

    recorded = arguments.checked(formula, values)
    if recorded.is_batched:
        raise ValueError(
            "a, b and their like must have no batch, as neighbours are a list: pass it as pairs"
        )
    call = _detached(recorded)
    limit = _threshold(formula, call, threshold)
    ranges = None if pairs is None else _ranges(call, pairs)[0]
    text, shape = headline_of(MATRIX, formula, call), (call.batch, call.rows, call.cols)
    matrix = blocks.Matrix(call.tensors, call.numbers, text, *shape, ranges)
    rows, cols, scores = blocks.below(matrix, limit)
    counts = torch.zeros(call.rows + 1, dtype=torch.int64, device=rows.device)
    splits = counts.index_add_(0, rows + 1, torch.ones_like(rows)).cumsum(0)
    if _is_recorded(recorded):
        scores = _of_pairs(formula, recorded, rows, cols)
    return splits, cols, scores.to(call.dtype)


def extreme(
    formula: Formula, values: dict, largest=False, debug=False, pairs: Pairs | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest, or largest, score of each row and its column, (M,) both."""
    call = arguments.checked(formula, values)
    if pairs is None and not call.cols:
        raise ValueError("the smallest of a row needs at least one column, and there are none")
    name = plans.GREATEST if largest else LEAST
    detached = _detached(call)
    entries, places = _reduced(name, formula, detached, debug, "", pairs)
    entries = -entries if largest else entries
    if _is_recorded(call) and call.cols:
        entries = _recorded_entries(formula, call, entries[..., None], places[..., None])[..., 0]
    return _written(entries, call), places if call.is_batched else places[0]


def topk(
    formula: Formula,
    values: dict,
    k: int,
    largest: bool = False,
    pairs: Pairs | None = None,
    debug: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k smallest, or largest, scores of each row in order and their columns, (M, k) both. A row
    that has less than k pairs has infinite ones behind them, of column -1."""
    from kernlib.families.pairwise.formula import operators  # 10 ms, as torch.library is

    call = arguments.checked(formula, values)
    if not 1 <= k <= call.cols:
        raise ValueError(f"k must be from 1 to the {call.cols} columns, got {k}")
    tensors = [t.detach() for t in call.tensors]
    tensors += () if pairs is None else _ranges(call, pairs)
    text = headline_of(MATRIX, formula, call, "", pairs is not None)
    text = operators.nearest_text(text, largest)
    sizes = [call.batch, call.rows, call.cols, k]
    entries, places = _called("formula_nearest", tensors, call.numbers, text, sizes, debug)
    if _is_recorded(call):
        entries = _recorded_entries(formula, call, entries, places)
    return _written(entries, call), places if call.is_batched else places[0]


def with_points(formula: Formula, points: tuple) -> dict:
    """Tensors by place, by the names that they have. Raises TypeError for tensors without one."""
    names = formula.operands
    if len(points) > len(names):
        takes = f"a and b by place, got {len(points)}" if names else "its tensors by name"
        raise TypeError(f"{formula.describe()} takes {takes}: {formula.call}")
    return dict(zip(names, points, strict=False))


def headline_of(reduction: str, formula: Formula, call: Call, weighted="", ranged=False) -> str:
    return plans.headline(reduction, formula.text, " ".join(call.on_host), weighted, ranged)


def _reduced(
    reduction: str, formula: Formula, call: Call, debug: bool, weighted="", pairs=None, more=None
):
    """The result with its batch, in the dtype of the arithmetic."""
    text = headline_of(reduction, formula, call, weighted, pairs is not None)
    tensors = list(call.tensors)
    if more is not None:
        tensors.insert(len(tensors) - bool(weighted), more)
    tensors += () if pairs is None else _ranges(call, pairs)
    sizes = [call.batch, call.rows, call.cols, call.features]
    from kernlib.families.pairwise.formula import operators  # 10 ms, as torch.library is

    return _called(operators.OF_REDUCTION[reduction], tensors, call.numbers, text, sizes, debug)


def _called(name: str, *request):
    """The result of an operator. Dynamo sees that alone."""
    if is_dynamo_compiling():
        from kernlib.families.pairwise.formula import operators

        return operators.BY_NAME[name](*request)
    from kernlib.families.pairwise.formula import transforms  # 10 ms, as torch.library is

    return transforms.call(name, *request)


def _ranges(call: Call, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
    """Raises TypeError and ValueError for pairs that do not fit a call."""
    if not isinstance(pairs, Pairs):
        raise TypeError(f"pairs must be a kl.Pairs, as from_splits makes, got {shown(pairs)}")
    if pairs.shape != (call.rows, call.cols):
        raise ValueError(
            f"pairs are of {pairs.shape[0]} rows and {pairs.shape[1]} columns, and the tensors "
            f"have {call.rows} and {call.cols}"
        )
    if call.is_batched:
        raise ValueError("pairs are batches already: pass tensors without a batch in front")
    device = call.tensors[0].device
    if pairs.rows.device != device:
        raise ValueError(
            f"pairs are on {pairs.rows.device}, the tensors on {device}: pairs.to(...)"
        )
    return pairs.rows, pairs.cols


def _detached(call: Call) -> Call:
    # Field by field: Dynamo of torch 2.8 knows no part of a named tuple.
    return Call(
        [t.detach() for t in call.tensors], call.numbers, call.on_host, call.batch, call.rows,
        call.cols, call.features, call.is_batched, call.dtype,
    )  # fmt: skip


def _threshold(formula: Formula, call: Call, threshold: float) -> torch.Tensor:
    """A number as the kernels' input. Raises TypeError and ValueError for what is none."""
    plan = plans.spec_of(headline_of(MATRIX, formula, call), call.tensors)
    wide, device = plans.arithmetic(call.tensors, plan.inputs), call.tensors[0].device
    value = host_value("threshold", threshold, 0)
    if value is None:
        check_tensor("threshold", threshold, frozenset(), dimensions=0)
        return on_device("threshold", threshold.detach().reshape(1), device, wide)
    check_host("threshold", value, frozenset())
    most = torch.finfo(wide).max
    value = value if -most <= value <= most else math.copysign(math.inf, value)
    return torch.full((1,), value, dtype=wide, device=device)


def _is_recorded(call: Call) -> bool:
    if not is_dynamo_compiling() and (
        _are_functorch_transforms_active() or forward_ad._current_level >= 0
    ):
        return True
    return torch.is_grad_enabled() and any([t.requires_grad for t in call.tensors])


def _recorded_entries(formula: Formula, call: Call, entries, places: torch.Tensor):
    """The scores of chosen columns of each row, differentiable by torch; those of no column, and
    infinite ones, as they are."""
    from kernlib.families.pairwise.formula import reference

    plan = plans.spec_of(headline_of(MATRIX, formula, call), call.tensors)
    values = plans.values_of(plan, call.tensors, call.numbers)
    wide = plans.arithmetic(call.tensors, plan.inputs)
    recorded = reference.chosen(plan, values, places.clamp(min=0), wide)
    return torch.where(entries.isinf(), entries, recorded)


def _of_pairs(formula: Formula, call: Call, rows: torch.Tensor, cols: torch.Tensor):
    """The scores of pairs by their rows and columns, differentiable by torch."""
    from kernlib.families.pairwise.formula import reference

    plan = plans.spec_of(headline_of(MATRIX, formula, call), call.tensors)
    of = [each for each in plan.inputs if not each.on_host]
    tensors = [
        t[:, rows] if ROW in x.axes else t for t, x in zip(call.tensors, of, strict=True)
    ]  # each pair a row
    values = plans.values_of(plan, tensors, call.numbers)
    wide = plans.arithmetic(call.tensors, plan.inputs)
    return reference.chosen(plan, values, cols[None, :, None], wide, rows)[0, :, 0]


def _written(result: torch.Tensor, call: Call, out=None, inputs: dict | None = None):
    """The result in its dtype, without a batch if no tensor has one, perhaps written to ``out``."""
    result = (result if call.is_batched else result[0]).to(call.dtype)
    if out is None:
        return result
    if torch.is_grad_enabled() and result.requires_grad:
        raise RuntimeError("out takes no gradient: leave it out, or call under torch.no_grad()")
    check_dense(("out",), out=out)
    check_result(out, tuple(result.shape), result)
    check_memory(out)
    tensors = {k: t for k, t in (inputs or {}).items() if isinstance(t, torch.Tensor)}
    refuse_any_overlap(out, **tensors)
    return out.copy_(result)


RUNS = {Formula: run}


# Calls before anybody makes them.


def call_of(formula: Formula, tensors: tuple, values: dict) -> Callable:
    """The call that is meant, which a ``reduction`` among the arguments names."""
    # By its name, as that module loads this one.
    functions = import_module("kernlib.families.pairwise.operation").reductions()
    values = dict(values)
    if "reduction" not in values:
        return partial(run, formula, *tensors, **values)
    name = values.pop("reduction")
    name = getattr(name, "__name__", name)
    if not isinstance(name, str) or name not in functions:
        raise ValueError(f"reduction must be one of {', '.join(functions)}, got {shown(name)}")
    return partial(functions[name], formula, *tensors, **values)


def planned(formula: Formula, tensors: tuple, values: dict) -> list[Planned]:
    """Calls of formulas have no plan that can be made before."""
    return []


def variants(formula: Formula, arch: str, dtypes: tuple[torch.dtype, ...]) -> list[KernelSpec]:
    """Raises ValueError: the kernels of a formula depend on the sizes of its tensors."""
    raise ValueError(
        f"the kernels of {formula.describe()} depend on numbers of features: pass the tensors of a "
        "call, as in kl.compile(formula, specs=(), x=..., y=...)"
    )

"""Calls of formulas: what :mod:`kernlib.families.pairwise.functions.reductions` documents, of the
scores of a :class:`kernlib.Formula`. ``values`` are its tensors and numbers by name; ``ranges``,
of rows (M, 2) and of columns (N, 2), say which pairs there are."""

from __future__ import annotations

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
from kernlib.families.pairwise.formula.spec import COL, FEATURE, LEAST, LOGSUMEXP, MATRIX, TOTAL
from kernlib.runtime.tensors import check_dense, check_memory, refuse_any_overlap

if TYPE_CHECKING:
    from kernlib.jit.spec import KernelSpec
    from kernlib.runtime.ahead import Planned

Ranges = tuple[torch.Tensor, torch.Tensor]


def reduced(reduction: str, formula: Formula, a, b, v, values: dict, **options):
    """A function that reduces rows, by the name of what it does."""
    values = mapped(formula, a, b, values)
    if reduction == "matmul":
        return matmul(formula, v, values, **options)
    return {"sum": total, "logsumexp": logsumexp}[reduction](formula, values, **options)


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
    return _written(_reduced(MATRIX, formula, call, debug), call, out, values)


def matmul(formula: Formula, v, values: dict, out=None, debug=False, ranges: Ranges | None = None):
    """``sum_n score(m, n) v[n,c]``: (M, C), or (M,) of v (N,)."""
    axes = (COL, FEATURE) if isinstance(v, torch.Tensor) and v.dim() > 1 else (COL,)
    call = arguments.checked(formula, values, v, axes)
    result = _reduced(TOTAL, formula, call, debug, axes[-1], ranges)
    result = result if FEATURE in axes else result.squeeze(-1)
    return _written(result, call, out, {**values, "v": v})


def total(formula: Formula, values: dict, debug=False, ranges: Ranges | None = None):
    """``sum_n score(m, n)``, (M,)."""
    call = arguments.checked(formula, values)
    return _written(_reduced(TOTAL, formula, call, debug, "", ranges).squeeze(-1), call)


def logsumexp(formula: Formula, values: dict, debug=False, ranges: Ranges | None = None):
    """``log sum_n exp(score(m, n))``, (M,)."""
    call = arguments.checked(formula, values)
    return _written(_reduced(LOGSUMEXP, formula, call, debug, "", ranges), call)


def extreme(
    formula: Formula, values: dict, largest=False, debug=False, ranges: Ranges | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest, or largest, score of each row and its column, (M,) both."""
    call = arguments.checked(formula, values)
    if ranges is None and not call.cols:
        raise ValueError("the smallest of a row needs at least one column, and there are none")
    name = plans.GREATEST if largest else LEAST
    detached = call._replace(tensors=[t.detach() for t in call.tensors])
    entries, places = _reduced(name, formula, detached, debug, "", ranges)
    entries = -entries if largest else entries
    if _is_recorded(call):
        entries = _chosen(formula, call, places[..., None])[..., 0]
    return _written(entries, call), places if call.is_batched else places[0]


def topk(
    formula: Formula, values: dict, k: int, largest: bool = False, debug: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k smallest, or largest, scores of each row in order and their columns, (M, k) both."""
    from kernlib.families.pairwise.formula import operators  # 10 ms, as torch.library is

    call = arguments.checked(formula, values)
    if not 1 <= k <= call.cols:
        raise ValueError(f"k must be from 1 to the {call.cols} columns, got {k}")
    detached = [t.detach() for t in call.tensors]
    text = operators.nearest_text(headline_of(MATRIX, formula, call), largest)
    sizes = [call.batch, call.rows, call.cols, k]
    entries, places = _called("formula_nearest", detached, call.numbers, text, sizes, debug)
    if _is_recorded(call):
        entries = _chosen(formula, call, places)
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


def _reduced(reduction: str, formula: Formula, call: Call, debug: bool, weighted="", ranges=None):
    """The result with its batch, in the dtype of the arithmetic."""
    from kernlib.families.pairwise.formula import operators  # 10 ms, as torch.library is

    text = headline_of(reduction, formula, call, weighted, ranges is not None)
    tensors = [*call.tensors, *(ranges or ())]
    sizes = [call.batch, call.rows, call.cols, call.features]
    return _called(operators.OF_REDUCTION[reduction], tensors, call.numbers, text, sizes, debug)


def _called(name: str, *request):
    """The result of an operator, inside of transforms of torch.func too."""
    if _are_functorch_transforms_active() and not is_dynamo_compiling():
        from kernlib.families.pairwise.formula import transforms

        return transforms.call(name, *request)
    from kernlib.families.pairwise.formula import operators

    return operators.BY_NAME[name](*request)


def _is_recorded(call: Call) -> bool:
    if not is_dynamo_compiling() and (
        _are_functorch_transforms_active() or forward_ad._current_level >= 0
    ):
        return True
    return torch.is_grad_enabled() and any([t.requires_grad for t in call.tensors])


def _chosen(formula: Formula, call: Call, places: torch.Tensor) -> torch.Tensor:
    """The scores of chosen columns of each row, differentiable by torch."""
    from kernlib.families.pairwise.formula import reference

    plan = plans.spec_of(headline_of(MATRIX, formula, call), call.tensors)
    values = plans.values_of(plan, call.tensors, call.numbers)
    wide = plans.arithmetic(call.tensors, plan.inputs)
    return reference.chosen(plan, values, places, wide)


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

"""Calls of reductions of kernel matrices, without gradients but those of chosen entries. A request
is ``(reduction, descriptor, a, b, v, out, row_offset, col_offset, values, wide)``, as :func:`run`
takes them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.matrix import kind_of_number, numbers_of, precision
from kernlib.families.pairwise.reductions import arguments as checks
from kernlib.families.pairwise.reductions import kernels
from kernlib.families.pairwise.reductions.arguments import Nearest, Request, Shape
from kernlib.runtime import rehearsal
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.operation import KERNELS, OPERATOR, REFERENCE, Operation, bind
from kernlib.runtime.precision import without_autocast
from kernlib.runtime.tensors import (
    UNREADABLE,
    check_dense,
    is_lazy,
    is_mapped,
    materialised,
    ranges_meet,
    refuse_any_overlap,
    refuse_overlap,
    signature,
    span,
    stand_ins,
)


class CallPlan(NamedTuple):
    """What a call of one signature needs besides its tensors and numbers."""

    descriptor: Pairwise  # symmetric no more
    shape: Shape
    size: tuple[int, ...]  # of the result
    dtype: torch.dtype  # of the result
    wide: torch.dtype  # of the arithmetic, in which kernels write
    device: torch.device
    spans: tuple[int, ...]  # bytes from first to last element of a, b, v, out
    folded: bool  # the batch of v becomes columns of one product
    launch: kernels.ReductionPlan | None  # None where blocks are reduced
    partial: tuple[int, ...]  # shape of what the kernels write
    writes_out: bool  # whether they can write out itself


def run(
    reduction: str | Nearest,
    descriptor: Pairwise,
    a: torch.Tensor,
    b: torch.Tensor | None,
    v: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    row_offset: int = 0,
    col_offset: int = 0,
    values: dict | None = None,
    wide: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``matmul``, ``sum`` or ``logsumexp`` as :mod:`kernlib.families.pairwise.functions.reductions`
    documents them, or ``min`` or a ``Nearest``: values and places. A result without ``out`` has the
    inputs' dtype, or, if ``wide``, that of the arithmetic. Raises ValueError, TypeError."""
    if b is a and getattr(descriptor, "symmetric", False):
        b = None
    request = reduction, descriptor, a, b, v, out, row_offset, col_offset, values or {}, wide
    return _execute(*request)


def key(reduction, descriptor, a, b, v, out, row_offset, col_offset, values, wide) -> tuple:
    """All that a plan depends on, as in :mod:`kernlib.families.pairwise.operation`."""
    try:
        key = (
            reduction,
            descriptor,
            signature(a),
            None if b is None else signature(b),
            None if v is None else signature(v),
            None if out is None else signature(out),
            row_offset,
            col_offset,
            wide,
            precision(descriptor),
        )
        for name, value in values.items():
            key += (name, kind_of_number(name, value))
    except UNREADABLE:
        if stand_ins(a, b, v, out, *values.values()) or _is_mapped(a, b, v, out, values):
            return None
        checks.request_of(descriptor, a, b, v, row_offset, col_offset, values)
        check_dense((), out=out)
        raise
    return key


def _is_mapped(a, b, v, out, values: dict) -> bool:
    """Whether torch.vmap maps over a call without an ``out``, which is the operator's then."""
    return out is None and is_mapped(a, b, v, *values.values())


class Call(NamedTuple):
    """A checked call."""

    request: Request
    shape: Shape
    size: tuple[int, ...]  # of the result


def _check(
    reduction, descriptor, a, b, v, out, row_offset, col_offset, values: dict, wide: bool
) -> Call | None:
    """Raises ValueError and TypeError; the operator does for what is mapped over."""
    if _is_mapped(a, b, v, out, values):
        return None
    request = checks.request_of(descriptor, a, b, v, row_offset, col_offset, values)
    shape = checks.shape_of(request, reduction)
    size = (shape.batch, shape.m) if shape.batched else (shape.m,)
    if v is not None and v.dim() > 1:
        size = (*size, shape.columns)
    elif isinstance(reduction, Nearest):
        size = (*size, reduction.k)
    if not a.is_meta or rehearsal.on_gpu(a.device):
        if out is not None:
            checks.check_out(out, size, request)
        if reduction == "min":
            checks.check_some(shape.n)
    return Call(request, shape, size)


def _way(call: Call | None, reduction, descriptor, a, *rest) -> str:
    if call is None or (a.is_meta and not rehearsal.on_gpu(a.device)):
        return OPERATOR  # which knows as much of meta tensors
    # By the plan of an empty call nothing would look at numbers.
    return REFERENCE if 0 in call.shape[:4] else KERNELS


def _reference(call: Call, *request):
    return launch(_plan(call, *request), *request)


def _plan(
    call: Call, reduction, descriptor, a, b, v, out, row_offset, col_offset, values, wide: bool
) -> CallPlan:
    """The plan of a checked call, its kernels loaded."""
    request, shape, size = call
    folded = reduction == "matmul" and v is not None and v.dim() == 3
    folded = folded and v.shape[0] > 1 and shape.matrices == 1
    launch = None if folded else kernels.plan(reduction, request, shape)
    arithmetic = accumulator(a.dtype)
    dtype = arithmetic if wide else a.dtype
    return CallPlan(
        descriptor=request.descriptor,
        shape=shape,
        size=size,
        dtype=dtype if out is None else out.dtype,
        wide=arithmetic,
        device=a.device,
        spans=tuple(0 if t is None else span(t) for t in (a, request.b, v, out)),
        folded=folded,
        launch=launch,
        partial=size if launch is None or launch.splits == 1 else (launch.splits, *size),
        writes_out=out is not None and out.dtype == arithmetic and out.is_contiguous(),
    )


def _tensors(
    reduction, descriptor, a, b, v, out, row_offset, col_offset, values: dict, wide
) -> tuple:
    return a, b, v, out, *values.values()


def _materialised(reduction, descriptor, a, b, v, out, *rest) -> tuple | None:
    if not any(t is not None and is_lazy(t) for t in (a, b, v)):
        return None
    refuse_any_overlap(out, a=a, b=b, v=v)
    a, b, v = (t if t is None else materialised(t) for t in (a, b, v))
    return reduction, descriptor, a, b, v, out, *rest


def _refuse_overlap(plan: CallPlan, out: torch.Tensor, values: dict, **inputs) -> None:
    """Raises ValueError when ``out`` shares memory with an input."""
    named = {name: t for name, t in inputs.items() if t is not None}
    ranges = [(t.data_ptr(), length) for t, length in zip(named.values(), plan.spans, strict=False)]
    if ranges_meet(out.data_ptr(), plan.spans[3], ranges):
        refuse_overlap(out, **named)
    if any(isinstance(value, torch.Tensor) for value in values.values()):
        refuse_overlap(out, **{k: t for k, t in values.items() if isinstance(t, torch.Tensor)})


def _without_kernels(reduction, plan: CallPlan, a, b, v, row_offset, col_offset, values: dict):
    """Values of the arithmetic's dtype, in any shape of their number; places too where these are
    asked for."""
    if plan.folded:  # this computes the matrix once
        shape = plan.shape
        flat = v.movedim(0, 1).reshape(shape.n, shape.batch * shape.columns)
        offsets = row_offset, col_offset
        product = run(reduction, plan.descriptor, a, b, flat, None, *offsets, values, True)
        return product.view(shape.m, shape.batch, shape.columns).movedim(1, 0)
    from kernlib.families.pairwise.reductions import blocks  # plans of kernels need none

    v = v[:, None] if v is not None and v.dim() == 1 else v
    request = Request(plan.descriptor, a, b, v, row_offset, col_offset, values)
    with torch.no_grad(), without_autocast(plan.device):
        if isinstance(reduction, Nearest):
            return blocks.topk(request, plan.shape, *reduction)
        return blocks.REDUCTIONS[reduction](request, plan.shape)


def launch(
    plan: CallPlan, reduction, descriptor, a, b, v, out, row_offset, col_offset, values, wide
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    second = a if b is None else b
    if out is not None:
        _refuse_overlap(plan, out, values, a=a, b=second, v=v)
    if plan.launch is None:
        result = _without_kernels(reduction, plan, a, second, v, row_offset, col_offset, values)
        return _finished(result, plan, out)
    return _by_kernels(reduction, plan, a, second, v, out, values)


def _by_kernels(reduction: str | Nearest, plan: CallPlan, a, b, v, out, values: dict):
    """The result of the kernels."""
    launch, numbers, converted = plan.launch, None, None
    if values:
        numbers, converted = numbers_of(launch.scalars, a, values)
    places, direct = None, plan.writes_out and launch.splits == 1
    result = out if direct else torch.empty(plan.partial, dtype=plan.wide, device=plan.device)
    if reduction == "min" or isinstance(reduction, Nearest):
        places = torch.empty(plan.partial, dtype=torch.int64, device=plan.device)
    of_v = 0 if v is None else v.data_ptr()
    of_places = 0 if places is None else places.data_ptr()
    if direct and not out.is_inference():  # inference tensors have no version
        torch.autograd.graph.increment_version(out)
    for part, in_v, in_values in launch.launches:
        pointers = a.data_ptr(), b.data_ptr(), of_v + in_v, result.data_ptr() + in_values, of_places
        part.launch(pointers, numbers)
    del converted  # the stream orders the reuse of their memory behind the launch
    if direct:
        return out
    if launch.splits > 1:
        if reduction == "min":
            result, split = result.min(0)
            places = places.gather(0, split[None])[0]
        else:
            result = result.logsumexp(0) if reduction == "logsumexp" else result.sum(0)
    if places is None and out is None and plan.dtype == plan.wide:
        return result
    return _finished(result if places is None else (result, places), plan, out)


def _finished(found, plan: CallPlan, out):
    """Values, and places if there are some, in the result's shape, values in its dtype."""
    if isinstance(found, tuple):
        found, places = found
        return found.reshape(plan.size).to(plan.dtype), places.reshape(plan.size)
    found = found.reshape(plan.size)
    return found.to(plan.dtype).contiguous() if out is None else out.copy_(found)


def _rehearsed(plan: CallPlan, reduction, descriptor, a, b, v, out, *rest):
    if plan.launch is None:
        return launch(plan, reduction, descriptor, a, b, v, out, *rest)
    result = torch.empty(plan.size, dtype=plan.dtype, device=plan.device) if out is None else out
    if reduction == "min" or isinstance(reduction, Nearest):
        return result, torch.empty(plan.size, dtype=torch.int64, device=plan.device)
    return result


REDUCTION = Operation(
    name="pairwise_reduce",
    operators="kernlib.families.pairwise.reductions.operators",
    key=key,
    check=_check,
    way=_way,
    reference=_reference,
    plan=_plan,
    launch=launch,
    tensors=_tensors,
    materialised=_materialised,
    rehearsed=_rehearsed,
)
_bound = bind(REDUCTION)
_execute, find = _bound.execute, _bound.find


# Reductions that choose entries of each row: the smallest, and the k nearest. Their gradients are
# those of the chosen pairs alone.


def choose(
    reduction: str, descriptor: Pairwise, a, b, k: int, largest: bool, rows, columns, values: dict
) -> tuple[torch.Tensor, torch.Tensor]:
    """``topk``, or ``min``, whose k is 1: values and places as
    :mod:`kernlib.families.pairwise.functions.reductions` documents them. ``rows`` and ``columns``
    are the offsets."""
    traced = rehearsal.is_traced() or stand_ins(a, b) or is_mapped(a, b, *values.values())
    if traced or (getattr(a, "is_meta", False) is True and rehearsal.current() is None):
        from kernlib import run as ops

        if not traced:  # for meta tensors operators would say less
            shape = checks.check_meta(descriptor, a, b, None, rows, columns, values)
            checks.check_k(k, shape.n)
        return ops.pairwise_reduce_operators.choose(
            reduction, descriptor, a, b, k, largest, rows, columns, values
        )
    request = checks.request_of(descriptor, a, b, None, rows, columns, values)
    entries, places = chosen(reduction, request, k, largest)
    if torch.is_grad_enabled() and any(t.requires_grad for t in request.tensors().values()):
        batched = places if places.dim() == 3 else places[None]
        entries = pair_values(request, batched).view(places.shape)
    entries = entries.to(a.dtype)
    return (entries, places) if reduction == "topk" else (entries.squeeze(-1), places.squeeze(-1))


def chosen(reduction: str, request: Request, k: int, largest: bool):
    """Values and places, (M, k) or (L, M, k), without a gradient, in the arithmetic's dtype."""
    descriptor, a, b, _, *offsets, values = request
    with torch.no_grad():
        if reduction == "min":
            entry, place = run("min", descriptor, a, b, None, None, *offsets, values, wide=True)
            return entry[..., None], place[..., None]
        checks.check_k(k, checks.shape_of(request).n)
        nearest = Nearest(k, largest)
        return run(nearest, descriptor, a, b, None, None, *offsets, values, wide=True)


def pair_values(request: Request, indices: torch.Tensor) -> torch.Tensor:
    """The entries ``K[l,m,indices[l,m,j]]`` as (L, M, J), differentiable: a batch of as many
    matrices of one row as there are rows."""
    from kernlib.families.pairwise.gradients.autograd import kernel_matrix

    batch, rows, count = indices.shape
    wide = accumulator(request.a.dtype)
    a, b = (t.to(wide) if t.dim() == 3 else t[None].to(wide) for t in (request.a, request.b))
    near = _chosen_points(b, indices)
    features, values = a.shape[-1], dict(request.hyperparameters)
    added = values.pop("regularization", None)
    pairs = kernel_matrix(
        request.descriptor,
        a.expand(batch, -1, -1).reshape(batch * rows, 1, features),
        near.reshape(batch * rows, count, features),
        **{name: _for_rows(value, rows) for name, value in values.items()},
    ).view(batch, rows, count)
    if added is None:
        return pairs
    if isinstance(added, torch.Tensor):
        added = added.to(pairs.device, pairs.dtype)
        added = added[:, None, None] if added.dim() else added
    on_diagonal = _places(indices, 1) + request.row_offset == indices + request.col_offset
    return pairs + added * on_diagonal.to(pairs.dtype)


def _chosen_points(b: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """``b[l,indices[l,m,j]]``, (L, M, J, K). In float64 where a gradient is recorded: the gradient
    of a point that many rows have chosen is summed term by term, which is 1e-5 off in float32 for
    7000 terms."""
    points = b.to(torch.float64) if b.requires_grad else b
    near = points[0][indices] if b.shape[0] == 1 else points[_places(indices, 0), indices]
    return near.to(b.dtype)


def _places(indices: torch.Tensor, dim: int) -> torch.Tensor:
    """0, 1, ... along a dimension, of size 1 along the others."""
    index = [slice(None) if d == dim else slice(1) for d in range(3)]
    return torch.ones_like(indices[tuple(index)]).cumsum(dim) - 1


def _for_rows(value, rows: int):
    """A hyperparameter (L,) for each row of each entry of the batch."""
    several = isinstance(value, torch.Tensor) and value.dim() == 1 and value.shape[0] != 1
    return value[:, None].expand(-1, rows).reshape(-1) if several else value

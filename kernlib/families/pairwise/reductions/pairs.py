"""Reductions of a kernel matrix that choose entries of each row: the smallest, and the k nearest.
Their gradients are those of the chosen pairs alone."""

from __future__ import annotations

import torch

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.reductions import arguments, operation
from kernlib.families.pairwise.reductions.arguments import Nearest, Request
from kernlib.run import run_kernel
from kernlib.runtime import rehearsal
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.tensors import is_mapped, stand_ins


def run(
    reduction: str, descriptor: Pairwise, a, b, k: int, largest: bool, rows, columns, values: dict
) -> tuple[torch.Tensor, torch.Tensor]:
    """``topk``, or ``min``, whose k is 1: values and places as
    :mod:`kernlib.families.pairwise.functions.reductions` documents them. ``rows`` and ``columns``
    are the offsets."""
    recorded = operation.is_recorded() or stand_ins(a, b) or is_mapped(a, b, *values.values())
    if recorded or (getattr(a, "is_meta", False) is True and rehearsal.current() is None):
        from kernlib import run as ops

        if not recorded:  # of meta tensors operators would say less
            found = arguments.check_meta(descriptor, a, b, None, rows, columns, values)
            arguments.check_k(k, found.n)
        return ops.pairwise_reduce_operators.choose(
            reduction, descriptor, a, b, k, largest, rows, columns, values
        )
    request = arguments.request_of(descriptor, a, b, None, rows, columns, values)
    found, places = chosen(reduction, request, k, largest)
    if torch.is_grad_enabled() and any(t.requires_grad for t in request.tensors().values()):
        batched = places if places.dim() == 3 else places[None]
        found = pair_values(request, batched).view(places.shape)
    found = found.to(a.dtype)
    return (found, places) if reduction == "topk" else (found.squeeze(-1), places.squeeze(-1))


def chosen(reduction: str, request: Request, k: int, largest: bool):
    """Values and places, (M, k) or (L, M, k), without a gradient, in the arithmetic's dtype."""
    descriptor, a, b, _, *offsets, values = request
    with torch.no_grad():
        if reduction == "min":
            found = operation.run("min", descriptor, a, b, None, None, *offsets, values, wide=True)
            return tuple(t[..., None] for t in found)
        arguments.check_k(k, arguments.shape_of(request).n)
        wanted = Nearest(k, largest)
        return operation.run(wanted, descriptor, a, b, None, None, *offsets, values, wide=True)


def pair_values(request: Request, indices: torch.Tensor) -> torch.Tensor:
    """The entries ``K[l,m,indices[l,m,j]]`` as (L, M, J), differentiable: a batch of as many
    matrices of one row as there are rows."""
    batch, rows, count = indices.shape
    wide = accumulator(request.a.dtype)
    a, b = (t.to(wide) if t.dim() == 3 else t[None].to(wide) for t in (request.a, request.b))
    near = _chosen_points(b, indices)
    features, values = a.shape[-1], dict(request.hyperparameters)
    added = values.pop("regularization", None)
    pairs = run_kernel(
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
    """``b[l,indices[l,m,j]]``, (L, M, J, K). In float64 where a gradient is recorded: that of a
    point that many rows have chosen is a sum of one term after the other, of 7000 of them 1e-5 off
    in float32."""
    points = b.to(torch.float64) if b.requires_grad else b
    near = points[0][indices] if b.shape[0] == 1 else points[_places(indices, 0), indices]
    return near.to(b.dtype)


def _places(indices: torch.Tensor, dim: int) -> torch.Tensor:
    """0, 1, ... along a dimension, of size 1 along the others."""
    others = [slice(None) if d == dim else slice(1) for d in range(3)]
    return torch.ones_like(indices[tuple(others)]).cumsum(dim) - 1


def _for_rows(value, rows: int):
    """A hyperparameter (L,) for each row of each entry of the batch."""
    several = isinstance(value, torch.Tensor) and value.dim() == 1 and value.shape[0] != 1
    return value[:, None].expand(-1, rows).reshape(-1) if several else value

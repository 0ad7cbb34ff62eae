"""Reductions of matrices with categories, by blocks that are computed, reduced and forgotten.

Backward makes blocks of rows again, as
:mod:`kernlib.families.pairwise.categories.operation` does, and reduces them by operators of torch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch._C import _are_functorch_transforms_active

from kernlib.families.pairwise import checks
from kernlib.families.pairwise.categories import arguments, operation
from kernlib.families.pairwise.categories.arguments import Tables
from kernlib.families.pairwise.categories.operation import Call
from kernlib.families.pairwise.descriptor import CODES, Pairwise
from kernlib.families.pairwise.gradients.products import multiplied
from kernlib.families.pairwise.reductions import arguments as reduced
from kernlib.families.pairwise.reductions import blocks
from kernlib.families.pairwise.reductions.arguments import Nearest, Shape
from kernlib.families.pairwise.request import Request
from kernlib.runtime import rehearsal
from kernlib.runtime.precision import without_autocast
from kernlib.runtime.tensors import refuse_any_overlap, stand_ins

_V = "v"  # its name among the tensors of a call


class Reduction(NamedTuple):
    """``name`` is "matmul", "sum", "logsumexp", "min" or "topk", which has ``nearest``."""

    name: str
    nearest: Nearest | None = None


@torch.compiler.disable
def run(
    reduction: Reduction,
    descriptor: Pairwise,
    a,
    b,
    v,
    out,
    row_offset,
    col_offset,
    values: dict,
    wide: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """A reduction as :mod:`kernlib.families.pairwise.functions.reductions` documents it.

    Raises ValueError and TypeError that name the argument, RuntimeError for an ``out`` while
    gradients are recorded, and TypeError for tensors without memory.
    """
    codes, values = arguments.separate(descriptor, values)
    tensors = {"a": a, "b": b, "v": v, "out": out} | dict(zip(CODES, codes, strict=True))
    _refuse_without_memory(descriptor, tensors)
    refuse_any_overlap(out, **{name: t for name, t in tensors.items() if name != "out"})
    points, tables = arguments.placed(descriptor, a, b, codes)
    arguments.check_exponents(descriptor, values)
    plain, offsets = operation.numerical(descriptor), (row_offset, col_offset)
    request = reduced.request_of(plain, points, b, v, *offsets, values)
    shape = reduced.shape_of(request, reduction.name)
    size = _size(reduction, shape, v)
    if out is not None:
        checks.refuse_out(out, out=out, tables=tables.flat, **request.tensors())
        reduced.check_out(out, size, request)
    placed = request._replace(
        descriptor=descriptor,
        hyperparameters=request.hyperparameters | dict(zip(CODES, codes, strict=True)),
    )
    with torch.no_grad(), without_autocast(a.device):
        result = _computed(reduction, placed, shape)
    result, places = result if isinstance(result, tuple) else (result, None)
    result = _recorded(reduction, descriptor, request, tables, result, places)
    result = result.reshape(size)
    if out is not None:
        return out.copy_(result)
    result = (result if wide else result.to(a.dtype)).contiguous()
    return result if places is None else (result, places.reshape(size))


def _refuse_without_memory(descriptor: Pairwise, given: dict) -> None:
    if rehearsal.current() is not None:
        checks.refuse_categories(descriptor)
    for name, t in given.items():
        if isinstance(t, torch.Tensor) and (t.is_meta or stand_ins(t)):
            raise TypeError(
                f"{name} has no memory (a meta or fake tensor), which reductions with categories "
                "need; run_kernel gives the matrix itself"
            )


def _size(reduction: Reduction, shape: Shape, v) -> tuple[int, ...]:
    """The result's shape. Raises ValueError where there is nothing to choose from."""
    size = (shape.batch, shape.m) if shape.batched else (shape.m,)
    if reduction.name == "min":
        reduced.check_some(shape.n)
    if reduction.nearest is not None:
        reduced.check_k(reduction.nearest.k, shape.n)
        return (*size, reduction.nearest.k)
    return (*size, shape.columns) if v is not None and v.dim() > 1 else size


def _computed(reduction: Reduction, request: reduced.Request, shape: Shape):
    """Values in the arithmetic's dtype, and places too where entries are chosen."""
    v = request.v
    is_product = reduction.name == "matmul"
    if is_product and v.dim() == 3 and v.shape[0] > 1 and shape.matrices == 1:
        # The matrix is computed once, for the columns of all entries of the batch.
        folded = v.movedim(0, 1).reshape(shape.n, shape.batch * shape.columns)
        once = shape._replace(batch=1, columns=shape.batch * shape.columns)
        product = blocks.matmul(request._replace(v=folded), once)
        return product.view(shape.m, shape.batch, shape.columns).movedim(1, 0)
    if reduction.nearest is not None:
        return blocks.topk(request, shape, *reduction.nearest)
    return blocks.REDUCTIONS[reduction.name](request, shape)


# Gradients. Results are (M, R) or (L, M, R) there, R being columns of v, chosen entries, or 1.


class _Reduced(NamedTuple):
    """A call and the reduction of its matrix."""

    call: Call
    reduction: Reduction
    places: torch.Tensor | None

    def of_rows(self, rows: slice) -> _Reduced:
        places = self.places if self.places is None else self.places[..., rows, :]
        return self._replace(call=self.call.of_rows(rows), places=places)

    def computed(self, *sides) -> torch.Tensor:
        """By operators that are differentiable."""
        request, tables = self.call.of(*sides)
        values = dict(request.hyperparameters)
        v = values.pop(_V, None)
        k = operation.matrix(request._replace(hyperparameters=values), tables)
        if self.places is not None:
            return k.gather(-1, self.places.view(*k.shape[:-1], -1))
        if self.reduction.name == "matmul":
            return multiplied(request.descriptor.precision, k, v.to(k.dtype))
        if self.reduction.name == "logsumexp":
            return (k if v is None else k + v.mT).logsumexp(-1, keepdim=True)
        return k.sum(-1, keepdim=True)


def _recorded(
    reduction: Reduction, descriptor, request: reduced.Request, tables: Tables, found, places
) -> torch.Tensor:
    """The result, with a record of gradients where one is needed."""
    named = request.tensors() | {"tables": tables.flat}
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in named.values())):
        return found
    _, a, b, v, *offsets, values = request
    rest = {} if v is None else {_V: v}
    rest |= {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    template = Request(descriptor, None, None, None, False, *offsets, values)
    call = Call(template, tables._replace(flat=None), tuple(rest))
    flat = a.dim() == b.dim() == tables.a_codes.dim() == tables.b_codes.dim() == 2
    flat = flat and tables.flat.dim() == 1 and (v is None or v.dim() == 2)
    flat = flat and all(t.numel() == 1 for name, t in rest.items() if name != _V)
    if places is None and reduction.name != "matmul":
        found = found[..., None]
    elif reduction.name == "min":
        found, places = found[..., None], places[..., None]
    if flat:  # as the formula has it
        found, places = found[0], places if places is None else places[0]
    needed = _Reduced(call, reduction, places)
    if _are_functorch_transforms_active():  # a Function knows no transforms
        return needed.computed(a, b, tables.flat, *rest.values())
    return _Recorded.apply(needed, found, a, b, tables.flat, *rest.values())


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, made, found, *sides):
        ctx.made = made
        ctx.save_for_backward(*sides)
        return found.view_as(found)

    @staticmethod
    def backward(ctx, grad):
        needs = ctx.needs_input_grad[2:]
        return None, None, *operation.gradients(ctx.made, needs, ctx.saved_tensors, grad)

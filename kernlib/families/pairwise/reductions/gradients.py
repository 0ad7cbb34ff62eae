"""Gradients of reductions of a kernel matrix. Nothing but a reduction's inputs and results is kept.

What each entry of a block of rows is worth to the reduction, such as ``g v^T``, is the gradient
that arrives at that block of the matrix: :mod:`kernlib.families.pairwise.gradients.backward` leads
it on to points and hyperparameters. The gradient of v is another product by the matrix. Memory
stays O(M + N) plus half a gigabyte. Of few columns kernels compute all of it, and store no block
(:mod:`kernlib.families.pairwise.reductions.fused`). A gradient that is itself to be differentiated
is recorded: its blocks, computed by calls that are recorded, and their graphs stay, O(M N).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch._C import _are_functorch_transforms_active
from torch._C._functorch import is_legacy_batchedtensor

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.gradients import autograd, backward
from kernlib.families.pairwise.gradients.products import multiplied
from kernlib.families.pairwise.reductions import arguments, blocks, fused, operation
from kernlib.families.pairwise.reductions.arguments import Request, Shape
from kernlib.runtime import early, rehearsal
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.numbers import on_device, plain
from kernlib.runtime.operation import by_operator
from kernlib.runtime.plan import PlanCache
from kernlib.runtime.precision import without_autocast
from kernlib.runtime.tensors import is_lazy, normal, stand_ins

MOST_BYTES = 1 << 29  # of all that a gradient keeps of a block
PARTS = 3  # tensors of a block's size among them: weights, a slope, and what packs their product
FEWEST_ROWS = 256  # of a block with all columns: sums by b then outweigh adding them up
RECORDED_PARTS = 4  # tensors of a block's size that a recorded gradient takes at once


def run(reduction: str, descriptor, a, b, v, out, row_offset, col_offset, values: dict, wide=False):
    """A call of ``matmul``, ``sum`` or ``logsumexp`` whose gradient is recorded; the result is as
    :func:`operation.run` has it. Raises RuntimeError for an ``out``."""
    refuse_out(out)
    watched = stand_ins(a, b, v)
    if _are_functorch_transforms_active():
        arguments.refuse_differentiated(a, b, v, values)
        watched = True  # where nothing is mapped too: a Function knows no transform
    if watched or (getattr(a, "is_meta", False) and rehearsal.current() is None):
        if not watched:  # for meta tensors operators would say less
            offsets = row_offset, col_offset
            arguments.check_meta(descriptor, a, b, v, *offsets, values, reduction)
        request = reduction, descriptor, a, b, v, None, row_offset, col_offset, values, wide
        return by_operator(operation.REDUCTION, request)
    request = reduction, descriptor, a, b, v, None, row_offset, col_offset, values, True
    key = operation.key(*request)
    if type(row_offset) is not int or type(col_offset) is not int:
        key = None  # 1.0 and True would be the key that 1 is, and arrays are no keys
    try:
        route = None if key is None else _routes.plans.get(key)
    except TypeError:  # an argument cannot be hashed: the checks say which one is wrong
        route = key = None
    if route is None or (descriptor.symmetric and b is not None and b is not a):
        y = _checked(key, reduction, descriptor, a, b, v, row_offset, col_offset, values)
        return y if wide else y.to(a.dtype)
    if not all([type(x) is float or isinstance(x, torch.Tensor) for x in values.values()]):
        values = {name: plain(name, value) for name, value in values.items()}
    v = v[:, None] if v is not None and v.dim() == 1 else v
    b = a if b is None else b
    call = Request(route.descriptor, a, b, v, row_offset, col_offset, values)
    y = _apply(reduction, call, route.shape, route.size, route.plan)
    return y if wide or y.dtype == a.dtype else y.to(a.dtype)


class Route(NamedTuple):
    """What a call of one signature is recorded by, decided at the first such call."""

    descriptor: Pairwise
    shape: Shape
    size: tuple[int, ...]  # of the result
    plan: operation.CallPlan


_routes = PlanCache()


def _checked(key, reduction: str, descriptor, a, b, v, row_offset, col_offset, values: dict):
    """:func:`run` of a call without a route, which it keeps if kernels compute the call."""
    request = arguments.request_of(descriptor, a, b, v, row_offset, col_offset, values)
    shape = arguments.shape_of(request, reduction)
    size = (shape.batch, shape.m) if shape.batched else (shape.m,)
    if v is not None and v.dim() > 1:
        size = (*size, shape.columns)
    again = _rehearsed, reduction, request, shape
    y = early.first(_apply, reduction, request, shape, size, again=again)
    tensors = (t for t in (a, b, v) if t is not None)
    if key is not None and not any(map(is_lazy, tensors)):  # a plan reads copies of these
        *tensors, rows, columns, values = request
        plan = operation.find(reduction, *tensors, None, rows, columns, values, True)
        if plan is not None and plan.launch is not None:
            _routes.keep(key, Route(request.descriptor, shape, size, plan))
    return y


def _rehearsed(reduction: str, request: Request, shape: Shape) -> None:
    """The backward pass of a call of meta tensors, of gradients as :func:`early.first` has them."""
    columns = () if request.v is None else (shape.columns,)
    scalar = torch.empty((), dtype=accumulator(request.a.dtype), device=request.a.device)
    size = shape.batch, shape.m, *columns
    names = [name for name, t in request.tensors().items() if t.requires_grad]
    with torch.no_grad():
        for gradient in (scalar.new_empty(size), scalar.expand(size)):
            out = gradient if reduction == "logsumexp" else None
            shared = request.a is request.b
            gradients(reduction, request, shape, names, gradient, out, shared)


def refuse_out(out) -> None:
    """Raises RuntimeError for an ``out`` while a gradient is recorded."""
    if out is not None:
        raise RuntimeError("out takes no gradient: leave it out, or call under torch.no_grad()")


def _apply(
    reduction: str, request: Request, shape: Shape, size: tuple[int, ...], plan=None
) -> torch.Tensor:
    """A recorded reduction of this size in the arithmetic's dtype, by a plan of its forward pass if
    there is one."""
    tensors = request.tensors()
    numbers = {k: v for k, v in request.hyperparameters.items() if k not in tensors}
    fixed = request._replace(a=None, b=None, v=None, hyperparameters=numbers)
    if any([t.is_inference() for t in tensors.values()]):  # this cannot be saved
        tensors = {name: normal(t) for name, t in tensors.items()}
        plan = None  # that of other strides
    return _Reduction.apply(reduction, fixed, shape, size, plan, tuple(tensors), *tensors.values())


def computed(reduction: str, request: Request, shape: Shape) -> torch.Tensor:
    """A reduction (L, M, C) or (L, M) in the arithmetic's dtype, without a gradient."""
    descriptor, a, b, v, *offsets, values = request
    with torch.no_grad():
        result = operation.run(reduction, descriptor, a, b, v, None, *offsets, values, wide=True)
    return result.reshape(shape.batch, shape.m, *((shape.columns,) if v is not None else ()))


def _whole(fixed: Request, names: tuple[str, ...], tensors: tuple) -> Request:
    """The request again, of its tensors and the rest."""
    named = dict(zip(names, tensors, strict=True))
    points = {name: named.pop(name, None) for name in ("a", "b", "v")}
    return fixed._replace(**points, hyperparameters={**fixed.hyperparameters, **named})


class _Reduction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, reduction, fixed, shape, size, plan, names, *tensors):
        ctx.fixed, ctx.shape, ctx.reduction, ctx.names = fixed, shape, reduction, names
        ctx.shared = tensors[0] is tensors[1]  # autograd adds up the gradients of a and b
        request = _whole(fixed, names, tensors)
        if plan is None:
            out = computed(reduction, request, shape)
        else:
            descriptor, a, b, v, *offsets, values = request
            out = operation.launch(
                plan, reduction, descriptor, a, b, v, None, *offsets, values, True
            )
        if plan is None or out.shape != size:
            # Not as a view, which torch forbids to write in place where a function has made it.
            out = torch.ops.aten._unsafe_view.default(out, size)
        # A saved tensor cannot be written in place, so it is saved only where its value counts.
        ctx.save_for_backward(*tensors, out if reduction == "logsumexp" else None)
        return out

    @staticmethod
    def backward(ctx, gradient):
        if is_legacy_batchedtensor(gradient):
            raise RuntimeError(autograd.NOT_BATCHED)
        *tensors, out = ctx.saved_tensors
        needs = zip(ctx.names, ctx.needs_input_grad[6:], strict=True)
        names = [name for name, need in needs if need]
        request, shape = _whole(ctx.fixed, ctx.names, tensors), ctx.shape
        size = (shape.batch, shape.m, *((shape.columns,) if request.v is not None else ()))
        gradient, out = gradient.reshape(size), None if out is None else out.reshape(size)
        grads = gradients(ctx.reduction, request, shape, names, gradient, out, ctx.shared)
        return (None,) * 6 + tuple(grads.get(name) for name in ctx.names)


def gradients(
    reduction: str,
    request: Request,
    shape: Shape,
    names: list[str],
    gradient,
    out,
    shared: bool = False,
) -> dict[str, torch.Tensor]:
    """The gradients of the tensors ``names`` from that of the result ``out``, both (L, M, C) or
    (L, M): recorded where gradients are. A product and a sum need no ``out``. Of an a that is b,
    ``shared``, a's may hold both, and b's be left out."""
    if reduction == "logsumexp" and request.v is not None:  # C is 1
        rows = gradient.squeeze(-1), out.squeeze(-1)
        return _gradients(reduction, request, shape, names, *rows, shared)
    if request.v is None or shape.matrices == shape.batch:
        return _gradients(reduction, request, shape, names, gradient, out, shared)
    # One matrix for a whole batch of v: the batch becomes columns.
    v, columns = request.v, shape.batch * shape.columns
    folded = shape._replace(batch=1, columns=columns)
    request = request._replace(v=v.movedim(0, 1).reshape(shape.n, columns))
    gradient = gradient.movedim(0, 1).reshape(1, shape.m, columns)
    grads = _gradients(reduction, request, folded, names, gradient, None, shared)
    if "v" in grads:
        grads["v"] = grads["v"].view(shape.n, *v.shape[::2]).movedim(1, 0).contiguous()
    return grads


def _gradients(reduction, request, shape, names, gradient, out, shared) -> dict:
    with without_autocast(request.a.device):
        if names == ["v"] and reduction != "logsumexp":
            return {"v": transposed_product(request, shape, gradient)}
        if torch.is_grad_enabled():
            return _recorded(reduction, request, shape, names, gradient, out)
        if rehearsal.recorders and request.a.device.type == "cuda":
            # As a whole, since kernels compute it on some GPUs, and blocks of the matrix on others.
            call = reduction, request, shape, names, gradient, out, shared
            rehearsal.note_call(_gradients, call, request.a.get_device())
        leaves = request.tensors()
        widened, grads = _widened(request, leaves), None
        if reduction != "logsumexp":
            grads = fused.gradients(widened, shape, names, gradient, shared)
        if grads is None:
            grads = _by_blocks(reduction, widened, shape, names, gradient, out)
            return {
                name: t.to(leaves[name].device, leaves[name].dtype) for name, t in grads.items()
            }
        fitted = {
            name: _fitted(grads.get(name), name, leaves[name])
            for name in names
            if name in grads or not (name == "v" or (name == "b" and shared))
        }
        if "v" in names and "v" not in grads:
            fitted["v"] = transposed_product(request, shape, gradient)
        return fitted


def transposed_product(request: Request, shape: Shape, weights: torch.Tensor) -> torch.Tensor:
    """``sum_m K[l,m,n] weights[l,m,c]`` in the shape of v."""
    v, n, m = request.v, shape.n, shape.m
    if request.descriptor.signed:
        out = torch.zeros(shape.batch, n, shape.columns, dtype=weights.dtype, device=v.device)
        precision = request.descriptor.precision
        for block, values in blocks.each(request, shape):
            l, rows, columns = block
            right = weights[l, rows]
            if right.requires_grad and torch.is_grad_enabled():
                values = values.clone()  # the next block is written over these
            out[l, columns] += multiplied(precision, values.mT.to(weights.dtype), right)
        return _to_shape(out, v)
    weights = weights.to(v.dtype)
    transposed = request.transposed()._replace(v=weights), shape._replace(m=n, n=m)
    recorded = torch.is_grad_enabled() and weights.requires_grad
    out = (_apply if recorded else computed)("matmul", *transposed)
    return _to_shape(out, v)


# Gradients that are not differentiated.


def _widened(request: Request, tensors: dict[str, torch.Tensor]) -> Request:
    """A request whose ``tensors`` are on the device and in the arithmetic's dtype."""
    device, wide = request.a.device, accumulator(request.a.dtype)
    if all([t.dtype == wide and t.device == device for t in tensors.values()]):
        return request
    placed = {name: on_device(name, t, device, wide) for name, t in tensors.items()}
    return _whole(request, tuple(placed), tuple(placed.values()))


def _fitted(grad: torch.Tensor | None, name: str, leaf: torch.Tensor) -> torch.Tensor:
    """A kernel's gradient in the form of its tensor, 0 where there is none."""
    if grad is None:
        return torch.zeros_like(leaf)
    if name in ("a", "b", "v"):
        return _to_shape(grad, leaf)
    grad = grad if grad.numel() == leaf.numel() else grad.sum()
    return grad.reshape(leaf.shape).to(leaf.device, leaf.dtype)


def _by_blocks(
    reduction: str, request: Request, shape: Shape, names: list[str], gradient, out
) -> dict[str, torch.Tensor]:
    """The gradients of a widened request, a block of the matrix at a time."""
    tensors = request.tensors()
    is_product = "v" in names and reduction != "logsumexp"
    through = [name for name in names if not (name == "v" and is_product)]
    totals = {name: torch.zeros_like(tensors[name]) for name in through}
    entries = blocks.entries_of(request.a.device, request.a.dtype, MOST_BYTES)
    once, alone = shape._replace(batch=shape.matrices), shape.matrices == shape.batch
    for block in blocks.blocks(once, max(1, entries // PARTS), FEWEST_ROWS):
        part = block if alone else _entries(shape, block)
        rows = gradient[part[:2]], None if out is None else out[part[:2]]
        for name, value in _of_block(reduction, request, shape, block, through, *rows).items():
            _part_of(totals[name], name, part if name == "v" else block).add_(value)
    if is_product:
        totals["v"] = transposed_product(request, shape, gradient)
    return totals


def _entries(shape: Shape, block):
    """A block with all entries of a batch whose entries share its matrix."""
    return block if shape.matrices == shape.batch else (slice(None), *block[1:])


def _of_block(
    reduction: str, request: Request, shape: Shape, block, through: list[str], gradient, out
) -> dict[str, torch.Tensor]:
    """What a block of the matrix contributes to the gradients of the tensors ``through``; of a
    product's v they are none."""
    parts, of_v = _parts(request, block), {}
    if reduction == "logsumexp" and request.v is not None:
        v = _part_of(request.v, "v", _entries(shape, block))
        weights, lines = _shifted_shares(_values(request, block, parts), v, gradient, out)
        of_v = {"v": _to_shape(lines, v)} if "v" in through else {}
        if len(of_v) == len(through):
            return of_v
    elif reduction == "logsumexp":
        weights = _weighted_shares(_values(request, block, parts), gradient, out)
    else:
        weights = _weights(reduction, request, block, parts, gradient)
    names = tuple(name for name in parts if name not in ("a", "b", "v"))
    numbers = {k: v for k, v in request.hyperparameters.items() if k not in names}
    offsets = request.row_offset + block[1].start, request.col_offset + block[2].start
    call = backward.Call(request.descriptor, *offsets, numbers, names)
    sides = ("a", "b", *names)
    needs = tuple(name in through for name in sides)
    grads = backward.gradients(call, needs, tuple(parts[name] for name in sides), weights)
    return of_v | {n: grad for n, grad, need in zip(sides, grads, needs, strict=True) if need}


def _shifted_shares(values: torch.Tensor, v, gradient, out) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight of each entry in log-sum-exps of values plus v, (N, 1) or (L, N, 1), of which the
    whole batch is added up where values are of one matrix; and the gradient of v, (L, N, 1)."""
    if len(values) == len(gradient):
        weights = _weighted_shares(values.add_(v.mT), gradient, out)
        return weights, weights.sum(-2)[..., None]
    total, lines = torch.zeros_like(values), []
    for i in range(len(gradient)):
        one = slice(i, i + 1)
        weights = _weighted_shares(values + v[one].mT, gradient[one], out[one])
        total += weights
        lines.append(weights.sum(-2)[..., None])
    return total, torch.cat(lines)


def _weighted_shares(values: torch.Tensor, gradient, out) -> torch.Tensor:
    """The weight of each entry in a log-sum-exp, written over the ``values``."""
    top = out[..., None]
    top = top.masked_fill(top.isneginf(), 0.0)  # where all values are -inf, whose shares are 0
    return values.sub_(top).exp_().mul_(gradient[..., None])


def _weights(reduction: str, request: Request, block, parts: dict, gradient) -> torch.Tensor:
    """The weight of each entry of a block in a sum or a product."""
    if reduction == "sum":
        return gradient[..., None].expand(*gradient.shape, block[2].stop - block[2].start)
    v = parts["v"].to(gradient.dtype)
    lines = (v if v.dim() == 3 else v[None]).mT
    if lines.shape[-2] == 1:  # no product, but one write
        return gradient * lines
    return multiplied(request.descriptor.precision, gradient, lines)


# Recorded gradients.


def _recorded(
    reduction: str, request: Request, shape: Shape, names: list[str], gradient, out
) -> dict[str, torch.Tensor]:
    """The gradients of the tensors ``names`` by blocks whose graphs are kept."""
    tensors, wide = request.tensors(), accumulator(request.a.dtype)
    totals = {name: torch.zeros_like(tensors[name], dtype=wide) for name in names}
    through = [name for name in names if name != "v"]
    entries = max(1, blocks.entries_of(request.a.device, wide) // RECORDED_PARTS)
    for block in blocks.blocks(shape._replace(batch=shape.matrices), entries, blocks.MOST_ROWS):
        parts, place = _parts(request, block), _entries(shape, block)
        values = _values(request, block, parts)
        g = gradient[place[:2]]
        if reduction == "logsumexp":
            v = None if request.v is None else _part_of(request.v, "v", place)
            shifted = values if v is None else values.to(v.dtype) + v.mT
            weights = _recorded_shares(shifted, g, out[place[:2]])
        else:
            weights = _weights(reduction, request, block, parts, g)
        if through:
            options = {"create_graph": True, "allow_unused": True}
            leaves = [parts[name] for name in through]
            once = weights if len(weights) == len(values) else weights.sum(0, keepdim=True)
            grads = torch.autograd.grad(values, leaves, once.to(values.dtype), **options)
            for name, grad in zip(through, grads, strict=True):
                if grad is not None:
                    _part_of(totals[name], name, block).add_(grad)
        if "v" in totals:
            if reduction == "logsumexp":
                product = weights.sum(-2)[..., None]
            else:
                product = multiplied(request.descriptor.precision, values.mT.to(g.dtype), g)
            part = _part_of(totals["v"], "v", place)
            part.add_(_to_shape(product, part))
    return {name: total.to(tensors[name].dtype) for name, total in totals.items()}


def _recorded_shares(values: torch.Tensor, gradient, out) -> torch.Tensor:
    """:func:`_weighted_shares` in memory of their own."""
    top = out[..., None]
    top = top.masked_fill(top.isneginf(), 0.0)
    return (values.to(out.dtype) - top).exp() * gradient[..., None]


# Parts of tensors that belong to a block.


def _part_of(t: torch.Tensor, name: str, block) -> torch.Tensor:
    """The part of a tensor that belongs to a block."""
    l, m, n = block
    if name in ("a", "b", "v"):
        return blocks.points_of(t, l, m if name == "a" else n)
    return blocks.numbers_of({name: t}, l)[name]


def _parts(request: Request, block) -> dict[str, torch.Tensor]:
    return {name: _part_of(t, name, block) for name, t in request.tensors().items()}


def _values(request: Request, block, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """A block of the matrix of parts that may require gradients."""
    values = {name: parts.get(name, value) for name, value in request.hyperparameters.items()}
    return blocks.matrix(request, block, parts["a"], parts["b"], values)


def _to_shape(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A gradient (L, N, C) summed over a batch that was broadcast."""
    if like.dim() == 2 or like.shape[0] == 1:
        whole = whole.sum(0, keepdim=like.dim() == 3) if whole.shape[0] > 1 else whole
    whole = whole.reshape(like.shape)
    return whole if whole.dtype == like.dtype else whole.to(like.dtype)

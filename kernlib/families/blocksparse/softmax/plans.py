"""Plans of block-sparse softmax and of its gradient: the problem that lowering sees, and its
kernel, loaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from kernlib.families.blocksparse.checks import Call, scale_of
from kernlib.families.blocksparse.kernels import softmax as kernels
from kernlib.families.blocksparse.layout import Layout
from kernlib.families.blocksparse.lowering.softmax import Gradient, Operand, Options, Softmax
from kernlib.families.blocksparse.softmax.arguments import NAMES, refuse_overlap
from kernlib.families.blocksparse.softmax.descriptor import BlockSparseSoftmax
from kernlib.runtime import devices
from kernlib.runtime.arguments import address_of, folded
from kernlib.runtime.devices import allocator, arch_of
from kernlib.runtime.dtypes import DTYPE_NAMES, accumulator
from kernlib.runtime.plan import Plan
from kernlib.runtime.sequence import Steps, load_lowered

Shapes = tuple[tuple[int, ...] | None, ...]


class SoftmaxPlan(NamedTuple):
    """What a call of one signature needs besides its pointers and its scale. ``copies`` are shapes
    of the copies of x, rpe and masks, or of y and its gradient, that are read in their place."""

    index: int  # of the device
    device: torch.device
    sums: torch.dtype  # of the arithmetic
    names: tuple[str, ...]  # of rpe and masks that are given
    copies: Shapes
    apart: bool  # a given out is written by a copy
    result: Callable[[], torch.Tensor]  # makes a new one
    launch: Plan | Steps | None  # None for a result without elements


class View(NamedTuple):
    """A tensor for a problem: its shape with the batch of x in front, the strides of the batch,
    those behind it in the kernels' order, and the alignment of the first address."""

    shape: tuple[int, ...]
    batch: tuple[int, ...]
    inner: tuple[int, int, int]
    alignment: int


def options_of(descriptor: BlockSparseSoftmax, parameters: dict) -> Options:
    """The parts of a call that decide code."""
    kinds = []
    for name in ("key_padding_mask", "attn_mask"):
        kind = getattr(descriptor, name)
        is_bool = kind is not None and parameters[name].dtype == torch.bool
        kinds.append("bool" if is_bool else kind)
    return Options(descriptor.causal, descriptor.rpe, *kinds)


def problem_of(
    descriptor, layout: Layout, x, out, parameters: dict
) -> tuple[Softmax, Shapes, bool]:
    """The problem of a checked call, the shapes of copies of x and of each parameter, and whether a
    given ``out`` is written by a copy."""
    views = [_values(x)]
    views += [_dense(layout, name, t, x.shape[:-3]) for name, t in parameters.items()]
    views.append(_new(x.shape) if out is None else _values(out))
    batch, (seen, *dense, written), copies = _batch(x.shape[:-3], views)
    named = dict(zip(parameters, dense, strict=True))
    problem = Softmax(
        dtype=DTYPE_NAMES[x.dtype],
        blocks=layout.sizes,
        batch=batch,
        options=options_of(descriptor, parameters),
        x=seen,
        out=written,
        rpe=named.get("rpe"),
        key=named.get("key_padding_mask"),
        attn=named.get("attn_mask"),
    )
    return problem, copies[:-1], copies[-1] is not None


def gradient_of(layout: Layout, grad, y) -> tuple[Gradient, Shapes]:
    """The problem of a gradient, and the shapes of copies of grad and y."""
    views = [_values(grad), _values(y), _new(y.shape)]
    batch, (grads, values, written), copies = _batch(y.shape[:-3], views)
    name = DTYPE_NAMES[y.dtype]
    return Gradient(name, layout.sizes, batch, values, grads, written), copies[:-1]


def plan(call: Call, descriptor, operands: tuple, out, scale, parameters: dict) -> SoftmaxPlan:
    """The plan of a checked call on CUDA tensors, its kernel loaded."""
    layout, x = operands
    arch_of(x.get_device())  # an old device is refused for an empty result too
    problem, copies, apart = problem_of(descriptor, layout, x, out, parameters)
    launch = None
    if call.count:
        launch = load_lowered(kernels.lower(problem), kernels.OPERANDS, x.device)
    return _plan(x, tuple(parameters), copies, apart, launch)


def gradient_plan(call: Call, layout: Layout, grad, y, scale, needs: tuple) -> SoftmaxPlan:
    """The plan of a gradient on CUDA tensors, its kernel loaded."""
    problem, copies = gradient_of(layout, grad, y)
    launch = None
    if call.count:
        launch = load_lowered(kernels.lower(problem), kernels.GRADIENT_OPERANDS, y.device)
    return _plan(y, (), copies, False, launch)


def _plan(x: torch.Tensor, names: tuple, copies: Shapes, apart: bool, launch) -> SoftmaxPlan:
    result = allocator(tuple(x.shape), x.dtype, x.device)
    sums = accumulator(x.dtype)
    return SoftmaxPlan(x.get_device(), x.device, sums, names, copies, apart, result, launch)


# Tensors as kernels see them.


def _values(t: torch.Tensor) -> View:
    *lead, slot, row, column = t.stride()
    inner = (slot if t.shape[-3] > 1 else 0, row, column)
    return View(tuple(t.shape), tuple(lead), inner, address_of(t) & 15 or 16)


def _new(shape: tuple[int, ...]) -> View:
    strides = [math.prod(shape[index + 1 :]) for index in range(len(shape))]
    return View(tuple(shape), tuple(strides[:-3]), tuple(strides[-3:]), 16)


def _dense(layout: Layout, name: str, t: torch.Tensor, lead: tuple[int, ...]) -> View:
    """rpe or a mask, expanded to the batch, with inner strides of heads, lines and columns."""
    alignment = address_of(t) & 15 or 16
    if name == "attn_mask":
        return View(tuple(t.shape), (0,) * len(lead), (0, *t.stride()), alignment)
    if name == "key_padding_mask":
        shape = (*lead, layout.shape[1])
        strides = t.expand(shape).stride()
        return View(shape, strides[:-1], (0, 0, strides[-1]), alignment)
    heads = () if layout.heads is None else (layout.heads,)
    shape = (*lead, *heads, *layout.shape)
    strides = t.expand(shape).stride()
    head = strides[-3] if heads and heads[0] > 1 else 0
    return View(shape, strides[: len(lead)], (head, *strides[-2:]), alignment)


def _batch(lead: tuple, views: list[View]) -> tuple[tuple[int, int], list[Operand], Shapes]:
    """The batch as two dimensions, the operands, and shapes of the copies of those that have no
    such strides."""
    sizes, strides = _merged(lead, [view.batch for view in views])
    if len(sizes) <= 2:
        empty = (1,) * (2 - len(sizes))
        pairs = [(*(0,) * len(empty), *stride) for stride in strides]
        operands = [_operand(pair, view) for pair, view in zip(pairs, views, strict=True)]
        return (*empty, *sizes), operands, (None,) * len(views)
    as_read = []
    for view in views:
        outer = folded(lead, view.batch)
        as_read.append((view, outer, None) if outer is not None else _copied(lead, view))
    operands = [_operand((0, outer), view) for view, outer, _ in as_read]
    return (1, math.prod(lead)), operands, tuple(shape for *_, shape in as_read)


def _copied(lead: tuple, view: View) -> tuple[View, int, tuple[int, ...]]:
    """A contiguous copy, its stride from one entry of the batch to the next, and its shape."""
    ends = view.shape[len(lead) :]
    strides = [math.prod(ends[index + 1 :]) for index in range(len(ends))]
    inner = (*(0,) * (3 - len(ends)), *strides)
    return view._replace(inner=inner, alignment=16), math.prod(ends), view.shape


def _operand(batch: tuple, view: View) -> Operand:
    return Operand((*batch, *view.inner), view.alignment)


def _merged(lead: tuple, strides: list[tuple]) -> tuple[tuple, list[tuple]]:
    """The dimensions of a batch and each operand's strides, as few as they can be: those of size 1
    are left out, neighbours that are one to every operand are one."""
    sizes, columns = [], []
    for size, column in zip(lead, zip(*strides, strict=True), strict=True):
        if size == 1:
            continue
        if sizes and all(o == i * size for o, i in zip(columns[-1], column, strict=True)):
            sizes[-1] *= size
            columns[-1] = column
        else:
            sizes.append(size)
            columns.append(column)
    return tuple(sizes), list(zip(*columns, strict=True)) if columns else [()] * len(strides)


# The launch.


def launch(plan: SoftmaxPlan, descriptor, operands: tuple, out, scale, parameters: dict):
    """The result of a call by its plan."""
    if devices.current_device() != plan.index:
        with torch.cuda.device(plan.index):
            return launch(plan, descriptor, operands, out, scale, parameters)
    layout, x = operands
    if out is not None:
        refuse_overlap(operands, out, scale, parameters)
        if not out.is_inference():  # inference tensors have no version
            torch.autograd.graph.increment_version(out)
    target = plan.result() if out is None or plan.apart else out
    if plan.launch is not None:
        *numbers, factor = scale_of(scale, plan.device, plan.sums)
        tensors = _read(plan, (x, *parameters.values()))
        places = dict(zip(plan.names, [t.data_ptr() for t in tensors[1:]], strict=True))
        _, row_ranks, _, _, cols, counts = layout.addresses
        dense = [places.get(name, 0) for name in NAMES]
        addresses = row_ranks, cols, counts, tensors[0].data_ptr(), target.data_ptr(), *dense
        plan.launch.launch(addresses, numbers)
        del tensors, factor  # the stream orders the reuse of their memory behind the launch
    return out.copy_(target) if plan.apart else target


def launch_gradient(plan: SoftmaxPlan, layout: Layout, grad, y, scale, needs: tuple) -> list:
    """The gradients by x and by the logits by their plan, None where there is no need."""
    if devices.current_device() != plan.index:
        with torch.cuda.device(plan.index):
            return launch_gradient(plan, layout, grad, y, scale, needs)
    results = [plan.result() if need else None for need in needs]
    if plan.launch is not None:
        *numbers, factor = scale_of(scale, plan.device, plan.sums)
        grad, y = _read(plan, (grad, y))
        _, row_ranks, _, _, _, counts = layout.addresses
        places = [0 if t is None else t.data_ptr() for t in results]
        plan.launch.launch((row_ranks, counts, y.data_ptr(), grad.data_ptr(), *places), numbers)
        del factor, grad, y
    return results


def _read(plan: SoftmaxPlan, tensors: tuple) -> tuple:
    """The tensors, or copies where kernels need some."""
    if not any(plan.copies):
        return tensors
    return tuple(
        t if shape is None else t.expand(shape).contiguous()
        for t, shape in zip(tensors, plan.copies, strict=True)
    )

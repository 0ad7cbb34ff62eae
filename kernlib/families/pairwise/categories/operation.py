"""Calls of pairwise descriptors with categories, and their gradients.

A call is ``finish(S + T)``, with the sums S of the numerical features and what the tables add, T.
The forward pass is one kernel; on a CPU torch computes it by blocks. It keeps the inputs. The
backward pass computes blocks of rows of the matrix again by differentiable operators, so that it
takes memory for one block."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch._C import _are_functorch_transforms_active

from kernlib import events
from kernlib.families.pairwise import checks
from kernlib.families.pairwise.categories import arguments
from kernlib.families.pairwise.categories.arguments import Tables
from kernlib.families.pairwise.descriptor import CODES, Pairwise
from kernlib.families.pairwise.gradients.autograd import kernel_matrix
from kernlib.families.pairwise.kernels.direct import DIRECT
from kernlib.families.pairwise.lowering.problem import OPERANDS as POINTS
from kernlib.families.pairwise.lowering.tables import TABLE_OPERANDS, Categories
from kernlib.families.pairwise.matrix import PairwisePlan, key_of, loaded_plan, numbers_of
from kernlib.families.pairwise.request import Request, is_empty, layout_of, problem_of
from kernlib.families.pairwise.stages_reference import finish
from kernlib.lowering.kernel import Gpu
from kernlib.lowering.steps import Lowered
from kernlib.runtime import rehearsal
from kernlib.runtime.devices import arch_of, model
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.numbers import plain
from kernlib.runtime.plan import PlanCache
from kernlib.runtime.precision import without_autocast
from kernlib.runtime.sequence import load_lowered
from kernlib.runtime.tensors import (
    is_mapped,
    materialised,
    refuse_any_overlap,
    refuse_overlap,
    refuse_transforms,
    signature,
    stand_ins,
)

OPERANDS = (*TABLE_OPERANDS, *POINTS)
CPU_ENTRIES = 1 << 20  # of a block of rows: 4 MB in float32, of which torch makes a few
BLOCK_ENTRIES = 1 << 24  # of the matrix at once in a backward pass, which stores about eight
_OF_SUMS = ("p", "inner_p", "inner_scale")
_plans = PlanCache()


def run(
    descriptor: Pairwise, a, b, out, accumulate, row_offset: int, col_offset: int, values: dict
) -> torch.Tensor:
    """``epilogue(outer(sum_k ... + sum_c tables[c][a_codes[m,c], b_codes[n,c]]))``, with what
    :func:`kernlib.families.pairwise.operation.run` takes and, among ``values``,

    - ``a_codes`` (M, C) and ``b_codes`` (N, C), or (L, M, C) and (L, N, C), with C the descriptor's
      ``categories``: integers from 0 on, of any strides. int32 and int64 are read as they are;
      others are converted, as are two of different dtypes.
    - ``tables``: (C, S, S) or (L, C, S, S), or a list of C tables (S_c, S_c), of the inputs' dtype
      or that of the arithmetic. A list is packed at each call.

    A code that is below 0, or not below the size of its table, makes NaN of every pair that it is
    part of: nothing outside a table is read, and nothing waits for a device to look at codes.
    Tables need not be symmetric, their entries not positive; the sum may be negative then, of which
    roots are NaN. Sums are those of ``power_sum``: a norm whose sum leaves the range of float32 is
    not computed anew.

    Gradients of points, tables and hyperparameters are recorded, those of gradients too.

    Raises TypeError and ValueError that name the argument, also for a number inf for p, which has
    no sum; RuntimeError for an ``out`` while gradients are recorded.
    """
    codes, values = arguments.separate(descriptor, values)
    checks.check_tensors(a, b, out)
    refuse_any_overlap(out, **dict(zip(CODES, codes, strict=True)))
    a, tables = arguments.placed(descriptor, a, b, codes)
    values = {name: plain(name, value) for name, value in values.items()}
    request = Request(descriptor, a, b, out, accumulate, row_offset, col_offset, values)
    tensors = (a, b, *tables[:3], *(v for v in values.values() if isinstance(v, torch.Tensor)))
    if stand_ins(out, *tensors) or a.is_meta:
        return _by_operator(request, codes)
    if out is None and is_mapped(*tensors):
        return matrix(request, tables).to(a.dtype)
    refuse_transforms(checks.MAPPED_ALONE, out=out, a=a, b=b, **tables.tensors())
    arguments.check_exponents(descriptor, values)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *_some(out))):
        checks.refuse_out(out, a=a, b=b, out=out, tables=tables.flat, **values)
        check(request)
        if _are_functorch_transforms_active():  # a Function knows no transforms
            return matrix(request, tables).to(a.dtype)
        names = tuple(name for name, v in values.items() if isinstance(v, torch.Tensor))
        call = Call(request._replace(a=None, b=None), tables._replace(flat=None), names)
        return _Recorded.apply(call, a, b, tables.flat, *(values[name] for name in names))
    return execute(request, tables)


def _by_operator(request: Request, codes: tuple) -> torch.Tensor:
    """A call of tensors without memory: the operator knows their results."""
    if rehearsal.current() is not None:
        checks.refuse_categories(request.descriptor)
    from kernlib import run

    descriptor, a, b, out, accumulate, row_offset, col_offset, values = request
    options = {"row_offset": row_offset, "col_offset": col_offset, "accumulate": accumulate}
    named = dict(zip(CODES, codes, strict=True))
    return run.pairwise_operators.run(descriptor, a, b, out=out, **options, **named, **values)


def _some(t: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return () if t is None else (t,)


# A call without a record of gradients.


@lru_cache(maxsize=256)
def numerical(descriptor: Pairwise) -> Pairwise:
    """The descriptor without its categories, whose checks are those of the other arguments."""
    return descriptor.replace(categories=0)


def check(request: Request) -> checks.Call:
    """Check all but codes and tables. Raises ValueError and TypeError."""
    checks.check_names(request.descriptor, request.hyperparameters)
    return checks.check_call(numerical(request.descriptor), *request[1:])


def execute(request: Request, tables: Tables) -> torch.Tensor:
    """The result. Raises ValueError and TypeError, UnsupportedError for other devices."""
    if request.a.device.type == "cpu":
        call = check(request)
        _refuse_overlap(request, tables)
        if events.listening():
            events.emit("torch", "", "", "pairwise on cpu: no kernel, computed by torch")
        return _on_cpu(request, call, tables)
    request = request.readable()
    tables = tables._replace(flat=materialised(tables.flat))
    key = (key_of(*request), *map(signature, tables[:3]), tables.sizes)
    try:
        plan = _plans.plans.get(key)
    except TypeError:  # something in the call cannot be hashed, and is wrong for that alone
        check(request)
        raise
    if plan is None:
        plan = _plan(request, check(request), tables)
        _plans.keep(key, plan)
    _refuse_overlap(request, tables)
    return _launch(plan, request, tables)


def _refuse_overlap(request: Request, tables: Tables) -> None:
    """Raises ValueError where ``out`` shares memory with an argument."""
    if request.out is not None:
        arguments = {"a": request.a, "b": request.b, **tables.tensors(), **request.hyperparameters}
        tensors = {name: t for name, t in arguments.items() if isinstance(t, torch.Tensor)}
        refuse_overlap(request.out, **tensors)


def _plan(request: Request, call: checks.Call, tables: Tables) -> PairwisePlan:
    device = request.device()
    arch_of(device)  # an old device is refused for an empty out too
    lowered = None
    if not is_empty(call):
        rehearsal.note_lowering(lambda: lower(request, call, tables, device), device)
        lowered = lower(request, call, tables, device)
    plan = loaded_plan(request, call, None)
    if lowered is None:
        return plan
    return plan._replace(launch=load_lowered(lowered, OPERANDS, call.device))


def lower(request: Request, call: checks.Call, tables: Tables, device: int) -> Lowered:
    """The kernel of a checked call on a device."""
    problem, strides = problem_of(request, call)
    gpu = Gpu(arch_of(device), model(device).multiprocessors)
    categories = categories_of(tables, call.batch)
    return DIRECT.launch_tables(request.descriptor, problem, gpu, strides, categories)


def categories_of(tables: Tables, batch: int) -> Categories:
    """Codes and tables as lowering sees them."""
    several = tables.flat.dim() == 2 and tables.flat.shape[0] > 1
    return Categories(
        *(layout_of(t, batch) for t in (tables.a_codes, tables.b_codes)),
        tables.sizes,
        tables.flat.stride(0) if several else 0,
        tables.a_codes.dtype == torch.int64,
    )


def _launch(plan: PairwisePlan, request: Request, tables: Tables) -> torch.Tensor:
    numbers, converted = numbers_of(plan.scalars, request.a, request.hyperparameters)
    out = request.out
    if out is None:
        out = torch.empty(plan.out_shape, dtype=plan.out_dtype, device=plan.out_device)
    elif not out.is_inference():  # inference tensors have no version
        torch.autograd.graph.increment_version(out)
    if plan.launch is not None:
        operands = (*tables[:3], request.a, request.b, out)
        plan.launch.launch(tuple(t.data_ptr() for t in operands), numbers)
    del converted  # the stream orders the reuse of their memory behind the launch
    return out


def of_rows(request: Request, rows: slice) -> Request:
    """The request of some rows of its matrix."""
    a, row_offset = request.a[..., rows, :], request.row_offset + rows.start
    return request._replace(a=a, row_offset=row_offset)


def _on_cpu(request: Request, call: checks.Call, tables: Tables) -> torch.Tensor:
    """By blocks of rows."""
    out = request.out
    if out is None:
        out = torch.empty(call.out_shape, dtype=call.out_dtype, device=call.device)
    if is_empty(call):
        return out
    step = max(1, CPU_ENTRIES // (call.n * call.batch))
    with without_autocast(call.device):
        for start in range(0, call.m, step):
            rows = slice(start, start + step)
            block = out[..., rows, :]  # (M, N) perhaps of a batch of 1
            values = matrix(of_rows(request, rows), tables.of_rows(rows)).view(block.shape)
            block.copy_(values + block if request.accumulate else values)
    return out


# The matrix by operators that are differentiable.


@lru_cache(maxsize=256)
def of_sums(descriptor: Pairwise) -> Pairwise:
    """The descriptor of the numerical features' sums alone."""
    return Pairwise(
        descriptor.operator,
        descriptor.inner,
        precision=descriptor.precision,
        direct=descriptor.direct,
    )


def matrix(request: Request, tables: Tables) -> torch.Tensor:
    """The matrix of a checked call out of operators of torch and the kernel of its numerical sums,
    differentiable in all of it, in the arithmetic's dtype: (M, N), or (L, M, N) where
    something has a batch. ``out`` and ``accumulate`` are not looked at."""
    descriptor, a, b, _, _, row_offset, col_offset, values = request
    wide, diagonal = accumulator(a.dtype), row_offset - col_offset
    arguments = {name: values[name] for name in _OF_SUMS if name in values}
    sums = kernel_matrix(of_sums(descriptor), a.to(wide), b.to(wide), **arguments)
    s = sums + gathered(tables)
    flat = s.dim() == 2
    root = checks.follows_inner(descriptor, values)
    entries = finish(descriptor, s[None] if flat else s, values, root=root, diagonal=diagonal)
    return entries[0] if flat and entries.shape[0] == 1 else entries


def gathered(tables: Tables) -> torch.Tensor:
    """``sum_c tables[c][a_codes[m, c], b_codes[n, c]]``, (M, N) or (L, M, N); NaN where a code is
    outside its table."""
    total = None
    for feature, size in enumerate(tables.sizes):
        table = tables.table(feature)
        # Whose last row and column are where other codes lead.
        padded = torch.nn.functional.pad(table, (0, 1, 0, 1), value=float("nan"))
        places = (_inside(t[..., feature], size) for t in (tables.a_codes, tables.b_codes))
        entries = _entries(padded, *places)
        total = entries if total is None else total + entries
    return total


def _inside(codes: torch.Tensor, size: int) -> torch.Tensor:
    return torch.where((codes >= 0) & (codes < size), codes, size).long()


def _entries(table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Rows, then columns, so that a gradient sorts no more than codes."""
    if table.dim() == rows.dim() + 1 == columns.dim() + 1 == 2:
        return table[rows][:, columns]
    batch = max(table.shape[0] if table.dim() == 3 else 1,
                *(t.shape[0] if t.dim() == 2 else 1 for t in (rows, columns)))  # fmt: skip
    several = torch.arange(batch, dtype=torch.int64, device=table.device)[:, None]
    table = table.expand(batch, *table.shape[-2:])
    picked = table[several, rows.expand(batch, rows.shape[-1])]
    columns = columns.expand(batch, columns.shape[-1])
    return picked.mT[several, columns].mT


# Gradients.


class Call(NamedTuple):
    """The parts of a call that autograd does not get. ``names`` are the hyperparameters that it
    does get."""

    request: Request
    tables: Tables
    names: tuple[str, ...]

    def computed(self, *sides) -> torch.Tensor:
        """The matrix, by operators that are differentiable."""
        return matrix(*self.of(*sides))

    def of(self, a, b, flat, *tensors) -> tuple[Request, Tables]:
        """The call of these."""
        values = self.request.hyperparameters | dict(zip(self.names, tensors, strict=True))
        request = self.request._replace(a=a, b=b, hyperparameters=values)
        return request, self.tables._replace(flat=flat)

    def of_rows(self, rows: slice) -> Call:
        """For some points of a."""
        offset = self.request.row_offset + rows.start
        request = self.request._replace(row_offset=offset)
        return self._replace(request=request, tables=self.tables.of_rows(rows))


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, a, b, flat, *tensors):
        ctx.call = call
        ctx.save_for_backward(a, b, flat, *tensors)
        return execute(*call.of(a, b, flat, *tensors))

    @staticmethod
    def backward(ctx, grad):
        needs = ctx.needs_input_grad[1:]
        return None, *gradients(ctx.call, needs, ctx.saved_tensors, grad)


def gradients(call, needs: tuple, saved: tuple, grad: torch.Tensor) -> list:
    """The gradients by the tensors ``saved``, None where ``needs`` says so. ``call`` is a Call, or
    an object with the same ``of_rows`` and ``computed`` whose result has as many rows as a."""
    compute = _made_again if torch.is_grad_enabled() else _by_blocks
    return compute(call, needs, saved, grad)


def _made_again(call, needs: tuple, saved: tuple, grad) -> list:
    """The gradients, recorded."""
    # Aliases, lest two of the arguments be one tensor.
    sides = [t.view_as(t) if need else t for t, need in zip(saved, needs, strict=True)]
    return _gradients(call, needs, sides, grad, create_graph=True)


def _by_blocks(call, needs: tuple, saved: tuple, grad: torch.Tensor) -> list:
    """The gradients, a block of rows of the matrix at a time, in the arithmetic's dtype."""
    rows = saved[0].shape[-2]
    totals = [
        torch.zeros(t.shape, dtype=_wide(t), device=t.device) if need else None
        for t, need in zip(saved, needs, strict=True)
    ]
    batch = max(t.shape[0] if t.dim() == 3 else 1 for t in (*saved[:2], grad))
    step = max(1, BLOCK_ENTRIES // max(1, saved[1].shape[-2] * batch))
    for start in range(0, rows if grad.numel() else 0, step):
        part = slice(start, start + step)
        a, *rest = (t.detach() for t in saved)
        sides = [t.to(_wide(t)) for t in (a[..., part, :], *rest)]
        with torch.enable_grad():
            sides = [t.detach().requires_grad_(need) for t, need in zip(sides, needs, strict=True)]
            grads = _gradients(call.of_rows(part), needs, sides, grad[..., part, :])
        for place, part_grad in enumerate(grads):
            if part_grad is not None:
                target = totals[place]
                (target[..., part, :] if place == 0 else target).add_(part_grad)
    return [
        None if total is None else total.to(t.dtype) for total, t in zip(totals, saved, strict=True)
    ]


def _wide(t: torch.Tensor) -> torch.dtype:
    return accumulator(t.dtype) if t.dtype.is_floating_point else t.dtype


def _gradients(call, needs, sides, grad, create_graph: bool = False) -> list:
    """The gradients by the ``sides`` that need one, None for others."""
    out = call.computed(*sides)
    leaves = [side for side, need in zip(sides, needs, strict=True) if need]
    options = {"create_graph": create_graph, "allow_unused": True}
    grads = iter(torch.autograd.grad(out, leaves, grad.to(out.dtype), **options))
    return [next(grads) if need else None for need in needs]

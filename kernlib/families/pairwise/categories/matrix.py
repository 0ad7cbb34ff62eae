"""The primitive with categories: a call without a record of gradients, by the direct kernel on a
GPU, by torch on the CPU."""

from __future__ import annotations

from functools import lru_cache

import torch

from kernlib import events
from kernlib.families.pairwise import checks, plans
from kernlib.families.pairwise.categories import formula
from kernlib.families.pairwise.categories.arguments import Tables
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering import direct
from kernlib.families.pairwise.lowering.layout import TABLE_OPERANDS, Categories
from kernlib.families.pairwise.matrix import key_of, readable
from kernlib.families.pairwise.plans import PairwisePlan
from kernlib.families.pairwise.request import Request, is_empty, layout_of, problem_of
from kernlib.lowering.steps import Lowered
from kernlib.runtime.devices import arch_of, model
from kernlib.runtime.plan import PlanCache
from kernlib.runtime.precision import without_autocast
from kernlib.runtime.sequence import load_lowered
from kernlib.runtime.tensors import materialised, refuse_overlap, signature

OPERANDS = (*TABLE_OPERANDS, *direct.OPERANDS)
CPU_ENTRIES = 1 << 20  # of a block of rows: 4 MB in float32, of which torch makes a few
_plans = PlanCache()


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
    request = readable(request)
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
        given = {"a": request.a, "b": request.b, **tables.tensors(), **request.hyperparameters}
        tensors = {name: t for name, t in given.items() if isinstance(t, torch.Tensor)}
        refuse_overlap(request.out, **tensors)


def _plan(request: Request, call: checks.Call, tables: Tables) -> PairwisePlan:
    device = request.device()
    arch_of(device)  # one too old is refused for an empty out as well
    lowered = None if is_empty(call) else lower(request, call, tables, device)
    made = plans.loaded_plan(request, call, None)
    if lowered is None:
        return made
    return made._replace(launch=load_lowered(lowered, OPERANDS, call.device))


def lower(request: Request, call: checks.Call, tables: Tables, device: int) -> Lowered:
    """The kernel of a checked call on a device."""
    problem, strides = problem_of(request, call)
    count = model(device).multiprocessors
    given = categories_of(tables, call.batch)
    return direct.lower(
        request.descriptor, problem, arch_of(device), count, strides, categories=given
    )


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
    numbers, kept = plans.numbers_of(plan, request.a, request.hyperparameters)
    out = request.out
    if out is None:
        out = torch.empty(plan.out_shape, dtype=plan.out_dtype, device=plan.out_device)
    elif not out.is_inference():  # those have no version to count
        torch.autograd.graph.increment_version(out)
    if plan.launch is not None:
        operands = (*tables[:3], request.a, request.b, out)
        plan.launch.launch(tuple(t.data_ptr() for t in operands), numbers)
    del kept  # converted tensors: the stream orders the reuse of their memory behind the launch
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
            made = formula.matrix(of_rows(request, rows), tables.of_rows(rows)).view(block.shape)
            block.copy_(made + block if request.accumulate else made)
    return out

"""Reductions over blocks of points that go round the processes, of which none holds all.

In step s a process has the rows of the one that is s places before it. While it computes with them
they are already on their way to the next one. In a backward pass the gradients of a block go round
behind it, and are at home after one step more than there are processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from kernlib.distributed.communicator import Processes
from kernlib.runtime.dtypes import accumulator

if TYPE_CHECKING:
    from kernlib.distributed.reductions import Call

_WITHOUT_GRADIENT = ("kernel_min", "kernel_topk")


def reduce(call: Call, communicator: Processes, rows: tuple[int, ...], names: dict):
    """The reduction of a call whose b and v are this process's rows, of which every process has so
    many of ``rows``."""
    keys = [name for name, value in names.items() if isinstance(value, torch.Tensor)]
    tensors = (call.a, call.b, call.v, *(names[key] for key in keys))
    if call.task not in _WITHOUT_GRADIENT:
        return _Ring.apply(call, communicator, rows, names, keys, *tensors)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(
            f"{call.task} gives no gradient in a ring: pass ring=False, or call it under "
            "torch.no_grad()"
        )
    return _forward(call, communicator, rows, names)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, communicator, rows, names, keys, a, b, v, *values):
        names = {**names, **dict(zip(keys, values, strict=True))}
        call = call._replace(a=a, b=b, v=v)
        result = _forward(call, communicator, rows, names)
        ctx.request = call._replace(a=None, b=None, v=None), communicator, rows, names, keys
        logs = result if call.task == "kernel_logsumexp" else None
        ctx.save_for_backward(a, b, v, logs, *values)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        call, communicator, rows, names, keys = ctx.request
        a, b, v, logs, *values = ctx.saved_tensors
        needs = ctx.needs_input_grad[5:]
        communicator.agree("a backward ring", lambda: {"gradients": str(needs)}, key=lambda: needs)
        staying = [
            _Sum(t, need) for t, need in zip((a, *values), (needs[0], *needs[3:]), strict=True)
        ]
        names = names | dict(zip(keys, (sum.leaf for sum in staying[1:]), strict=True))
        moving = [
            None if t is None or not need else torch.zeros_like(t, dtype=accumulator(t.dtype))
            for t, need in zip((b, v), needs[1:3], strict=True)
        ]
        for source, first, block in _blocks(communicator, rows, (b, v)):
            leaves = [_Sum(*each) for each in zip(block, needs[1:3], moving, strict=True)]
            if rows[source] and a.shape[0]:
                tensors = staying[0].leaf, *(sum.leaf for sum in leaves)
                with torch.enable_grad():
                    part = _local(call, tensors, names, first, rows[source])
                weight = grad if logs is None else grad * torch.exp(part.detach() - logs)
                _add_gradients(part, weight, [*staying, *leaves])
            following = rows[(source - 1) % communicator.size]
            moving = _passed(communicator, moving, following)
        totals = [staying[0], *moving, *staying[1:]]
        totals = [each.total if isinstance(each, _Sum) else each for each in totals]
        inputs = (a, b, v, *values)
        grads = [None if t is None else t.to(x.dtype) for t, x in zip(totals, inputs, strict=True)]
        return *(None,) * 5, *grads


class _Sum:
    """A tensor of a backward pass, as a leaf of its own graph, and the sum of its gradients, which
    is None where none is asked for."""

    def __init__(self, t: torch.Tensor | None, needed: bool, total: torch.Tensor | None = None):
        self.leaf = None if t is None else t.detach().requires_grad_(needed)
        if total is None and needed:
            total = torch.zeros_like(t, dtype=accumulator(t.dtype))
        self.total = total


def _add_gradients(part: torch.Tensor, weight: torch.Tensor, sums: list[_Sum]) -> None:
    sums = [each for each in sums if each.total is not None]
    grads = torch.autograd.grad(part, [each.leaf for each in sums], weight)
    for each, grad in zip(sums, grads, strict=True):
        each.total += grad


def _blocks(
    communicator: Processes, rows: tuple[int, ...], tensors: tuple
) -> Iterator[tuple[int, int, tuple]]:
    """Rank, first row and tensors of each block that comes by; the next is on its way meanwhile."""
    block = tensors
    for step in range(communicator.size):
        source = (communicator.rank - step) % communicator.size
        wait = None
        if step + 1 < communicator.size:
            wait = _begin(communicator, block, rows[(source - 1) % communicator.size])
        yield source, sum(rows[:source]), block
        block = wait() if wait is not None else block


def _begin(communicator: Processes, tensors, rows: int):
    """Begin to pass tensors on, in whose place come others of so many rows."""
    there = [t for t in tensors if t is not None]
    wait = communicator.pass_on(there, [torch.Size((rows, *t.shape[1:])) for t in there])

    def arrived() -> tuple:
        others = iter(wait())
        return tuple(None if t is None else next(others) for t in tensors)

    return arrived


def _passed(communicator: Processes, tensors: list, rows: int) -> list:
    if all(t is None for t in tensors):
        return tensors
    return list(_begin(communicator, tensors, rows)())


def _local(call: Call, tensors: tuple, names: dict, first: int, rows: int):
    """The part of a result that a block of so many rows from ``first`` on leaves."""
    names = {**names, "col_offset": names["col_offset"] + first}
    if call.task == "kernel_topk":
        k, largest = call.more
        call = call._replace(more=(min(k, rows), largest))
    return call.local(call.descriptor, *tensors, names)


def _forward(call: Call, communicator: Processes, rows: tuple[int, ...], names: dict):
    if call.task == "kernel_topk" and not 1 <= call.more[0] <= sum(rows):
        raise ValueError(f"k must be 1 to {sum(rows)}, the rows of b, got {call.more[0]}")
    joined = None
    for source, first, (b, v) in _blocks(communicator, rows, (call.b, call.v)):
        if call.task in _WITHOUT_GRADIENT and not rows[source]:
            continue
        part = _local(call, (call.a, b, v), names, first, rows[source])
        if call.task in _WITHOUT_GRADIENT:
            part = part[0], part[1] + first
        joined = part if joined is None else _JOINS[call.task](call, joined, part)
    if joined is None:
        raise ValueError(f"b must have points for {call.task}")
    return joined if isinstance(joined, tuple) else joined.to(call.a.dtype)


def _added(call: Call, total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    return total.to(accumulator(part.dtype)) + part


def _joined_logs(call: Call, total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    return torch.logaddexp(total.to(accumulator(part.dtype)), part.to(accumulator(part.dtype)))


def _smaller(call: Call, first: tuple, second: tuple) -> tuple:
    """Of equal values that of the lower index; a NaN is smaller than any number."""
    (x, i), (y, j) = first, second
    both = (x == y) | (x.isnan() & y.isnan())
    chosen = torch.where(both, j < i, (y < x) | (y.isnan() & ~x.isnan()))
    return torch.where(chosen, y, x), torch.where(chosen, j, i)


def _best(call: Call, first: tuple, second: tuple) -> tuple:
    """The k best of two lists: of equal values those of the lower index first, which a stable sort
    of what is in the order of indices leaves in front."""
    k, largest = call.more
    values, indices = (torch.cat(pair, -1) for pair in zip(first, second, strict=True))
    indices, order = indices.sort(-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=largest, stable=True)
    return values[..., :k], indices.gather(-1, order)[..., :k]


_JOINS = {
    "kernel_matmul": _added,
    "kernel_sum": _added,
    "kernel_logsumexp": _joined_logs,
    "kernel_min": _smaller,
    "kernel_topk": _best,
}

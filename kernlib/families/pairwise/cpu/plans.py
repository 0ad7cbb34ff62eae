"""The pairwise op on CPU tensors: plans, and blocks of rows that torch's operators compute.

The oracle of tests is :mod:`kernlib.families.pairwise.reference`, which computes here what is
differentiated forwards: it is made of operators that torch differentiates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.autograd import forward_ad

from kernlib import events
from kernlib.descriptors.epilogues import Gaussian, Laplace
from kernlib.families.pairwise import checks, reference, stages, units
from kernlib.families.pairwise.cpu import sums
from kernlib.families.pairwise.request import Request
from kernlib.runtime import expressions
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.numbers import host_value
from kernlib.runtime.precision import without_autocast
from kernlib.runtime.tensors import check_memory, refuse_overlap, span

# Between these a factor made of a bandwidth is neither a denormal of float32 nor infinite.
_LEAST_FACTOR, _MOST_FACTOR = 1e-30, 1e30


class CpuPlan(NamedTuple):
    """What a call of one signature on the CPU needs besides its tensors and numbers."""

    call: checks.Call
    spans: tuple[int, int, int]  # bytes from first to last element of a, b, out
    positive: frozenset[str]  # hyperparameters that must be greater than zero
    wide: torch.dtype  # of the arithmetic
    root: bool  # the outer exponent follows from the inner one
    straight: bool  # whether blocks are computed where the result is wanted
    quotients: bool  # points are divided by a bandwidth

    def run(
        self, descriptor, a, b, out, accumulate, row_offset, col_offset, hyperparameters: dict
    ) -> torch.Tensor:
        """A request of :mod:`kernlib.families.pairwise.matrix`. Raises ValueError and TypeError
        for numbers that the signature does not tell apart, or where memory overlaps."""
        if a.device != self.call.device:  # of a subclass that stands for another one
            Request(descriptor, a, b, out, accumulate, row_offset, col_offset, {}).device()
        if events.listening():
            events.emit("torch", "", "", "pairwise on cpu: no kernel, computed by torch")
        return self.compute(
            descriptor, a, b, out, accumulate, row_offset, col_offset, hyperparameters
        )

    def compute(
        self, descriptor, a, b, out, accumulate, row_offset, col_offset, hyperparameters: dict
    ) -> torch.Tensor:
        """:meth:`run` without an event."""
        values = _plain(self, hyperparameters) if hyperparameters else {}
        second = a if b is None else b
        if out is not None:
            _refuse_overlap(self, out, a, second, hyperparameters)
        diagonal = row_offset - col_offset
        with without_autocast(self.call.device):
            if forward_ad._current_level >= 0:
                return _by_formula(self, descriptor, a, second, out, accumulate, diagonal, values)
            if out is None:
                out = torch.empty(self.call.out_shape, dtype=self.call.out_dtype, device="cpu")
            _fill(self, descriptor, a, second, out, accumulate, diagonal, values)
        return out


def plan(call: checks.Call, descriptor, a, b, out, accumulate, *rest) -> CpuPlan:
    """The plan of a checked call."""
    wide, values = accumulator(call.dtype), rest[-1]
    second = a if b is None else b
    straight = call.out_dtype == wide and not accumulate
    return CpuPlan(
        call=call,
        spans=(span(a), span(second), 0 if out is None else span(out)),
        positive=descriptor.positive,
        wide=wide,
        root=checks.follows_inner(descriptor, values),
        straight=straight and (out is None or out.is_contiguous()),
        quotients=units.is_of_quotients(descriptor, values),
    )


def _plain(plan: CpuPlan, hyperparameters: dict) -> dict:
    """Hyperparameters as floats and tensors. Raises ValueError and TypeError."""
    values = {}
    for name, value in hyperparameters.items():
        number = host_value(name, value)
        if number is None:
            checks.check_tensor(name, value, plan.positive)
        elif not number > 0:
            checks.check_host(name, number, plan.positive)
        values[name] = value if number is None else number
    return values


def _refuse_overlap(plan: CpuPlan, out: torch.Tensor, a, b, hyperparameters: dict) -> None:
    """Raises ValueError where ``out`` shares memory with an input, or may not be written."""
    check_memory(out)
    if checks.ranges_meet((a.data_ptr(), b.data_ptr(), out.data_ptr()), plan.spans):
        refuse_overlap(out, a=a, b=b)
    tensors = {k: v for k, v in hyperparameters.items() if isinstance(v, torch.Tensor)}
    if tensors:
        refuse_overlap(out, **tensors)


def _by_formula(plan: CpuPlan, descriptor, a, b, out, accumulate, diagonal: int, values: dict):
    """By the reference, which torch can differentiate."""
    call, values = plan.call, dict(values)
    first, second = (
        (x if x.dim() == 3 else x[None]).expand(call.batch, -1, -1).to(plan.wide) for x in (a, b)
    )
    unit = units.unit_of(descriptor, values, plan.wide) if plan.quotients else None
    if unit is not None:
        first, second, values, _ = units.in_unit(unit, first, second, values)
    inner = values.pop("p", values.pop("inner_p", None))
    names = ("epsilon", "regularization", "inner_scale", "outer_p")
    arguments = {name: values.pop(name) for name in names if name in values}
    result = reference.pairwise(
        descriptor,
        first,
        second,
        inner_p=inner,
        root=plan.root,
        diagonal=diagonal,
        parameters=values,
        **arguments,
    )
    if descriptor.symmetric:
        below = torch.ones(call.m, call.n, dtype=torch.bool, device=a.device).tril(-1)
        result = torch.where(below, result.mT, result)
    if out is None:
        out = torch.empty(call.out_shape, dtype=call.out_dtype, device=a.device)
    result = result.view(out.shape)
    return out.copy_(out.to(result.dtype) + result if accumulate else result)


def _fill(plan: CpuPlan, descriptor, a, b, out, accumulate, diagonal: int, values: dict) -> None:
    """Compute all entries of the batch into ``out``."""
    call, same = plan.call, _are_same(a, b)
    if 0 in (call.m, call.n, call.batch):
        return
    a, b = a.to(plan.wide), b.to(plan.wide)
    for l in range(call.batch):
        target = out[l] if out.dim() == 3 else out
        first, second = _of(a, l), _of(b, l)
        numbers = {name: reference.entry(value, l) for name, value in values.items()}
        if plan.quotients and not _is_usual(numbers["bandwidth"]):
            first, second, numbers = _in_unit(plan, descriptor, first, second, same, numbers)
        entry = _Entry(plan, descriptor, first, second, diagonal, numbers, same)
        entry.fill(target, accumulate)


def _is_usual(bandwidth: float) -> bool:
    return units.LEAST_USUAL <= bandwidth < units.MOST_USUAL


def _in_unit(plan: CpuPlan, descriptor, a, b, same: bool, numbers: dict) -> tuple:
    """Points and numbers of an entry, in a unit near a bandwidth far from 1."""
    unit = units.unit_of(descriptor, numbers, plan.wide)
    if unit is None:
        return a, b, numbers
    left, right, numbers, _ = units.in_unit(unit, a, None if same else b, numbers)
    return left, left if same else right, numbers | {"bandwidth": float(numbers["bandwidth"])}


def _are_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both are the same points in the same memory."""
    if a is b:
        return True
    same = a.data_ptr() == b.data_ptr() and a.shape == b.shape
    return same and a.stride() == b.stride()


def _of(points: torch.Tensor, l: int) -> torch.Tensor:
    """(N, K) of a batch entry."""
    if points.dim() == 2:
        return points
    return points[l if points.shape[0] > 1 else 0]


class _Entry:
    """One matrix of a batch."""

    def __init__(self, plan: CpuPlan, descriptor, a, b, diagonal: int, numbers: dict, same: bool):
        self.plan, self.descriptor, self.a, self.b = plan, descriptor, a, b
        self.diagonal, self.numbers = diagonal, numbers
        self.p = numbers.get("p", numbers.get("inner_p"))
        if self.p is not None:
            # As float32 has it: torch.pow takes it so for most elements of a tensor.
            self.p = a.new_tensor(self.p).item()
        self.sums = None
        if a.shape[1]:
            scale = numbers.get("inner_scale")
            self.sums = sums.of(descriptor, a, b, self.p, scale, same)

    def fill(self, target: torch.Tensor, accumulate: bool) -> None:
        """Compute the matrix into ``target``, or add it."""
        m, n = target.shape
        mirrored = self.descriptor.symmetric
        if mirrored and not self.plan.straight:  # whose values below are those of the arithmetic
            matrix = target.new_empty(m, n, dtype=self.plan.wide)
            self._fill(matrix, True, False)
            self._write(target, matrix, accumulate)
            return
        self._fill(target, self.plan.straight, accumulate)

    def _fill(self, target: torch.Tensor, straight: bool, accumulate: bool) -> None:
        m, n = target.shape
        step = m if self.sums is None else max(1, self._entries() // n)
        mirrored = self.descriptor.symmetric
        for start in range(0, m, step):
            rows = slice(start, min(start + step, m))
            columns = slice(start if mirrored else 0, n)
            block = target if (rows.stop - start, columns.start) == (m, 0) else None
            block = target[rows, columns] if block is None else block
            # Products into part of a line would be copied there by torch, by way of others.
            into = block if straight and block.is_contiguous() else None
            if into is None:
                into = block.new_empty(block.shape, dtype=self.plan.wide)
            values = self._block(into, rows, columns)
            if values is not block:
                self._write(block, values, accumulate)
            if mirrored:
                _mirror(target, rows)

    def _entries(self) -> int:
        """The entries of a block: fewer where its values are not finished in its own memory."""
        first = self.descriptor.epilogue[:1]
        beside = self.plan.root or (first and _factor(first[0], self.numbers) is None)
        return min(self.sums.entries, sums.ENTRIES) if beside else self.sums.entries

    def _write(self, block: torch.Tensor, made: torch.Tensor, accumulate: bool) -> None:
        block.copy_(made.add_(block) if accumulate else made)

    def _block(self, into: torch.Tensor, rows: slice, columns: slice) -> torch.Tensor:
        """Finished values of some rows and columns, in ``into`` or elsewhere."""
        descriptor, numbers = self.descriptor, self.numbers
        if self.sums is None:
            into.zero_()
        else:
            self.sums.fill(into, rows, columns)
        if self.plan.root:
            v = reference.norms(descriptor, self.a[rows], self.b[columns], into, self.p)
        elif isinstance(descriptor.outer, stages.Sqrt):
            v = into if self.sums is not None and self.sums.rooted else into.sqrt_()
            if sums.is_of_squares(descriptor, self.p):
                v = reference.distances(descriptor, self.a[rows], self.b[columns], v)
        else:
            v = reference.outer(descriptor.outer, into, numbers.get("outer_p"))
        if not descriptor.epilogue:
            return v
        epsilon = numbers.get("epsilon", 0.0)
        if epsilon:
            v = torch.where(v.abs() < epsilon, 0.0, v)
        v = _finished(descriptor, v, numbers)
        added = numbers.get("regularization", 0.0)
        if added:
            v.diagonal(self.diagonal + rows.start - columns.start).add_(added)
        return v


def _mirror(target: torch.Tensor, rows: slice) -> None:
    """Copy what is right of the diagonal to below it: BLAS sums (m, n) and (n, m) in different
    orders. The block has all columns from that of its first row on."""
    square = target[rows, rows]
    square.copy_(square.triu() + square.triu(1).T)
    target[rows.stop :, rows] = target[rows, rows.stop :].T


def _finished(descriptor, v: torch.Tensor, numbers: dict) -> torch.Tensor:
    """The epilogues over a block, in its memory where that is one of its own."""
    first, *rest = descriptor.epilogue
    factor = _factor(first, numbers)
    if factor is None:
        return _evaluated(descriptor.epilogue, v, numbers)
    v = v.mul_(factor).exp_()
    return _evaluated(tuple(rest), v, numbers) if rest else v


def _evaluated(epilogues: tuple, v: torch.Tensor, numbers: dict) -> torch.Tensor:
    names = [name for epilogue in epilogues for name in epilogue.parameters]
    result = expressions.apply(epilogues, v, {name: numbers[name] for name in names})
    # A result of one number alone is expanded.
    return result if result.is_contiguous() else result.clone()


def _factor(epilogue: object, numbers: dict) -> float | None:
    """The factor of an epilogue ``exp(factor * v)``; None for others, and at the ends of the
    range."""
    if type(epilogue) is Gaussian:
        factor = 0.5 / numbers["bandwidth"] / numbers["bandwidth"]
    elif type(epilogue) is Laplace:
        factor = 1 / numbers["bandwidth"]
    else:
        return None
    return -factor if _LEAST_FACTOR < factor < _MOST_FACTOR else None

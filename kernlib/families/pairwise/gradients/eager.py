"""Gradients of the pairwise op in eager calls.

A call is ``finish(S)`` with the sums ``S = sum_k inner(op(a, b))``. Forward is the ordinary fused
kernel, of which only the inputs are kept. Backward computes ``d finish / d S`` by a kernel like it
(:mod:`kernlib.families.pairwise.gradients.weights`), a block of rows at a time, multiplies it by
the gradient that arrives, and turns these weights W into gradients of the points by one kernel for
each side: ``sum_t W[q,t] d inner(op(x_q, z_t)) / d x_q``. So a gradient takes memory for a block,
and not for the matrix.

With ``create_graph`` the call is made again out of operators that are recorded themselves
(:mod:`kernlib.families.pairwise.gradients.operators`), as it is under torch.compile.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch._C import _are_functorch_transforms_active

from kernlib.descriptors.expression import VALUE
from kernlib.families.pairwise import checks, stages
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.gradients import formula, products, weights
from kernlib.families.pairwise.gradients.formula import Sums
from kernlib.families.pairwise.gradients.point_products import FEWEST
from kernlib.families.pairwise.gradients.weights import Finish
from kernlib.families.pairwise.matrix import MATRIX, calls, matrix
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.numbers import host_value, on_device
from kernlib.runtime.operation import by_operator, operators_of
from kernlib.runtime.tensors import (
    check_flag,
    is_lazy,
    is_mapped,
    materialised,
    refuse_transforms,
    stand_ins,
)

BLOCK_ENTRIES = 1 << 27  # of the matrix at once: 512 MB in float32, and as much where it is packed
FEWEST_ROWS = 128  # of a block, unless there are fewer: a kernel's tile has as many
_INFINITE = float("inf")
_INNER = frozenset(("p", "inner_p", "inner_scale"))  # names of what the sums are given


def run(
    descriptor: Pairwise, a, b, out, accumulate, row_offset: int, col_offset: int, values: dict
) -> torch.Tensor:
    """A call whose gradient is recorded. Raises RuntimeError for an ``out``, and inside transforms
    of torch.func."""
    if out is not None:
        checks.check_tensors(a, b, out)
        refuse_out(a, b, out, values)
    if accumulate is not False:
        check_flag("accumulate", accumulate)
        raise ValueError("accumulate=True adds to out, and no out is given")
    tensors, numbers = {}, {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        else:
            numbers[name] = host_value(name, value)
    watched = stand_ins(a, b)
    if _are_functorch_transforms_active():
        watched = is_mapped(a, b, *tensors.values())
        if not watched:
            refuse_transforms(checks.MAPPED_ALONE, a=a, b=b, **tensors)
    if watched or getattr(a, "is_meta", False):
        request = descriptor, a, b, None, False, row_offset, col_offset, values
        if not watched:  # of meta tensors operators would say less
            checks.check_call(*request)
        return by_operator(MATRIX, request)
    call = Call(descriptor, row_offset, col_offset, numbers, tuple(tensors))
    try:
        return _Pairwise.apply(call, *map(formula.normal, (a, b, *tensors.values())))
    except Exception:
        checks.check_tensors(a, b, out)  # of others than dense ones torch says less, if it is first
        raise


def refuse_out(a, b, out, values: dict) -> None:
    """Raises RuntimeError, naming the argument that requires a gradient, for an ``out``."""
    checks.refuse_out(out, a=a, b=b, out=out, **values)


class Call(NamedTuple):
    """What of a call is no tensor, and the names of those of its hyperparameters that are."""

    descriptor: Pairwise
    row_offset: int
    col_offset: int
    numbers: dict
    names: tuple[str, ...]

    def values(self, tensors) -> dict:
        """All hyperparameters."""
        if not self.names:
            return self.numbers
        return self.numbers | dict(zip(self.names, tensors, strict=True))

    @property
    def diagonal(self) -> int:
        """``n - m`` of the entries that receive the regularization."""
        return self.row_offset - self.col_offset


class _Pairwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, call, a, b, *tensors):
        ctx.call = call
        ctx.save_for_backward(a, b, *tensors)
        offsets, values = (call.row_offset, call.col_offset), call.values(tensors)
        return calls.execute(call.descriptor, a, b, None, False, *offsets, values)

    @staticmethod
    def backward(ctx, grad):
        needs = ctx.needs_input_grad[1:]
        made = _made_again if torch.is_grad_enabled() else gradients
        return None, *made(ctx.call, needs, ctx.saved_tensors, grad)


def _made_again(call: Call, needs: tuple, saved: tuple, grad) -> list:
    """The gradients, recorded."""
    # Aliases, lest two of the arguments be one tensor.
    sides = [t.view_as(t) if need else t for t, need in zip(saved, needs, strict=True)]
    values = call.values(sides[2:])
    out = operators_of(MATRIX).recorded(call.descriptor, *sides[:2], values, call.diagonal)
    wanted = [side for side, need in zip(sides, needs, strict=True) if need]
    options = {"create_graph": True, "allow_unused": True}
    found = iter(torch.autograd.grad(out, wanted, grad, **options))
    return [next(found) if need else None for need in needs]


# The parts of a call.


def sums_of(descriptor: Pairwise, values: dict) -> Sums:
    """The sums of a call."""
    p, scale = values.get("p", values.get("inner_p")), values.get("inner_scale")
    if type(descriptor.inner) is stages.Power and not isinstance(p, torch.Tensor) and p in (1, 2):
        return Sums(_plain(descriptor, "Abs" if p == 1 else "Square"))
    return Sums(_plain(descriptor), p, scale)


@lru_cache(maxsize=1024)
def _plain(descriptor: Pairwise, inner: str | None = None) -> Pairwise:
    stage = getattr(stages, inner)() if inner else descriptor.inner
    return descriptor.replace(inner=stage, outer=stages.Identity(), epilogue=())


@lru_cache(maxsize=1024)
def _one_sided(descriptor: Pairwise) -> Pairwise:
    return descriptor.replace(symmetric=False) if descriptor.symmetric else descriptor


def is_plain(descriptor: Pairwise, values: dict) -> bool:
    """Whether a call's values are the sums."""
    p = values.get("p", values.get("inner_p"))
    root = checks.follows_inner(descriptor, values)
    same = not isinstance(p, torch.Tensor) and p in (0, 1, _INFINITE)
    identity = same if root else isinstance(descriptor.outer, stages.Identity)
    return identity and not descriptor.epilogue


def points_gradient(made: Sums, x, z, given: torch.Tensor, first: bool) -> torch.Tensor:
    """``sum_t W[l,q,t] d inner(op(x[l,q,k], z[l,t,k])) / d x``, (L, Q, K), or all without a batch,
    of weights ``given`` and without a record; x is the op's a if ``first``, else its b."""
    if given.numel() == 0 or x.shape[-1] == 0:
        return x.new_zeros(*given.shape[:-2], *x.shape[-2:])
    descriptor = made.descriptor
    if by_formula(made):
        sides = (batched(t) for t in (x, z, given))
        return _by_formula(made, *sides, first).view(*given.shape[:-2], *x.shape[-2:])
    if made.linear:
        if descriptor.operator == "dot":
            return products.dots(descriptor.precision, z, given)
        if given.numel() * x.shape[-1] >= FEWEST and x.dtype == torch.float32:
            return products.squares(descriptor.precision, x, z, given)
    from kernlib.families.pairwise.gradients.points import pair_gradient

    options = {"p": made.p, "inner_scale": made.scale, "first": first}
    return pair_gradient(descriptor.operator, descriptor.inner, x, z, given, **options)


def _by_formula(made: Sums, x, z, given, first: bool) -> torch.Tensor:
    x = x.expand(given.shape[0], -1, -1)
    return formula.gradients(made, x, z, given, first, (True, False, False, False))[0]


def by_formula(made: Sums) -> bool:
    """Whether no kernel knows the gradient."""
    infinite = not isinstance(made.p, torch.Tensor) and made.p == _INFINITE
    return infinite or isinstance(made.descriptor.inner, stages.PowerLog)


def exponent_sums(made: Sums) -> Sums | None:
    """The sums whose terms are the derivatives by the exponent of those of ``made``, if they have a
    kernel."""
    if not isinstance(made.descriptor.inner, stages.Power):
        return None
    return made._replace(descriptor=_plain(made.descriptor, "PowerLog"))


def batched(x: torch.Tensor) -> torch.Tensor:
    """With a batch, of size 1 if there is none."""
    return x if x.dim() == 3 else x[None]


# Blocks of the matrix.


class Block(NamedTuple):
    """Entries of the batch, and rows of a."""

    part: slice
    rows: slice

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """The block of something (L, M, ...) or (1, M, ...)."""
        return self.entries(x)[:, self.rows]

    def entries(self, x):
        """The batch entries of something (L, ...); what holds for all of them as it is."""
        whole = not isinstance(x, torch.Tensor) or x.dim() == 0 or x.shape[0] == 1
        return x if whole else x[self.part]


def blocks(batch: int, rows: int, columns: int, most: int) -> Iterator[Block]:
    """The blocks of a (batch, rows, columns) matrix, of about ``most`` entries each."""
    height = max(1, min(rows, max(FEWEST_ROWS, most // max(1, batch * columns))))
    depth = max(1, min(batch, most // max(1, height * columns)))
    for entry in range(0, batch, depth):
        for row in range(0, rows, height):
            yield Block(slice(entry, entry + depth), slice(row, row + height))


# The gradients.


class Backward(NamedTuple):
    """What the blocks of one backward pass share: the call, with tensors among its ``values`` on
    the device and in the arithmetic's dtype, and what is asked for: whether a and b, and which
    hyperparameters. ``plain``: the values are the sums. ``mirrored``: the gradient that arrives is
    added to its transpose."""

    descriptor: Pairwise
    values: dict
    points: tuple[bool, bool]
    wanted: tuple[str, ...]
    plain: bool
    mirrored: bool

    def part(self, block: Block) -> Backward:
        """For a block. Kernels that are symmetric compute no rows alone."""
        values = {name: block.entries(value) for name, value in self.values.items()}
        return self._replace(descriptor=_one_sided(self.descriptor), values=values)


@torch.no_grad()
def gradients(call: Call, needs: tuple, saved: tuple, grad: torch.Tensor) -> list:
    """The gradients of ``a``, ``b`` and the hyperparameters that are tensors, None where there is
    no need, without a record: from those inputs and from ``grad``, that of the output."""
    a, b, *tensors = saved
    wide = accumulator(a.dtype)
    grad = materialised(grad) if is_lazy(grad) else grad
    x = _ready(a, grad, wide)
    z = x if b is None else _ready(b, grad, wide)
    pairs = zip(call.names, tensors, strict=True)
    values = call.numbers | {name: on_device(name, t, a.device, wide) for name, t in pairs}
    unit = weights.unit_of(call.descriptor, values, wide)
    if unit is not None:
        x, z, values, unit = weights.in_unit(unit, x, z, values)
    wanted = tuple(name for name, need in zip(call.names, needs[2:], strict=True) if need)
    plain, mirrored = is_plain(call.descriptor, values), call.descriptor.symmetric and needs[0]
    shared = Backward(call.descriptor, values, needs[:2], wanted, plain, mirrored)
    # Without weights of its own, and with none that products would pack, nothing is large.
    light = plain and not wanted and not sums_of(call.descriptor, values).linear
    by = _at_once if light or grad.numel() <= BLOCK_ENTRIES else _by_blocks
    found = by(shared, x, z, grad)
    if unit is not None:
        found = {n: v / unit if n in ("a", "b") else v for n, v in found.items()}
    if "regularization" in wanted:
        found["regularization"] = grad.diagonal(call.diagonal, -2, -1).sum(-1, dtype=wide)
    names = ("a", "b", *call.names)
    made = zip(names, saved, needs, strict=True)
    return [_fitted(found.get(name), leaf) if need else None for name, leaf, need in made]


def _ready(x: torch.Tensor, grad: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """Points in the arithmetic's dtype, with a batch if the gradient has one."""
    x = batched(x) if grad.dim() == 3 else x
    x = x if x.dtype == wide else x.to(wide)
    return materialised(x) if is_lazy(x) else x


def _fitted(found: torch.Tensor | None, leaf: torch.Tensor) -> torch.Tensor:
    """A gradient in the form of its tensor: summed over a batch that was broadcast."""
    if found is None:
        return torch.zeros_like(leaf)
    if found.numel() != leaf.numel():
        found = found.sum(0)
    if found.shape != leaf.shape:
        found = found.reshape(leaf.shape)
    return found.to(leaf.device, leaf.dtype)


def _at_once(shared: Backward, x, z, grad) -> dict:
    if shared.mirrored:
        grad = grad.to(x.dtype) + grad.mT
    return _contributions(shared, x, z, grad)


def _by_blocks(shared: Backward, x, z, grad) -> dict:
    x, z, grad = (batched(t) for t in (x, z, grad))
    totals = {name: x.new_zeros(grad.shape[0]) for name in shared.wanted}
    totals |= {"a": torch.zeros_like(x), "b": torch.zeros_like(z)}
    for block in blocks(grad.shape[0], x.shape[1], z.shape[1], BLOCK_ENTRIES):
        given = block.of(grad)
        if shared.mirrored:
            given = given.to(x.dtype) + block.entries(grad)[:, :, block.rows].mT
        found = _contributions(shared.part(block), block.of(x), block.entries(z), given)
        for name, value in found.items():
            total = totals[name]
            total = block.of(total) if name == "a" else block.entries(total)
            total += value.sum_to_size(total.shape) if value.dim() == 3 else value
    return totals


def _contributions(shared: Backward, x, z, grad) -> dict[str, torch.Tensor]:
    """What a block of the matrix contributes to all gradients: (L, M, K), (L, N, K) and (L,), or
    (M, K), (N, K) and () without a batch."""
    descriptor, values = shared.descriptor, shared.values
    made, second = sums_of(descriptor, values), None if descriptor.symmetric else z
    if shared.plain:
        given, found = grad.to(x.dtype), {}
    else:
        given, found = _through_finish(shared, made, x, second, grad)
    if given is not None:
        for name, value in _through_inner(shared, made, x, z, given).items():
            found[name] = found[name] + value if name in found else value
    if shared.mirrored:
        found = {name: value / 2 for name, value in found.items()}
    if given is not None and shared.points[0]:
        found["a"] = points_gradient(made, x, z, given, True)
    if given is not None and shared.points[1]:
        found["b"] = points_gradient(made, z, x, given.mT, False)
    return found


def _through_finish(shared: Backward, made: Sums, x, second, grad) -> tuple:
    """``grad * d finish / d S``, None if that is 0, and what hyperparameters receive not by way of
    the sums."""
    finish = weights.finish_of(shared.descriptor, shared.values)
    if not weights.has_kernels(finish):
        return _by_torch(shared, made, x, second, grad)
    given, found = None, {}
    if any(shared.points) or not _INNER.isdisjoint(shared.wanted):
        given = weights.derivative(made, finish, VALUE, x, second)
        given = None if given is None else weights.weighted(given, grad)
    for name in shared.wanted:
        by = _name_in_finish(shared, finish, name)
        slope = None if by is None else weights.derivative(made, finish, by, x, second)
        if slope is not None:
            found[name] = weights.contracted(slope, grad)
            if name in _INNER:  # of whose exponent the outer one is the reciprocal
                p, power = shared.values[name], finish.values[by]
                whole = (p == 0) | p.isinf()
                found[name] = torch.where(whole, 0.0, -power * power * found[name])
    return given, found


def _name_in_finish(shared: Backward, finish: Finish, name: str) -> str | None:
    """What a hyperparameter is called in the derivatives of what follows the sums."""
    if name in shared.descriptor.parameters:
        return name
    root = checks.follows_inner(shared.descriptor, shared.values)
    return finish.exponent if name in (("p", "inner_p") if root else ("outer_p",)) else None


def _by_torch(shared: Backward, made: Sums, x, second, grad) -> tuple:
    """The same by torch, from the sums."""
    values = {name: v for name, v in shared.values.items() if name != "regularization"}
    leaves = {n: values[n].detach().requires_grad_() for n in shared.wanted if n in values}
    s = batched(matrix(made.descriptor, x, second, **made.arguments()))
    grad3 = batched(grad).to(s.dtype)
    s = s.expand(grad3.shape)
    given, *found = weights.by_torch(
        shared.descriptor, s, values | leaves, grad3, [*leaves.values()]
    )
    pairs = zip(leaves, found, strict=True)
    return given.view(grad.shape), {name: g for name, g in pairs if g is not None}


def _through_inner(shared: Backward, made: Sums, x, z, given) -> dict[str, torch.Tensor]:
    """What the exponent and the scale of the inner stage receive by way of the sums."""
    names = [name for name in shared.wanted if name in _INNER]
    if not names:
        return {}
    logarithmic = exponent_sums(made)
    if logarithmic is not None:
        second = None if made.descriptor.symmetric else z
        terms = matrix(logarithmic.descriptor, x, second, **logarithmic.arguments())
        return {names[0]: weights.contracted(terms, given)}
    x, z, given = (batched(t) for t in (x, z, given))
    each = [v.expand(given.shape[0]) if isinstance(v, torch.Tensor) else v for v in made[1:]]
    needs = (False, False, names != ["inner_scale"], "inner_scale" in names)
    to_p, to_scale = formula.gradients(Sums(made.descriptor, *each), x, z, given, True, needs)[2:]
    return {name: to_scale if name == "inner_scale" else to_p for name in names}

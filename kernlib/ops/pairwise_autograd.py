"""Gradients of the pairwise op in eager calls.

A call is ``finish(S)`` with the sums ``S = sum_k inner(op(a, b))``. Forward is the ordinary fused
kernel, of which only the inputs are kept. Backward makes S again, a block of rows at a time, lets
torch differentiate what follows it, which is elementwise, and turns ``W = d out / d S`` into
gradients of the points by one kernel for each side: ``sum_t W[q,t] d inner(op(x_q, z_t)) / d x_q``.
So a gradient takes memory for a block, and not for the matrix.

With ``create_graph`` the call is made again out of operators that are recorded themselves
(:mod:`kernlib.ops.pairwise_operators`), as it is under torch.compile.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch._C import _are_functorch_transforms_active

from kernlib.descriptors import norms
from kernlib.descriptors.pairwise import Pairwise
from kernlib.ops import pairwise as op
from kernlib.ops import pairwise_checks as checks
from kernlib.ops import pairwise_formula as formula
from kernlib.ops.hyperparameters import accumulator
from kernlib.ops.pairwise_formula import Sums
from kernlib.ops.tensors import is_lazy, materialised, refuse_transforms, stand_ins
from kernlib.reference import pairwise_stages as stages

BLOCK_ENTRIES = 1 << 25  # of the matrix at once: 128 MB in float32, some five times
FEWEST_ROWS = 128  # of a block, unless there are fewer: a kernel's tile has as many
_INFINITE = float("inf")


def run(
    descriptor: Pairwise, a, b, out, accumulate, row_offset: int, col_offset: int, values: dict
) -> torch.Tensor:
    """A call whose gradient is recorded. Raises RuntimeError for an ``out``, and inside transforms
    of torch.func."""
    refuse_out(a, b, out, values)
    if accumulate:
        raise ValueError("accumulate=True adds to out, and no out is given")
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    if _are_functorch_transforms_active():
        refuse_transforms(checks.NO_TRANSFORMS, a=a, b=b, **tensors)
    if stand_ins(a, b):
        from kernlib.ops import pairwise_library

        offsets = {"row_offset": row_offset, "col_offset": col_offset}
        return pairwise_library.run(descriptor, a, b, **offsets, **values)
    numbers = {name: value for name, value in values.items() if name not in tensors}
    call = Call(descriptor, row_offset, col_offset, numbers, tuple(tensors))
    return _Pairwise.apply(call, a, b, *tensors.values())


def refuse_out(a, b, out, values: dict) -> None:
    """Raises RuntimeError, naming the argument that requires a gradient, for an ``out``."""
    if out is None:
        return
    for name, value in {"a": a, "b": b, "out": out, **values}.items():
        if getattr(value, "requires_grad", False):
            raise RuntimeError(
                f"{name} requires a gradient, which a call that writes out does not record: leave "
                f"out and accumulate away, pass {name}.detach(), or call under torch.no_grad()"
            )


class Call(NamedTuple):
    """What of a call is no tensor, and the names of those of its hyperparameters that are."""

    descriptor: Pairwise
    row_offset: int
    col_offset: int
    numbers: dict
    names: tuple[str, ...]

    def values(self, tensors) -> dict:
        """All hyperparameters."""
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
        offsets = {"row_offset": call.row_offset, "col_offset": call.col_offset}
        return op.run(call.descriptor, a, b, **offsets, **call.values(tensors))

    @staticmethod
    def backward(ctx, grad):
        needs = ctx.needs_input_grad[1:]
        made = _made_again if torch.is_grad_enabled() else gradients
        return None, *made(ctx.call, needs, ctx.saved_tensors, grad)


def _made_again(call: Call, needs: tuple, saved: tuple, grad) -> list:
    """The gradients, recorded."""
    from kernlib.ops import pairwise_operators

    # Aliases, lest two of the arguments be one tensor.
    sides = [t.view_as(t) if need else t for t, need in zip(saved, needs, strict=True)]
    values = call.values(sides[2:])
    out = pairwise_operators.recorded(call.descriptor, *sides[:2], values, call.diagonal)
    wanted = [side for side, need in zip(sides, needs, strict=True) if need]
    options = {"create_graph": True, "allow_unused": True}
    found = iter(torch.autograd.grad(out, wanted, grad, **options))
    return [next(found) if need else None for need in needs]


# The parts of a call.


def sums_of(descriptor: Pairwise, values: dict) -> Sums:
    """The sums of a call."""
    p, scale = values.get("p", values.get("inner_p")), values.get("inner_scale")
    power = isinstance(descriptor.inner, norms.Power)
    if power and not isinstance(p, torch.Tensor) and p in (1, 2):
        return Sums(_plain(descriptor, norms.Abs() if p == 1 else norms.Square()))
    return Sums(_plain(descriptor, descriptor.inner), p, scale)


@lru_cache(maxsize=1024)
def _plain(descriptor: Pairwise, inner: object) -> Pairwise:
    return descriptor.replace(inner=inner, outer=norms.Identity(), epilogue=())


def is_plain(descriptor: Pairwise, values: dict) -> bool:
    """Whether a call's values are the sums."""
    p = values.get("p", values.get("inner_p"))
    root = checks.follows_inner(descriptor, values)
    same = not isinstance(p, torch.Tensor) and p in (0, 1, _INFINITE)
    identity = same if root else isinstance(descriptor.outer, norms.Identity)
    return identity and not descriptor.epilogue


def points_gradient(made: Sums, x, z, weights, first: bool) -> torch.Tensor:
    """``sum_t W[l,q,t] d inner(op(x[l,q,k], z[l,t,k])) / d x``, (L, Q, K), without a record; x is
    the op's a if ``first``, else its b."""
    from kernlib.ops.pairwise_gradient import pair_gradient

    if weights.numel() == 0 or x.shape[-1] == 0:
        return x.new_zeros(weights.shape[0], *x.shape[1:])
    if by_formula(made):
        needs, x = (True, False, False, False), x.expand(weights.shape[0], -1, -1)
        return formula.gradients(made, x, z, weights, first, needs)[0]
    operator, inner = made.descriptor.operator, made.descriptor.inner
    options = {"p": made.p, "inner_scale": made.scale, "first": first}
    return pair_gradient(operator, inner, x, z, weights, **options)


def by_formula(made: Sums) -> bool:
    """Whether no kernel knows the gradient."""
    infinite = not isinstance(made.p, torch.Tensor) and made.p == _INFINITE
    return infinite or isinstance(made.descriptor.inner, norms.PowerLog)


def exponent_sums(made: Sums) -> Sums | None:
    """The sums whose terms are the derivatives by the exponent of those of ``made``, if they have a
    kernel."""
    if not isinstance(made.descriptor.inner, norms.Power):
        return None
    return made._replace(descriptor=_plain(made.descriptor, norms.PowerLog()))


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


def weights_of(
    descriptor: Pairwise, s: torch.Tensor, values: dict, diagonal: int, grad, wanted: list
) -> list:
    """The gradients of ``sum grad * finish(s)`` with respect to s and the ``wanted`` tensors among
    ``values``, None for what nothing depends on."""
    with torch.enable_grad():
        s = s.detach().requires_grad_()
        root = checks.follows_inner(descriptor, values)
        out = stages.finish(descriptor, s, values, root=root, diagonal=diagonal)
        if not out.requires_grad:
            return [None] * (1 + len(wanted))
        grad = torch.ones_like(out) if grad is None else grad
        return list(torch.autograd.grad(out, [s, *wanted], grad, allow_unused=True))


def gradients(call: Call, needs: tuple, saved: tuple, grad: torch.Tensor) -> list:
    """The gradients of ``a``, ``b`` and the hyperparameters that are tensors, None where there is
    no need, without a record."""
    a, b, *tensors = saved
    wide = accumulator(a.dtype)
    x = _ready(a, wide)
    z = x if b is None else _ready(b, wide)
    leaves = {
        name: t.detach().to(a.device, wide, copy=True).requires_grad_(need)
        for name, t, need in zip(call.names, tensors, needs[2:], strict=True)
    }
    totals = [torch.zeros_like(x) if needs[0] else None]
    totals.append(torch.zeros_like(z) if needs[1] else None)
    totals += [torch.zeros_like(t) if t.requires_grad else None for t in leaves.values()]
    grad = batched(materialised(grad) if is_lazy(grad) else grad)
    symmetric = call.descriptor.symmetric
    descriptor = call.descriptor.replace(symmetric=False) if symmetric else call.descriptor
    made = call._replace(descriptor=descriptor)
    plain = is_plain(descriptor, call.values(tensors)) and not any(needs[2:])
    most = grad.numel() if plain else BLOCK_ENTRIES
    for block in blocks(grad.shape[0], x.shape[1], z.shape[1], max(1, most)):
        given = block.of(grad).to(wide)
        if symmetric:  # out is, so its gradient may be taken so
            given = (given + block.entries(grad)[:, :, block.rows].mT) / 2
        _add_block(made, block, x, z, given, leaves, totals, plain)
    if symmetric and needs[0]:
        totals[0] *= 2  # a stands on both sides
    pairs = zip(totals, saved, strict=True)
    return [None if g is None else g.to(t.device, t.dtype).reshape(t.shape) for g, t in pairs]


def _ready(x: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    x = batched(x.detach()).to(wide)
    return materialised(x) if is_lazy(x) else x


def _add_block(call: Call, block: Block, x, z, grad, leaves: dict, totals: list, plain) -> None:
    """Add what a block of the matrix contributes to all gradients."""
    rows, columns = block.of(x), block.entries(z)
    with torch.enable_grad():
        values = call.numbers | {name: block.entries(t) for name, t in leaves.items()}
    detached = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
    made, weights = sums_of(call.descriptor, detached), grad
    if not plain:
        s = batched(op.run(made.descriptor, rows, columns, **made.arguments()))
        wanted = [t for t in leaves.values() if t.requires_grad]
        diagonal = call.diagonal + block.rows.start
        weights, *found = weights_of(call.descriptor, s, values, diagonal, grad, wanted)
        for total, g in zip([t for t in totals[2:] if t is not None], found, strict=True):
            total += 0 if g is None else g
    if weights is None:  # of an epilogue that does not look at its value
        return
    if totals[0] is not None:
        _add(block.of(totals[0]), points_gradient(made, rows, columns, weights, True))
    if totals[1] is not None:
        _add(block.entries(totals[1]), points_gradient(made, columns, rows, weights.mT, False))
    _add_inner(made, block, (rows, columns, weights), dict(zip(leaves, totals[2:], strict=True)))


def _add_inner(made: Sums, block: Block, sides: tuple, totals: dict) -> None:
    """Add what the exponent and the scale of the inner stage receive through the sums."""
    to_p = totals.get("p", totals.get("inner_p"))
    to_scale = totals.get("inner_scale")
    logarithmic = exponent_sums(made)
    if logarithmic is not None and to_p is not None:
        terms = batched(op.run(logarithmic.descriptor, *sides[:2], **logarithmic.arguments()))
        _add(block.entries(to_p), (sides[2] * terms).sum((1, 2)))
    elif to_p is not None or to_scale is not None:
        needs = (False, False, to_p is not None, to_scale is not None)
        found = formula.gradients(made, *sides, True, needs)[2:]
        for total, g in zip((to_p, to_scale), found, strict=True):
            if total is not None:
                _add(block.entries(total), g)


def _add(total: torch.Tensor, found: torch.Tensor) -> None:
    """Add to one of a smaller batch, or of none, too."""
    total += found.sum_to_size(total.shape)

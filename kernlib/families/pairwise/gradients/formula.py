"""Derivatives of pairwise sums by torch's own operators on their formula: those that no kernel
computes, which are first ones of rare stages, and second ones.

All differences of a block are in memory at once, so work goes by blocks of rows wherever it may.
Under ``create_graph`` everything is kept for second derivatives."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from kernlib.families.pairwise import stages as norms
from kernlib.families.pairwise import stages_reference as stages
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.runtime import rehearsal
from kernlib.runtime.precision import times, without_autocast
from kernlib.runtime.tensors import normal

BLOCK_ELEMENTS = 1 << 24  # of (L, rows, T, K) at once: 64 MB in float32, several times


class Sums(NamedTuple):
    """Sums ``sum_k inner(op(a, b))``: the descriptor that computes nothing else, and by their names
    the ``p`` and ``inner_scale`` that it takes: numbers, or tensors of shape () or (L,)."""

    descriptor: Pairwise
    given: dict

    @property
    def p(self) -> float | torch.Tensor | None:
        """The exponent of the inner stage, if it has one."""
        return self.given.get("p")

    @property
    def scale(self) -> float | torch.Tensor | None:
        """The scale of the inner stage, if it has one."""
        return self.given.get("inner_scale")

    def having(self, p, scale) -> Sums:
        """The same sums with other numbers; None is a number that they do not take."""
        numbers = {"p": p, "inner_scale": scale}
        return self._replace(given={k: v for k, v in numbers.items() if v is not None})

    def of(self, x, z, first: bool) -> torch.Tensor:
        """The sums, by the formula."""
        descriptor = self.descriptor
        return stages.sums(descriptor.operator, descriptor.inner, x, z, **self.given, first=first)

    @property
    def linear(self) -> bool:
        """Whether their gradient is products of matrices."""
        return stages.linear(self.descriptor.operator, self.descriptor.inner)


def sums_of(descriptor: Pairwise, values: dict) -> Sums:
    """The sums of a call."""
    p = values.get("p", values.get("inner_p"))
    if type(descriptor.inner) is norms.Power and not isinstance(p, torch.Tensor) and p in (1, 2):
        return Sums(_alone(descriptor, "Abs" if p == 1 else "Square"), {})
    return Sums(_alone(descriptor), {}).having(p, values.get("inner_scale"))


@lru_cache(maxsize=1024)
def _alone(descriptor: Pairwise, inner: str | None = None) -> Pairwise:
    """The descriptor of the sums alone, perhaps of another inner stage."""
    stage = getattr(norms, inner)() if inner else descriptor.inner
    return descriptor.replace(inner=stage, outer=norms.Identity(), epilogue=())


def exponent_sums(made: Sums) -> Sums | None:
    """The sums of the derivatives by the exponent of the terms of ``made``, if they have a
    kernel."""
    if not isinstance(made.descriptor.inner, norms.Power):
        return None
    return made._replace(descriptor=_alone(made.descriptor, "PowerLog"))


def gradients(made: Sums, x, z, weights, first: bool, needs: tuple) -> list:
    """The gradients of ``sum W S`` with respect to x, z, p and the inner scale, None where there is
    no need: (L, Q, K), (L, T, K), the shapes of p and of the scale."""
    create = torch.is_grad_enabled()

    def value(x, z, weights, p, scale):
        return (made.having(p, scale).of(x, z, first) * weights).sum((1, 2))

    needed = (*needs[:2], False, *needs[2:])
    tensors = x, z, weights, made.p, made.scale
    grads = by_rows(value, tensors, needed, None, create, whole=made.linear)
    return [*grads[:2], *grads[3:]]


def second(made: Sums, x, z, weights, first: bool, along, needs: tuple) -> list:
    """The gradients of ``sum_qk along * (gradient of sum W S with respect to x)`` with respect to
    x, z, W, p and the inner scale, None where there is no need."""
    create = torch.is_grad_enabled()
    if made.linear and made.descriptor.operator == "difference":
        with without_autocast(x.device):
            return _second_of_squares(made.descriptor.precision, x, z, weights, along, needs)

    def value(x, z, weights, p, scale):
        if made.linear:
            return times(made.descriptor.precision, weights, z)
        x = x.expand(weights.shape[0], -1, -1)
        s = made.having(p, scale).of(x, z, first)
        (slope,) = torch.autograd.grad(s, x, weights, create_graph=True)
        return slope

    tensors = x, z, weights, made.p, made.scale
    with without_autocast(x.device):
        return by_rows(value, tensors, needs, along, create, whole=made.linear)


def _second_of_squares(precision: str | None, x, z, weights, along, needs: tuple) -> list:
    """:func:`second` of squared differences, whose gradient is ``2 sum_t W (x - z)``. What W
    receives is made of differences: of products ``along x - along z`` nothing is left where points
    lie close together."""
    x, z, weights, along = (normal(t) for t in (x, z, weights, along))
    to_x = to_z = to_weights = None
    if needs[0]:
        to_x = (2 * weights.sum(-1, keepdim=True) * along).sum_to_size(x.shape)
    if needs[1]:
        to_z = (-2 * times(precision, weights.mT, along)).sum_to_size(z.shape)
    if needs[2]:
        rows = max(1, BLOCK_ELEMENTS // max(1, weights.shape[0] * z.shape[1] * z.shape[2]))
        parts = zip(x.split(rows, 1), along.split(rows, 1), strict=True)
        blocks = [_along_differences(part, z, direction) for part, direction in parts]
        to_weights = 2 * torch.cat(blocks, 1) if blocks else torch.zeros_like(weights)
    return [to_x, to_z, to_weights, None, None]


def _along_differences(x, z, along) -> torch.Tensor:
    """``sum_k along[l,q,k] (x[l,q,k] - z[l,t,k])``, (L, Q, T)."""
    return ((x[:, :, None] - z[:, None]) * along[:, :, None]).sum(-1)


def by_rows(
    value,
    tensors: tuple,
    needs: tuple,
    along,
    create: bool,
    of_rows: tuple[int, ...] = (0, 2),
    whole: bool = False,
) -> list:
    """The gradients of a function ``value`` of x, z, W and more, tensors or numbers, which treats
    each row of x, W and whatever else has a place in ``of_rows`` alone; of all rows at once if
    ``whole``."""
    x, z, weights = tensors[:3]
    count = rows = max(1, x.shape[1])  # an empty x is one empty block
    alone = rehearsal.current() is None  # a meta tensor takes no memory
    if not create and not whole and alone:
        rows = max(1, BLOCK_ELEMENTS // max(1, weights.shape[0] * z.shape[1] * z.shape[2]))
    lists = [[] for _ in needs]
    for begin in range(0, count, rows):
        part = slice(begin, begin + rows)
        direction = None if along is None else along[:, part]
        sides = [t[:, part] if i in of_rows else t for i, t in enumerate(tensors)]
        block = _block(value, sides, needs, direction, create)
        for grads, grad in zip(lists, block, strict=True):
            grads.append(grad)
    return [_joined(grads, i in of_rows) if needs[i] else None for i, grads in enumerate(lists)]


def _block(value, sides: list, needs: tuple, along, create: bool) -> list:
    with torch.inference_mode(False), torch.enable_grad():
        sides, along = [normal(t) for t in sides], normal(along)
        # x always: its own gradient is what second() differentiates.
        needed = (True, *needs[1:])
        leaves = [_leaf(t, create) if ask else t for t, ask in zip(sides, needed, strict=True)]
        y = value(*leaves)
        inputs = [leaf for leaf, need in zip(leaves, needs, strict=True) if need]
        if not y.requires_grad:  # such as W z, when x alone is asked for
            grads = [torch.zeros_like(leaf) for leaf in inputs]
        else:
            along = torch.ones_like(y) if along is None else along.expand_as(y)
            options = {"create_graph": create, "materialize_grads": True}
            grads = torch.autograd.grad(y, inputs, along, **options) if inputs else []
    remaining = iter(grads)
    return [next(remaining) if need else None for need in needs]


def _leaf(t: torch.Tensor, create: bool) -> torch.Tensor:
    """A leaf for a gradient: an alias, lest two of the arguments be one tensor."""
    if create and t.requires_grad:
        return t.view_as(t)
    return t.detach().requires_grad_()


def _joined(parts: list, are_rows: bool) -> torch.Tensor:
    """Rows one after another, others summed."""
    if are_rows:
        return torch.cat(parts, 1)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total

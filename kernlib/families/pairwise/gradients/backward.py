"""The backward pass of a matrix, or of a block of one, without a record.

A call is ``finish(S)`` with the sums ``S = sum_k inner(op(a, b))``. ``d finish / d S`` is computed
by a kernel like that of the call (:mod:`kernlib.families.pairwise.gradients.weights`), a block of
rows at a time, multiplied by the gradient that arrives, and these weights W are turned into
gradients of the points by one kernel for each side: ``sum_t W[q,t] d inner(op(x_q, z_t)) / d x_q``.
So a gradient takes memory for a block, and not for the matrix.

A pass begins with its :class:`Route`: all that follows from its descriptor, the kinds of its
hyperparameters and the gradients that are needed, without numbers that may change from call to
call, such as a bandwidth. It is kept with the plans, so that a hot pass looks it up and
launches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from kernlib.descriptors.expression import VALUE
from kernlib.families.pairwise import checks, stages
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.gradients import formula, norms, primitive, products, weights
from kernlib.families.pairwise.gradients.arguments import Kind, Operands
from kernlib.families.pairwise.gradients.formula import Sums, exponent_sums, sums_of
from kernlib.families.pairwise.gradients.weights import Finish, Slope
from kernlib.families.pairwise.matrix import calls, matrix
from kernlib.families.pairwise.stages_reference import linear
from kernlib.families.pairwise.units import (
    LEAST_USUAL,
    MOST_USUAL,
    in_unit,
    is_of_quotients,
    unit_of,
)
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.numbers import on_device
from kernlib.runtime.plan import PlanCache
from kernlib.runtime.tensors import is_lazy, materialised

BLOCK_ENTRIES = 1 << 27  # of the matrix at once: 512 MB in float32, and as much where it is packed
FEWEST_ROWS = 128  # of a block, unless there are fewer: a kernel's tile has as many
_INFINITE = float("inf")
_WITH_UNIT = frozenset(("a", "b", "bandwidth"))
INNER = frozenset(("p", "inner_p", "inner_scale"))  # names of the sums' arguments
DECIDING = frozenset(("p", "inner_p", "outer_p", "epsilon"))  # numbers that choose code


class Call(NamedTuple):
    """The parts of a call that are no tensors, and the names of the hyperparameters that are."""

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


class Route(NamedTuple):
    """How the gradients of a call are computed that are asked for."""

    descriptor: Pairwise
    wide: torch.dtype  # of the arithmetic
    points: tuple[bool, bool]  # whether the gradients by a and b are needed
    names: tuple[str, ...]  # hyperparameters whose gradients are
    inner: tuple[str, ...]  # the sums' ones among ``names``
    quotients: bool  # points are divided by a bandwidth
    sums: Pairwise
    arguments: tuple[tuple[str, str], ...]  # that the sums take, and the hyperparameters they are
    plain: bool  # the values are the sums
    light: bool  # nothing is made that is as large as the matrix
    mirrored: bool  # the gradient that arrives is added to its transpose
    finish: Finish | None  # what follows the sums; None if torch computes its derivatives
    weight: Slope | None  # its derivative by the sums; None if that is 0 or not needed
    slopes: tuple[tuple[str, Slope], ...]  # those by hyperparameters of ``names``, unless 0
    norm: Pairwise | None  # whose finish, weight and slopes these are, in place of the sums'
    parts: int  # matrices side by side


_routes = PlanCache()


def route_of(call: Call, needs: tuple, saved: tuple, scaled: bool = True) -> Route:
    """The route to the gradients of a call; ``needs`` says for each of the ``saved`` tensors
    whether its gradient is needed. It goes by the norms if they may be ``scaled``, else by the
    sums."""
    dtype = saved[0].dtype
    key = call.descriptor.text, dtype, call.names, needs, scaled
    for name, value in call.numbers.items():
        key += (name, value if name in DECIDING else None)
    route = _routes.plans.get(key)
    if route is None:
        names = tuple(name for name, need in zip(call.names, needs[2:], strict=True) if need)
        values = call.values(saved[2:])
        route = _route(call.descriptor, values, accumulator(dtype), needs[:2], names, scaled)
        _routes.keep(key, route)
    return route


def of_rows(route: Route, values: dict) -> Route:
    """The way for a block of rows. Kernels that are symmetric compute no rows alone."""
    if not route.descriptor.symmetric:
        return route
    descriptor = route.descriptor.replace(symmetric=False)
    several = _route(descriptor, values, *route[1:4], route.norm is not None)
    return several._replace(mirrored=route.mirrored)


def _route(
    descriptor: Pairwise,
    values: dict,
    wide: torch.dtype,
    points: tuple,
    names: tuple,
    scaled: bool,
) -> Route:
    sums, plain = sums_of(descriptor, values), weights.is_plain(descriptor, values)
    of_norms = scaled and norms.are_values(descriptor, values)
    inner = tuple(name for name in names if name in INNER)
    finish = None if plain else weights.finish_of(descriptor, values, of_norms)
    if finish is not None and not weights.has_kernels(finish):
        finish = None
    weight, slopes = None, ()
    if finish is not None:
        named = {name: _name_in_finish(descriptor, values, finish, name) for name in names}
        if of_norms:  # what follows these has no exponent
            named = {name: by for name, by in named.items() if name not in INNER}
        slopes = _slopes(sums.descriptor, finish, named, wide)
        if any(points) or inner:
            weight = weights.slope_of(sums.descriptor, finish, VALUE, wide)
    return Route(
        descriptor, wide, points, names, inner,
        quotients=is_of_quotients(descriptor, values),
        sums=sums.descriptor,
        arguments=tuple((name, name if name in values else "inner_p") for name in sums.given),
        plain=plain,
        # Without weights of its own, and with none that products would pack.
        light=plain and not names and not sums.linear,
        mirrored=descriptor.symmetric and points[0],
        finish=finish, weight=weight, slopes=slopes,
        norm=norms.root_of(sums.descriptor) if of_norms else None,
        parts=2 if of_norms else 1,
    )  # fmt: skip


def _slopes(sums: Pairwise, finish: Finish, named: dict, wide: torch.dtype) -> tuple:
    """The derivatives that are not 0, by hyperparameters that are ``named`` in them."""
    slopes = {
        name: weights.slope_of(sums, finish, by, wide)
        for name, by in named.items()
        if by is not None
    }
    return tuple((name, slope) for name, slope in slopes.items() if slope is not None)


def _name_in_finish(descriptor: Pairwise, values: dict, finish: Finish, name: str) -> str | None:
    """A hyperparameter's name in the derivatives of the stages behind the sums."""
    if name in descriptor.parameters:
        return name
    root = checks.follows_inner(descriptor, values)
    return finish.exponent if name in (("p", "inner_p") if root else ("outer_p",)) else None


# The gradients of sums.


def points_gradient(
    made: Sums, x, z, given: torch.Tensor, first: bool, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """``sum_t W[l,q,t] d inner(op(x[l,q,k], z[l,t,k])) / d x``, (L, Q, K), or all without a batch,
    of weights ``given`` and without a record; x is the op's a if ``first``, else its b. Of norms
    with ``scales``
    (:func:`kernlib.families.pairwise.gradients.norms.shared`) ``sum_t W dN / dx``."""
    if given.numel() == 0 or x.shape[-1] == 0:
        return x.new_zeros(*given.shape[:-2], *x.shape[-2:])
    descriptor = made.descriptor
    if scales is None and by_formula(made):
        x, z, weights = (batched(t) for t in (x, z, given))
        x, needs = x.expand(weights.shape[0], -1, -1), (True, False, False, False)
        grad = formula.gradients(made, x, z, weights, first, needs)[0]
        return grad.view(*given.shape[:-2], *x.shape[-2:])
    if linear(descriptor.operator, descriptor.inner):
        if descriptor.operator == "dot":
            return products.dots(descriptor.precision, z, given)
        if given.numel() * x.shape[-1] >= products.FEWEST and x.dtype == torch.float32:
            return products.squares(descriptor.precision, x, z, given)
    kind = Kind(descriptor.operator, descriptor.inner, first, False, scales is not None)
    compute = primitive.rehearsed if x.is_meta else primitive.execute
    return compute(kind, Operands(x, z, given, None, scales), None, False, made.given)


def by_formula(made: Sums) -> bool:
    """Whether no kernel knows the gradient."""
    p = made.given.get("p")
    infinite = not isinstance(p, torch.Tensor) and p == _INFINITE
    return infinite or isinstance(made.descriptor.inner, stages.PowerLog)


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
        """The batch entries of a value (L, ...); a value for all entries as it is."""
        is_shared = not isinstance(x, torch.Tensor) or x.dim() == 0 or x.shape[0] == 1
        return x if is_shared else x[self.part]


def blocks(batch: int, rows: int, columns: int, most: int) -> Iterator[Block]:
    """The blocks of a (batch, rows, columns) matrix, of about ``most`` entries each."""
    height = max(1, min(rows, max(FEWEST_ROWS, most // max(1, batch * columns))))
    depth = max(1, min(batch, most // max(1, height * columns)))
    for entry in range(0, batch, depth):
        for row in range(0, rows, height):
            yield Block(slice(entry, entry + depth), slice(row, row + height))


# The gradients.


class Backward(NamedTuple):
    """What the blocks of one backward pass share: the way, and the hyperparameters, tensors among
    them on the device and in the arithmetic's dtype."""

    route: Route
    values: dict

    def part(self, block: Block) -> Backward:
        """For a block."""
        return Backward(self.route, {n: block.entries(value) for n, value in self.values.items()})


@torch.no_grad()
def gradients(call: Call, needs: tuple, saved: tuple, grad: torch.Tensor) -> list:
    """The gradients of ``a``, ``b`` and the hyperparameters that are tensors, None where not
    needed, from those inputs and the output's ``grad``, without a record."""
    a, b, *tensors = saved
    route, values = route_of(call, needs, saved), call.numbers
    wide = route.wide
    if is_lazy(a, b, grad):
        a, b, grad = (t if t is None else materialised(t) for t in (a, b, grad))
    x = _ready(a, grad, wide)
    z = x if b is None else _ready(b, grad, wide)
    if tensors:
        pairs = zip(call.names, tensors, strict=True)
        values = values | {name: on_device(name, t, a.device, wide) for name, t in pairs}
    unit = None
    if route.quotients:
        bandwidth = values["bandwidth"]
        if type(bandwidth) is not float or not LEAST_USUAL <= bandwidth < MOST_USUAL:
            unit = unit_of(call.descriptor, call.values(tensors), wide)
    if unit is not None:
        x, z, values, unit = in_unit(unit, x, z, values)
    by = _at_once if route.light or grad.numel() * route.parts <= BLOCK_ENTRIES else _by_blocks
    grads = by(Backward(route, values), x, z, grad)
    if unit is not None:
        grads = {n: _in_unit(v, unit) if n in _WITH_UNIT else v for n, v in grads.items()}
    if "regularization" in route.names:
        grads["regularization"] = grad.diagonal(call.diagonal, -2, -1).sum(-1, dtype=wide)
    leaves = zip(("a", "b", *call.names), saved, needs, strict=True)
    return [_fitted(grads.get(name), leaf) if need else None for name, leaf, need in leaves]


def _in_unit(grad: torch.Tensor, unit: float | torch.Tensor) -> torch.Tensor:
    """The gradient by points or by a bandwidth that were divided by a unit."""
    several = isinstance(unit, torch.Tensor) and unit.dim() > grad.dim()
    return grad / (unit.reshape(-1) if several else unit)


def _ready(x: torch.Tensor, grad: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """Points in the arithmetic's dtype, with a batch if the gradient has one."""
    x = batched(x) if grad.dim() == 3 else x
    return x if x.dtype == wide else x.to(wide)


def _fitted(grad: torch.Tensor | None, leaf: torch.Tensor) -> torch.Tensor:
    """A gradient in the form of its tensor: summed over a batch that was broadcast."""
    if grad is None:
        return torch.zeros_like(leaf)
    if grad.numel() != leaf.numel():
        grad = grad.sum(0)
    if grad.shape != leaf.shape:
        grad = grad.reshape(leaf.shape)
    return grad.to(leaf.device, leaf.dtype)


def _at_once(shared: Backward, x, z, grad) -> dict:
    if shared.route.mirrored:
        grad = grad.to(x.dtype) + grad.mT
    return _contributions(shared, x, z, grad)


def _by_blocks(shared: Backward, x, z, grad) -> dict:
    x, z, grad = (batched(t) for t in (x, z, grad))
    shared = shared._replace(route=of_rows(*shared))
    totals = {name: x.new_zeros(grad.shape[0]) for name in shared.route.names}
    totals |= {"a": torch.zeros_like(x), "b": torch.zeros_like(z)}
    most = BLOCK_ENTRIES // shared.route.parts
    for block in blocks(grad.shape[0], x.shape[1], z.shape[1], most):
        rows = block.of(grad)
        if shared.route.mirrored:
            rows = rows.to(x.dtype) + block.entries(grad)[:, :, block.rows].mT
        grads = _contributions(shared.part(block), block.of(x), block.entries(z), rows)
        for name, value in grads.items():
            total = totals[name]
            total = block.of(total) if name == "a" else block.entries(total)
            total += value.sum_to_size(total.shape) if value.dim() == 3 else value
    return totals


def _contributions(shared: Backward, x, z, grad) -> dict[str, torch.Tensor]:
    """What a block of the matrix contributes to all gradients: (L, M, K), (L, N, K) and (L,), or
    (M, K), (N, K) and () without a batch."""
    route, values = shared
    sums = Sums(route.sums, {})
    for name, source in route.arguments:  # a comprehension would be a call
        sums.given[name] = values[source]
    second = None if route.descriptor.symmetric else z
    scales = None
    if route.norm is not None:
        by_sums, scales, grads = _through_norms(shared, sums, x, z, second, grad)
    elif route.plain:
        by_sums, grads = grad.to(x.dtype), {}
    else:
        through = _by_torch if route.finish is None else _through_finish
        by_sums, grads = through(shared, sums, x, second, grad)
    if route.inner and by_sums is not None and route.norm is None:
        for name, value in _through_inner(route, sums, x, z, by_sums).items():
            grads[name] = grads[name] + value if name in grads else value
    if route.mirrored:
        grads = {name: value / 2 for name, value in grads.items()}
    if by_sums is not None and route.points[0]:
        grads["a"] = points_gradient(sums, x, z, by_sums, True, scales)
    if by_sums is not None and route.points[1]:
        transposed = None if scales is None else scales.mT
        grads["b"] = points_gradient(sums, z, x, by_sums.mT, False, transposed)
    return grads


def _through_norms(shared: Backward, sums: Sums, x, z, second, grad) -> tuple:
    """Weights and scales of pair gradients, None where the gradient is 0 or not needed, and the
    gradients of hyperparameters."""
    route, values = shared
    n = calls.execute(route.norm, x, second, None, False, 0, 0, sums.given)
    by_norms, grads = grad.to(x.dtype), {}
    if route.finish is None:
        by_norms, grads = _finish_by_torch(shared, n, grad)
    elif route.descriptor.epilogue:
        by_norms = None
        if route.weight is not None:
            by_norms = (weights.of_norms(route.weight, values, n) * grad).view(grad.shape)
        for name, slope in route.slopes:
            grads[name] = weights.contracted(weights.of_norms(slope, values, n), grad)
    if route.inner and by_norms is not None:
        sides = (batched(t) for t in (x, z, n, by_norms))
        grads[route.inner[0]] = norms.by_exponent(sums, *sides)
    if by_norms is None or True not in route.points:
        return None, None, grads
    return *norms.shared(sums.given["p"], by_norms, n), grads


def _through_finish(shared: Backward, sums: Sums, x, second, grad) -> tuple:
    """``grad * d finish / d S``, None if that is 0, and the hyperparameters' gradients that do not
    come through the sums."""
    route, values = shared
    by_sums, grads = None, {}
    if route.weight is not None:
        by_sums = weights.derivative(sums, route.weight, values, x, second)
        by_sums = weights.weighted(by_sums, grad)
    for name, slope in route.slopes:
        grads[name] = weights.contracted(weights.derivative(sums, slope, values, x, second), grad)
        if name in INNER:  # the outer exponent is the reciprocal of its exponent
            p, power = values[name], slope.finish.values(values)[slope.by]
            constant = (p == 0) | p.isinf()
            grads[name] = torch.where(constant, 0.0, -power * power * grads[name])
    return by_sums, grads


def _by_torch(shared: Backward, sums: Sums, x, second, grad) -> tuple:
    """:func:`_through_finish` by torch, from the sums."""
    return _finish_by_torch(shared, matrix(sums.descriptor, x, second, **sums.given), grad)


def _finish_by_torch(shared: Backward, s: torch.Tensor, grad) -> tuple:
    """:func:`_by_torch` from sums or norms."""
    route = shared.route
    values = {name: v for name, v in shared.values.items() if name != "regularization"}
    leaves = {n: values[n].detach().requires_grad_() for n in route.names if n in values}
    s = batched(s)
    grad3 = batched(grad).to(s.dtype)
    s = s.expand(grad3.shape)
    by_s, *grads = weights.by_torch(
        route.descriptor,
        s,
        values | leaves,
        grad3,
        [*leaves.values()],
        route.norm is not None,
    )
    pairs = zip(leaves, grads, strict=True)
    return by_s.view(grad.shape), {name: g for name, g in pairs if g is not None}


def _through_inner(route: Route, sums: Sums, x, z, by_sums) -> dict[str, torch.Tensor]:
    """The gradients of the inner stage's exponent and scale, which come through the sums."""
    names = route.inner
    logarithmic = exponent_sums(sums)
    if logarithmic is not None:
        second = None if sums.descriptor.symmetric else z
        terms = matrix(logarithmic.descriptor, x, second, **logarithmic.given)
        return {names[0]: weights.contracted(terms, by_sums)}
    x, z, by_sums = (batched(t) for t in (x, z, by_sums))
    expanded = {
        name: value.expand(by_sums.shape[0]) if isinstance(value, torch.Tensor) else value
        for name, value in sums.given.items()
    }
    needs = (False, False, names != ("inner_scale",), "inner_scale" in names)
    sums = Sums(sums.descriptor, expanded)
    to_p, to_scale = formula.gradients(sums, x, z, by_sums, True, needs)[2:]
    return {name: to_scale if name == "inner_scale" else to_p for name in names}

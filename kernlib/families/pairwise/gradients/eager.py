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
from typing import NamedTuple

import torch
from torch._C import _are_functorch_transforms_active
from torch._C._functorch import is_legacy_batchedtensor

from kernlib.descriptors.base import check_flag
from kernlib.families.pairwise import checks, stages
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.gradients import formula, norms, products, routes, weights
from kernlib.families.pairwise.gradients.formula import Sums
from kernlib.families.pairwise.gradients.point_products import FEWEST
from kernlib.families.pairwise.gradients.routes import INNER, Route, exponent_sums
from kernlib.families.pairwise.matrix import MATRIX, calls, matrix
from kernlib.families.pairwise.stages_reference import linear
from kernlib.families.pairwise.units import LEAST_USUAL, MOST_USUAL, in_unit, unit_of
from kernlib.run import run_kernel
from kernlib.runtime import rehearsal
from kernlib.runtime.numbers import host_value, on_device
from kernlib.runtime.operation import by_operator, operators_of
from kernlib.runtime.tensors import (
    is_lazy,
    is_mapped,
    materialised,
    refuse_transforms,
    stand_ins,
)

BLOCK_ENTRIES = 1 << 27  # of the matrix at once: 512 MB in float32, and as much where it is packed
FEWEST_ROWS = 128  # of a block, unless there are fewer: a kernel's tile has as many
_INFINITE = float("inf")
_WITH_UNIT = frozenset(("a", "b", "bandwidth"))
NOT_BATCHED = (
    "is_grads_batched=True, which jacobian(vectorize=True) sets, is not supported by this kernel "
    "matrix; ask for one gradient after the other"
)


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
    tensors, numbers, several = {}, {}, False
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
            several = several or value.dim() > 0
        else:
            numbers[name] = host_value(name, value)
    if several:
        from kernlib.families.pairwise import per_point  # which most calls do without

        request = descriptor, a, b, None, False, row_offset, col_offset, values
        made = per_point.computed(run_kernel, *request)
        if made is not None:
            return made
    watched = stand_ins(a, b)
    if _are_functorch_transforms_active():
        if not is_mapped(a, b, *tensors.values()):
            refuse_transforms(checks.MAPPED_ALONE, a=a, b=b, **tensors)
        watched = True  # where nothing is mapped too: a Function knows no transform
    if watched or (getattr(a, "is_meta", False) and rehearsal.current() is None):
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
        offsets = call.row_offset, call.col_offset
        values = call.values(tensors) if tensors else call.numbers
        return calls.execute(call.descriptor, a, b, None, False, *offsets, values)

    @staticmethod
    def backward(ctx, grad):
        needs = ctx.needs_input_grad[1:]
        if is_legacy_batchedtensor(grad):
            return None, *_of_several(ctx.call, needs, ctx.saved_tensors, grad)
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


def _of_several(call: Call, needs: tuple, saved: tuple, grad) -> list:
    """Those of several gradients at once, as ``is_grads_batched`` has them: not by kernels, which
    cannot read those. Raises RuntimeError for what no kernel knows the gradient of: torch's own
    operators for a maximum refuse them too, or answer 0, as those of torch 2.8 do."""
    if by_formula(routes.sums_of(call.descriptor, call.values(saved[2:]))):
        raise RuntimeError(NOT_BATCHED)
    with torch.enable_grad():
        return _made_again(call, needs, saved, grad)


# The gradients of the sums.


def points_gradient(
    made: Sums, x, z, given: torch.Tensor, first: bool, scales: torch.Tensor | None = None
) -> torch.Tensor:
    """``sum_t W[l,q,t] d inner(op(x[l,q,k], z[l,t,k])) / d x``, (L, Q, K), or all without a batch,
    of weights ``given`` and without a record; x is the op's a if ``first``, else its b. Of norms
    with ``scales`` (:func:`norms.shared`) ``sum_t W dN / dx``."""
    if given.numel() == 0 or x.shape[-1] == 0:
        return x.new_zeros(*given.shape[:-2], *x.shape[-2:])
    descriptor = made.descriptor
    if scales is None and by_formula(made):
        sides = (batched(t) for t in (x, z, given))
        return _by_formula(made, *sides, first).view(*given.shape[:-2], *x.shape[-2:])
    if linear(descriptor.operator, descriptor.inner):
        if descriptor.operator == "dot":
            return products.dots(descriptor.precision, z, given)
        if given.numel() * x.shape[-1] >= FEWEST and x.dtype == torch.float32:
            return products.squares(descriptor.precision, x, z, given)
    from kernlib.families.pairwise.gradients import points

    kind = points.Kind(descriptor.operator, descriptor.inner, first, False, scales is not None)
    compute = points.rehearsed if x.is_meta else points.execute
    return compute(kind, points.Operands(x, z, given, None, scales), None, False, made.given)


def _by_formula(made: Sums, x, z, given, first: bool) -> torch.Tensor:
    x = x.expand(given.shape[0], -1, -1)
    return formula.gradients(made, x, z, given, first, (True, False, False, False))[0]


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
    """What the blocks of one backward pass share: the way, and the hyperparameters, tensors among
    them on the device and in the arithmetic's dtype."""

    route: Route
    values: dict

    def part(self, block: Block) -> Backward:
        """For a block."""
        return Backward(self.route, {n: block.entries(value) for n, value in self.values.items()})


@torch.no_grad()
def gradients(call: Call, needs: tuple, saved: tuple, grad: torch.Tensor) -> list:
    """The gradients of ``a``, ``b`` and the hyperparameters that are tensors, None where there is
    no need, without a record: from those inputs and from ``grad``, that of the output."""
    a, b, *tensors = saved
    route, values = routes.route_of(call, needs, saved), call.numbers
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
    found = by(Backward(route, values), x, z, grad)
    if unit is not None:
        found = {n: _in_unit(v, unit) if n in _WITH_UNIT else v for n, v in found.items()}
    if "regularization" in route.wanted:
        found["regularization"] = grad.diagonal(call.diagonal, -2, -1).sum(-1, dtype=wide)
    made = zip(("a", "b", *call.names), saved, needs, strict=True)
    return [_fitted(found.get(name), leaf) if need else None for name, leaf, need in made]


def _in_unit(found: torch.Tensor, unit: float | torch.Tensor) -> torch.Tensor:
    """The gradient by points or by a bandwidth that were divided by a unit."""
    several = isinstance(unit, torch.Tensor) and unit.dim() > found.dim()
    return found / (unit.reshape(-1) if several else unit)


def _ready(x: torch.Tensor, grad: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """Points in the arithmetic's dtype, with a batch if the gradient has one."""
    x = batched(x) if grad.dim() == 3 else x
    return x if x.dtype == wide else x.to(wide)


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
    if shared.route.mirrored:
        grad = grad.to(x.dtype) + grad.mT
    return _contributions(shared, x, z, grad)


def _by_blocks(shared: Backward, x, z, grad) -> dict:
    x, z, grad = (batched(t) for t in (x, z, grad))
    shared = shared._replace(route=routes.of_rows(*shared))
    totals = {name: x.new_zeros(grad.shape[0]) for name in shared.route.wanted}
    totals |= {"a": torch.zeros_like(x), "b": torch.zeros_like(z)}
    most = BLOCK_ENTRIES // shared.route.parts
    for block in blocks(grad.shape[0], x.shape[1], z.shape[1], most):
        given = block.of(grad)
        if shared.route.mirrored:
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
    route, values = shared
    made = Sums(route.sums, {})
    for name, source in route.given:  # a comprehension would be a call
        made.given[name] = values[source]
    second = None if route.descriptor.symmetric else z
    scales = None
    if route.norm is not None:
        given, scales, found = _through_norms(shared, made, x, z, second, grad)
    elif route.plain:
        given, found = grad.to(x.dtype), {}
    else:
        through = _by_torch if route.finish is None else _through_finish
        given, found = through(shared, made, x, second, grad)
    if route.inner and given is not None and route.norm is None:
        for name, value in _through_inner(route, made, x, z, given).items():
            found[name] = found[name] + value if name in found else value
    if route.mirrored:
        found = {name: value / 2 for name, value in found.items()}
    if given is not None and route.points[0]:
        found["a"] = points_gradient(made, x, z, given, True, scales)
    if given is not None and route.points[1]:
        turned = None if scales is None else scales.mT
        found["b"] = points_gradient(made, z, x, given.mT, False, turned)
    return found


def _through_norms(shared: Backward, made: Sums, x, z, second, grad) -> tuple:
    """Weights and scales of pair gradients, None where a gradient of 0 or none is asked for, and
    what hyperparameters receive."""
    route, values = shared
    n = calls.execute(route.norm, x, second, None, False, 0, 0, made.given)
    given, found = grad.to(x.dtype), {}
    if route.finish is None:
        given, found = _finish_by_torch(shared, n, grad)
    elif route.descriptor.epilogue:
        given = None
        if route.weight is not None:
            given = (weights.of_norms(route.weight, values, n) * grad).view(grad.shape)
        for name, slope in route.slopes:
            found[name] = weights.contracted(weights.of_norms(slope, values, n), grad)
    if route.inner and given is not None:
        sides = (batched(t) for t in (x, z, n, given))
        found[route.inner[0]] = norms.by_exponent(made, *sides)
    if given is None or True not in route.points:
        return None, None, found
    return *norms.shared(made.given["p"], given, n), found


def _through_finish(shared: Backward, made: Sums, x, second, grad) -> tuple:
    """``grad * d finish / d S``, None if that is 0, and what hyperparameters receive not by way of
    the sums."""
    route, values = shared
    given, found = None, {}
    if route.weight is not None:
        given = weights.derivative(made, route.weight, values, x, second)
        given = weights.weighted(given, grad)
    for name, slope in route.slopes:
        found[name] = weights.contracted(weights.derivative(made, slope, values, x, second), grad)
        if name in INNER:  # of whose exponent the outer one is the reciprocal
            p, power = values[name], slope.finish.values(values)[slope.by]
            whole = (p == 0) | p.isinf()
            found[name] = torch.where(whole, 0.0, -power * power * found[name])
    return given, found


def _by_torch(shared: Backward, made: Sums, x, second, grad) -> tuple:
    """The same by torch, from the sums."""
    return _finish_by_torch(shared, matrix(made.descriptor, x, second, **made.given), grad)


def _finish_by_torch(shared: Backward, s: torch.Tensor, grad) -> tuple:
    """:func:`_by_torch` from sums or norms."""
    route = shared.route
    values = {name: v for name, v in shared.values.items() if name != "regularization"}
    leaves = {n: values[n].detach().requires_grad_() for n in route.wanted if n in values}
    s = batched(s)
    grad3 = batched(grad).to(s.dtype)
    s = s.expand(grad3.shape)
    given, *found = weights.by_torch(
        route.descriptor,
        s,
        values | leaves,
        grad3,
        [*leaves.values()],
        route.norm is not None,
    )
    pairs = zip(leaves, found, strict=True)
    return given.view(grad.shape), {name: g for name, g in pairs if g is not None}


def _through_inner(route: Route, made: Sums, x, z, given) -> dict[str, torch.Tensor]:
    """What the exponent and the scale of the inner stage receive by way of the sums."""
    names = route.inner
    logarithmic = exponent_sums(made)
    if logarithmic is not None:
        second = None if made.descriptor.symmetric else z
        terms = matrix(logarithmic.descriptor, x, second, **logarithmic.given)
        return {names[0]: weights.contracted(terms, given)}
    x, z, given = (batched(t) for t in (x, z, given))
    each = {
        name: value.expand(given.shape[0]) if isinstance(value, torch.Tensor) else value
        for name, value in made.given.items()
    }
    needs = (False, False, names != ("inner_scale",), "inner_scale" in names)
    made = Sums(made.descriptor, each)
    to_p, to_scale = formula.gradients(made, x, z, given, True, needs)[2:]
    return {name: to_scale if name == "inner_scale" else to_p for name in names}

"""The sums of the pairwise op and their gradients as operators of ``torch.library``, for compiled
and recorded calls, and for gradients of gradients. Whatever follows the sums is elementwise, and
torch's own.

``pairwise_sums`` is ``S[l,m,n] = sum_k inner(op(a[l,m,k], b[l,n,k]))``, ``pairwise_gradient``
``sum_t W[l,q,t] d inner(op(x[l,q,k], z[l,t,k])) / d x``. ``pairwise_norms`` and
``pairwise_norm_gradient`` are the same of norms ``S^(1/p)`` in place of sums. All tensors have a
batch, and the exponent and the scale of the inner stage are numbers or tensors.
"""

from __future__ import annotations

import torch

from kernlib.descriptors.text import from_text
from kernlib.families.pairwise import checks
from kernlib.families.pairwise import stages_reference as stages
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.gradients import backward, formula, norms
from kernlib.families.pairwise.gradients.formula import Sums
from kernlib.families.pairwise.matrix import matrix
from kernlib.families.pairwise.units import in_unit, unit_of
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.operators import register

_INNER = "str descriptor, float? p_number, float? scale_number, Tensor? p, Tensor? scale"


def recorded(descriptor: Pairwise, a, b, values: dict, diagonal: int) -> torch.Tensor:
    """A checked call, without ``out``, whose gradient is recorded. ``regularization`` is added
    where ``n - m == diagonal``."""
    wide = accumulator(a.dtype)
    x = backward.batched(a).to(wide)
    z = None if b is None else backward.batched(b).to(wide)
    placed = {
        k: v.to(a.device, wide) if isinstance(v, torch.Tensor) else v for k, v in values.items()
    }
    unit = unit_of(descriptor, values, wide)
    if unit is not None:
        x, z, placed, _ = in_unit(unit, x, z, placed)
    of_norms, made = norms.are_values(descriptor, placed), formula.sums_of(descriptor, placed)
    s = (_norms if of_norms else _sums)(x, z, *_written(made))
    root = checks.follows_inner(descriptor, placed)
    v = stages.finish(descriptor, s, placed, root=root, diagonal=diagonal, of_norms=of_norms)
    flat = a.dim() == 2 and (b is None or b.dim() == 2) and v.shape[0] == 1
    return (v[0] if flat else v).to(a.dtype).contiguous()


def sums(made: Sums, a, b) -> torch.Tensor:
    """``made`` of ``a`` and ``b``, recorded."""
    return _sums(a, b, *_written(made))


def points_gradient(made: Sums, x, z, weights, first: bool) -> torch.Tensor:
    """:func:`kernlib.families.pairwise.gradients.backward.points_gradient`, recorded."""
    if backward.by_formula(made):  # torch records it, as it would not inside of an operator
        return backward.points_gradient(made, x, z, weights, first)
    return _gradient(x, z, weights, first, *_written(made))


def _written(made: Sums) -> tuple:
    """As the operators take it."""
    pairs = [(None, v) if isinstance(v, torch.Tensor) else (v, None) for v in (made.p, made.scale)]
    numbers, tensors = zip(*pairs, strict=True)
    return made.descriptor.text, *numbers, *tensors


def _read(descriptor: str, p_number, scale_number, p, scale) -> Sums:
    p, scale = p_number if p is None else p, scale_number if scale is None else scale
    return Sums(from_text(descriptor), {}).having(p, scale)


# What the operators compute.


def _compute_sums(a, b, *inner) -> torch.Tensor:
    made = _read(*inner)
    with torch.no_grad():
        return matrix(made.descriptor, a, b, **made.given)


def _compute_gradient(x, z, weights, first: bool, *inner) -> torch.Tensor:
    with torch.no_grad():
        return backward.points_gradient(_read(*inner), x, z, weights, first).contiguous()


def _compute_norms(a, b, *inner) -> torch.Tensor:
    with torch.no_grad():
        return norms.of(_read(*inner), a, b)


def _compute_norm_gradient(x, z, weights, n, first: bool, *inner) -> torch.Tensor:
    made = _read(*inner)
    with torch.no_grad():
        given, scales = norms.shared(made.p, weights, n)
        return backward.points_gradient(made, x, z, given, first, scales).contiguous()


def _fake_sums(a, b, *inner):
    tensors = {name: t for name, t in zip(("p", "inner_scale"), inner[3:], strict=True)}
    given = {name: t for name, t in tensors.items() if t is not None}
    return a.new_empty(checks.check_shapes(a, b, None, given))


def _fake_gradient(x, z, weights, first, *inner):
    return x.new_empty(weights.shape[0], x.shape[1], x.shape[2])


def _fake_norm_gradient(x, z, weights, n, first, *inner):
    return _fake_gradient(x, z, weights, first)


# Their gradients.


def _save(ctx, inputs, output) -> None:
    """Tensors as such: those of the points and weights, then exponent and scale."""
    *points, descriptor, p_number, scale_number, p, scale = inputs
    ctx.first = points[3] if len(points) > 3 else True
    ctx.inner = descriptor, p_number, scale_number
    ctx.save_for_backward(*points[:3], p, scale)


def _sums_backward(ctx, grad):
    a, b, p, scale = ctx.saved_tensors
    needs, made = ctx.needs_input_grad, _read(*ctx.inner, p, scale)
    to_a = to_b = None
    if b is None:  # S and what is done with it alike are symmetric in a's two roles
        if needs[0]:
            to_a = points_gradient(_one_sided(made), a, a, grad + grad.mT, True)
    else:
        if needs[0]:
            to_a = points_gradient(made, a, b, grad, True).sum_to_size(a.shape)
        if needs[1]:
            to_b = points_gradient(made, b, a, grad.mT, False).sum_to_size(b.shape)
    to_p, to_scale = _inner_gradients(made, a, b, grad, needs[-2:])
    return to_a, to_b, None, None, None, to_p, to_scale


def _one_sided(made: Sums) -> Sums:
    return made._replace(descriptor=made.descriptor.replace(symmetric=False))


def _save_norms(ctx, inputs, output) -> None:
    a, b, *ctx.inner, p, scale = inputs
    ctx.save_for_backward(a, b, p, scale, output)


def _norms_backward(ctx, grad):
    a, b, p, scale, n = ctx.saved_tensors
    needs, made = ctx.needs_input_grad, _read(*ctx.inner, p, scale)
    to_a = to_b = to_p = None
    if b is None:
        if needs[0]:
            written = _written(_one_sided(made))
            to_a = _norm_gradient(a, a, grad + grad.mT, n, True, *written)
    else:
        if needs[0]:
            to_a = _norm_gradient(a, b, grad, n, True, *_written(made)).sum_to_size(a.shape)
        if needs[1]:
            turned = grad.mT, n.mT, False
            to_b = _norm_gradient(b, a, *turned, *_written(made)).sum_to_size(b.shape)
    if needs[-2]:
        to_p = norms.by_exponent(made, a, a if b is None else b, n, grad).sum_to_size(p.shape)
    return to_a, to_b, None, None, None, to_p, None


def _save_norm_gradient(ctx, inputs, output) -> None:
    x, z, weights, n, ctx.first, *ctx.inner, p, scale = inputs
    ctx.save_for_backward(x, z, weights, n, p, scale)


def _norm_gradient_backward(ctx, along):
    x, z, weights, n, p, scale = ctx.saved_tensors
    made, needs = _read(*ctx.inner, p, scale), ctx.needs_input_grad
    needs = (*needs[:4], needs[-2])
    *found, to_p = norms.second(made, x, z, weights, n, ctx.first, along, needs)
    return *found, None, None, None, None, to_p, None


def _inner_gradients(made: Sums, a, b, grad, needs: tuple) -> tuple:
    """Those with respect to exponent and scale."""
    if not any(needs):
        return None, None
    logarithmic = formula.exponent_sums(made)
    if logarithmic is not None:
        found = (grad * sums(logarithmic, a, b)).sum((1, 2))
        return found.sum_to_size(made.p.shape), None
    second = a if b is None else b
    return tuple(formula.gradients(made, a, second, grad, True, (False, False, *needs))[2:])


def _gradient_backward(ctx, along):
    x, z, weights, p, scale = ctx.saved_tensors
    made, all_needs = _read(*ctx.inner, p, scale), ctx.needs_input_grad
    needs = (*all_needs[:3], *all_needs[-2:])
    found = formula.second(made, x, z, weights, ctx.first, along, needs)
    return *found[:3], None, None, None, None, *found[3:]


_sums = register(
    "pairwise_sums",
    f"(Tensor a, Tensor? b, {_INNER}) -> Tensor",
    _compute_sums,
    _fake_sums,
    save=_save,
    backward=_sums_backward,
)
_gradient = register(
    "pairwise_gradient",
    f"(Tensor x, Tensor z, Tensor weights, bool first, {_INNER}) -> Tensor",
    _compute_gradient,
    _fake_gradient,
    save=_save,
    backward=_gradient_backward,
)
_norms = register(
    "pairwise_norms",
    f"(Tensor a, Tensor? b, {_INNER}) -> Tensor",
    _compute_norms,
    _fake_sums,
    save=_save_norms,
    backward=_norms_backward,
)
_norm_gradient = register(
    "pairwise_norm_gradient",
    f"(Tensor x, Tensor z, Tensor weights, Tensor norms, bool first, {_INNER}) -> Tensor",
    _compute_norm_gradient,
    _fake_norm_gradient,
    save=_save_norm_gradient,
    backward=_norm_gradient_backward,
)

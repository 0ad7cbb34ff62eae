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
from kernlib.runtime.arguments import tensors_of
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.operators import register
from kernlib.runtime.schema import Kind, Schema


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
    of_norms, sums = norms.are_values(descriptor, placed), formula.sums_of(descriptor, placed)
    s = (_norms if of_norms else _sums)(x, z, sums)
    root = checks.follows_inner(descriptor, placed)
    v = stages.finish(descriptor, s, placed, root=root, diagonal=diagonal, of_norms=of_norms)
    flat = a.dim() == 2 and (b is None or b.dim() == 2) and v.shape[0] == 1
    return (v[0] if flat else v).to(a.dtype).contiguous()


def sums(made: Sums, a, b) -> torch.Tensor:
    """``made`` of ``a`` and ``b``, recorded."""
    return _sums(a, b, made)


def points_gradient(made: Sums, x, z, weights, first: bool) -> torch.Tensor:
    """:func:`kernlib.families.pairwise.gradients.backward.points_gradient`, recorded."""
    if backward.by_formula(made):  # torch records it, as it would not inside of an operator
        return backward.points_gradient(made, x, z, weights, first)
    return _gradient(x, z, weights, first, made)


def _flattened(sums: Sums) -> tuple:
    pairs = [(None, v) if isinstance(v, torch.Tensor) else (v, None) for v in (sums.p, sums.scale)]
    numbers, tensors = zip(*pairs, strict=True)
    return sums.descriptor.text, *numbers, *tensors


def _sums_of(text: str, p_number, scale_number, p, scale) -> Sums:
    p, scale = p_number if p is None else p, scale_number if scale is None else scale
    return Sums(from_text(text), {}).having(p, scale)


# What the operators compute.


def _compute_sums(a, b, sums: Sums) -> torch.Tensor:
    with torch.no_grad():
        return matrix(sums.descriptor, a, b, **sums.given)


def _compute_gradient(x, z, weights, first: bool, sums: Sums) -> torch.Tensor:
    with torch.no_grad():
        return backward.points_gradient(sums, x, z, weights, first).contiguous()


def _compute_norms(a, b, sums: Sums) -> torch.Tensor:
    with torch.no_grad():
        return norms.of(sums, a, b)


def _compute_norm_gradient(x, z, weights, n, first: bool, sums: Sums) -> torch.Tensor:
    with torch.no_grad():
        shared, scales = norms.shared(sums.p, weights, n)
        return backward.points_gradient(sums, x, z, shared, first, scales).contiguous()


def _fake_sums(a, b, sums: Sums) -> torch.Tensor:
    tensors = tensors_of({"p": sums.p, "inner_scale": sums.scale})
    return a.new_empty(checks.check_shapes(a, b, None, tensors))


def _fake_gradient(x, z, weights, *rest) -> torch.Tensor:
    return x.new_empty(weights.shape[0], x.shape[1], x.shape[2])


# Their gradients.


def _sums_backward(saved, grad) -> dict:
    a, b, sums, needs = saved.a, saved.b, saved.sums, saved.needs
    grads = {}
    if b is None:  # S and what is done with it alike are symmetric in a's two roles
        if needs.a:
            grads["a"] = points_gradient(_one_sided(sums), a, a, grad + grad.mT, True)
    else:
        if needs.a:
            grads["a"] = points_gradient(sums, a, b, grad, True).sum_to_size(a.shape)
        if needs.b:
            grads["b"] = points_gradient(sums, b, a, grad.mT, False).sum_to_size(b.shape)
    grads["p"], grads["scale"] = _inner_gradients(sums, a, b, grad, (needs.p, needs.scale))
    return grads


def _one_sided(sums: Sums) -> Sums:
    return sums._replace(descriptor=sums.descriptor.replace(symmetric=False))


def _norms_backward(saved, grad) -> dict:
    a, b, sums, needs = saved.a, saved.b, saved.sums, saved.needs
    (n,) = saved.outputs
    grads = {}
    if b is None:
        if needs.a:
            grads["a"] = _norm_gradient(a, a, grad + grad.mT, n, True, _one_sided(sums))
    else:
        if needs.a:
            grads["a"] = _norm_gradient(a, b, grad, n, True, sums).sum_to_size(a.shape)
        if needs.b:
            grads["b"] = _norm_gradient(b, a, grad.mT, n.mT, False, sums).sum_to_size(b.shape)
    if needs.p:
        by_exponent = norms.by_exponent(sums, a, a if b is None else b, n, grad)
        grads["p"] = by_exponent.sum_to_size(sums.p.shape)
    return grads


def _norm_gradient_backward(saved, along) -> dict:
    points = saved.x, saved.z, saved.weights, saved.norms
    names = "x", "z", "weights", "norms", "p"
    needs = tuple(getattr(saved.needs, name) for name in names)
    grads = norms.second(saved.sums, *points, saved.first, along, needs)
    return dict(zip(names, grads, strict=True))


def _inner_gradients(made: Sums, a, b, grad, needs: tuple) -> tuple:
    """The gradients by exponent and scale."""
    if not any(needs):
        return None, None
    logarithmic = formula.exponent_sums(made)
    if logarithmic is not None:
        by_exponent = (grad * sums(logarithmic, a, b)).sum((1, 2))
        return by_exponent.sum_to_size(made.p.shape), None
    second = a if b is None else b
    return tuple(formula.gradients(made, a, second, grad, True, (False, False, *needs))[2:])


def _gradient_backward(saved, along) -> dict:
    names = "x", "z", "weights", "p", "scale"
    needs = tuple(getattr(saved.needs, name) for name in names)
    points = saved.x, saved.z, saved.weights
    grads = formula.second(saved.sums, *points, saved.first, along, needs)
    return dict(zip(names, grads, strict=True))


_SUMS = Kind(
    "sums",
    ("str descriptor", "float? p_number", "float? scale_number", "Tensor? p", "Tensor? scale"),
    _flattened,
    _sums_of,
)
_POINTS = "Tensor x", "Tensor z", "Tensor weights"
_sums = register(
    "pairwise_sums",
    Schema("Tensor a", "Tensor? b", _SUMS),
    "Tensor",
    _compute_sums,
    _fake_sums,
    saves=("a", "b", "sums"),
    backward=_sums_backward,
)
_gradient = register(
    "pairwise_gradient",
    Schema(*_POINTS, "bool first", _SUMS),
    "Tensor",
    _compute_gradient,
    _fake_gradient,
    saves=("x", "z", "weights", "sums"),
    backward=_gradient_backward,
)
_norms = register(
    "pairwise_norms",
    Schema("Tensor a", "Tensor? b", _SUMS),
    "Tensor",
    _compute_norms,
    _fake_sums,
    saves=("a", "b", "sums"),
    outputs=1,
    backward=_norms_backward,
)
_norm_gradient = register(
    "pairwise_norm_gradient",
    Schema(*_POINTS, "Tensor norms", "bool first", _SUMS),
    "Tensor",
    _compute_norm_gradient,
    _fake_gradient,
    saves=("x", "z", "weights", "norms", "sums"),
    backward=_norm_gradient_backward,
)

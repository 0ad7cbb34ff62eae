"""Operations of each operator, as torch's FlopCounterMode counts them: two for each feature of each
pair of points, as of a product of matrices of these sizes, whatever the kernel is."""

from __future__ import annotations

import torch


def _matrix(result: torch.Tensor, /, *, a, out=None, **_) -> int:
    return 2 * (result if out is None else out).numel() * a.shape[-1]


def _pairs(a, b, *others) -> int:
    batch = max(t.shape[0] if t is not None and t.dim() == 3 else 1 for t in (a, b, *others))
    return batch * a.shape[-2] * (a if b is None else b).shape[-2]


def _columns(v) -> int:
    return 0 if v is None else v.shape[-1] if v.dim() > 1 else 1


def _reduced(result, /, *, a, b, v=None, **_) -> int:
    return 2 * _pairs(a, b, v) * (a.shape[-1] + _columns(v))


def _reduced_gradient(result: list, /, *, a, b, v, wanted: str, **_) -> int:
    """With the matrix anew."""
    names = wanted.split()
    features = a.shape[-1] * (1 + ("a" in names) + ("b" in names))
    return 2 * _pairs(a, b, v) * (features + _columns(v) * (1 + ("v" in names)))


def _gradient(result: torch.Tensor, /, *, x, weights, **_) -> int:
    return 2 * weights.numel() * x.shape[-1]


FORMULAS = {
    "pairwise": _matrix,
    "pairwise_categories": _matrix,
    "pairwise_choose": _reduced,
    "pairwise_gradient": _gradient,
    "pairwise_norm_gradient": _gradient,
    "pairwise_norms": _matrix,
    "pairwise_out": _matrix,
    "pairwise_reduce": _reduced,
    "pairwise_reduce_gradient": _reduced_gradient,
    "pairwise_sums": _matrix,
}

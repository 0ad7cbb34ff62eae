"""Operations of each operator, as torch's FlopCounterMode counts them: two for a product that is
added up."""

from __future__ import annotations

import math

import torch


def _product(result: torch.Tensor, /, *, x, weight, **_) -> int:
    a, _b, c, d = weight.shape
    return 2 * x.numel() // (a * c * d) * weight.numel()


def _weight_gradient(result: torch.Tensor, /, *, grad, pattern, **_) -> int:
    a, b, _c, d = pattern
    return 2 * grad.numel() // (a * b * d) * math.prod(pattern)


FORMULAS = {
    "kronecker_sparse": _product,
    "kronecker_sparse_product": _product,
    "kronecker_sparse_weight_gradient": _weight_gradient,
}

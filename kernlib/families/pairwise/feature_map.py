"""Maps of features ahead of a pairwise kernel: a lengthscale or a weight for each feature, or a
matrix.

A map costs one pass over the points, O((M + N) K), beside the O(M N K) of the kernel that follows.
"""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.numbers import check_host, extremes
from kernlib.runtime.tensors import (
    check_dense,
    is_wrapped,
    refuse_any_overlap,
    refuse_other,
    stand_ins,
)

SHAPES = "(K,) or (L, 1, K) for weights, (K, K2) or (L, K, K2) for a matrix"


def apply(
    feature_map: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``a`` (M, K) or (L, M, K) and ``b`` (N, K) or (L, N, K), both mapped; None stays None.

    - (K,): each feature times its weight, such as 1 / lengthscale (automatic relevance
      determination); (L, 1, K), or (L, K) where L is not K, has weights of its own for each entry
      of the batch.
    - (K, K2) or (L, K, K2), (K, K) too: ``x @ feature_map``, so that a squared distance becomes
      Mahalanobis's of the metric ``feature_map @ feature_map.T``. float32 products are as accurate
      as torch's settings say.

    Batches of 1 broadcast. The results have the inputs' dtype; the map has that too, or the one of
    the arithmetic (float32 for float16 and bfloat16). Autocast changes nothing. Differentiable by
    all three.

    Raises TypeError and ValueError that name the argument, also for an ``out`` that shares memory
    with one: the call that follows sees the mapped points alone."""
    _check(feature_map, a, b)
    refuse_any_overlap(out, a=a, b=b, feature_map=feature_map)
    weights = _as_weights(feature_map, a)
    first = _mapped(feature_map, weights, "a", a)
    if b is a:
        return first, first
    return first, None if b is None else _mapped(feature_map, weights, "b", b)


def scaled(
    descriptor: Pairwise,
    lengthscale: torch.Tensor,
    feature_map: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor | None,
    out: torch.Tensor | None,
    values: dict,
) -> tuple[torch.Tensor, torch.Tensor | None, dict]:
    """The points divided by ``lengthscale``, which has a value for each feature, and the
    hyperparameters of the call, among which a bandwidth is 1 unless it is given.

    ``lengthscale`` is (K,) or (1, K), or (L, 1, K) for one in each entry of the batch, greater than
    0, of the inputs' dtype or that of the arithmetic; a 1 in the place of K is one for all
    features, as GPyTorch's kernels have it. :func:`apply` of its reciprocal, and differentiable as
    that is. Raises TypeError and ValueError that name the argument.
    """
    if feature_map is not None:
        raise TypeError("lengthscale and feature_map both map the features: give either")
    if not isinstance(lengthscale, torch.Tensor):
        kind = "a tensor with a value for each feature (one number for all is a bandwidth)"
        refuse_other("lengthscale", lengthscale, kind)
    check_dense(("lengthscale", "a"), lengthscale=lengthscale, a=a, b=b)
    refuse_any_overlap(out, lengthscale=lengthscale)
    lengthscale = _of_features(lengthscale, a.shape[-1] if a.dim() else 0)
    _check(lengthscale, a, b, "lengthscale")
    if not (is_dynamo_compiling() or stand_ins(lengthscale) or is_wrapped(lengthscale)):
        for number in extremes(lengthscale):
            check_host("lengthscale", number, frozenset(("lengthscale",)))
    weights = lengthscale.to(accumulator(a.dtype)).reciprocal()
    if "bandwidth" in descriptor.parameters:
        values = {"bandwidth": 1.0} | values
    return *apply(weights, a, b, out), values


def _of_features(lengthscale: torch.Tensor, features: int) -> torch.Tensor:
    """A lengthscale as (K,) or (L, 1, K). Raises ValueError for other shapes."""
    shape = tuple(lengthscale.shape)
    if shape == (features,):
        return lengthscale
    if len(shape) not in (2, 3) or shape[-2] != 1 or shape[-1] not in (1, features):
        raise ValueError(
            f"lengthscale must be (K,) or (1, K), with K = {features} features, (L, 1, K) for a "
            f"batch, or (1, 1) or (L, 1, 1) for one of all features, got {shape}"
        )
    wide = lengthscale.expand(*shape[:-1], features)
    return wide if wide.dim() == 3 else wide[0]


def _check(
    feature_map, a: torch.Tensor, b: torch.Tensor | None, called: str = "feature_map"
) -> None:
    check_dense((called, "a"), **{called: feature_map}, a=a, b=b)
    for name, x in (("a", a), ("b", b)):
        if x is None:
            continue
        if x.dim() not in (2, 3):
            raise ValueError(f"{name} must be (N, K) or (L, N, K), got shape {tuple(x.shape)}")
        if x.shape[-1] != a.shape[-1]:  # a b of one feature would broadcast
            raise ValueError(
                f"a and b must have the same number of features, got {tuple(a.shape)} and "
                f"{tuple(x.shape)}"
            )
        if x.device != a.device:
            raise ValueError(f"a and b must be on one device, got {a.device} and {x.device}")
    if not a.dtype.is_floating_point:
        raise TypeError(f"a must have a floating dtype for a {called}, got {a.dtype}")
    allowed = tuple(dict.fromkeys((a.dtype, accumulator(a.dtype))))
    if feature_map.dtype not in allowed:
        dtypes = " or ".join(map(str, allowed))
        raise TypeError(f"{called} must be {dtypes} for {a.dtype} inputs, got {feature_map.dtype}")
    if feature_map.device != a.device:
        raise ValueError(
            f"{called} must be on the inputs' device {a.device}, got {feature_map.device}"
        )


def _as_weights(feature_map: torch.Tensor, a: torch.Tensor) -> torch.Tensor | None:
    """The weights as (K,) or (L, 1, K), None for a matrix. Raises ValueError for other shapes."""
    shape, features = tuple(feature_map.shape), a.shape[-1]
    if len(shape) == 1 and shape[0] == features:
        return feature_map
    if len(shape) in (2, 3) and shape[-2] == features:
        # Where the batch is K as well, (K, K) could be either.
        if shape == (features, features) and a.dim() == 3 and 1 < a.shape[0] == features:
            raise ValueError(
                f"feature_map of shape {shape} may be a matrix or {features} entries of weights: "
                "pass (1, K, K) or (L, 1, K)"
            )
        return None
    if len(shape) == 2 and shape[1] == features:
        return feature_map[:, None]
    if len(shape) == 3 and shape[1:] == (1, features):
        return feature_map
    raise ValueError(f"feature_map must be {SHAPES}, with K = {features}, got shape {shape}")


def _mapped(feature_map, weights: torch.Tensor | None, name: str, x: torch.Tensor) -> torch.Tensor:
    batch = feature_map.shape[0] if (feature_map if weights is None else weights).dim() == 3 else 1
    if x.dim() == 3 and batch != x.shape[0] and 1 not in (batch, x.shape[0]):
        raise ValueError(
            f"batches must be 1 or equal, got feature_map: {batch}, {name}: {x.shape[0]}"
        )
    wide = x.to(feature_map.dtype)
    return (_product(wide, feature_map) if weights is None else wide * weights).to(x.dtype)


def _product(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):  # there is none for meta
        return x @ matrix
    with torch.autocast(x.device.type, enabled=False):
        return x @ matrix

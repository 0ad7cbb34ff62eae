"""Gradients of pairwise sums that are products of the weights with the points: of dot products,
``W z``, and of squared differences, ``2 (x sum_t W - W z)``. The terms of the latter cancel, the
less the smaller x and z: so the mean of z is taken from both first, and what counts are differences
to x. What is left of the cancellation is an error of about 2^-22 of ``sum_t |W| (|x| + |z|)``.
"""

from __future__ import annotations

import torch

from kernlib.families.pairwise.descriptor import dot_product
from kernlib.families.pairwise.matrix import MATRIX, calls
from kernlib.runtime import rehearsal
from kernlib.runtime.devices import model
from kernlib.runtime.operation import by_operator
from kernlib.runtime.precision import float32_precision, product, without_autocast

FEWEST = 1 << 31  # of (query, point, feature), from which products of squared differences pay
KERNEL_COLUMNS = 128  # of a product, from which the kernel of dot products beats SGEMM
KERNEL_TILE = (128, 192)  # its rows and columns
TORCH_COLUMNS = 64  # of a tile of SGEMM
MOST_PARTS, SHORTEST_PART = 16, 1024  # of long sums, and terms of each
BUSY_ENOUGH = 0.85
_DOTS = {p: dot_product(precision=p) for p in (None, "fp32", "tf32", "bf16")}


def dots(precision: str | None, z: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``sum_t W[l,q,t] z[l,t,k]``; without batches (Q, T) and (T, K)."""
    return multiplied(precision, weights, z)


def squares(precision: str | None, x, z, weights: torch.Tensor) -> torch.Tensor:
    """``2 sum_t W[l,q,t] (x[l,q,k] - z[l,t,k])``; without batches (Q, K), (T, K) and (Q, T)."""
    features, mean = z.shape[-1], centre(z)
    if not _has_room(features):
        sums, products = weights.sum(-1, keepdim=True), multiplied(precision, weights, z - mean)
    else:  # a column of ones beside those of z: no pass of its own over the weights
        lines = z.new_empty(*z.shape[:-2], features + 1, z.shape[-2])
        torch.sub(z.mT, mean.mT, out=lines[..., :features, :])
        lines[..., features:, :] = 1
        both = multiplied(precision, weights, lines.mT)
        products, sums = both[..., :features], both[..., features:]
    return torch.addcmul(products, sums, x - mean, value=-1).mul_(-2)


def centre(z: torch.Tensor) -> torch.Tensor:
    """The mean of points (..., T, K), (..., 1, K), with 0 for coordinates that are not finite.
    Subtracted from both sides of a difference it leaves little that cancels."""
    mean = z.mean(-2, keepdim=True)
    return torch.where(mean.isfinite(), mean, 0.0)


def _has_room(columns: int) -> bool:
    """Whether one more column costs a product nothing, as its last tile is not full."""
    free = columns % TORCH_COLUMNS != 0
    return free or (columns >= KERNEL_COLUMNS and columns % KERNEL_TILE[1] != 0)


def multiplied(precision: str | None, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left @ right`` of (L, M, N) or (1, M, N) and (L, N, C) or (1, N, C), or without batches, as
    accurate as a descriptor of this precision asks: by torch's setting for None."""
    if torch.is_grad_enabled() and (left.requires_grad or right.requires_grad):
        return _Product.apply(precision, left, right)
    return _product(precision, left, right)


class _Product(torch.autograd.Function):
    """A product whose derivatives are such too: autocast does not round them either where they are
    taken."""

    generate_vmap_rule = True

    @staticmethod
    def forward(precision, left, right):
        return _product(precision, left, right)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.precision, *operands = inputs
        ctx.save_for_backward(*operands)
        ctx.save_for_forward(*operands)

    @staticmethod
    def backward(ctx, grad):
        left, right = ctx.saved_tensors
        _, needs_left, needs_right = ctx.needs_input_grad
        of_left = of_right = None
        if needs_left:
            of_left = _Product.apply(ctx.precision, grad, right.mT).sum_to_size(left.shape)
        if needs_right:
            of_right = _Product.apply(ctx.precision, left.mT, grad).sum_to_size(right.shape)
        return None, of_left, of_right

    @staticmethod
    def jvp(ctx, _, of_left, of_right):
        left, right = ctx.saved_tensors
        by_left = _Product.apply(ctx.precision, of_left, right)
        return by_left + _Product.apply(ctx.precision, left, of_right)


def _product(precision: str | None, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """:func:`multiplied` without a record."""
    if is_torchs(precision, left, min(right.shape[-2:])):
        with without_autocast(left.device):
            return product(left, right)
    if not left.is_meta:
        return _in_parts(precision, left, right, parts_of(left, right))
    # A rehearsal, perhaps of several GPUs.
    counts = rehearsal.current().counts
    for parts in {parts_on(left, right, count) for count in counts}:
        result = _in_parts(precision, left, right, parts)
    return result


def _in_parts(precision: str | None, left: torch.Tensor, right: torch.Tensor, parts: int):
    """:func:`_product` by the kernel of dot products."""
    if parts == 1:
        return _dot(precision, left, right.mT)
    lines = left.unflatten(-1, (parts, -1)).movedim(-2, 0).flatten(0, -3)
    points = right.mT.unflatten(-1, (parts, -1)).movedim(-2, 0).flatten(0, -3)
    sums = _dot(precision, lines, points)  # of (parts, M, N / parts)
    return sums.sum(0, keepdim=max(left.dim(), right.dim()) == 3)


def _dot(precision: str | None, a, b, out=None, accumulate: bool = False) -> torch.Tensor:
    """The kernel of dot products, or its operator where calls are traced."""
    request = _DOTS[precision], a, b, out, accumulate, 0, 0, {}
    return by_operator(MATRIX, request) if rehearsal.is_traced() else calls.execute(*request)


def is_torchs(precision: str | None, left: torch.Tensor, narrowest: int) -> bool:
    """Whether a product is torch's: where that is as accurate as is asked for, unless it is wide
    enough for the kernel to be faster, or permits tensor cores more than torch's setting does."""
    if left.dtype != torch.float32 or left.device.type == "cpu":
        return True
    setting = float32_precision()
    needed = precision or setting
    if needed == "fp32":
        return setting == "fp32" and narrowest < KERNEL_COLUMNS
    return setting != "fp32" or narrowest < KERNEL_COLUMNS


def parts_of(left: torch.Tensor, right: torch.Tensor) -> int:
    """In how many parts a sum is computed, so that its tiles fill the GPU's multiprocessors, each
    of which sums up a tile alone: the fewest that keep them nearly as busy as any number does."""
    return parts_on(left, right, model(left.get_device()).multiprocessors)


def parts_on(left: torch.Tensor, right: torch.Tensor, at_once: int) -> int:
    """:func:`parts_of` on a GPU of so many multiprocessors."""
    batch = max(t.shape[0] if t.dim() == 3 else 1 for t in (left, right))
    if batch > 1:
        return 1
    rows, terms = left.shape[-2:]
    tiles = -(-rows // KERNEL_TILE[0]) * -(-right.shape[-1] // KERNEL_TILE[1])
    most = min(MOST_PARTS, terms // SHORTEST_PART)
    counts = [n for n in range(1, most + 1) if terms % (4 * n) == 0] or [1]
    busy = {n: tiles * n / (-(-tiles * n // at_once) * at_once) for n in counts}
    return next(n for n in counts if busy[n] >= BUSY_ENOUGH * max(busy.values()))


# With coefficients for several sums of each query, as pair gradients have them.


def weighted_dots(target: torch.Tensor, z, weights, coefficients, accumulate: bool) -> None:
    """``target[l,o,q,k] (+)= sum_t c[l,o,t] W[l,q,t] z[l,t,k]``."""
    if coefficients is None:
        _dot("fp32", weights, z.mT, out=target[:, 0], accumulate=accumulate)
        return
    for l in range(target.shape[0]):
        points = _weighted(_entry(coefficients, l), _entry(z, l).mT, 1.0)
        _dot("fp32", _entry(weights, l), points, out=target[l], accumulate=accumulate)


def weighted_squares(
    target: torch.Tensor, x, z, weights, coefficients, factor: float, accumulate: bool
) -> None:
    """``target[l,o,q,k] (+)= factor sum_t c[l,o,t] W[l,q,t] (x[l,q,k] - z[l,t,k])``."""
    mean = centre(z)
    x, z = x - mean, z - mean
    for l in range(target.shape[0]):
        c = None if coefficients is None else _entry(coefficients, l)
        sides = _entry(x, l), _entry(z, l), _entry(weights, l), c
        _weighted_squares(target[l], *sides, factor, accumulate)


def _weighted_squares(target, x, z, weights, coefficients, factor: float, accumulate: bool) -> None:
    """One batch entry: target (O, Q, K)."""
    if coefficients is None:
        sums, points = weights.sum(-1, keepdim=True)[None], z.mT.contiguous().mul(-factor)[None]
    else:
        sums = _dot("fp32", coefficients, weights)[..., None]
        points = _weighted(coefficients, z.mT, -factor)
    if accumulate:  # sums (O, Q, 1), points (O, K, T)
        target.addcmul_(x, sums, value=factor)
    else:
        torch.mul(x * factor, sums, out=target)
    _dot("fp32", weights, points, out=target, accumulate=True)


def _weighted(coefficients: torch.Tensor, points: torch.Tensor, factor: float) -> torch.Tensor:
    """``factor c[o,t] z[k,t]`` as (O, K, T), each line of points contiguous."""
    shape = (coefficients.shape[0], *points.shape)
    out = torch.empty(shape, dtype=points.dtype, device=points.device)
    return torch.mul(coefficients[:, None] * factor, points, out=out)


def _entry(t: torch.Tensor, index: int) -> torch.Tensor:
    """A batch entry of (L, ...), (1, ...) or, without a batch, the whole."""
    if t.dim() == 2:
        return t
    return t[index if t.shape[0] > 1 else 0]

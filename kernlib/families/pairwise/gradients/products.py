"""Gradients of pairwise sums that are products of the weights with the points: of dot products,
``W z``, and of squared differences, ``2 (x sum_t W - W z)``. The terms of the latter cancel, so the
mean of z is taken from both first: what counts are differences to x.
"""

from __future__ import annotations

import torch

from kernlib.families.pairwise.descriptor import dot_product
from kernlib.run import run_kernel
from kernlib.runtime import rehearsal
from kernlib.runtime.devices import model
from kernlib.runtime.precision import float32_precision, product, without_autocast

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
    """The mean of points (..., T, K), (..., 1, K), with 0 for what is not finite: taken from both
    sides of a difference, what cancels is small."""
    mean = z.mean(-2, keepdim=True)
    return torch.where(mean.isfinite(), mean, 0.0)


def _has_room(columns: int) -> bool:
    """Whether one more column costs a product nothing, as its last tile is not full."""
    free = columns % TORCH_COLUMNS != 0
    return free or (columns >= KERNEL_COLUMNS and columns % KERNEL_TILE[1] != 0)


def multiplied(precision: str | None, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left @ right`` of (L, M, N) or (1, M, N) and (L, N, C) or (1, N, C), or without batches, as
    accurate as a descriptor of this precision asks: by torch's setting for None."""
    if is_torchs(precision, left, min(right.shape[-2:])):
        if torch.is_grad_enabled() and (left.requires_grad or right.requires_grad):
            return _Product.apply(left, right)
        with without_autocast(left.device):
            return product(left, right)
    if not left.is_meta:
        return _in_parts(precision, left, right, parts_of(left, right))
    # A rehearsal, perhaps of several GPUs.
    counts = rehearsal.current().counts
    for parts in {parts_on(left, right, count) for count in counts}:
        found = _in_parts(precision, left, right, parts)
    return found


class _Product(torch.autograd.Function):
    """torch's product, whose derivatives autocast does not round either where they are taken."""

    generate_vmap_rule = True

    @staticmethod
    def forward(left, right):
        with without_autocast(left.device):
            return product(left, right)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        left, right = ctx.saved_tensors
        needs_left, needs_right = ctx.needs_input_grad
        of_left = _Product.apply(grad, right.mT).sum_to_size(left.shape) if needs_left else None
        of_right = _Product.apply(left.mT, grad).sum_to_size(right.shape) if needs_right else None
        return of_left, of_right

    @staticmethod
    def jvp(ctx, of_left, of_right):
        left, right = ctx.saved_tensors
        return _Product.apply(of_left, right) + _Product.apply(left, of_right)


def _in_parts(precision: str | None, left: torch.Tensor, right: torch.Tensor, parts: int):
    """:func:`multiplied` by the kernel of dot products."""
    if parts == 1:
        return run_kernel(_DOTS[precision], left, right.mT)
    lines = left.unflatten(-1, (parts, -1)).movedim(-2, 0).flatten(0, -3)
    points = right.mT.unflatten(-1, (parts, -1)).movedim(-2, 0).flatten(0, -3)
    sums = run_kernel(_DOTS[precision], lines, points)  # of (parts, M, N / parts)
    return sums.sum(0, keepdim=max(left.dim(), right.dim()) == 3)


def is_torchs(precision: str | None, left: torch.Tensor, narrowest: int) -> bool:
    """Whether a product is torch's: where that is as accurate as is asked for, unless it is wide
    enough for the kernel to be faster, or permits tensor cores more than torch's setting does."""
    if left.dtype != torch.float32 or left.device.type == "cpu":
        return True
    setting = float32_precision()
    wanted = precision or setting
    if wanted == "fp32":
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
    known = [n for n in range(1, most + 1) if terms % (4 * n) == 0] or [1]
    busy = {n: tiles * n / (-(-tiles * n // at_once) * at_once) for n in known}
    return next(n for n in known if busy[n] >= BUSY_ENOUGH * max(busy.values()))

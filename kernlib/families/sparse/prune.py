"""Pruning: some entries of a weight stay, and all others become zeros."""

from __future__ import annotations

import torch

from kernlib.debug import eager_only
from kernlib.descriptors.base import check_flag, real, shown
from kernlib.runtime.tensors import (
    check_dense,
    materialised,
    overlaps_itself,
    refuse_distributed,
    refuse_other,
)

PER = ("matrix", "row")
_KEYS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Floats without a negative zero: its bits are their only NaN.
_UNSIGNED_ZERO = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
FLOATS = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn,
    torch.float8_e5m2, *_UNSIGNED_ZERO,
)  # fmt: skip


@eager_only
def magnitude(
    weight: torch.Tensor,
    density: float,
    per: str = "matrix",
    inplace: bool = False,
    *,
    debug: bool = False,
) -> torch.Tensor:
    """``weight`` with its entries of largest magnitude, and 0 elsewhere.

    - ``density``: the part that stays, from 0 to 1. Exactly ``round(density * n)`` entries of n
      keep their bits. Of equal magnitudes the first ones stay, in row-major order, so that the
      result is the same on every device. NaN is the largest magnitude of all.
    - ``per``: ``"matrix"`` counts over the whole tensor, ``"row"`` over each row along the last
      dimension.
    - ``inplace``: write into ``weight``, which is returned; else a new tensor. No gradient is
      recorded either way.
    - ``debug=True`` writes what runs to stderr.

    Works on floats of any dtype that has a zero, of any shape and strides, on any device and
    without a host synchronisation. Raises TypeError for a ``weight`` that holds no such floats and
    an ``inplace`` that is no bool, ValueError for a ``density`` outside of 0 to 1, an unknown
    ``per``, and a ``weight`` to write whose elements share memory, such as an expanded one.

    Example:
        >>> weight = torch.tensor([[1.0, -5.0, 4.0, 0.5], [2.0, 0.1, -0.2, 3.0]])
        >>> kl.sparse.magnitude(weight, density=0.5, per="row")
        tensor([[ 0., -5.,  4.,  0.],
                [ 2.,  0.,  0.,  3.]])
    """
    check_flag("inplace", inplace)
    dropped = ~largest(weight, density, per)
    if not inplace:
        bits = _bits(materialised(weight.detach()))
        return bits.masked_fill(dropped, 0).view(weight.dtype)
    if weight._is_zerotensor():
        raise ValueError("weight is a zero tensor, which has no memory to write to: clone it")
    if overlaps_itself(weight):
        raise ValueError(
            f"weight overlaps itself (shape {tuple(weight.shape)}, strides {weight.stride()}): "
            "elements that share memory cannot all be written; clone it"
        )
    with torch.no_grad():
        if weight.is_neg():
            weight.copy_(magnitude(weight, density, per))
        else:
            _bits(weight).masked_fill_(dropped, 0)
    return weight


@torch.no_grad()
def largest(weight: torch.Tensor, density: float, per: str = "matrix") -> torch.Tensor:
    """Which entries :func:`magnitude` keeps, as a tensor of bools of the shape of ``weight``.
    Raises what that raises."""
    _check(weight, density, per)
    rows = weight.shape[-1] if per == "row" and weight.dim() else weight.numel()
    keys = _magnitudes(materialised(weight.detach()))
    keys = keys.reshape(-1, rows) if rows else keys.reshape(0, 0)
    count = round(float(density) * rows)
    least = _nth_largest(keys, count, 8 * weight.element_size() - 1)
    kept = keys > least
    left = count - kept.sum(1, keepdim=True)  # how many of those equal to the least stay
    equal = keys == least
    kept |= equal & (equal.cumsum(1, dtype=_counter(rows)) <= left)
    return kept.reshape(weight.shape)


def _magnitudes(weight: torch.Tensor) -> torch.Tensor:
    """Integers in the order of magnitudes: the bits of floats without their signs."""
    bits = _bits(weight)
    limits = torch.iinfo(bits.dtype)
    keys = bits & limits.max
    if weight.dtype in _UNSIGNED_ZERO:
        keys = torch.where(bits == limits.min, limits.max, keys)
    return keys


def _bits(weight: torch.Tensor) -> torch.Tensor:
    """A view as integers."""
    return weight.view(_KEYS[weight.element_size()])


def _nth_largest(keys: torch.Tensor, count: int, bits: int) -> torch.Tensor:
    """(rows, 1): the largest key that ``count`` of each row reach, found bit by bit.

    This is one pass over the keys for each bit. Sorting would hold an index of 8 bytes for each
    entry, 5 GB for a matrix of 12288 x 49152.
    """
    found = keys.new_zeros(keys.shape[0], 1)
    for bit in reversed(range(bits)):
        higher = found | (1 << bit)
        found = torch.where((keys >= higher).sum(1, keepdim=True) >= count, higher, found)
    return found


def _counter(entries: int) -> torch.dtype:
    return torch.int32 if entries < 2**31 else torch.int64


def _check(weight, density, per: str) -> None:
    if not isinstance(weight, torch.Tensor):
        refuse_other("weight", weight, "a tensor of floats")
    if weight.dtype not in FLOATS:
        zero = " that have a zero" if weight.dtype.itemsize == 1 else ""
        raise TypeError(f"weight must be a tensor of floats{zero}, got {weight.dtype}")
    check_dense(("weight",), weight=weight)
    refuse_distributed(weight=weight)
    check_density(density)
    check_per(per)


def check_density(density) -> None:
    """Raises TypeError for what is no number, ValueError for one outside of 0 to 1."""
    number = real(density)
    if number is None:
        raise TypeError(f"density must be a number from 0 to 1, got {shown(density)}")
    if not 0 <= number <= 1:
        text = "a number past 2^64" if abs(number) > 2**64 else density
        raise ValueError(f"density must be from 0 to 1, got {text}")


def check_per(per: str) -> None:
    """Raises ValueError for an unknown way to count entries."""
    if not isinstance(per, str) or per not in PER:
        raise ValueError(f"per must be one of {', '.join(PER)}, got {shown(per)}")

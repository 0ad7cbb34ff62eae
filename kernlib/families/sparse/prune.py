"""Pruning: some entries of a weight stay, and all others become zeros.

Weights are read piece by piece, so that a large one needs little further memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from math import prod

import torch

from kernlib.debug import eager_only
from kernlib.descriptors.base import as_int, check_flag, real, shown
from kernlib.runtime.tensors import (
    check_dense,
    materialised,
    overlaps_itself,
    refuse_distributed,
    refuse_other,
)

PER = ("matrix", "row")
# Entries of a piece, unless a row has more that must stay together: on a CPU what its caches hold,
# elsewhere enough that few kernels are launched.
PIECE_CPU, PIECE = 1 << 18, 1 << 22
# Bits of a magnitude that one histogram counts. Of more, torch's on a GPU takes 400 MB.
DIGIT_CPU, DIGIT = 16, 11
_KEYS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Floats without a negative zero: its bits are their only NaN.
_UNSIGNED_ZERO = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
FLOATS = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn,
    torch.float8_e5m2, *_UNSIGNED_ZERO,
)  # fmt: skip
Part = tuple[tuple, torch.Tensor]  # an index of a piece, and which of its entries stay


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
    _check(weight, density, per)
    if not inplace:
        bits = _bits(materialised(weight.detach()))
        pruned = bits.clone(memory_format=torch.contiguous_format).view(weight.dtype)
        _drop(pruned, _largest(pruned, density, per))
        return pruned
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
            _drop(weight, _largest(weight.detach(), density, per))
    return weight


@eager_only
def n_m(weight: torch.Tensor, n: int = 2, m: int = 4, *, debug: bool = False) -> torch.Tensor:
    """Which entries of ``weight`` an N:M pattern keeps: of each ``m`` consecutive ones of a row the
    ``n`` of largest magnitude, as bools of the shape of ``weight``.

    - ``weight``: (..., C), floats of any dtype that has a zero, of any strides, on any device; m
      divides C. Of equal magnitudes the first ones stay, and NaN is the largest of all.
    - ``n``, ``m``: ints, n from 0 to m. 2 and 4 are what sparse tensor cores multiply by.
    - ``debug=True`` writes what runs to stderr.

    ``weight * n_m(weight)`` is the pruned weight. Raises TypeError for a ``weight`` that holds no
    such floats and for ``n`` and ``m`` that are no ints, ValueError for an ``m`` below 1 or one
    that does not divide C, and an ``n`` outside of 0 to m. The pattern 2:4 is that of A. Mishra and
    others, Accelerating Sparse Deep Neural Networks, arXiv 2104.08378.

    Example:
        >>> kl.sparse.prune.n_m(torch.tensor([[1.0, -5.0, 4.0, 0.5], [2.0, 2.0, -2.0, 1.0]]))
        tensor([[False,  True,  True, False],
                [ True,  True, False, False]])
    """
    check_weight(weight)
    n, m = checked_pattern(n, m)
    check_groups("weight", weight, m)
    return _mask(weight, lambda source: _groups(source, n, m))


def largest(weight: torch.Tensor, density: float, per: str = "matrix") -> torch.Tensor:
    """Which entries :func:`magnitude` keeps, as a tensor of bools of the shape of ``weight``.
    Raises what that raises."""
    _check(weight, density, per)
    return _mask(weight, lambda source: _largest(source, density, per))


def largest_of(weight: torch.Tensor, count: int) -> torch.Tensor:
    """Which entries are the ``count`` of largest magnitude, the first of equal ones, as
    :func:`largest` has them."""
    return _mask(weight, lambda source: _largest_of(source, count))


def prune_n_m(weight: torch.Tensor, n: int, m: int) -> None:
    """Set the entries of a ``weight`` that :func:`n_m` drops to zero, in place."""
    with torch.no_grad():
        _drop(weight, _groups(weight.detach(), n, m))


def prune_together(weights: Sequence[torch.Tensor], count: int) -> list[int]:
    """Make zeros of all entries of the ``weights`` but the ``count`` of largest magnitude of all of
    them together, in place, and return how many of each weight stay. Of equal ones the first stay,
    in the order of the weights, in each of them in row-major order.

    Magnitudes of several dtypes are compared in float32, or float64 if there is one. The smallest
    that stays is read from histograms of the leading bits over all weights, then of those behind
    them, so that nothing of the size of a weight is held.
    """
    with torch.no_grad():
        sources = [weight.detach() for weight in weights]
        dtype = _common(sources)
        least, equals = _threshold(sources, dtype, count)
        counts = []
        for source in sources:
            stay: int | torch.Tensor = 0
            for piece in _pieces(source, 0):
                keys = _magnitudes(source[piece].to(dtype)).reshape(1, -1)
                mask, equals = _with_first(keys, least, equals)
                stay = stay + mask.sum()
                _drop(source, [(piece, mask.reshape(source[piece].shape))])
            counts.append(int(stay))
            equals = int(equals)  # the next weight may lie on another device
    return counts


def _common(weights: Sequence[torch.Tensor]) -> torch.dtype:
    """The dtype in which magnitudes of all weights are compared."""
    dtypes = {weight.dtype for weight in weights}
    if len(dtypes) == 1:
        return dtypes.pop()
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _threshold(weights: Sequence[torch.Tensor], dtype: torch.dtype, count: int) -> tuple[int, int]:
    """The largest key that ``count`` of all entries reach, and how many of those that equal it are
    among the ``count``."""
    bits = 8 * dtype.itemsize - 1
    most = DIGIT_CPU if all(weight.device.type == "cpu" for weight in weights) else DIGIT
    if not count:
        return (1 << bits) - 1, 0
    least, above, remaining = 0, 0, bits  # leading bits, entries with higher ones, bits behind them
    while remaining:
        width = min(remaining, most)
        digits = (1 << width) - 1
        histogram = torch.zeros(1 << width, dtype=torch.int64, device="cpu")
        for weight in weights:
            counts = torch.zeros_like(histogram, device=weight.device)
            for piece in _pieces(weight, 0):
                keys = _magnitudes(weight[piece].to(dtype)).reshape(-1)
                if remaining < bits:
                    keys = keys[keys >> remaining == least]
                counts += torch.bincount(keys >> (remaining - width) & digits, minlength=1 << width)
            histogram += counts.cpu()
        reach = histogram.flip(0).cumsum(0)  # entries of the highest digit, the two highest, ...
        place = int(torch.searchsorted(reach, count - above))
        above += int(reach[place - 1]) if place else 0
        least, remaining = least << width | digits - place, remaining - width
    return least, count - above


def _mask(weight: torch.Tensor, masks) -> torch.Tensor:
    """The masks of all pieces that ``masks(weight)`` yields, as one tensor."""
    with torch.no_grad():
        result = torch.empty_like(weight, dtype=torch.bool, memory_format=torch.contiguous_format)
        for piece, mask in masks(materialised(weight.detach())):
            result[piece] = mask
    return result


def _drop(weight: torch.Tensor, masks: Iterable[Part]) -> None:
    """Set the entries that a piece's mask drops to zero."""
    bits = _bits(weight)
    for piece, mask in masks:
        bits[piece].mul_(mask)


def _largest(weight: torch.Tensor, density: float, per: str) -> Iterator[Part]:
    """Each piece of a weight and what stays of it, which may be written before the next one."""
    if per == "matrix" or not weight.dim():
        yield from _largest_of(weight, round(float(density) * weight.numel()))
        return
    columns = weight.shape[-1]
    count = round(float(density) * columns)
    for piece in _pieces(weight, 1):
        keys = _magnitudes(weight[piece])
        rows = keys.reshape(-1, columns)
        least = _nth_largest(lambda rows=rows: [rows], count, 8 * weight.element_size() - 1)
        equals = count - (rows > least).sum(1, keepdim=True)
        yield piece, _with_first(rows, least, equals)[0].reshape(keys.shape)


def _largest_of(weight: torch.Tensor, count: int) -> Iterator[Part]:
    """:func:`_largest` of ``count`` entries of the weight, without a host synchronisation."""
    pieces = [*_pieces(weight, 0)]
    if not pieces:
        return

    def every() -> Iterator[torch.Tensor]:
        return (_magnitudes(weight[piece]).reshape(1, -1) for piece in pieces)

    if weight.device.type == "cpu":
        least, equals = _threshold([weight], weight.dtype, count)
    else:  # a histogram would wait for the device
        least = _nth_largest(every, count, 8 * weight.element_size() - 1)
        equals = count - sum((keys > least).sum(1, keepdim=True) for keys in every())
    for piece, keys in zip(pieces, every(), strict=True):
        mask, equals = _with_first(keys, least, equals)
        yield piece, mask.reshape(weight[piece].shape)


def _with_first(keys: torch.Tensor, least, equals) -> tuple[torch.Tensor, torch.Tensor]:
    """Which keys (rows, n) are above the ``least`` of their row, or among the first ``equals`` that
    equal it; and how many of these are left for what follows."""
    mask, equal = keys > least, keys == least
    if keys.device.type == "cpu" and len(keys) == 1:  # of few that are equal a sum of all is slow
        places = equal[0].nonzero()[:, 0]
        mask[0, places[: int(equals)]] = True
        return mask, max(0, int(equals) - places.numel())
    mask |= equal & (equal.cumsum(1, dtype=_counter(keys.shape[1])) <= equals)
    return mask, (equals - equal.sum(1, keepdim=True)).clamp(min=0)


def _groups(weight: torch.Tensor, n: int, m: int) -> Iterator[Part]:
    """Each piece of a weight and the ``n`` of each ``m`` entries that stay, by the rank of each
    in its group: how many are larger, or equal and further in front."""
    for piece in _pieces(weight, 1):
        groups = _magnitudes(weight[piece]).unflatten(-1, (-1, m))
        ranks = torch.zeros_like(groups, dtype=torch.int8 if m < 128 else torch.int32)
        for first, second in combinations(range(m), 2):
            behind = groups[..., second] > groups[..., first]
            ranks[..., first] += behind
            ranks[..., second] += ~behind
        yield piece, (ranks < n).flatten(-2)


def _pieces(weight: torch.Tensor, together: int) -> Iterator[tuple]:
    """Indices of views that hold all entries in row-major order, with the last dimensions, as many
    as ``together``, in one."""
    if weight.numel():
        most = PIECE_CPU if weight.device.type == "cpu" else PIECE
        yield from _split(weight.shape, together, most)


def _split(shape: Sequence[int], together: int, most: int) -> Iterator[tuple]:
    if prod(shape) <= most or len(shape) <= together:
        yield (...,)
        return
    step = most // prod(shape[1:])
    if step or len(shape) == together + 1:
        step = max(step, 1)
        yield from ((slice(start, start + step),) for start in range(0, shape[0], step))
        return
    for index in range(shape[0]):
        yield from ((index, *rest) for rest in _split(shape[1:], together, most))


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


def _nth_largest(
    every: Callable[[], Iterable[torch.Tensor]], count: int, bits: int
) -> torch.Tensor:
    """(rows, 1): the largest key that ``count`` of each row reach, bit by bit. The keys are the
    columns of all parts (rows, n) together that ``every()`` has.

    This is one pass over the keys for each bit. Sorting would hold an index of 8 bytes for each
    entry, 5 GB for a matrix of 12288 x 49152.
    """
    least = next(iter(every())).new_zeros(1, 1)
    for bit in reversed(range(bits)):
        higher = least | (1 << bit)
        reached = sum((keys >= higher).sum(1, keepdim=True) for keys in every())
        least = torch.where(reached >= count, higher, least)
    return least


def _counter(entries: int) -> torch.dtype:
    return torch.int32 if entries < 2**31 else torch.int64


def checked_pattern(n: object, m: object, names: tuple[str, str] = ("n", "m")) -> tuple[int, int]:
    """An N:M pattern as ints. Raises TypeError for what is none, ValueError for an m below 1 and an
    n outside of 0 to m."""
    n, m = as_int(names[0], n), as_int(names[1], m)
    if m < 1:
        raise ValueError(f"{names[1]} must be 1 or more, got {shown(m)}")
    if not 0 <= n <= m:
        raise ValueError(f"{names[0]} must be from 0 to {names[1]} = {shown(m)}, got {shown(n)}")
    return n, m


def check_groups(name: str, weight: torch.Tensor, m: int, of: str = "m") -> None:
    """Raises ValueError for a tensor whose rows are no whole groups of ``m``."""
    if not weight.dim() or weight.shape[-1] % m:
        raise ValueError(
            f"the last dimension of {name} must be divisible by {of} = {shown(m)}, got shape "
            f"{tuple(weight.shape)}"
        )


def _check(weight, density, per: str) -> None:
    check_weight(weight)
    check_density(density)
    check_per(per)


def check_weight(weight: object, name: str = "weight") -> None:
    """Raises TypeError for what is no dense tensor of floats that have a zero."""
    if not isinstance(weight, torch.Tensor):
        refuse_other(name, weight, "a tensor of floats")
    if weight.dtype not in FLOATS:
        zero = " that have a zero" if weight.dtype.itemsize == 1 else ""
        raise TypeError(f"{name} must be a tensor of floats{zero}, got {weight.dtype}")
    check_dense((name,), **{name: weight})
    refuse_distributed(**{name: weight})


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

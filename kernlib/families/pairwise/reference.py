"""Pairwise kernels in PyTorch, by direct differences, a block of rows at a time."""

from __future__ import annotations

import math

import torch

from kernlib.families.pairwise import stages
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.runtime import expressions
from kernlib.runtime.precision import product

BLOCK_ELEMENTS = 1 << 22  # of (rows, N, K) at once: 16 MB in float32, so that it stays in cache


def pairwise(
    descriptor: Pairwise,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    inner_p=None,
    inner_scale=None,
    outer_p=None,
    root: bool = False,
    epsilon=0.0,
    regularization=0.0,
    diagonal: int = 0,
    parameters: dict | None = None,
) -> torch.Tensor:
    """(L, M, N) from ``a`` (L, M, K) and ``b`` (L, N, K), in their dtype.

    Exponents and ``inner_scale`` are None, numbers or tensors of shape () or (L,); the outer
    exponent is ``1 / inner_p`` when ``root``. Other hyperparameters are numbers or tensors of shape
    () or (L,). ``regularization`` is added where ``n - m == diagonal``.
    """
    batch = a.shape[0]
    entries = []
    for l in range(batch):
        # As float32 has it: torch.pow takes it so for most elements of a tensor, and not for all.
        p = None if inner_p is None else a.new_tensor(entry(inner_p, l)).item()
        total = sums(descriptor, a[l], b[l], p, entry(inner_scale, l))
        if root:
            entries.append(norms(descriptor, a[l], b[l], total, p))
        else:
            entries.append(outer(descriptor.outer, total, entry(outer_p, l)))
    v = torch.stack(entries) if entries else a.new_zeros(0, a.shape[1], b.shape[1])
    if descriptor.epilogue:
        v = torch.where(v.abs() < _column(epsilon, v), torch.zeros_like(v), v)
        columns = {name: _column(x, v) for name, x in (parameters or {}).items()}
        v = expressions.apply(descriptor.epilogue, v, columns).clone()
        m = torch.arange(v.shape[1], dtype=torch.int64, device=v.device)[:, None]
        n = torch.arange(v.shape[2], dtype=torch.int64, device=v.device)[None, :]
        v = torch.where(n - m == diagonal, v + _column(regularization, v), v)
    return v


def entry(value, index: int) -> float | None:
    """The number that belongs to one batch entry."""
    if isinstance(value, torch.Tensor):
        flat = value.reshape(-1)
        return float(flat[index if flat.shape[0] > 1 else 0])
    return None if value is None else float(value)


def _column(value, like: torch.Tensor) -> torch.Tensor:
    tensor = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    return tensor.reshape(-1, 1, 1)


def sums(descriptor: Pairwise, a, b, p: float | None, scale: float | None) -> torch.Tensor:
    """``sum_k inner(op(a, b))`` of one batch entry, the maximum for ``p = inf``."""
    if a.shape[1] == 0 or 0 in (a.shape[0], b.shape[0]):
        return a.new_zeros(a.shape[0], b.shape[0])
    rows = max(1, BLOCK_ELEMENTS // max(1, b.shape[0] * b.shape[1]))
    sums = a.new_empty(a.shape[0], b.shape[0])
    # In place: results kept between the temporaries of 16 MB tear the heap apart, 6 GB for 5000^2.
    for block, out in zip(a.split(rows), sums.split(rows), strict=True):
        out.copy_(_block(descriptor, block, b, p, scale))
    return sums


def _block(descriptor: Pairwise, a, b, p: float | None, scale: float | None) -> torch.Tensor:
    if descriptor.operator == "dot" and isinstance(descriptor.inner, stages.Identity):
        return product(a, b.T)
    v = _terms(descriptor, a[:, None], b[None])
    if isinstance(descriptor.inner, stages.Power) and math.isinf(p):
        return v.abs().amax(-1)
    return _inner(descriptor.inner, v, p, scale).sum(-1)


def _terms(descriptor: Pairwise, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return b * a if descriptor.operator == "dot" else b - a


def norms(descriptor: Pairwise, a, b, sums: torch.Tensor, p: float) -> torch.Tensor:
    """``sums ** (1 / p)``. Sums of powers leave the range of their type where norms do not: those
    are computed anew, of terms divided by the largest."""
    if p in (0, 1, math.inf) or a.shape[-1] == 0:
        return sums
    info = torch.finfo(sums.dtype)
    # In double: the rounding of 1 / p times ln(s) is an error of the root.
    result = sums.sqrt() if p == 2 else (sums.double() ** (1 / p)).to(sums.dtype)
    return _mend(descriptor, a, b, result, (sums < info.tiny / info.eps) | (sums == math.inf), p)


def distances(descriptor: Pairwise, a, b, roots: torch.Tensor) -> torch.Tensor:
    """Square roots of sums of squares, of which those whose squares have left the range of their
    type are computed anew, in place."""
    if roots.numel() == 0 or a.shape[-1] == 0:
        return roots
    info = torch.finfo(roots.dtype)
    least, most = (info.tiny / info.eps) ** 0.5, info.max**0.5
    smallest, largest = roots.aminmax()
    if smallest.item() >= least and largest.item() <= most:
        return roots
    if descriptor.operator == "difference" and _are_moderate(a, b, 2 * least / info.eps):
        return roots  # its zeros belong to equal points
    return _mend(descriptor, a, b, roots, (roots < least) | (roots == math.inf), 2)


def _are_moderate(a: torch.Tensor, b: torch.Tensor, least: float) -> bool:
    """Whether all numbers but zeros are at least so large, and no sum of squares overflows."""
    most = torch.finfo(a.dtype).max ** 0.25
    for points in (a, b):
        sizes = points.abs()
        smallest, largest = sizes.aminmax()
        if smallest.item() == 0.0:
            smallest = sizes.masked_fill_(sizes == 0, 1.0).amin()
        if not (smallest.item() >= least and largest.item() <= most):
            return False
    return True


def _mend(descriptor: Pairwise, a, b, result, odd: torch.Tensor, p: float) -> torch.Tensor:
    """The norms that are ``odd`` anew, of terms divided by the largest, in place."""
    odd = odd.nonzero()
    for m, n in (part.unbind(-1) for part in odd.split(max(1, BLOCK_ELEMENTS // a.shape[-1]))):
        sizes = _terms(descriptor, a[m], b[n]).abs()
        largest = sizes.amax(-1)
        plain = (largest == 0) | largest.isinf()
        # In two steps: the reciprocal of a denormal is infinite.
        shift = torch.full_like(largest, 2.0**64).where(largest < 1, 2.0**-64)
        unit = torch.where(plain, 1.0, largest * shift)
        scaled = (sizes * shift[:, None] / unit[:, None]) ** p
        root = (scaled.sum(-1).double() ** (1 / p)).to(result.dtype)
        result[m, n] = torch.where(plain, largest, largest * root)
    return result


def _inner(stage: object, v: torch.Tensor, p: float | None, scale: float | None) -> torch.Tensor:
    if isinstance(stage, stages.Power):
        return _power(v, p)
    if isinstance(stage, stages.ExpPower):
        return torch.exp(scale * _power(v, p))
    if isinstance(stage, stages.PowerLog):
        size = v.abs()
        return torch.where(v == 0, torch.zeros_like(v), size**p * size.log())
    if isinstance(stage, stages.Abs):
        return v.abs()
    if isinstance(stage, stages.Square):
        return v * v
    return v.sqrt() if isinstance(stage, stages.Sqrt) else v


def _power(v: torch.Tensor, p: float) -> torch.Tensor:
    """``|v|^p``; for p = 0 whether v is not 0, a NaN staying one."""
    return torch.where(v.isnan(), v, (v != 0).to(v.dtype)) if p == 0 else v.abs() ** p


def outer(stage: object, s: torch.Tensor, p: float | None) -> torch.Tensor:
    if isinstance(stage, stages.Power):
        return s**p
    if isinstance(stage, stages.Abs):
        return s.abs()
    if isinstance(stage, stages.Square):
        return s * s
    return s.sqrt() if isinstance(stage, stages.Sqrt) else s

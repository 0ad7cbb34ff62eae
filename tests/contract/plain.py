"""What calls should give, in plain torch and float64. Raises for what is no valid argument."""

from __future__ import annotations

import math
import operator
from decimal import Decimal
from fractions import Fraction

import numpy as np
import torch

import kernlib as kl

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def wide(t) -> torch.Tensor:
    """The values of a dense tensor of floats."""
    if not isinstance(t, torch.Tensor) or t.dtype not in FLOATS or t.layout != torch.strided:
        raise TypeError(f"no dense tensor of floats: {type(t)}")
    t = t.detach().clone()
    return t.double()


def same_kind(*tensors) -> None:
    """They have one dtype and device."""
    given = [t for t in tensors if t is not None]
    if len({(t.dtype, t.device) for t in given}) != 1:
        raise TypeError("dtypes or devices differ")


def number(value, least=-math.inf, above=-math.inf, most=math.inf):
    """A number within limits, of those of a tensor on a device as they are; (L, 1, 1) of (L,)."""
    if isinstance(value, torch.Tensor):
        if value.dim() == 2 and value.shape == (1, 1):
            value = value.reshape(())
        if value.dim() > 1 or value.is_complex() or value.dtype == torch.bool:
            raise ValueError("no number")
        found = value.detach().clone().double()
        looked = found.flatten().tolist() if value.device.type == "cpu" else []
        for one in looked:
            number(one, least, above, most)
        return found[:, None, None] if found.numel() != 1 else found.reshape(())
    if isinstance(value, np.ndarray) and not value.ndim:
        value = value.item()
    if isinstance(value, (bool, np.bool_)) or not isinstance(
        value, (int, float, Fraction, Decimal, np.number)
    ):
        raise TypeError("no number")
    if isinstance(value, np.complexfloating):
        raise TypeError("no number")
    found = float(value)
    unbounded = above == found == -math.inf
    if not least <= found <= most or not (found > above or unbounded):
        raise ValueError("out of range")
    return found


def flag(*values) -> None:
    for value in values:
        if type(value) is not bool:
            raise TypeError("no flag")


def integer(value, least=-(2**61), most=2**61) -> int:
    if isinstance(value, (bool, np.bool_, torch.Tensor)):
        raise TypeError("no int")
    value = operator.index(value)
    if not least <= value <= most:
        raise TypeError("no int in range")
    return value


def _differences(a, b):
    return a.unsqueeze(-2) - b.unsqueeze(-3)


def power(sums, p, root):
    """``(sum |d|^p)^(1/p)`` of the magnitudes of differences."""
    if not isinstance(p, torch.Tensor):
        if p == 0:
            return (sums != 0).double().masked_fill(sums.isnan(), math.nan).sum(-1)
        if p == math.inf:
            return sums.amax(-1) if sums.shape[-1] else sums.sum(-1)
        total = (sums**p).sum(-1)
        return total ** (1 / p) if root else total
    if (p.dim() and p.shape[0] != 1) or p.numel() == 0:
        each = zip(sums.expand(p.shape[0], *sums.shape[-3:]), p.flatten(), strict=True)
        parts = [power(s, float(q), root) for s, q in each]
        return torch.stack(parts) if parts else sums.new_empty(0, *sums.shape[-3:-1])
    if p.is_meta:
        return sums.sum(-1)
    found = power(sums, float(p), root)
    return found if not p.dim() or found.dim() == 3 else found[None]


def matrix(descriptor, a, b=None, **values):
    """K of the descriptors that cases use, (M, N) or (L, M, N)."""
    symmetric = isinstance(descriptor, kl.Pairwise) and descriptor.symmetric
    if symmetric:
        if b is not None:
            raise ValueError("symmetric")
        b = a
    same_kind(a, b)
    given, like = (a, b), a.dtype
    a, b = wide(a), wide(b)
    feature_map, lengthscale = (values.pop(k, None) for k in ("feature_map", "lengthscale"))
    if lengthscale is not None:
        if feature_map is not None:
            raise TypeError("two maps")
        a, b = (x / _lengths(x, lengthscale) for x in (a, b))
        if descriptor.parameters:
            values.setdefault("bandwidth", 1.0)
    if feature_map is not None:
        a, b = (_mapped(x, wide(feature_map)) for x in (a, b))
    for x in (a, b):
        if x.dim() not in (2, 3):
            raise ValueError("dimensions")
    if a.shape[-1] != b.shape[-1]:
        raise ValueError("features")
    rows, columns = (integer(values.pop(k, 0)) for k in ("row_offset", "col_offset"))
    epsilon, added = values.pop("epsilon", None), values.pop("regularization", None)
    plain = kl.Pairwise.replace(descriptor, symmetric=False, categories=0)
    d, tabled = _differences(a, b), 0.0
    if descriptor.categories:
        tabled = _gathered(descriptor.categories, given, like, values)
    least = 0.0 if epsilon is None else number(epsilon, least=0)

    def cut(k):
        return torch.where(k.abs() < least, 0.0, k)

    if plain == kl.gaussian():
        width = number(values.pop("bandwidth"), above=0)
        k = torch.exp(-cut(d.square().sum(-1) + tabled) / (2 * width * width))
    elif plain == kl.laplace_l1():
        k = torch.exp(-cut(d.abs().sum(-1) + tabled) / number(values.pop("bandwidth"), above=0))
    elif plain == kl.l1_distance():
        k = d.abs().sum(-1)
    elif plain == kl.l2_distance():
        k = d.square().sum(-1).sqrt()
    elif plain == kl.p_distance():
        k = power(d.abs(), number(values.pop("p"), least=0), True)
    else:
        raise TypeError("no known descriptor")
    if (epsilon is not None or added is not None) and not plain.epilogue:
        raise ValueError("epsilon and regularization need an epilogue")
    if added is not None:
        m = torch.arange(k.shape[-2], device=k.device)[:, None] + rows
        n = torch.arange(k.shape[-1], device=k.device) + columns
        k = k + number(added) * (m == n)
    if values:
        raise TypeError(f"no arguments: {values}")
    return k


CODES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _gathered(count, points, dtype, values):
    """What tables of categories add, NaN where a code is outside of one."""
    codes, tables = [values.pop("a_codes"), values.pop("b_codes")], values.pop("tables")
    allowed = (dtype, torch.float32 if dtype in FLOATS[2:] else dtype)
    if not isinstance(tables, torch.Tensor) or tables.dtype not in allowed or tables.dim() < 3:
        raise TypeError("tables")
    *_, number_of, size, other = tables.shape
    if tables.dim() > 4 or number_of != count or size != other or not size:
        raise ValueError("tables")
    padded = torch.nn.functional.pad(wide(tables), (0, 1, 0, 1), value=math.nan)
    for place, (t, x) in enumerate(zip(codes, points, strict=True)):
        if not isinstance(t, torch.Tensor) or t.dtype not in CODES or t.layout != torch.strided:
            raise TypeError("codes")
        if t.dim() not in (2, 3) or t.shape[-2:] != (x.shape[-2], count) or t.is_quantized:
            raise ValueError("codes")
        if t.device != x.device or tables.device != x.device:
            raise ValueError("devices")
        t = t.detach().clone().long()
        codes[place] = t.where((t >= 0) & (t < size), size)
    found = 0.0
    for c in range(count):
        lead = [t.shape[:-2] for t in codes] + [padded.shape[:-3]]
        lead = torch.broadcast_shapes(*lead)
        table = padded[..., c, :, :].expand(*lead, size + 1, size + 1)
        rows, columns = (t[..., c].expand(*lead, t.shape[-2]) for t in codes)
        table = table.gather(-2, rows[..., None].expand(*rows.shape, size + 1))
        found = found + table.gather(-1, columns[..., None, :].expand(*rows.shape, -1))
    return found


def _lengths(x, lengths):
    lengths = wide(lengths)
    if lengths.shape != (x.shape[-1],) and (
        lengths.dim() not in (2, 3)
        or lengths.shape[-2] != 1
        or lengths.shape[-1] not in (1, x.shape[-1])
    ):
        raise ValueError("features")
    lengths = lengths[0] if lengths.dim() == 2 else lengths
    if not (lengths > 0).all():
        raise ValueError("sign")
    return lengths


def _mapped(x, m):
    if m.dim() == 1:
        if m.shape[0] != x.shape[-1]:
            raise ValueError("features")
        return x * m
    if m.dim() == 3 and tuple(m.shape[1:]) == (1, x.shape[-1]) and x.shape[-1] != 1:
        return x * m
    if m.dim() == 2 and m.shape[0] != x.shape[-1] and m.shape[1] == x.shape[-1]:
        return x * m[:, None]
    return x @ m


def written(k, like, out, accumulate=False):
    """A result in the place of ``out``, if that is given."""
    flag(accumulate)
    if out is None:
        if accumulate:
            raise ValueError("accumulate needs out")
        return k
    allowed = (like.dtype, torch.float32 if like.dtype in FLOATS[2:] else like.dtype)
    if out.dtype not in allowed or out.device != like.device:
        raise TypeError("out's kind")
    if out.dim() == k.dim() + 1 or (out.dim() == 3 and k.dim() == 3 and k.shape[0] == 1):
        k = k.expand(out.shape[0], *k.shape[-2:])
    if tuple(out.shape) != tuple(k.shape):
        if tuple(out.shape) != (1, *k.shape) and (1, *out.shape) != tuple(k.shape):
            raise ValueError("out's shape")
        k = k.reshape(out.shape)
    return k + wide(out) if accumulate else k


def summed(terms, weights, c):
    """``sum_k c[o,k] w[k,m] t[n,m,k]`` for t (L, N, M, K)."""
    return torch.einsum("lok,lkm,lnmk->lonm", c, weights, terms)


def pair_gradient(a, b, c, d, slope, numbers=()):
    """``sum_k c[o,k] a[k,m] slope(d[n,m] - b[n,k])``, without a batch where nothing has one."""
    same_kind(a, b, c, d)
    given = [wide(t) for t in (a, b, c, d)]
    if any(t.dim() not in (2, 3) for t in given):
        raise ValueError("dimensions")
    batched = any(t.dim() == 3 for t in given)
    sizes = [t.shape[0] for t in given if t.dim() == 3]
    sizes += [x.shape[0] for x in numbers if isinstance(x, torch.Tensor) and x.dim()]
    batch = max(sizes, default=1) if 0 not in sizes else 0
    a, b, c, d = (t.expand(batch, *t.shape[-2:]) for t in given)
    (k, m), n = a.shape[-2:], b.shape[-2]
    if b.shape[-1] != k or c.shape[-1] != k or tuple(d.shape[-2:]) != (n, m):
        raise ValueError("shapes")
    v = d[:, :, :, None] - b[:, :, None, :]
    found = summed(slope(v), a, c)
    return found if batched or batch != 1 else found[0]

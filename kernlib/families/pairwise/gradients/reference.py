"""Gradients of pairwise sums in PyTorch, by direct differences, a block of pairs at a time."""

from __future__ import annotations

import torch

from kernlib.families.pairwise import stages

BLOCK_ELEMENTS = 1 << 22  # of (queries, points, features) at once: 16 MB in float32
LONGEST_SUM = 1024  # points that a product adds one after the other: 20000 were 5e-6 off


def pair_gradient(
    operator: str,
    inner: object,
    x: torch.Tensor,
    z: torch.Tensor,
    weights: torch.Tensor,
    coefficients: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    *,
    p=None,
    inner_scale=None,
    first: bool = True,
    plain: bool = False,
    eps: float = 0.0,
) -> torch.Tensor:
    """``out[l,o,q,k] = sum_t c[l,o,t] W[l,q,t] d inner(op(x[l,q,k], z[l,t,k])) / d x[l,q,k]``, of
    ``op(..) scales[l,q,t]`` where there are ``scales`` (L, Q, T).

    ``x`` (L, Q, K), ``z`` (L, T, K), ``weights`` (L, Q, T) and ``coefficients`` (L, O, T), None for
    one set of ones; all of one dtype, in which (L, O, Q, K) is computed. ``p`` and ``inner_scale``
    are numbers or tensors of shape () or (L,). ``plain`` leaves out the factor p of a power, and
    ``eps`` is the smallest ``|v|`` where the exponent of the slope is negative and v is not 0.
    """
    batch, queries, features = x.shape
    sets = 1 if coefficients is None else coefficients.shape[1]
    out = x.new_zeros(batch, sets, queries, features)
    if out.numel() == 0 or z.shape[1] == 0:
        return out
    rows, points = _block_sizes(queries, z.shape[1], max(features, sets))
    for l in range(batch):
        slope = Slope(operator, inner, _entry(p, l), _entry(inner_scale, l), first, plain, eps)
        for q in range(0, queries, rows):
            for t in range(0, z.shape[1], points):
                factors = None if coefficients is None else coefficients[l, :, t : t + points]
                scale = None if scales is None else scales[l, q : q + rows, t : t + points]
                out[l, :, q : q + rows] += _block(
                    slope,
                    x[l, q : q + rows],
                    z[l, t : t + points],
                    weights[l, q : q + rows, t : t + points],
                    factors,
                    scale,
                )
    return out


def _block_sizes(queries: int, points: int, width: int) -> tuple[int, int]:
    """Queries and points of a block."""
    points = min(points, LONGEST_SUM, max(1, BLOCK_ELEMENTS // width))
    return min(queries, max(1, BLOCK_ELEMENTS // (width * points))), points


def _block(slope: Slope, x, z, weights, coefficients, scales) -> torch.Tensor:
    """(O, Q, K) of some queries and points."""
    slopes = slope(x[:, None], z[None], None if scales is None else scales[..., None])
    rows = weights[:, None]
    if coefficients is not None:
        rows = rows * coefficients
    return torch.bmm(rows, slopes).transpose(0, 1)


class Slope:
    """``d inner(op(x, z)) / d x`` of coordinates that broadcast, exactly 0 where v is 0."""

    def __init__(self, operator, inner, p, scale, first, plain, eps):
        self.operator, self.inner, self.first = operator, inner, first
        self.p, self.scale, self.plain, self.eps = p, scale, plain, eps

    def __call__(self, x: torch.Tensor, z: torch.Tensor, scale=None) -> torch.Tensor:
        if self.operator == "dot":
            return self._of(x * z, scale) * z
        return -self._of(z - x, scale) if self.first else self._of(x - z, scale)

    def _of(self, v: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        stage = self.inner
        v = v if scale is None else v * scale
        if isinstance(stage, stages.Identity):
            return torch.ones_like(v)
        if isinstance(stage, stages.Abs):
            return torch.where(v.isnan(), v, v.sign())  # whatever torch says of a NaN's sign
        if isinstance(stage, stages.Square):
            return 2 * v
        if isinstance(stage, stages.Sqrt):
            return torch.where(v == 0, 0.0, 0.5 * v.rsqrt())
        slope = self._power(v)
        if isinstance(stage, stages.Power):
            return slope if self.plain else self.p * slope
        share = torch.exp(self.scale * v.abs() ** self.p)
        # Powers may be infinite where exponentials are 0.
        return torch.where(share == 0, 0.0, self.p * self.scale * slope * share)

    def _power(self, v: torch.Tensor) -> torch.Tensor:
        """``sign(v) |v|^(p - 1)``."""
        size = v.abs()
        if self.p < 1:
            least = max(self.eps, torch.finfo(v.dtype).tiny)
            size = size.clamp(min=least)
        slope = v.sign() * size ** (self.p - 1)
        slope = torch.where(v.isnan(), v, slope)
        return torch.where(v == 0, 0.0, slope)


def _entry(value, index: int) -> float | None:
    """The number that belongs to one batch entry."""
    if isinstance(value, torch.Tensor):
        flat = value.reshape(-1)
        return float(flat[index if flat.shape[0] > 1 else 0])
    return None if value is None else float(value)

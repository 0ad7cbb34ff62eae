"""Units of points and bandwidths. A kernel of points divided by a bandwidth is the same of both in
another unit: in one near a bandwidth that is far from 1, no square or power of what matters leaves
the range of its type.
"""

from __future__ import annotations

import math

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kernlib.descriptors.epilogues import (
    Cauchy,
    Gaussian,
    Laplace,
    Matern,
    PowerExponential,
    RationalQuadratic,
)
from kernlib.families.pairwise import checks, stages
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.numbers import host_value
from kernlib.runtime.tensors import stand_ins

_USUAL_EXPONENT = 30  # of two, of a bandwidth
# Between these, the first of them included, all bandwidths have such.
LEAST_USUAL, MOST_USUAL = 2.0 ** (-_USUAL_EXPONENT - 1), 2.0**_USUAL_EXPONENT
_LARGEST_EXPONENTS = {torch.float32: 120, torch.float64: 1000}  # whose negatives are normal too


def unit_of(descriptor: Pairwise, values: dict, dtype: torch.dtype) -> float | torch.Tensor | None:
    """A power of two near a bandwidth whose square is far from 1. Points and bandwidth may be
    divided by it, where the kernel depends on their quotients alone. It is a tensor (L,) for a
    bandwidth (L,) in host memory. None for all other bandwidths and kernels, for a bandwidth on a
    device, and in a call that is traced."""
    bandwidth, most = values.get("bandwidth"), _LARGEST_EXPONENTS[dtype]
    if isinstance(bandwidth, torch.Tensor):
        if bandwidth.device.type != "cpu" or stand_ins(bandwidth) or is_in_torch_dispatch_mode():
            return None
        if bandwidth.numel() != 1:
            return _units_of(descriptor, values, bandwidth.detach(), most)
        bandwidth = float(bandwidth.detach())
    elif bandwidth is not None:
        bandwidth = host_value("bandwidth", bandwidth)
    if bandwidth is None or not 0 < bandwidth < math.inf:
        return None
    exponent = math.frexp(bandwidth)[1]
    if abs(exponent) <= _USUAL_EXPONENT or not is_of_quotients(descriptor, values):
        return None
    return 2.0 ** max(-most, min(most, exponent))


def _units_of(descriptor: Pairwise, values: dict, bandwidths: torch.Tensor, most: int):
    exponents = torch.frexp(bandwidths.double()).exponent
    far = (exponents.abs() > _USUAL_EXPONENT) & (bandwidths > 0) & bandwidths.isfinite()
    if not far.any() or not is_of_quotients(descriptor, values):
        return None
    exponents = torch.where(far, exponents.clamp(-most, most), 0)
    return torch.ldexp(torch.ones(exponents.shape, dtype=torch.float64, device="cpu"), exponents)


def in_unit(
    unit: float | torch.Tensor, x: torch.Tensor, z: torch.Tensor | None, values: dict
) -> tuple:
    """Points, of which the second may be the first or None, and bandwidth divided by a unit, and
    that unit: 1, and nothing is divided, where a coordinate would overflow. Points take the batch
    of units of shape (L,), which come back as (L, 1, 1). A unit that is a tensor, and its
    bandwidth, have the arithmetic's dtype."""
    shared, limits, wide = z is None or z is x, torch.finfo(x.dtype), accumulator(x.dtype)
    several = isinstance(unit, torch.Tensor)
    if several:
        unit = unit.to(x.device, wide)
    if several or unit < 1.0:
        most = limits.max * unit
        for size in [_largest(t) for t in ((x,) if shared else (x, z)) if t.numel()]:
            unit = torch.where(size < most, unit * torch.ones_like(size, dtype=wide), 1.0)
    bandwidth = values["bandwidth"]
    if isinstance(bandwidth, torch.Tensor):
        bandwidth = bandwidth.to(x.device, wide)
    bandwidth = bandwidth / unit
    if isinstance(bandwidth, torch.Tensor):  # a reciprocal of less would be infinite
        bandwidth = bandwidth.clamp(min=torch.finfo(wide).tiny)
    if several:
        unit = unit[:, None, None]
    left = (x / unit).to(x.dtype)
    right = z if z is None else left if shared else (z / unit).to(z.dtype)
    return left, right, values | {"bandwidth": bandwidth}, unit


def _largest(x: torch.Tensor) -> torch.Tensor:
    """The largest of the finite coordinates' sizes."""
    x = x.detach()
    return torch.where(x.isfinite(), x.abs(), 0.0).amax()


def is_of_squares(descriptor: Pairwise, values: dict) -> bool:
    """Whether a kernel of quotients takes squares of differences."""
    return isinstance(descriptor.inner, stages.Square) and is_of_quotients(descriptor, values)


def is_of_quotients(descriptor: Pairwise, values: dict) -> bool:
    """Whether a kernel is one of points divided by a bandwidth."""
    snaps = isinstance(values.get("epsilon"), torch.Tensor) or values.get("epsilon")
    if snaps or descriptor.operator != "difference" or len(descriptor.epilogue) != 1:
        return False
    if descriptor.categories:  # whose tables have no unit
        return False
    kinds = type(descriptor.inner), type(descriptor.outer)
    if kinds == (stages.Square, stages.Identity):
        return isinstance(descriptor.epilogue[0], (Gaussian, RationalQuadratic, Cauchy))
    is_common = kinds in ((stages.Abs, stages.Identity), (stages.Square, stages.Sqrt))
    if not is_common and not _is_norm(descriptor, values):
        return False
    return isinstance(descriptor.epilogue[0], (Laplace, Matern, PowerExponential))


def _is_norm(descriptor: Pairwise, values: dict) -> bool:
    """Whether sums and root are a norm, which a count of differences (p = 0) is not."""
    p = values.get("p", values.get("inner_p"))
    return checks.follows_inner(descriptor, values) and not isinstance(p, torch.Tensor) and p != 0

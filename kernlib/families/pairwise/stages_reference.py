"""The stages of a pairwise kernel in PyTorch, ``out = finish(sums)``, differentiable in everything
as often as is asked for.

``|v|^p`` and its root have an infinite first or second derivative at 0 where the exponent is no
whole number and smaller than 1 or 2. Distances of equal points are 0, and there the derivative is
said to be 0, as ``torch.cdist`` has it: never an infinity, and no NaN of 0 times one. The sign of 0
is 0.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from kernlib import sharding
from kernlib.descriptors.epilogues import Matern
from kernlib.families.pairwise import stages
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.runtime import expressions
from kernlib.runtime.tensors import broadcast_shapes

_VANISHED = 800.0  # minus a logarithm that no float64 has


def power(x, y):
    """``x ** y`` of tensors or numbers, of which one is a tensor. Where ``x`` is 0 and ``y``
    between 0 and 2, and not 1, the derivatives of every order are 0. So are those that name ``y``
    where ``x`` is 0, whatever it is from 0 on: they are powers of x times some of its logarithm,
    which go to 0, but for that by ``x`` and a ``y`` of 1, which is infinite."""
    if not isinstance(x, torch.Tensor):
        return x**y if x else power(torch.zeros_like(y), y)
    if isinstance(y, torch.Tensor):
        zero = (x == 0) & (y > 0) & (y < 2) & (y != 1)
        if y.requires_grad:
            return _by_exponents(x, y, zero)
    elif 0 < y < 2 and y != 1:
        zero = x == 0
    else:
        return x**y
    # Twice: a derivative that one `where` leaves out is multiplied by 0 all the same.
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x) ** y)


def _by_exponents(x: torch.Tensor, y: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """:func:`power` with derivatives by y, whose logarithm never gets a 0. They are 0 where
    ``zero`` is true."""
    at_zero = (x == 0) & (y >= 0)
    smooth = torch.where(at_zero & ~zero, x, 1.0) ** y.detach()
    result = torch.where(at_zero, smooth, torch.where(at_zero, 1.0, x) ** y)
    return torch.where(zero, 0.0, result)


def square_root(x: torch.Tensor) -> torch.Tensor:
    """``sqrt(x)``, with derivatives 0 where ``x`` is 0."""
    zero = x == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x).sqrt())


_FINITE = {"**": power, "pow": power, "sqrt": square_root}  # of an epilogue


def matern(u: torch.Tensor, nu: float) -> torch.Tensor:
    """The Matérn kernel of ``nu`` 0.5, 1.5 or 2.5 and ``u = t ** 2``, where t is ``sqrt(2 nu)``
    times the distance over the bandwidth. Recorded, with derivatives of every order accurate next
    to 0, which are kernels of smaller ``nu``. torch's of ``(1 + t) exp(-t)`` subtract numbers near
    1 from each other, and divide by t: for points 1e-7 apart nothing is left in float32, and 1e-9
    of it wrong in float64."""
    return torch.exp(-square_root(u)) if nu == 0.5 else _Matern.apply(u, nu)


class _Matern(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, nu):
        ctx.save_for_backward(u)
        ctx.nu = nu
        t = u.sqrt()
        finite = t.clamp(max=_VANISHED)  # an infinity times 0 would be NaN
        return (1 + finite + (finite * finite / 3 if nu == 2.5 else 0)) * torch.exp(-t)

    @staticmethod
    def backward(ctx, grad):
        (u,) = ctx.saved_tensors
        factor = -1 / 6 if ctx.nu == 2.5 else -1 / 2
        return factor * grad * matern(u, ctx.nu - 1), None


def sums(
    operator: str, inner: object, x, z, *, p=None, inner_scale=None, first: bool = True
) -> torch.Tensor:
    """``sum_k inner(op(x[l,q,k], z[l,t,k]))``: (L, Q, T) from (L, Q, K) and (L, T, K), with every
    difference there at once. Differences are ``z - x`` where x is ``first``, else ``x - z``;
    ``p`` and ``inner_scale`` are numbers or tensors of shape () or (L,)."""
    left, right = (x[:, :, None], z[:, None]) if first else (z[:, None], x[:, :, None])
    v = left * right if operator == "dot" else right - left
    if _is(p, math.inf):
        return v.abs().amax(-1) if v.shape[-1] else v.sum(-1)
    return _inner(inner, v, entries(p, 4), entries(inner_scale, 4)).sum(-1)


@lru_cache(maxsize=64)  # hot backward passes ask twice
def linear(operator: str, inner: object) -> bool:
    """Whether the gradient of the sums is made of products of matrices: ``W z`` of dot products,
    ``2 (x sum_t W - W z)`` of squared differences."""
    dot = operator == "dot"
    return isinstance(inner, stages.Identity if dot else stages.Square)


def finish(
    descriptor: Pairwise,
    s: torch.Tensor,
    values: dict,
    *,
    root: bool,
    diagonal: int = 0,
    of_norms: bool = False,
) -> torch.Tensor:
    """``epilogue(outer(s))`` with epsilon and regularization: (L, M, N) from sums (1, M, N) or
    (L, M, N).

    ``values`` are the call's hyperparameters by name, numbers or tensors of shape () or (L,).
    ``root`` says that the outer exponent is the reciprocal of the inner one; ``regularization`` is
    added where ``n - m == diagonal``. If it is ``of_norms``, s is what ``root`` makes of sums.
    """
    placed = {name: entries(_placed(value, s), 3) for name, value in values.items()}
    shapes = [x.shape for x in placed.values() if isinstance(x, torch.Tensor)]
    s = s.expand(broadcast_shapes(s.shape, *shapes))
    epilogues, epsilon = descriptor.epilogue, placed.get("epsilon", 0.0)
    if _is_matern(descriptor) and _is(epsilon, 0.0):
        rate = (2 * epilogues[0].nu) ** 0.5 / placed["bandwidth"]
        v, epilogues = matern(s * rate * rate, epilogues[0].nu), epilogues[1:]
    else:
        v = s if of_norms else _outer(descriptor, s, placed, root)
    if not descriptor.epilogue:
        return v
    if not _is(epsilon, 0.0):
        v = torch.where(v.abs() < epsilon, 0.0, v)
    arguments = {name: placed[name] for name in descriptor.parameters}
    v = expressions.apply(epilogues, v, arguments, functions=_FINITE)
    regularization = placed.get("regularization", 0.0)
    if _is(regularization, 0.0):
        return v
    m = torch.arange(v.shape[1], dtype=torch.int64, device=v.device)[:, None]
    n = torch.arange(v.shape[2], dtype=torch.int64, device=v.device)[None, :]
    is_own = sharding.beside(n - m == diagonal, v)
    return torch.where(is_own, v + regularization, v)


def _is_matern(descriptor: Pairwise) -> bool:
    first = descriptor.epilogue[0] if descriptor.epilogue else None
    return isinstance(first, Matern) and isinstance(descriptor.outer, stages.Sqrt)


def entries(value, dimensions: int):
    """A number as it is, a tensor of shape () or (L,) as one that broadcasts over a batch of
    ``dimensions`` in all."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.reshape(-1, *[1] * (dimensions - 1))


def _placed(value, like: torch.Tensor):
    return value.to(like.device, like.dtype) if isinstance(value, torch.Tensor) else value


def _is(value, number: float) -> bool:
    return value is not None and not isinstance(value, torch.Tensor) and value == number


def _inner(stage: object, v: torch.Tensor, p, scale) -> torch.Tensor:
    if isinstance(stage, stages.Abs):
        return v.abs()
    if isinstance(stage, stages.Square):
        return v * v
    if isinstance(stage, stages.Sqrt):
        return square_root(v)
    if isinstance(stage, stages.Power):
        return _power(v, p)
    if isinstance(stage, stages.ExpPower):
        return torch.exp(scale * _power(v, p))
    if isinstance(stage, stages.PowerLog):
        zero = v == 0
        safe = torch.where(zero, 1.0, v.abs())
        return torch.where(zero, 0.0, safe**p * safe.log())
    return v


def _power(v: torch.Tensor, p) -> torch.Tensor:
    """``|v| ** p``, for p = 0 whether v is not 0."""
    if isinstance(p, torch.Tensor):
        return torch.where((v == 0) & (p == 0), 0.0, power(v.abs(), p))
    if p == 0:
        return torch.where(v.isnan(), v, (v != 0).to(v.dtype))
    if p == 1:
        return v.abs()
    return v * v if p == 2 else power(v.abs(), p)


def _outer(descriptor: Pairwise, s: torch.Tensor, values: dict, root: bool) -> torch.Tensor:
    stage = descriptor.outer
    if root:
        return _root(s, values.get("p", values.get("inner_p")))
    if isinstance(stage, stages.Power):
        return power(s, values["outer_p"])
    if isinstance(stage, stages.Abs):
        return s.abs()
    if isinstance(stage, stages.Square):
        return s * s
    return square_root(s) if isinstance(stage, stages.Sqrt) else s


def _root(s: torch.Tensor, p) -> torch.Tensor:
    if isinstance(p, torch.Tensor):
        is_limit = (p == 0) | p.isinf()
        return power(s, torch.where(is_limit, 1.0, 1 / torch.where(is_limit, 1.0, p)))
    return s if p in (0, math.inf) else power(s, 1 / p)

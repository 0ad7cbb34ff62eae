"""The expadd family: sums of one-dimensional exponential kernels, and the gradient of their powers.

Semantics of the kermac project's ``cdist_expadd`` and ``cdist_grad_expadd``.
"""

from __future__ import annotations

import math

import torch
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kernlib.debug import eager_only
from kernlib.descriptors.base import shown
from kernlib.errors import KernlibError
from kernlib.families.pairwise import checks, per_point
from kernlib.families.pairwise.descriptor import exp_power_sum
from kernlib.run import run_kernel
from kernlib.runtime import numbers as hyperparameters
from kernlib.runtime.dtypes import DTYPE_NAMES, accumulator
from kernlib.runtime.numbers import check_kind, host_value, on_device, plain
from kernlib.runtime.tensors import (
    check_dense,
    check_memory,
    check_out_shape,
    common_batch,
    refuse_any_overlap,
    refuse_distributed,
    refuse_gradients,
    refuse_overlap,
    refuse_transforms,
    stand_ins,
)

_SUMS = exp_power_sum()
_SHAPES = {"a": "KM", "b": "NK", "c": "OK", "d": "NM", "s_km": "KM"}  # behind the batch
_FINITE = ("p", "q", "c0")
_POSITIVE = frozenset(("lengthscale",))
# A lower scale becomes -inf in the arithmetic, or its product with p |v|^(p-1) does, and -inf * 0
# is a NaN.
_LOWEST = {torch.float32: -1e30, torch.float64: -1e300}
# Binary exponents of a lengthscale, and of its power, up to which the points stay as they are: the
# error of |v|^p grows with log2 |v|, 6e-7 at 16.
_NEAR, _NEAR_POWER = 16, 64
_ENDS = {torch.float32: 126, torch.float64: 1022}  # exponents of units, which are normal numbers
_FAR = -64  # exponent of a lengthscale; a smaller one's unit may take points out of range


def cdist_expadd(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    p: float | torch.Tensor = 2.0,
    lengthscale: float | torch.Tensor | None = None,
    scale: float | torch.Tensor | None = None,
    debug: bool = False,
) -> torch.Tensor:
    """``out[l,m,n] = sum_k exp(scale * |a[l,m,k] - b[l,n,k]|^p)``.

    ``a`` (M, K) or (L, M, K), ``b`` (N, K) or (L, N, K), ``out`` (M, N) or (L, M, N): layouts,
    dtypes, batches and ``out`` as in :func:`kernlib.families.pairwise.operation.run`. ``p``,
    ``lengthscale`` and ``scale`` are real numbers or tensors of shape (), (L,) or (L, 1, 1).
    ``lengthscale`` stands for ``scale = -1 / lengthscale^p``; where that may leave the arithmetic's
    range, as it may for a tensor or a number far from 1, the points are first multiplied by a power
    of two near its reciprocal. A scale below -1e30 (-1e300 for float64) counts as that, unless it
    is a tensor.
    Gradients of all tensors are recorded. ``debug=True`` writes a line to stderr for each event.
    Semantics of the kermac project, whose ``lengthscale`` has the other sign.

    Raises ValueError unless exactly one of ``lengthscale`` and ``scale`` is given, for a host
    lengthscale that is not positive, a host p that is negative or infinite, and what
    :func:`kernlib.run_kernel` raises.

    Example:
        >>> kl.cdist_expadd(torch.zeros(1, 2), torch.tensor([[0.0, 1.0]]), lengthscale=1.0)
        tensor([[1.3679]])
    """
    numbers = {"p": p, "lengthscale": lengthscale, "scale": scale}
    for value in numbers.values():
        if isinstance(value, torch.Tensor) and value.dim():
            again = per_point.respelled(a, b, numbers, out)
            if again is not None:
                return cdist_expadd(again.a, again.b, out=out, debug=debug, **again.values)
    inner_scale = scale_of(p, lengthscale, scale, a)
    refuse_any_overlap(out, lengthscale=lengthscale, scale=scale)
    try:
        x, y, inner_scale = _in_units(p, lengthscale, inner_scale, a, b, out)
        return run_kernel(_SUMS, x, y, out=out, p=p, inner_scale=inner_scale, debug=debug)
    except (KernlibError, RuntimeError, TypeError, ValueError):
        _check_scale(lengthscale, scale, a, b, p, out)  # by the names that it has here
        raise


def _check_scale(lengthscale, scale, a, b, p, out) -> None:
    """Device and batch of the scale. Raises ValueError."""
    scales = {"lengthscale": lengthscale, "scale": scale}
    for name, value in scales.items():
        _check_device(name, value, a)
    check_dense(("a", "b"), a=a, b=b, out=out)
    _batch({"a": a, "b": b}, None, scales | {"p": p})
    checks.refuse_out(out, a=a, b=b, p=p, **scales)


@eager_only
def cdist_grad_expadd(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    p: float | torch.Tensor = 2.0,
    q: float | torch.Tensor = 1.0,
    c0: float | torch.Tensor = 0.0,
    lengthscale: float | torch.Tensor | None = None,
    scale: float | torch.Tensor | None = None,
    eps: float = 1e-8,
    s_km: torch.Tensor | None = None,
    debug: bool = False,
) -> torch.Tensor:
    """The gradient of ``sum_k c[o,k] a[k,m] (c0 + S[k,m])^q`` by the query points ``d``, with
    ``S[k,m] = sum_n exp(scale * |d[n,m] - b[n,k]|^p)``: ``out[l,o,n,m] = sum_k c[o,k] a[k,m]
    q (c0 + S[k,m])^(q-1) * scale p sign(v) |v|^(p-1) exp(scale |v|^p)``, where
    ``v = d[n,m] - b[n,k]``.

    - Points are columns, as in :func:`kernlib.cdist_grad`: ``a`` (K, M) weights of the pairs, ``b``
      (N, K) and ``d`` (N, M) points, ``c`` (O, K) coefficients, each with an optional batch in
      front; one dtype, any strides.
    - ``out`` (O, N, M) or (L, O, N, M) is written in place; without it a new tensor, of three
      dimensions where nothing has a batch. Half types also take a float32 ``out``.
    - ``s_km`` (K, M): S, where it is there already, or what is to stand in its place; else, unless
      ``q`` is the number 1, it is computed. Where ``c0 + S`` is 0 so is the gradient.
    - ``p``, ``q``, ``c0``, ``lengthscale`` and ``scale`` are real numbers or tensors of shape () or
      (L,), as in :func:`cdist_expadd`. ``eps`` is the smallest ``|v|`` that counts where p < 1;
      equal coordinates add 0. ``debug=True`` writes a line to stderr for each event.

    Raises ValueError and TypeError that name the argument, RuntimeError for inputs that require a
    gradient while gradients are recorded. Semantics of the kermac project, whose ``lengthscale``
    has the other sign.

    Example:
        >>> a, c, b, d = torch.ones(1, 1), torch.ones(1, 1), torch.zeros(1, 1), torch.ones(1, 1)
        >>> kl.cdist_grad_expadd(a, b, c, d, scale=-1.0)  # -2 v exp(-v^2) for v = 1
        tensor([[[-0.7358]]])
    """
    tensors = {"a": a, "b": b, "c": c, "d": d, "s_km": s_km}
    numbers = {"p": p, "q": q, "c0": c0, "lengthscale": lengthscale, "scale": scale}
    shape = _check_gradient(tensors, numbers, out)
    eps = _least(eps)
    scale = scale_of(p, lengthscale, scale, d, "d")
    if d.is_meta:
        return d.new_empty(shape) if out is None else out
    p, q, c0 = (plain(name, numbers[name]) for name in ("p", "q", "c0"))
    from kernlib.families.pairwise.gradients.points import (
        pair_gradient,  # cdist_expadd needs none
    )

    wide = {name: t if t is None or t.dim() == 3 else t[None] for name, t in tensors.items()}
    queries, points, first = wide["d"].mT, wide["b"].mT, wide["a"]
    clamped = isinstance(p, torch.Tensor) or p < 1  # else no slope grows towards 0
    unit, sets = None, wide["c"]
    if lengthscale is not None:
        unit = _unit(p, lengthscale, d, (queries, points))
    if unit is not None and not (clamped and isinstance(unit, torch.Tensor)):
        scale = scale_of(p, _length(lengthscale, d) * unit, None, d)
        queries, points = _times(queries, unit), _times(points, unit)
        # The result is multiplied by these in two steps, neither near the ends of the range.
        halves = _halves(unit)
        first, sets = _times(first, halves[0]), _times(sets, halves[1])
        eps = eps * unit if clamped else eps
    weights = _weights(first, queries, points, wide["s_km"], p, q, c0, scale)
    out = d.new_empty(shape) if out is None else out
    # Kernels write (queries, features); kermac has the features first.
    turned = (out if out.dim() == 4 else out[None]).mT
    values = {"p": p, "inner_scale": scale, "out": turned}
    if clamped:
        values["eps"] = eps
    stages = (_SUMS.operator, _SUMS.inner)
    pair_gradient(*stages, queries, points, weights.mT, sets, **values)
    return out


def _weights(a, queries, points, s, p, q, c0, scale) -> torch.Tensor:
    """``a q (c0 + S)^(q-1)``, (L, K, M) in a's dtype."""
    if host_value("q", q) == 1:
        return a
    dtype = accumulator(a.dtype)
    if s is None:
        values = {"p": p, "inner_scale": scale}
        s = run_kernel(_SUMS, points.to(dtype), queries.to(dtype), **values)
    q, c0 = (_placed(name, x, a) for name, x in (("q", q), ("c0", c0)))
    q, c0 = (x.reshape(-1, 1, 1) if isinstance(x, torch.Tensor) else x for x in (q, c0))
    base = s.to(dtype) + c0
    return (a * torch.where(base == 0, 0.0, q * base ** (q - 1))).to(a.dtype)


def _check_gradient(
    tensors: dict[str, torch.Tensor | None], numbers: dict, out: torch.Tensor | None
) -> tuple[int, ...]:
    """The result's shape. Raises TypeError, ValueError and RuntimeError that name the argument."""
    check_dense(("a", "b", "c", "d"), **tensors, out=out)
    present = {name: t for name, t in tensors.items() if t is not None}
    refuse_transforms(checks.NO_TRANSFORMS, **present)
    refuse_distributed(**tensors)
    sizes = _check_tensors(present)
    for name, value in numbers.items():
        _check_number(name, value)
        _check_device(name, value, tensors["d"])
    batch = _batch(present, out, numbers)
    shape = tuple(sizes[letter] for letter in "ONM")
    flat = batch == 1 and all(t.dim() == 2 for t in present.values())
    shape = shape if (flat if out is None else out.dim() == 3) else (batch, *shape)
    refuse_gradients("cdist_grad_expadd", **present, **numbers, out=out)
    if out is not None:
        vectors = {name: x for name, x in numbers.items() if isinstance(x, torch.Tensor)}
        _check_out(out, shape, batch, present | vectors)
    return shape


def _check_tensors(given: dict[str, torch.Tensor]) -> dict[str, int]:
    """The sizes by their letters in _SHAPES."""
    like, sizes, places = given["d"], {}, {}
    for name, t in given.items():
        if t.dim() not in (2, 3):
            letters = ", ".join(_SHAPES[name])
            raise ValueError(f"{name} must be ({letters}) or (L, {letters}), got {tuple(t.shape)}")
        if t.dtype not in DTYPE_NAMES:
            raise TypeError(
                f"{name} must be one of {', '.join(DTYPE_NAMES.values())}, got {t.dtype}"
            )
        if t.dtype not in (like.dtype, accumulator(like.dtype) if name == "s_km" else like.dtype):
            raise TypeError(f"{name} must be {like.dtype} as d is, got {t.dtype}")
        if t.device != like.device:
            raise ValueError(f"{name} must be on d's device {like.device}, got {t.device}")
        for letter, size in zip(_SHAPES[name], t.shape[-2:], strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(
                    f"{name} of shape {tuple(t.shape)} has {letter} = {size}, "
                    f"{places[letter]} has {sizes[letter]}: they must be one"
                )
            places.setdefault(letter, name)
    return sizes


def _check_number(name: str, value: object) -> None:
    if value is None:
        return
    number = host_value(name, value)
    if number is not None:
        _check_host(name, number)
    elif is_dynamo_compiling() or is_in_torch_dispatch_mode() or stand_ins(value):
        check_kind(name, value)  # its value is not known yet
    else:
        refuse_transforms(checks.NO_TRANSFORMS, **{name: value})
        hyperparameters.check_tensor(name, value, _POSITIVE, _check_host)


def _check_device(name: str, value: object, like: torch.Tensor) -> None:
    """Raises ValueError for a tensor of another device than the inputs' and the host."""
    if isinstance(value, torch.Tensor) and value.device not in (like.device, torch.device("cpu")):
        raise ValueError(f"{name} is on {value.device}, the inputs on {like.device}: move it there")


def _check_host(name: str, number: float, positive: frozenset[str] = _POSITIVE) -> None:
    """Checks of a host value by its name alone. Raises ValueError."""
    if name == "p" and not 0 <= number < math.inf:
        raise ValueError(f"p must be 0 or greater and finite, got {number}")
    if name in _FINITE and not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    hyperparameters.check_host(name, number, positive)


def _batch(given: dict[str, torch.Tensor], out: torch.Tensor | None, numbers: dict) -> int:
    """The batch that all broadcast to. Raises ValueError where two differ."""
    sizes = {name: t.shape[0] for name, t in given.items() if t.dim() == 3}
    vectors = {name: x for name, x in numbers.items() if isinstance(x, torch.Tensor) and x.dim()}
    sizes |= {name: x.shape[0] for name, x in vectors.items()}
    if out is not None and out.dim() == 4:
        sizes["out"] = out.shape[0]
    return common_batch(sizes)


def _check_out(
    out: torch.Tensor, shape: tuple[int, ...], batch: int, given: dict[str, torch.Tensor]
) -> None:
    like = given["d"]
    if len(shape) == 3 and batch != 1:
        raise ValueError(f"out must be 4-D for a batch of {batch}, got shape {tuple(out.shape)}")
    check_out_shape(out, shape)
    if out.dtype not in (like.dtype, accumulator(like.dtype)):
        raise TypeError(f"out must be {like.dtype} as d is, got {out.dtype}")
    if out.device != like.device:
        raise ValueError(f"out must be on the inputs' device {like.device}, got {out.device}")
    check_memory(out)
    refuse_overlap(out, **given)


def _least(eps: float) -> float:
    number = host_value("eps", eps, 0)
    if number is None or not number >= 0:
        raise ValueError(f"eps must be a number of 0 or greater, got {shown(eps)}")
    return number


def scale_of(
    p, lengthscale, scale, like: torch.Tensor, name_of_like: str = "a"
) -> float | torch.Tensor:
    """``scale``, or ``-1 / lengthscale^p`` for inputs ``like`` one tensor. Raises ValueError unless
    exactly one is given, and for host values that would not do."""
    if (lengthscale is None) == (scale is None):
        which = "neither" if scale is None else "both"
        raise ValueError(f"give exactly one of lengthscale and scale, got {which}")
    for name, value in (("p", p), ("lengthscale", lengthscale), ("scale", scale)):
        _check_number(name, value)
    _check_like(name_of_like, like)
    lowest = _LOWEST[accumulator(like.dtype)]
    if scale is not None:
        number = host_value("scale", scale)
        return scale if number is None else max(number, lowest)
    exponent, length = host_value("p", p), host_value("lengthscale", lengthscale)
    if exponent is None or length is None:
        _batch({}, None, {"p": p, "lengthscale": lengthscale})
        power = _placed("lengthscale", lengthscale, like) ** -_placed("p", p, like)
        return (-power).clamp(min=lowest)
    try:
        return max(-(length**-exponent), lowest)
    except OverflowError:
        return lowest


def _in_units(p, lengthscale, scale, a, b, out) -> tuple:
    """Both operands and the scale, in a unit near the lengthscale where that is needed."""
    unit = None if lengthscale is None else _unit(p, lengthscale, a, (a, b))
    if unit is None:
        return a, b, scale
    check_dense(("a", "b"), a=a, b=b, out=out)
    if a.device != b.device:
        raise ValueError(f"a and b must be on one device, got {a.device} and {b.device}")
    refuse_any_overlap(out, a=a, b=b)
    scale = scale_of(p, _length(lengthscale, a) * unit, None, a)
    return _times(a, unit), _times(b, unit), scale


def _unit(p, lengthscale, like: torch.Tensor, points: tuple) -> float | torch.Tensor | None:
    """A power of two that brings a lengthscale to 0.5 to 1, or at the end of the range to 4; None,
    or 1 in a tensor, where points and lengthscale do as they are, or multiplying would take points
    out of the range of their type, as it would those of float16."""
    if like.dtype == torch.float16:
        return None
    most = _ENDS[accumulator(like.dtype)]
    length, exponent = host_value("lengthscale", lengthscale), host_value("p", p)
    if length is None:
        values = _length(lengthscale, like).detach()
        inside = (values >= 2.0**-most) & values.isfinite()
        shifts = torch.where(inside, -torch.frexp(values).exponent, 0).clamp(-most, most)
        unit = torch.ldexp(torch.ones_like(values), shifts)
        # On a device that would be several kernels more, of all calls.
        return _within(unit, points) if like.device.type == "cpu" else unit
    if not math.isfinite(length):
        return None
    shift = math.frexp(length)[1]
    near = abs(shift) <= _NEAR and abs(shift * (exponent or 0.0)) <= _NEAR_POWER
    if near or shift < -most:
        return None
    unit = 2.0 ** -min(shift, most)
    return unit if shift > _FAR else _within(unit, points)


def _within(unit: float | torch.Tensor, points: tuple) -> torch.Tensor:
    """A unit, or 1 where it would take a point out of the range of its type."""
    for x in points:
        if x.numel():
            wide = accumulator(x.dtype)
            size = torch.where(x.isfinite(), x.detach().abs(), 0.0).amax().to(wide)
            ones = torch.ones_like(size)
            unit = torch.where(size * unit < torch.finfo(x.dtype).max, unit * ones, ones)
    return unit


def _halves(unit: float | torch.Tensor) -> tuple:
    """Two powers of two whose product is a third one."""
    if not isinstance(unit, torch.Tensor):
        half = 2.0 ** (math.frexp(unit)[1] // 2)
        return half, unit / half
    half = torch.ldexp(torch.ones_like(unit), torch.frexp(unit).exponent // 2)
    return half, unit / half


def _length(lengthscale, like: torch.Tensor):
    """A lengthscale in the inputs' arithmetic."""
    return _placed("lengthscale", lengthscale, like)


def _times(points: torch.Tensor, unit) -> torch.Tensor:
    """Points, (N, K) or (L, N, K), times one unit, or one for each entry of the batch."""
    if not isinstance(unit, torch.Tensor):
        return points * unit
    unit = unit.to(points.dtype)
    return points * (unit.reshape(()) if unit.numel() == 1 else unit.reshape(-1, 1, 1))


def _check_like(name: str, like: torch.Tensor) -> None:
    """Raises TypeError for a dtype without arithmetic here."""
    check_dense((name,), **{name: like})
    if like.dtype not in DTYPE_NAMES:
        names = ", ".join(DTYPE_NAMES.values())
        raise TypeError(f"{name} must be one of {names}, got {like.dtype}")


def _placed(name: str, value, like: torch.Tensor):
    """A tensor on the inputs' device in the dtype of their arithmetic; a number as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    check_kind(name, value)
    return on_device(name, value, like.device, accumulator(like.dtype))

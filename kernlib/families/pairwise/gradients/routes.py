"""Which way a backward pass takes: all that its descriptor, the kinds of its hyperparameters and
what is asked for decide, and no number that may change from call to call, such as a bandwidth. It
is found once and kept with the plans, so that a hot pass looks it up and launches.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from kernlib.descriptors.expression import VALUE
from kernlib.families.pairwise import checks, stages
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.gradients import norms, weights
from kernlib.families.pairwise.gradients.formula import Sums
from kernlib.families.pairwise.gradients.weights import Finish, Slope
from kernlib.families.pairwise.units import is_of_quotients
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.plan import PlanCache

if TYPE_CHECKING:
    from kernlib.families.pairwise.gradients.eager import Call

INNER = frozenset(("p", "inner_p", "inner_scale"))  # names of what the sums are given
_DECIDING = frozenset(("p", "inner_p", "outer_p", "epsilon"))  # numbers that choose code
_INFINITE = float("inf")


class Route(NamedTuple):
    """How the gradients of a call are computed that are asked for."""

    descriptor: Pairwise
    wide: torch.dtype  # of the arithmetic
    points: tuple[bool, bool]  # whether those of a and b are asked for
    wanted: tuple[str, ...]  # hyperparameters whose gradients are
    inner: tuple[str, ...]  # those of them that the sums are given
    quotients: bool  # of points by a bandwidth
    sums: Pairwise
    given: tuple[tuple[str, str], ...]  # what they take, and the hyperparameters that are it
    plain: bool  # the values are the sums
    light: bool  # nothing is made that is as large as the matrix
    mirrored: bool  # the gradient that arrives is added to its transpose
    finish: Finish | None  # what follows the sums; None if torch computes its derivatives
    weight: Slope | None  # its derivative by the sums; None if that is 0, or nobody needs it
    slopes: tuple[tuple[str, Slope], ...]  # those by wanted hyperparameters, unless they are 0
    norm: Pairwise | None  # whose finish, weight and slopes these are, in place of the sums'
    parts: int  # matrices side by side


_routes = PlanCache()


def route_of(call: Call, needs: tuple, saved: tuple, scaled: bool = True) -> Route:
    """The way to the gradients of a call of which ``needs`` says, one by one of the ``saved``
    tensors, whether they are asked for: of norms by way of those, if it may be ``scaled``, else by
    way of the sums."""
    dtype = saved[0].dtype
    key = call.descriptor.text, dtype, call.names, needs, scaled
    for name, value in call.numbers.items():
        key += (name, value if name in _DECIDING else None)
    route = _routes.plans.get(key)
    if route is None:
        wanted = tuple(name for name, need in zip(call.names, needs[2:], strict=True) if need)
        values = call.values(saved[2:])
        route = _made(call.descriptor, values, accumulator(dtype), needs[:2], wanted, scaled)
        _routes.keep(key, route)
    return route


def of_rows(route: Route, values: dict) -> Route:
    """The way for a block of rows. Kernels that are symmetric compute no rows alone."""
    if not route.descriptor.symmetric:
        return route
    descriptor = route.descriptor.replace(symmetric=False)
    made = _made(descriptor, values, *route[1:4], route.norm is not None)
    return made._replace(mirrored=route.mirrored)


def _made(
    descriptor: Pairwise,
    values: dict,
    wide: torch.dtype,
    points: tuple,
    wanted: tuple,
    scaled: bool,
) -> Route:
    made, plain = sums_of(descriptor, values), is_plain(descriptor, values)
    of_norms = scaled and norms.are_values(descriptor, values)
    inner = tuple(name for name in wanted if name in INNER)
    finish = None if plain else weights.finish_of(descriptor, values, of_norms)
    if finish is not None and not weights.has_kernels(finish):
        finish = None
    weight, slopes = None, ()
    if finish is not None:
        named = {name: _name_in_finish(descriptor, values, finish, name) for name in wanted}
        if of_norms:  # what follows these has no exponent
            named = {name: by for name, by in named.items() if name not in INNER}
        slopes = _slopes(made.descriptor, finish, named, wide)
        if any(points) or inner:
            weight = weights.slope_of(made.descriptor, finish, VALUE, wide)
    return Route(
        descriptor, wide, points, wanted, inner,
        quotients=is_of_quotients(descriptor, values),
        sums=made.descriptor,
        given=tuple((name, name if name in values else "inner_p") for name in made.given),
        plain=plain,
        # Without weights of its own, and with none that products would pack.
        light=plain and not wanted and not made.linear,
        mirrored=descriptor.symmetric and points[0],
        finish=finish, weight=weight, slopes=slopes,
        norm=norms.root_of(made.descriptor) if of_norms else None,
        parts=2 if of_norms else 1,
    )  # fmt: skip


def _slopes(sums: Pairwise, finish: Finish, named: dict, wide: torch.dtype) -> tuple:
    """The derivatives that are not 0, by hyperparameters that are ``named`` in them."""
    found = {
        name: weights.slope_of(sums, finish, by, wide)
        for name, by in named.items()
        if by is not None
    }
    return tuple((name, slope) for name, slope in found.items() if slope is not None)


def _name_in_finish(descriptor: Pairwise, values: dict, finish: Finish, name: str) -> str | None:
    """What a hyperparameter is called in the derivatives of what follows the sums."""
    if name in descriptor.parameters:
        return name
    root = checks.follows_inner(descriptor, values)
    return finish.exponent if name in (("p", "inner_p") if root else ("outer_p",)) else None


# The parts of a call.


def sums_of(descriptor: Pairwise, values: dict) -> Sums:
    """The sums of a call."""
    p = values.get("p", values.get("inner_p"))
    if type(descriptor.inner) is stages.Power and not isinstance(p, torch.Tensor) and p in (1, 2):
        return Sums(_plain(descriptor, "Abs" if p == 1 else "Square"), {})
    return Sums(_plain(descriptor), {}).having(p, values.get("inner_scale"))


@lru_cache(maxsize=1024)
def _plain(descriptor: Pairwise, inner: str | None = None) -> Pairwise:
    stage = getattr(stages, inner)() if inner else descriptor.inner
    return descriptor.replace(inner=stage, outer=stages.Identity(), epilogue=())


def exponent_sums(made: Sums) -> Sums | None:
    """The sums whose terms are the derivatives by the exponent of those of ``made``, if they have a
    kernel."""
    if not isinstance(made.descriptor.inner, stages.Power):
        return None
    return made._replace(descriptor=_plain(made.descriptor, "PowerLog"))


def is_plain(descriptor: Pairwise, values: dict) -> bool:
    """Whether a call's values are the sums."""
    p = values.get("p", values.get("inner_p"))
    root = checks.follows_inner(descriptor, values)
    same = not isinstance(p, torch.Tensor) and p in (0, 1, _INFINITE)
    identity = same if root else isinstance(descriptor.outer, stages.Identity)
    return identity and not descriptor.epilogue

"""The weight of each entry of a pairwise matrix in a gradient. With ``out = finish(S)``, the
derivatives of ``finish`` by S and by hyperparameters are pairwise matrices themselves: of the same
sums, under epilogues that :mod:`kernlib.descriptors.derivative` makes. So one kernel computes
each."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from kernlib.descriptors.derivative import ZERO, Derivative, fits, free_names
from kernlib.descriptors.epilogues import Epilogue
from kernlib.descriptors.expression import VALUE
from kernlib.families.pairwise import checks
from kernlib.families.pairwise import stages as norms
from kernlib.families.pairwise import stages_reference as stages
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.gradients.formula import Sums
from kernlib.families.pairwise.matrix import calls, matrix
from kernlib.runtime import expressions
from kernlib.runtime.tensors import broadcast_shapes, normal

_INFINITE = float("inf")
_SMALLEST = {torch.float32: 1e-38, torch.float64: 1e-300}
_STAGES = {1.0: "Identity", 0.5: "Sqrt", 2.0: "Square"}  # of exponents
_LARGEST_PRODUCT = 2**31  # elements of a dot product by cuBLAS, less one


class Finish(NamedTuple):
    """What follows the sums of a call: the fields of a :class:`Derivative`, and the hyperparameter
    that the exponent of "Power" is, or is made of."""

    outer: str
    epilogue: tuple[Epilogue, ...]
    snaps: bool
    power: str | None

    @property
    def exponent(self) -> str:
        """The name of the exponent of "Power"."""
        return free_names(self.epilogue)[0]

    def values(self, values: dict) -> dict:
        """The parameters of its derivatives, and more, by name: from hyperparameters, tensors on
        the device and in the arithmetic's dtype."""
        if self.power is None and not self.snaps:
            return values
        power = None if self.power is None else values[self.power]
        if self.power in ("p", "inner_p"):
            power = root_of(power)
        exponent, limit = free_names(self.epilogue)
        return {**values, exponent: power, limit: values.get("epsilon", 0.0)}


class Slope(NamedTuple):
    """A derivative of the stages behind the sums, by the sums (``VALUE``) or by a parameter: a
    kernel for points of one dtype, and the names of what it takes besides the sums' own."""

    finish: Finish
    by: str
    kernel: Pairwise
    names: tuple[str, ...]


def finish_of(descriptor: Pairwise, values: dict, of_norms: bool = False) -> Finish:
    """The stages behind the sums of a call with these hyperparameters, or behind the root if
    ``of_norms``, without ``regularization``."""
    outer, power = ("Identity", None) if of_norms else _outer(descriptor, values)
    epsilon = values.get("epsilon", 0.0)
    snaps = isinstance(epsilon, torch.Tensor) or epsilon != 0
    return Finish(outer, descriptor.epilogue, snaps, power)


def _outer(descriptor: Pairwise, values: dict) -> tuple[str, str | None]:
    """The outer stage's name, and the argument that gives the exponent of "Power"."""
    if checks.follows_inner(descriptor, values):
        source = "p" if "p" in values else "inner_p"
        power = root_of(values[source])
    elif isinstance(descriptor.outer, norms.Power):
        source, power = "outer_p", values["outer_p"]
    else:
        return type(descriptor.outer).__name__, None
    stage = None if isinstance(power, torch.Tensor) else _STAGES.get(power)
    return (stage, None) if stage else ("Power", source)


def root_of(p: float | torch.Tensor) -> float | torch.Tensor:
    """The exponent of the root that follows the inner exponent p: ``1 / p``, 1 for 0 and inf."""
    if not isinstance(p, torch.Tensor):
        return 1.0 if p in (0, _INFINITE) else 1 / p
    is_limit = (p == 0) | p.isinf()
    return torch.where(is_limit, 1.0, 1 / torch.where(is_limit, 1.0, p))


def is_plain(descriptor: Pairwise, values: dict) -> bool:
    """Whether a call's values are the sums."""
    p = values.get("p", values.get("inner_p"))
    root = checks.follows_inner(descriptor, values)
    same = not isinstance(p, torch.Tensor) and p in (0, 1, _INFINITE)
    identity = same if root else isinstance(descriptor.outer, norms.Identity)
    return identity and not descriptor.epilogue


def derivative(
    made: Sums, slope: Slope, values: dict, a: torch.Tensor, b: torch.Tensor | None
) -> torch.Tensor:
    """``d finish(S) / d S``, or by a parameter, of points in the arithmetic's dtype and of
    hyperparameters as :class:`Finish` takes them, without a record."""
    finish_values = slope.finish.values(values)
    numbers = {**made.given}
    for name in slope.names:  # a comprehension would be a call
        numbers[name] = finish_values[name]
    return calls.execute(slope.kernel, a, b, None, False, 0, 0, numbers)


def of_norms(slope: Slope, values: dict, n: torch.Tensor) -> torch.Tensor:
    """:func:`derivative` of the stages behind norms, from the norms (L, M, N) or (M, N)."""
    finish_values = slope.finish.values(values)
    placed = {name: stages.entries(finish_values[name], n.dim()) for name in slope.names}
    shapes = [t.shape for t in placed.values() if isinstance(t, torch.Tensor)]
    n = n.expand(broadcast_shapes(n.shape, *shapes))
    return expressions.apply(slope.kernel.epilogue, n, placed)


@lru_cache(maxsize=1024)
def slope_of(sums: Pairwise, finish: Finish, by: str, dtype: torch.dtype) -> Slope | None:
    """How :func:`derivative` computes that by ``by`` of points of a dtype; None if it is 0
    everywhere."""
    outer, epilogue, snaps = finish[:3]
    derived = Derivative(outer, epilogue, by, snaps, _SMALLEST[dtype])
    if derived.tree() == ZERO:
        return None
    root = norms.Sqrt() if outer == "Sqrt" else norms.Identity()
    kernel = sums.replace(outer=root, epilogue=(derived,))
    return Slope(finish, by, kernel, kernel.parameters)


def has_kernels(finish: Finish) -> bool:
    """Whether :func:`derivative` knows what follows the sums: all but chains of epilogues whose
    text would grow too long for a compiler."""
    return fits(finish.outer, finish.epilogue, finish.snaps)


def by_sums(
    descriptor: Pairwise, made: Sums, values: dict, a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor | None:
    """``d finish(S) / d S`` of a call with these hyperparameters; None if it is 0 everywhere."""
    finish = finish_of(descriptor, values)
    if has_kernels(finish):
        slope = slope_of(made.descriptor, finish, VALUE, a.dtype)
        return None if slope is None else derivative(made, slope, values, a, b)
    return _by_torch(descriptor, matrix(made.descriptor, a, b, **made.given), values)


def by_norms(
    descriptor: Pairwise, made: Sums, values: dict, n: torch.Tensor
) -> torch.Tensor | None:
    """:func:`by_sums` for the stages behind norms, by the norms."""
    finish = finish_of(descriptor, values, True)
    if has_kernels(finish):
        slope = slope_of(made.descriptor, finish, VALUE, n.dtype)
        return None if slope is None else of_norms(slope, values, n)
    return _by_torch(descriptor, n, values, True)


def _by_torch(descriptor: Pairwise, s: torch.Tensor, values: dict, of_norms: bool = False):
    counts = [v.shape[0] for v in values.values() if isinstance(v, torch.Tensor) and v.dim()]
    if s.dim() == 3:  # else the weights of its entries would be added up
        s = s.expand(max(s.shape[0], *counts, 1), -1, -1)
    return by_torch(descriptor, s, values, torch.ones_like(s), [], of_norms)[0]


def contracted(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``sum_mn values[l,m,n] weights[l,m,n]``, (L,), or () of matrices; ``values`` may be
    overwritten, and their dtype is the result's."""
    alike = values.shape == weights.shape and values.dtype == weights.dtype
    lines = alike and values.is_contiguous() and weights.is_contiguous()
    if lines and values.shape[:-2].numel() == 1 and values.numel() < _LARGEST_PRODUCT:
        return torch.dot(values.view(-1), weights.view(-1))
    return weighted(values, weights).sum((-2, -1))


def weighted(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``values * weights`` in the dtype of the values, which may be overwritten."""
    if values.is_meta:  # in a rehearsal, where a product would import a second of torch
        return values
    if values.shape == weights.shape:
        return values.mul_(weights)
    return values * weights.to(values.dtype)


def by_torch(
    descriptor: Pairwise,
    s: torch.Tensor,
    values: dict,
    grad: torch.Tensor,
    wanted: list,
    of_norms: bool = False,
) -> list:
    """The gradients of ``sum grad * finish(s)`` with respect to s, sums or norms, and the
    ``wanted`` tensors among ``values``, None for what nothing depends on, by torch: ten to twenty
    passes over memory."""
    with torch.inference_mode(False), torch.enable_grad():
        s, grad = normal(s).detach().requires_grad_(), normal(grad)
        values = {name: normal(value) for name, value in values.items()}
        root = checks.follows_inner(descriptor, values)
        out = stages.finish(descriptor, s, values, root=root, of_norms=of_norms)
        if not out.requires_grad:
            return [None] * (1 + len(wanted))
        return list(torch.autograd.grad(out, [s, *wanted], grad, allow_unused=True))

"""Formulas that one specialised descriptor computes: of some features, or a product of Gaussians,
which is one Gaussian of features divided by the bandwidths of their parts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernlib.families.pairwise.descriptor import Pairwise, gaussian

_GAUSSIAN = gaussian()


class Factor(NamedTuple):
    """A descriptor of some features, None for all, and what it calls its parameters."""

    descriptor: Pairwise
    features: tuple[int, ...] | None
    names: tuple[tuple[str, str], ...]  # the descriptor's, and the formula's


class Plain(NamedTuple):
    """A call of a descriptor."""

    descriptor: Pairwise
    a: torch.Tensor
    b: torch.Tensor
    values: dict


_factors: dict[str, tuple[Factor, ...]] = {}  # by texts of formulas, whose product they are


_positive: dict[str, frozenset[str]] = {}  # numbers of formulas that are greater than 0, by texts


def note_positive(text: str, names: frozenset[str]) -> None:
    """Remember which numbers of the formula of a text must be greater than 0."""
    if names and len(_positive) < MOST:
        _positive[text] = names


def positive_of(text: str) -> frozenset[str]:
    """The numbers of a formula that must be greater than 0: of descriptors that it was made of."""
    return _positive.get(text, frozenset())


def note(text: str, factors: tuple[Factor, ...]) -> None:
    """Remember what the formula of a text is a product of."""
    if len(_factors) < MOST:
        _factors[text] = factors


def factors_of(text: str) -> tuple[Factor, ...]:
    """Empty for a formula that is no product of descriptors."""
    return _factors.get(text, ())


MOST = 1024


def plain_of(text: str, values: dict) -> Plain | None:
    """The call of one descriptor that computes the formula of a text, or None."""
    factors = _factors.get(text)
    if not factors or not all(isinstance(values.get(name), torch.Tensor) for name in ("a", "b")):
        return None
    a, b = values["a"], values["b"]
    if len(factors) == 1:
        (factor,) = factors
        named = {own: values[name] for own, name in factor.names if name in values}
        return Plain(factor.descriptor, _taken(a, factor), _taken(b, factor), named)
    if any(factor.descriptor != _GAUSSIAN for factor in factors):
        return None
    bandwidths = [values.get(dict(factor.names)["bandwidth"]) for factor in factors]
    if not all(_divides(x, a) for x in bandwidths):
        return None
    a, b = (
        torch.cat(
            [_taken(t, factor) / x for factor, x in zip(factors, bandwidths, strict=True)], -1
        )
        for t in (a, b)
    )
    return Plain(_GAUSSIAN, a, b, {"bandwidth": 1.0})


def _divides(bandwidth: object, a: torch.Tensor) -> bool:
    """Whether points may be divided by a bandwidth, so that nothing overflows, and half types,
    whose rounding would show, are left out."""
    if a.dtype not in (torch.float32, torch.float64):
        return False
    if isinstance(bandwidth, torch.Tensor):
        return bandwidth.dim() == 0 and bandwidth.device == a.device
    return isinstance(bandwidth, (int, float)) and 1e-12 < bandwidth < 1e12


def _taken(t: torch.Tensor, factor: Factor) -> torch.Tensor:
    """The points' features of a factor: a view where they are neighbours."""
    places = factor.features
    if places is None:
        return t
    first, end = places[0], places[-1] + 1
    if places == tuple(range(first, end)):
        return t[..., first:end]
    return t[..., list(places)]

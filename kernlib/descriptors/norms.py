"""The inner and outer stages of a pairwise kernel: ``outer(sum_k inner(v_k))``."""

from __future__ import annotations

from dataclasses import dataclass

from kernlib.descriptors.base import Part


@dataclass(frozen=True, slots=True)
class Identity(Part):
    """``v``: inner or outer."""


@dataclass(frozen=True, slots=True)
class Abs(Part):
    """``|v|``: inner or outer."""


@dataclass(frozen=True, slots=True)
class Square(Part):
    """``v * v``: inner or outer."""


@dataclass(frozen=True, slots=True)
class Sqrt(Part):
    """``sqrt(v)``, NaN for negative ``v``: inner or outer."""


@dataclass(frozen=True, slots=True)
class Power(Part):
    """Inner: ``|v| ** inner_p``, where ``inner_p = 0`` counts ``v != 0`` (a NaN stays one) and
    ``inner_p = inf`` takes the largest ``|v|`` in place of the sum. Outer: ``s ** outer_p``, no
    absolute value.

    The exponents are arguments of the call. ``p`` sets ``inner_p = p`` and, where the outer stage
    is a Power too, ``outer_p = 1 / p``.
    """


@dataclass(frozen=True, slots=True)
class Root(Part):
    """Outer: ``s ** (1 / inner_p)``, the root that turns a power sum into a norm; ``s`` itself
    for ``inner_p`` 0 and inf, as in ``torch.cdist``. Requires ``inner=Power()``."""


INNER = (Identity, Abs, Square, Sqrt, Power)
OUTER = (Identity, Abs, Square, Sqrt, Power, Root)

"""The inner and outer stages of a pairwise kernel: ``outer(sum_k inner(v_k))``."""

from __future__ import annotations

from kernlib.descriptors.base import Part, Value


class Identity(Value, Part):
    """``v``: inner or outer."""

    __slots__ = ()


class Abs(Value, Part):
    """``|v|``: inner or outer."""

    __slots__ = ()


class Square(Value, Part):
    """``v * v``: inner or outer."""

    __slots__ = ()


class Sqrt(Value, Part):
    """``sqrt(v)``, NaN for negative ``v``: inner or outer."""

    __slots__ = ()


class Power(Value, Part):
    """Inner: ``|v| ** inner_p``, where ``inner_p = 0`` counts ``v != 0`` (a NaN stays one) and
    ``inner_p = inf`` takes the largest ``|v|`` in place of the sum. Outer: ``s ** outer_p``, no
    absolute value.

    The exponents are arguments of the call. ``p`` sets ``inner_p = p`` and, where the outer stage
    is a Power too, ``outer_p = 1 / p``.
    """

    __slots__ = ()


class ExpPower(Value, Part):
    """Inner: ``exp(inner_scale * |v| ** inner_p)``, so that the sum is one of kernels of single
    features, each 1 where its coordinates are equal. ``inner_p = 0`` stands for ``v != 0``, as in
    :class:`Power`; inf is refused.

    Both are arguments of the call, ``p`` another name of ``inner_p``; ``inner_scale`` is usually
    negative. The expadd family of the kermac project.
    """

    __slots__ = ()


class PowerLog(Value, Part):
    """Inner: ``|v| ** inner_p * ln|v|``, 0 where ``v = 0``: the derivative of :class:`Power` by its
    exponent, for gradients of ``p``. ``p`` is another name of ``inner_p``; inf is refused."""

    __slots__ = ()


class Root(Value, Part):
    """Outer: ``s ** (1 / inner_p)``, the root that turns a power sum into a norm; ``s`` itself
    for ``inner_p`` 0 and inf, as in ``torch.cdist``. Requires ``inner=Power()``."""

    __slots__ = ()


INNER = (Identity, Abs, Square, Sqrt, Power, ExpPower, PowerLog)
EXPONENTS = (Power, ExpPower, PowerLog)  # the inner stages that take inner_p
OUTER = (Identity, Abs, Square, Sqrt, Power, Root)

"""The inner and outer stages of a pairwise kernel: ``outer(sum_k inner(v_k))``."""

from __future__ import annotations

from kernlib.descriptors.base import Part, Value


class Identity(Value, Part):
    """``v``: inner or outer.

    Example:
        >>> x, y = torch.zeros(1, 2), torch.tensor([[3.0, -4.0]])
        >>> kl.run_kernel(kl.Pairwise(inner=kl.Identity()), x, y)
        tensor([[-1.]])
    """

    __slots__ = ()


class Abs(Value, Part):
    """``|v|``: inner or outer.

    Example:
        >>> x, y = torch.zeros(1, 2), torch.tensor([[3.0, -4.0]])
        >>> kl.run_kernel(kl.Pairwise(inner=kl.Abs()), x, y)
        tensor([[7.]])
    """

    __slots__ = ()


class Square(Value, Part):
    """``v * v``: inner or outer.

    Example:
        >>> x, y = torch.zeros(1, 2), torch.tensor([[3.0, -4.0]])
        >>> kl.run_kernel(kl.Pairwise(inner=kl.Square()), x, y)
        tensor([[25.]])
    """

    __slots__ = ()


class Sqrt(Value, Part):
    """``sqrt(v)``, NaN for negative ``v``: inner or outer.

    Example:
        >>> x, y = torch.zeros(1, 2), torch.tensor([[3.0, -4.0]])
        >>> kl.run_kernel(kl.Pairwise(inner=kl.Square(), outer=kl.Sqrt()), x, y)
        tensor([[5.]])
    """

    __slots__ = ()


class Power(Value, Part):
    """Inner: ``|v| ** inner_p``, where ``inner_p = 0`` counts ``v != 0`` (a NaN stays one) and
    ``inner_p = inf`` takes the largest ``|v|`` in place of the sum. Outer: ``s ** outer_p``, no
    absolute value.

    The exponents are arguments of the call. ``p`` sets ``inner_p = p`` and, where the outer stage
    is a Power too, ``outer_p = 1 / p``.

    Example:
        >>> x, y = torch.zeros(1, 2), torch.tensor([[3.0, -4.0]])
        >>> kl.run_kernel(kl.Pairwise(inner=kl.Power()), x, y, p=3.0)
        tensor([[91.]])
    """

    __slots__ = ()


class ExpPower(Value, Part):
    """Inner: ``exp(inner_scale * |v| ** inner_p)``, so that the sum is one of kernels of single
    features, each 1 where its coordinates are equal. ``inner_p = 0`` stands for ``v != 0``, as in
    :class:`Power`; inf is refused.

    Both are arguments of the call, ``p`` another name of ``inner_p``; ``inner_scale`` is usually
    negative. The expadd family of the kermac project.

    Example:
        >>> x, y = torch.zeros(1, 2), torch.tensor([[0.0, 1.0]])
        >>> kl.run_kernel(kl.Pairwise(inner=kl.ExpPower()), x, y, p=2.0, inner_scale=-1.0)
        tensor([[1.3679]])
    """

    __slots__ = ()


class PowerLog(Value, Part):
    """Inner: ``|v| ** inner_p * ln|v|``, 0 where ``v = 0``: the derivative of :class:`Power` by its
    exponent, for gradients of ``p``. ``p`` is another name of ``inner_p``; inf is refused.

    Example:
        >>> x, y = torch.zeros(1, 2), torch.tensor([[1.0, 2.0]])
        >>> kl.run_kernel(kl.Pairwise(inner=kl.PowerLog()), x, y, p=2.0)
        tensor([[2.7726]])
    """

    __slots__ = ()


class Root(Value, Part):
    """Outer: ``s ** (1 / inner_p)``, the root that turns a power sum into a norm; ``s`` itself
    for ``inner_p`` 0 and inf, as in ``torch.cdist``. Requires ``inner=Power()``.

    Example:
        >>> x, y = torch.zeros(1, 2), torch.tensor([[3.0, -4.0]])
        >>> kl.run_kernel(kl.Pairwise(inner=kl.Power(), outer=kl.Root()), x, y, p=3.0)
        tensor([[4.4979]])
    """

    __slots__ = ()


INNER = (Identity, Abs, Square, Sqrt, Power, ExpPower, PowerLog)
EXPONENTS = (Power, ExpPower, PowerLog)  # the inner stages that take inner_p
OUTER = (Identity, Abs, Square, Sqrt, Power, Root)

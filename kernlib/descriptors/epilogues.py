"""What is done to each finished value before it is written. Epilogues compose from left to right.

Every epilogue states one expression of ``v``, the value it receives, and names its parameters; the
parameters become keyword arguments of the call, as numbers or as tensors of shape () or (L,).
"""

from __future__ import annotations

import keyword
from dataclasses import dataclass

from kernlib.descriptors.base import Part, require
from kernlib.descriptors.expression import CONSTANTS, FUNCTIONS, VALUE, names, parse


class Epilogue(Part):
    """Base of all epilogues: an ``expression`` over ``v`` and ``parameters``.

    Parameters listed in ``positive`` must be greater than zero: a host value that is not raises
    ValueError; a device tensor is not looked at, which would wait for the device.
    """

    __slots__ = ()

    @property
    def expression(self) -> str:
        raise NotImplementedError

    @property
    def parameters(self) -> tuple[str, ...]:
        return ()

    @property
    def positive(self) -> tuple[str, ...]:
        return ()

    def tree(self):
        """The parsed expression."""
        return parse(self.expression, self.parameters)


class _Bandwidth(Epilogue):
    __slots__ = ()

    @property
    def parameters(self) -> tuple[str, ...]:
        return ("bandwidth",)

    @property
    def positive(self) -> tuple[str, ...]:
        return self.parameters


@dataclass(frozen=True, slots=True)
class Laplace(_Bandwidth):
    """``exp(-v / bandwidth)``; ``v`` is a distance."""

    @property
    def expression(self) -> str:
        return "exp(-v / bandwidth)"


@dataclass(frozen=True, slots=True)
class Gaussian(_Bandwidth):
    """``exp(-v / (2 * bandwidth**2))``; ``v`` is a squared distance."""

    @property
    def expression(self) -> str:
        return "exp(-v / (2 * bandwidth * bandwidth))"


@dataclass(frozen=True, slots=True)
class Matern(_Bandwidth):
    """Matérn kernel of a distance ``v``, with ``t = sqrt(2 nu) * v / bandwidth``:
    ``(1 + t) exp(-t)`` for ``nu = 1.5``, ``(1 + t + t**2 / 3) exp(-t)`` for ``nu = 2.5``.

    Raises ValueError for another ``nu``; ``nu = 0.5`` is :class:`Laplace`.
    """

    nu: float = 1.5

    def __post_init__(self):
        require(self.nu in (1.5, 2.5), f"nu must be 1.5 or 2.5 (0.5 is Laplace), got {self.nu!r}")

    @property
    def expression(self) -> str:
        t = f"(sqrt({2 * self.nu}) / bandwidth * v)"
        quadratic = f" + {t} * {t} / 3" if self.nu == 2.5 else ""
        return f"(1 + {t}{quadratic}) * exp(-{t})"


@dataclass(frozen=True, slots=True)
class RationalQuadratic(Epilogue):
    """``(1 + v / (2 * alpha * bandwidth**2)) ** -alpha``; ``v`` is a squared distance."""

    @property
    def expression(self) -> str:
        return "(1 + v / (2 * alpha * bandwidth * bandwidth)) ** -alpha"

    @property
    def parameters(self) -> tuple[str, ...]:
        return ("bandwidth", "alpha")

    @property
    def positive(self) -> tuple[str, ...]:
        return self.parameters


@dataclass(frozen=True, slots=True)
class Cauchy(_Bandwidth):
    """``1 / (1 + v / bandwidth**2)``; ``v`` is a squared distance."""

    @property
    def expression(self) -> str:
        return "1 / (1 + v / (bandwidth * bandwidth))"


@dataclass(frozen=True, slots=True)
class PowerExponential(Epilogue):
    """``exp(-(v / bandwidth) ** q)``; ``v`` is a distance, usually with ``0 < q <= p``."""

    @property
    def expression(self) -> str:
        return "exp(-((v / bandwidth) ** q))"

    @property
    def parameters(self) -> tuple[str, ...]:
        return ("bandwidth", "q")

    @property
    def positive(self) -> tuple[str, ...]:
        return self.parameters


@dataclass(frozen=True, slots=True)
class Polynomial(Epilogue):
    """``(gamma * v + offset) ** degree``; ``v`` is a dot product, ``degree`` 1 to 16."""

    degree: int = 3

    def __post_init__(self):
        valid = type(self.degree) is int and 1 <= self.degree <= 16
        require(valid, f"degree must be an int from 1 to 16, got {self.degree!r}")

    @property
    def expression(self) -> str:
        return f"(gamma * v + offset) ** {self.degree}"

    @property
    def parameters(self) -> tuple[str, ...]:
        return ("gamma", "offset")


@dataclass(frozen=True, slots=True)
class Scale(Epilogue):
    """``scale * v``; ``parameter`` renames the argument when there are several."""

    parameter: str = "scale"

    def __post_init__(self):
        _check_parameters((self.parameter,))

    @property
    def expression(self) -> str:
        return f"{self.parameter} * v"

    @property
    def parameters(self) -> tuple[str, ...]:
        return (self.parameter,)


@dataclass(frozen=True, slots=True)
class Custom(Epilogue):
    """Any expression of ``v`` and named parameters, such as
    ``Custom("tanh(gain * v) + shift", ("gain", "shift"))``.

    The language is numbers, ``v``, the parameters, ``pi``, ``e``, ``+ - * / **``, parentheses and
    the functions of :data:`kernlib.descriptors.expression.FUNCTIONS`. Raises ValueError for
    anything else, for a parameter that is not used, and for names that are not identifiers.
    """

    expression: str
    parameters: tuple[str, ...] = ()

    def __post_init__(self):
        if not isinstance(self.expression, str):
            raise TypeError(f"expression must be a string, got {self.expression!r}")
        if isinstance(self.parameters, str):
            raise TypeError(f"parameters must be a tuple, such as ({self.parameters!r},)")
        object.__setattr__(self, "parameters", tuple(self.parameters))
        _check_parameters(self.parameters)
        unused = set(self.parameters) - names(self.tree())
        require(not unused, f"expression {self.expression!r} does not use {sorted(unused)}")


RESERVED = {
    *FUNCTIONS, *CONSTANTS, VALUE, "p", "inner_p", "outer_p", "epsilon", "regularization",
    "row_offset", "col_offset", "out", "accumulate", "debug", "a", "b", "descriptor",
}  # fmt: skip


def _check_parameters(parameters: tuple[str, ...]) -> None:
    for name in parameters:
        valid = isinstance(name, str) and name.isidentifier() and name.isascii()
        require(
            valid and name not in keyword.kwlist,
            f"parameter {name!r} is not an ASCII identifier; its value is an argument of the call",
        )
        require(name not in RESERVED, f"parameter name {name!r} is taken; choose another")
    require(len(set(parameters)) == len(parameters), f"parameters {parameters} repeat a name")


def as_epilogues(value) -> tuple[Epilogue, ...]:
    """One epilogue, several or None as a tuple; their parameters must have distinct names.

    Raises TypeError for anything that is no epilogue, ValueError for a repeated parameter.
    """
    epilogues = () if value is None else value if isinstance(value, (tuple, list)) else (value,)
    for epilogue in epilogues:
        if not isinstance(epilogue, Epilogue):
            raise TypeError(
                f"epilogue must be made of epilogues such as Laplace(), got {epilogue!r}"
            )
    taken = [name for epilogue in epilogues for name in epilogue.parameters]
    repeated = sorted({name for i, name in enumerate(taken) if name in taken[:i]})
    require(
        not repeated,
        f"epilogues share the parameter(s) {repeated}; rename one, as in Scale(parameter='gain')",
    )
    return tuple(epilogues)

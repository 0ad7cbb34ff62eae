"""What is done to each finished value before it is written. Epilogues compose from left to right.

Every epilogue states one expression of ``v``, the value it receives, and names its parameters; the
parameters become keyword arguments of the call, as numbers or as tensors of shape () or (L,), and
those listed in ``vectors`` as tensors that hold one value for each output feature, those in
``summands`` as tensors that hold one for each element of the result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kernlib.descriptors.base import Descriptor, Part, Value, as_number, require, shown, whole
from kernlib.descriptors.expression import Node, check_parameters, names, parse


class Epilogue(Part):
    """Base of all epilogues: an ``expression`` over ``v`` and ``parameters``.

    Parameters listed in ``vectors`` hold one value for each output feature, those in ``summands``
    one for each element of the result, to which they broadcast; the others are scalars. Those
    listed in ``positive`` must be greater than zero: a host value that is not raises ValueError; a
    device tensor is not looked at, which would wait for the device.

    Example:
        >>> epilogue = kl.RationalQuadratic()
        >>> epilogue.expression
        '(1 + v / (2 * alpha * bandwidth * bandwidth)) ** -alpha'
        >>> epilogue.parameters, epilogue.positive
        (('bandwidth', 'alpha'), ('bandwidth', 'alpha'))
        >>> kl.Bias().vectors, kl.Add().summands
        (('bias',), (('y', 'beta'),))
    """

    __slots__ = ()

    @property
    def expression(self) -> str:
        """What is computed of ``v`` and the parameters."""
        raise NotImplementedError

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the arguments that the call takes for it, in order."""
        return ()

    @property
    def vectors(self) -> tuple[str, ...]:
        """The parameters that hold one value for each output feature."""
        return ()

    @property
    def summands(self) -> tuple[tuple[str, str | None], ...]:
        """The parameters that hold one value for each element of the result, each with the scalar
        that it is multiplied by, and where that is 0 it is not read; None for one that always
        is."""
        return ()

    @property
    def positive(self) -> tuple[str, ...]:
        """The parameters that must be greater than zero."""
        return ()

    def tree(self):
        """The parsed expression.

        Example:
            >>> kl.Custom("2 * v").tree().operator
            '*'
        """
        return parse(self.expression, self.parameters)


class _Bandwidth(Epilogue):
    __slots__ = ()

    @property
    def parameters(self) -> tuple[str, ...]:
        return ("bandwidth",)

    @property
    def positive(self) -> tuple[str, ...]:
        return self.parameters


class Laplace(Value, _Bandwidth):
    """``exp(-v / bandwidth)``; ``v`` is a distance.

    Example:
        >>> x, y = torch.zeros(1, 2), torch.tensor([[3.0, 4.0]])
        >>> kl.run_kernel(kl.l1_distance(epilogue=kl.Laplace()), x, y, bandwidth=7.0)
        tensor([[0.3679]])
    """

    __slots__ = ()

    @property
    def expression(self) -> str:
        return "exp(-v / bandwidth)"


class Gaussian(Value, _Bandwidth):
    """``exp(-v / (2 * bandwidth**2))``; ``v`` is a squared distance.

    Example:
        >>> x, y = torch.zeros(1, 2), torch.tensor([[3.0, 4.0]])
        >>> kl.run_kernel(kl.squared_distance(epilogue=kl.Gaussian()), x, y, bandwidth=5.0)
        tensor([[0.6065]])
    """

    __slots__ = ()

    @property
    def expression(self) -> str:
        return "exp(-v / (2 * bandwidth * bandwidth))"


@dataclass(frozen=True, slots=True)
class Matern(_Bandwidth):
    """Matérn kernel of a distance ``v``, with ``t = sqrt(2 nu) * v / bandwidth``:
    ``(1 + t) exp(-t)`` for ``nu = 1.5``, ``(1 + t + t**2 / 3) exp(-t)`` for ``nu = 2.5``.

    Raises ValueError for another ``nu``, TypeError for what is no number; ``nu = 0.5`` is
    :class:`Laplace`.

    Example:
        >>> x, y = torch.zeros(1, 2), torch.tensor([[3.0, 4.0]])
        >>> kl.run_kernel(kl.l2_distance(epilogue=kl.Matern(2.5)), x, y, bandwidth=5.0)
        tensor([[0.5240]])
    """

    nu: float = 1.5

    def __post_init__(self):
        nu = as_number("nu", self.nu)
        if nu not in (1.5, 2.5):  # whose text Dynamo of torch 2.8 cannot trace
            raise ValueError(f"nu must be 1.5 or 2.5 (0.5 is Laplace), got {shown(nu)}")
        object.__setattr__(self, "nu", nu)

    @property
    def expression(self) -> str:
        t = f"(sqrt({2 * self.nu}) / bandwidth * v)"
        quadratic = f" + {t} * {t} / 3" if self.nu == 2.5 else ""
        return f"(1 + {t}{quadratic}) * exp(-{t})"


class RationalQuadratic(Value, Epilogue):
    """``(1 + v / (2 * alpha * bandwidth**2)) ** -alpha``; ``v`` is a squared distance.

    Example:
        >>> x, y = torch.zeros(1, 2), torch.tensor([[3.0, 4.0]])
        >>> kernel = kl.squared_distance(epilogue=kl.RationalQuadratic())
        >>> kl.run_kernel(kernel, x, y, bandwidth=5.0, alpha=1.0)
        tensor([[0.6667]])
    """

    __slots__ = ()

    @property
    def expression(self) -> str:
        return "(1 + v / (2 * alpha * bandwidth * bandwidth)) ** -alpha"

    @property
    def parameters(self) -> tuple[str, ...]:
        return ("bandwidth", "alpha")

    @property
    def positive(self) -> tuple[str, ...]:
        return self.parameters


class Cauchy(Value, _Bandwidth):
    """``1 / (1 + v / bandwidth**2)``; ``v`` is a squared distance.

    Example:
        >>> x, y = torch.zeros(1, 2), torch.tensor([[3.0, 4.0]])
        >>> kl.run_kernel(kl.squared_distance(epilogue=kl.Cauchy()), x, y, bandwidth=5.0)
        tensor([[0.5000]])
    """

    __slots__ = ()

    @property
    def expression(self) -> str:
        return "1 / (1 + v / (bandwidth * bandwidth))"


class PowerExponential(Value, Epilogue):
    """``exp(-(v / bandwidth) ** q)``; ``v`` is a distance, usually with ``0 < q <= p``.

    Example:
        >>> x, y = torch.zeros(1, 2), torch.tensor([[3.0, 4.0]])
        >>> kernel = kl.l1_distance(epilogue=kl.PowerExponential())
        >>> kl.run_kernel(kernel, x, y, bandwidth=3.5, q=0.5)
        tensor([[0.2431]])
    """

    __slots__ = ()

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
    """``(gamma * v + offset) ** degree``; ``v`` is a dot product, ``degree`` 1 to 16.

    Raises ValueError for another ``degree``.

    Example:
        >>> kernel = kl.dot_product(epilogue=kl.Polynomial(2))
        >>> kl.run_kernel(kernel, torch.ones(1, 3), torch.ones(1, 3), gamma=1.0, offset=2.0)
        tensor([[25.]])
    """

    degree: int = 3

    def __post_init__(self):
        degree = whole(self.degree)
        if degree is None or not 1 <= degree <= 16:
            raise ValueError(f"degree must be an int from 1 to 16, got {shown(self.degree)}")
        object.__setattr__(self, "degree", degree)

    @property
    def expression(self) -> str:
        return f"(gamma * v + offset) ** {self.degree}"

    @property
    def parameters(self) -> tuple[str, ...]:
        return ("gamma", "offset")


@dataclass(frozen=True, slots=True)
class Scale(Epilogue):
    """``scale * v``; ``parameter`` renames the argument when there are several.

    Raises ValueError for a ``parameter`` that is no ASCII identifier, or that has another meaning.

    Example:
        >>> kernel = kl.dot_product(epilogue=kl.Scale("gain"))
        >>> kl.run_kernel(kernel, torch.ones(1, 3), torch.ones(1, 3), gain=0.5)
        tensor([[1.5000]])
    """

    parameter: str = "scale"

    def __post_init__(self):
        check_parameters((self.parameter,))

    @property
    def expression(self) -> str:
        return f"{self.parameter} * v"

    @property
    def parameters(self) -> tuple[str, ...]:
        return (self.parameter,)


@dataclass(frozen=True, slots=True)
class Bias(Epilogue):
    """``v + bias``, one value for each output feature: a tensor (features,) of the inputs' dtype.

    ``parameter`` renames the argument when there are several. For families whose outputs have
    features, such as :class:`kernlib.KroneckerSparse`. Raises ValueError for a ``parameter`` that
    is no ASCII identifier, or that has another meaning.

    Example:
        >>> product = kl.KroneckerProduct((2,), epilogue=kl.Bias())
        >>> kl.run_kernel(product, torch.ones(1, 2), torch.eye(2), bias=torch.tensor([5.0, 7.0]))
        tensor([[6., 8.]])
    """

    parameter: str = "bias"

    def __post_init__(self):
        check_parameters((self.parameter,))

    @property
    def expression(self) -> str:
        return f"v + {self.parameter}"

    @property
    def parameters(self) -> tuple[str, ...]:
        return (self.parameter,)

    @property
    def vectors(self) -> tuple[str, ...]:
        return (self.parameter,)


class Add(Value, Epilogue):
    """``v + beta * y``: ``y`` a tensor of the inputs' dtype that broadcasts to the result, of any
    strides, which may be ``out`` itself; ``beta`` a number or a tensor of shape (). Where it is 0,
    on the device too, y is not read and may hold NaN.

    For :class:`kernlib.KroneckerProduct` and :class:`kernlib.BlockSparseMatmul`, whose kernels read
    y where they write the result.

    Example:
        >>> product, y = kl.KroneckerProduct((2,), epilogue=kl.Add()), torch.tensor([[5.0, 7.0]])
        >>> kl.run_kernel(product, torch.ones(1, 2), torch.eye(2), y=y, beta=2.0)
        tensor([[11., 15.]])
    """

    __slots__ = ()

    @property
    def expression(self) -> str:
        return "v + beta * y"

    @property
    def parameters(self) -> tuple[str, ...]:
        return ("beta", "y")

    @property
    def summands(self) -> tuple[tuple[str, str], ...]:
        return (("y", "beta"),)


class Relu(Value, Epilogue):
    """``max(v, 0)``.

    Example:
        >>> x = torch.tensor([[-1.0], [2.0]])
        >>> kl.run_kernel(kl.dot_product(epilogue=kl.Relu()), x, torch.ones(1, 1))
        tensor([[0.], [2.]])
    """

    __slots__ = ()

    @property
    def expression(self) -> str:
        return "max(v, 0)"


@dataclass(frozen=True, slots=True)
class LeakyRelu(Epilogue):
    """``v`` where it is positive, else ``negative_slope * v``.

    Raises TypeError for a slope that is no number, ValueError for one that is not finite.

    Example:
        >>> kernel = kl.dot_product(epilogue=kl.LeakyRelu(0.1))
        >>> kl.run_kernel(kernel, torch.tensor([[-1.0], [2.0]]), torch.ones(1, 1))
        tensor([[-0.1000], [ 2.0000]])
    """

    negative_slope: float = 0.01

    def __post_init__(self):
        slope = as_number("negative_slope", self.negative_slope)
        if not math.isfinite(slope):
            raise ValueError(f"negative_slope must be finite, got {shown(slope)}")
        object.__setattr__(self, "negative_slope", slope)

    @property
    def expression(self) -> str:
        return f"max(v, 0) + {self.negative_slope!r} * min(v, 0)"


@dataclass(frozen=True, slots=True)
class Gelu(Epilogue):
    """``v * (1 + erf(v / sqrt(2))) / 2``, or with ``approximate="tanh"``
    ``v * (1 + tanh(sqrt(2 / pi) * (v + 0.044715 * v**3))) / 2``, as ``torch.nn.GELU``.

    Raises ValueError for another ``approximate``.

    Example:
        >>> x = torch.tensor([[-1.0], [2.0]])
        >>> kl.run_kernel(kl.dot_product(epilogue=kl.Gelu()), x, torch.ones(1, 1))
        tensor([[-0.1587], [ 1.9545]])
    """

    approximate: str = "none"

    def __post_init__(self):
        choices, value = ("none", "tanh"), self.approximate
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"approximate must be one of {choices}, got {shown(value)}")

    @property
    def expression(self) -> str:
        if self.approximate == "tanh":
            return "0.5 * v * (1 + tanh(0.7978845608028654 * (v + 0.044715 * v * v * v)))"
        return "v * ndtr(v)"


# 1 / (1 + exp(-v)) in which no exponent is positive, so that neither it nor its derivative
# overflows, and which keeps its relative accuracy where it is small.
_SIGMOID = "exp(min(v, 0)) / (exp(min(v, 0)) + exp(-max(v, 0)))"


class Sigmoid(Value, Epilogue):
    """``1 / (1 + exp(-v))``.

    Example:
        >>> x = torch.tensor([[-1.0], [2.0]])
        >>> kl.run_kernel(kl.dot_product(epilogue=kl.Sigmoid()), x, torch.ones(1, 1))
        tensor([[0.2689], [0.8808]])
    """

    __slots__ = ()

    @property
    def expression(self) -> str:
        return _SIGMOID


class Silu(Value, Epilogue):
    """``v / (1 + exp(-v))``, also called swish.

    Example:
        >>> x = torch.tensor([[-1.0], [2.0]])
        >>> kl.run_kernel(kl.dot_product(epilogue=kl.Silu()), x, torch.ones(1, 1))
        tensor([[-0.2689], [ 1.7616]])
    """

    __slots__ = ()

    @property
    def expression(self) -> str:
        return f"v * ({_SIGMOID})"


class Tanh(Value, Epilogue):
    """``tanh(v)``.

    Example:
        >>> x = torch.tensor([[-1.0], [2.0]])
        >>> kl.run_kernel(kl.dot_product(epilogue=kl.Tanh()), x, torch.ones(1, 1))
        tensor([[-0.7616], [ 0.9640]])
    """

    __slots__ = ()

    @property
    def expression(self) -> str:
        return "tanh(v)"


@dataclass(frozen=True, slots=True)
class Custom(Epilogue):
    """Any expression of ``v`` and named parameters, such as
    ``Custom("tanh(gain * v) + shift", ("gain", "shift"))``.

    The language is numbers, ``v``, the parameters, ``pi``, ``e``, ``+ - * / **``, parentheses and
    the functions of :data:`kernlib.descriptors.expression.FUNCTIONS`.

    With ``axes``, for distances and dot products of points alone, it reads tensors: an s for each
    point of a, a t for each of b and a w for each pair by ``Custom("exp(-v / (s * t)) * w",
    axes={"s": "row", "t": "col", "w": ("row", "col")})``, in the language of
    :class:`kernlib.Formula`, and makes one.

    Raises ValueError for anything else, for what is not used and for names that are no identifiers,
    TypeError for what is no text, no tuple of parameters and no dict of axes.

    Example:
        >>> kernel = kl.dot_product(epilogue=kl.Custom("min(v, top) ** 2", ("top",)))
        >>> kl.run_kernel(kernel, torch.tensor([[-1.0], [5.0]]), torch.ones(1, 1), top=3.0)
        tensor([[1.], [9.]])
    """

    expression: str = field()  # without it the base's property were its default
    parameters: tuple[str, ...] = ()
    axes: tuple[tuple[str, tuple[str, ...]], ...] = field(default=(), repr=False)

    def __post_init__(self):
        if not isinstance(self.expression, str):
            raise TypeError(f"expression must be a string, got {shown(self.expression)}")
        if not isinstance(self.parameters, (tuple, list)):
            example = self.parameters if isinstance(self.parameters, str) else "gain"
            raise TypeError(
                f"parameters must be a tuple, such as ({example!r},), got {shown(self.parameters)}"
            )
        object.__setattr__(self, "parameters", tuple(self.parameters))
        check_parameters(self.parameters)
        if self.axes:
            from kernlib.descriptors import axes  # most epilogues need none

            object.__setattr__(self, "axes", axes.of_epilogue(self.axes, self.parameters))
        unused = {*self.parameters, *(name for name, _ in self.axes)} - names(self.tree())
        if unused:
            raise ValueError(f"expression {shown(self.expression)} does not use {sorted(unused)}")

    def __setstate__(self, state: list) -> None:
        """Pickles of the time before ``axes`` hold none."""
        for name, value in zip(("expression", "parameters", "axes"), (*state, ()), strict=False):
            object.__setattr__(self, name, value)

    def tree(self) -> Node:
        """The parsed expression. Tensors are of any kind in it."""
        if not self.axes:
            return parse(self.expression, self.parameters)
        from kernlib.descriptors import axes  # most epilogues need none

        return axes.tree_of(self)


def as_epilogues(value, summands: bool = False) -> tuple[Epilogue, ...]:
    """One epilogue, several or None as a tuple; their parameters must have distinct names.

    Raises TypeError for anything that is no epilogue, ValueError for a repeated parameter, and for
    summands unless the family's kernels read ``summands``.
    """
    epilogues = () if value is None else value if isinstance(value, (tuple, list)) else (value,)
    for epilogue in epilogues:
        if not isinstance(epilogue, Epilogue):
            raise TypeError(
                "epilogue must be made of epilogues such as Laplace(), got "
                f"{shown(epilogue)}{advice_on(epilogue)}"
            )
        if getattr(epilogue, "axes", ()):
            from kernlib.descriptors import axes  # most epilogues need none

            axes.refuse(epilogue)
        if epilogue.summands and not summands:
            raise ValueError(
                f"{epilogue!r} takes a tensor of the result's shape, which of all kernels those of "
                "KroneckerProduct and BlockSparseMatmul alone read: apply it to the result"
            )
    names = [name for epilogue in epilogues for name in epilogue.parameters]
    repeated = sorted({name for i, name in enumerate(names) if name in names[:i]})
    require(
        not repeated,
        f"epilogues share the parameter(s) {repeated}; rename one, as in Scale(parameter='gain')",
    )
    return tuple(epilogues)


def advice_on(value: object) -> str:
    """What to write in place of something that is no epilogue, or ""."""
    from kernlib.hints.descriptors import instead_of_part  # only errors need it

    return instead_of_part(value, KINDS)


KINDS = (
    *(Laplace, Gaussian, Matern, RationalQuadratic, Cauchy, PowerExponential, Polynomial),
    *(Scale, Bias, Add, Relu, LeakyRelu, Gelu, Sigmoid, Silu, Tanh, Custom),
)


def refuse_vectors(epilogues: tuple[Epilogue, ...], family: str) -> None:
    """Raises ValueError for an epilogue that needs output features, which ``family`` has not."""
    for epilogue in epilogues:
        if epilogue.vectors:
            raise ValueError(
                f"{epilogue!r} needs one value for each output feature, and a {family} kernel has "
                "pairs of points in place of features; a shift of all values is "
                "Custom('v + shift', ('shift',))"
            )


class Product(Descriptor):
    """Base of products of which a field, ``epilogue``, finishes each value. The features of their
    results are what vectors hold a value for.

    Example:
        >>> product = kl.KroneckerProduct((2, 3), epilogue=(kl.Scale(), kl.Bias(), kl.Add()))
        >>> product.parameters
        ('scale', 'bias', 'beta', 'y')
        >>> product.vectors, product.summands, product.positive
        (('bias',), ('y',), frozenset())
    """

    __slots__ = ()
    epilogue: Epilogue | tuple[Epilogue, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the epilogues' parameters, in order."""
        return tuple(name for epilogue in self.epilogue for name in epilogue.parameters)

    @property
    def vectors(self) -> tuple[str, ...]:
        """The parameters that hold one value for each output feature, in order."""
        return tuple(name for epilogue in self.epilogue for name in epilogue.vectors)

    @property
    def summands(self) -> tuple[str, ...]:
        """The parameters that hold one value for each element of the result, in order."""
        return tuple(name for epilogue in self.epilogue for name, _ in epilogue.summands)

    @property
    def positive(self) -> frozenset[str]:
        """The parameters that must be greater than zero."""
        return frozenset(name for epilogue in self.epilogue for name in epilogue.positive)

"""What every descriptor is: a frozen value that names a computation and knows no tensor."""

from __future__ import annotations

import dataclasses
import functools
from numbers import Real
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

from kernlib.canonical import encode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

_Kind = TypeVar("_Kind")
parsed: dict[str, Descriptor] = {}  # texts that kernlib.descriptors.text has read


class Part:
    """Base of descriptors and of what they are made of. A text names them by their class."""

    __slots__ = ()

    def __init_subclass__(cls, **options) -> None:
        super().__init_subclass__(**options)
        parsed.clear()  # a name may mean another class now, as when a notebook's cell runs again


@dataclasses.dataclass(frozen=True)
class Value:
    """Base of parts without fields, each equal to those of its class alone: the one dataclass for
    all of them, since each costs 0.5 ms of the first call. No Part, so that no text names it. Slots
    by hand: ``slots=True`` makes a second class, of which a subclass's ``__setattr__`` knows
    nothing."""

    __slots__ = ()

    def __setstate__(self, state: list) -> None:
        """Pickles of the time when each class was a dataclass hold an empty list."""


class Descriptor(Part):
    """Base of the frozen dataclasses that :func:`kernlib.run_kernel` accepts.

    ``family`` names the package ``kernlib.families.<family>`` that implements it. Where that has
    several packages, ``package`` names the one whose ``operation`` runs it: a first call need not
    load the others. Copies and pickles rebuild through the constructor, so that a descriptor is
    always a validated one."""

    __slots__ = ()
    family: ClassVar[str]
    package: ClassVar[str] = ""

    @property
    def operands(self) -> tuple[str, ...]:
        """What its call takes behind the descriptor, in order.

        Example:
            >>> kl.gaussian().operands
            ('a', 'b')
        """
        return ()

    @property
    def required(self) -> tuple[str, ...]:
        """The keyword arguments that its call must be given.

        Example:
            >>> kl.laplace_pq().required
            ('p', 'bandwidth', 'q')
        """
        return getattr(self, "parameters", ())

    @property
    def options(self) -> dict[str, object]:
        """The keyword arguments that its call may be given, and their defaults.

        Example:
            >>> kl.KroneckerProduct((2, 3)).options
            {'out': None, 'debug': False}
        """
        return {"out": None, "debug": False}

    @property
    def signature(self) -> str:
        """Its call with all arguments; what stands there without a default is required.

        Example:
            >>> kl.SparseMatmul(kl.Bias()).signature
            'run_kernel(descriptor, w, x, *, bias, out=None, debug=False)'
        """
        optional = [f"{name}={value!r}" for name, value in self.options.items()]
        arguments = ["descriptor", *self.operands, "*", *self.required, *optional]
        return f"run_kernel({', '.join(arguments)})"

    @property
    def call(self) -> str:
        """Its call with what is required.

        Example:
            >>> kl.SparseMatmul(kl.Bias()).call
            'run_kernel(descriptor, w, x, bias=...)'
        """
        arguments = [f"{name}=..." for name in self.required]
        return f"run_kernel({', '.join(['descriptor', *self.operands, *arguments])})"

    if not TYPE_CHECKING:  # callers are told so before it runs

        def __call__(self, *_: object, **__: object) -> NoReturn:
            """Raises TypeError, which says how it is called: Python's own says that it is not."""
            from kernlib.hints.descriptors import refuse_call  # only errors need it

            refuse_call(self)

    def __repr__(self) -> str:
        """What makes an equal one, and behind it, as a comment, how it is called."""
        return f"{render(self)}  # {self.call}"

    def canonical(self) -> bytes:
        """Bytes that equal descriptors share in every process.

        Example:
            >>> kl.gaussian().canonical() == kl.Pairwise(
            ...     inner=kl.Square(), epilogue=kl.Gaussian()
            ... ).canonical()
            True
        """
        return encode(self)

    def describe(self) -> str:
        """One line for people.

        Example:
            >>> kl.matern52(symmetric=True).describe()
            'matern52(symmetric)'
        """
        return render(self)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated again.

        ``changes`` are fields by name. Raises TypeError for a name that is no field, and what the
        constructor raises for a value.

        Example:
            >>> kl.gaussian().replace(symmetric=True) == kl.gaussian(symmetric=True)
            True
        """
        return dataclasses.replace(self, **changes)

    def __reduce__(self):
        fields = (f for f in dataclasses.fields(self) if f.init)
        return type(self), tuple(getattr(self, f.name) for f in fields)


def explained(kind: type[_Kind]) -> type[_Kind]:
    """A dataclass of descriptors whose error for an unknown field says where its value goes."""
    make = kind.__init__
    names = [field.name for field in dataclasses.fields(kind) if field.init and field.name != "_"]
    fields = frozenset(names)

    def refuse(values: tuple, named: dict) -> None:  # apart: Dynamo of torch 2.8 traces `init`
        from kernlib.hints.descriptors import refuse_fields  # only errors need it

        placed = dict(zip(names, values, strict=False))
        refuse_fields(kind.__name__, placed | named, names, kind)

    @functools.wraps(make)
    def init(self, *values, **named):
        for name in named:
            if name not in fields:
                refuse(values, named)
        make(self, *values, **named)

    kind.__init__ = init
    return kind


def render(value: object) -> str:
    """A descriptor, or a part of one, as its constructor's call with every field named, from which
    :func:`kernlib.descriptors.text.from_text` makes an equal one. A field with ``repr=False`` came
    later: it is named where it is not its default, and texts from before it stay what they were.

    Raises TypeError for what is neither a plain value nor a dataclass. Dynamo can trace it.
    """
    if value is None or isinstance(value, bool):
        return repr(value)
    for kind in (int, float, str):  # the kind itself, for subclasses such as numpy.float64
        if isinstance(value, kind):
            return repr(kind(value))
    if isinstance(value, tuple):
        inside = ", ".join([render(item) for item in value])
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    fields = [
        f.name
        for f in dataclasses.fields(value)
        if f.init and (f.repr or getattr(value, f.name) != f.default)
    ]
    parts = [f"{name}={render(getattr(value, name))}" for name in fields]
    return f"{type(value).__name__}({', '.join(parts)})"


def with_symbols(descriptor: object, **sizes: object):
    """An unchecked copy of a descriptor with the sizes of traced tensors. These may be symbols,
    which its text does not show."""
    copy = object.__new__(type(descriptor))
    for field in dataclasses.fields(descriptor):
        value = sizes.get(field.name, getattr(descriptor, field.name))
        object.__setattr__(copy, field.name, value)
    return copy


def require(condition: bool, message: str) -> None:
    """Raise ValueError with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)


def refuse_descriptor(expected: str, value: object) -> NoReturn:
    """Raises TypeError for what is no descriptor, or another than the ``expected`` one."""
    from kernlib.hints.descriptors import instead_of_descriptor  # only errors need it

    advice = "" if isinstance(value, Descriptor) else instead_of_descriptor(value)
    raise TypeError(f"descriptor must be a {expected}, got {shown(value)}{advice}")


def refuse_argument(descriptor: Descriptor, name: str, accepted: Sequence[str]) -> NoReturn:
    """Raises TypeError for a keyword that is none of the ``accepted`` ones."""
    from kernlib.hints import spelling  # only errors need it

    listed = ", ".join(accepted) or "none"
    hint = spelling.argument(name, (*accepted, *descriptor.options))
    if name == "bias" and descriptor.family != "pairwise":
        hint = "; with epilogue=kernlib.Bias() it takes bias"
    raise TypeError(f"{name} is no argument of {descriptor.describe()}; it takes {listed}{hint}")


def shown(value: object) -> str:
    """A value as messages show it: short, whatever it is and however deep it is nested; of tensors
    and arrays their shape, of functions and classes their name."""
    from reprlib import Repr  # for errors alone

    def sizes(x, level: int) -> str:
        return f"a {type(x).__name__} of shape {tuple(x.shape)}"

    def by_kind(x, level: int) -> str:  # in steps that Dynamo follows, unlike those of Repr
        return getattr(short, f"repr_{type(x).__name__}", short.repr_instance)(x, level)

    if isinstance(value, Descriptor):
        return value.describe()
    short = Repr()
    short.repr1 = by_kind
    short.maxstring = short.maxother = short.maxlong = 200
    short.repr_Tensor = short.repr_Parameter = short.repr_ndarray = sizes
    short.repr_type = lambda kind, level: f"the class {kind.__name__}"
    short.repr_function = lambda function, level: f"the function {function.__name__}"
    short.repr_builtin_function_or_method = short.repr_function
    try:
        return short.repr(value)
    except ValueError:  # of an int with more digits than Python prints
        return f"{type(value).__name__} of many digits"


def real(value: object) -> Real | None:
    """The real number that a value is: Python's, NumPy's, an array's of no dimensions, a Decimal.
    None for others, such as a bool and a tensor of torch."""
    if isinstance(value, bool):
        return None
    if isinstance(value, Real):
        return value
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item") and not _is_tensor(value):
        return real(value.item())
    if type(value).__name__ == "Decimal" and not value.is_snan():
        from fractions import Fraction  # only such numbers need it

        return Fraction(value) if value.is_finite() else float(value)
    return None


def whole(value: object) -> int | None:
    """The whole number that a value is: Python's, NumPy's, or an integer array's of no dimensions.
    None for others, such as a bool, a float, a tensor of torch, and a symbol of a traced size, of
    which ``index`` would make a constant."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or _is_tensor(value) or type(value).__name__ == "SymInt":
        return None
    # Dynamo before torch 2.9 ends a trace at an index() that raises: sequences are asked for first.
    if isinstance(value, (tuple, list, str)):
        return None
    try:
        return index(value)
    except TypeError:
        return None


def _is_tensor(value: object) -> bool:
    return hasattr(value, "requires_grad")


def as_number(name: str, value: object) -> float:
    """A real number, such as a Fraction, as a float. Raises TypeError for what is none, ValueError
    for one beyond any float64."""
    if type(value) is float:
        return value
    number = real(value)
    if number is None:
        raise TypeError(f"{name} must be a number, got {shown(value)}")
    try:
        return float(number)
    except OverflowError:
        raise ValueError(f"{name} must fit a float64, got {shown(value)}") from None


def as_int(name: str, value: object) -> int:
    """A whole number, such as NumPy's, as an int. Raises TypeError for what is none."""
    number = whole(value)
    if number is None:
        advice = ": pass its item()" if _is_tensor(value) else ""
        raise TypeError(f"{name} must be an int, got {shown(value)}{advice}")
    return number


def check_flag(name: str, value: object) -> None:
    """Raises TypeError for what is neither True nor False, whatever its truth would be."""
    if type(value) is not bool:
        raise TypeError(f"{name} must be a bool, got {shown(value)}")


PRECISIONS = ("fp32", "tf32", "bf16")


def check_precision(precision: str | None) -> None:
    """``precision`` permits less accuracy and never asks for it; raises ValueError for others."""
    if precision is None or (isinstance(precision, str) and precision in PRECISIONS):
        return
    raise ValueError(f"precision must be None or one of {PRECISIONS}, got {shown(precision)}")

"""What descriptors of pairs share: their sums and products, which are formulas, and the decorator
of functions that make them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from importlib import import_module
from typing import TYPE_CHECKING

from kernlib.descriptors.base import shown

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import TypeVar

    from kernlib.families.pairwise.formula.descriptor import Formula

    _Function = TypeVar("_Function", bound=Callable)


def algebra() -> ModuleType:
    """The module that makes formulas of descriptors, by its name: it knows the descriptors, and
    most of them are not combined."""
    return import_module("kernlib.families.pairwise.formula.algebra")


def _combined(operator: str, left: object, right: object) -> Formula:
    return algebra().combined(operator, left, right)


def reads_tensors(epilogue: object) -> bool:
    """Whether one of some epilogues reads tensors of rows and columns, and makes a formula."""
    several = epilogue if isinstance(epilogue, (tuple, list)) else (epilogue,)
    return any([getattr(each, "axes", ()) for each in several])


class Combined:
    """Base of descriptors that ``+``, ``*`` and ``**`` take, beside others and numbers."""

    __slots__ = ()

    def __add__(self, other: object) -> Formula:
        return _combined("+", self, other)

    def __radd__(self, other: object) -> Formula:
        return _combined("+", other, self)

    def __mul__(self, other: object) -> Formula:
        return _combined("*", self, other)

    def __rmul__(self, other: object) -> Formula:
        return _combined("*", other, self)

    def __pow__(self, other: object) -> Formula:
        return _combined("**", self, other)


def named(kind: type, *more: str) -> Callable[[_Function], _Function]:
    """A decorator of functions that make a descriptor of a ``kind``: equal calls get the same one,
    which takes 0.2 us where a new one takes 29. It says what their ``**fields`` are, to ``help``
    and to who gives them something else, such as an argument of the call."""
    names = (*more, "precision", "symmetric", "direct", "categories", "features")

    def decorate(function: _Function) -> _Function:
        positional = function.__code__.co_varnames[: function.__code__.co_argcount]
        listed = (*positional, *names)
        # Other stages may be given where the function leaves them open.
        accepted = {*listed, "operator", "inner", "outer"}

        def new(*values, **fields):
            if len(values) > len(positional) or not accepted.issuperset(fields):
                _refuse(function, values[len(positional) :], fields, listed, accepted)
            if fields.get("features", 0) is None:  # the default
                del fields["features"]
            if "features" in fields or reads_tensors(fields.get("epilogue")):
                return algebra().of_call(function, values, fields)
            return function(*values, **fields)

        cached = functools.lru_cache(maxsize=64, typed=True)(new)  # 1 is not True

        @functools.wraps(function)
        def make(*values, **fields):
            try:
                return cached(*values, **fields)
            except TypeError:  # unhashable: the cache's message says less
                pass
            return new(*values, **fields)

        # What Dynamo traces instead: of a cache it warns. To ask whether it traces takes torch,
        # which this module does not load.
        make._torchdynamo_inline = new
        defaults = zip(positional, function.__defaults__ or (), strict=True)
        annotated = ((name, default, function.__annotations__[name]) for name, default in defaults)
        make.__signature__ = _signature(kind, names, *annotated)
        return make

    return decorate


@functools.cache  # each takes 30 us of a first call
def _signature(kind: type, names: tuple[str, ...], *own) -> inspect.Signature:
    """A signature with some fields by keyword, behind a function's own parameters."""
    kinds = inspect.Parameter
    by_name = {field.name: (field.default, field.type) for field in dataclasses.fields(kind)}
    by_name["features"] = (None, "Iterable[int] | slice | None")
    parameters = [
        kinds(name, kinds.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation)
        for name, default, annotation in own
    ]
    parameters += [
        kinds(x, kinds.KEYWORD_ONLY, default=by_name[x][0], annotation=by_name[x][1]) for x in names
    ]
    return inspect.Signature(parameters, return_annotation=kind.__name__)


def _refuse(function: Callable, values: tuple, given: dict, listed, taken) -> None:
    """Raises TypeError for values without a place, or for the first keyword that is not taken."""
    from kernlib.hints.descriptors import refuse_fields, refuse_positional  # only errors need it

    if values:
        refuse_positional(function.__name__, shown(values[0]), function)
    wrong = {name: value for name, value in given.items() if name not in taken}
    refuse_fields(function.__name__, wrong, listed, function)

"""Errors of public constructors for arguments that do not fit. Python's own text does not say which
arguments would."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from inspect import Signature
    from typing import Any

_Function = TypeVar("_Function", bound="Callable[..., Any]")


def hinted(function: _Function) -> _Function:
    """A function, or a class with its constructor and public class methods, with better errors for
    arguments that do not fit: the TypeError for an unknown keyword says which one may have been
    meant, and any other shows the signature. What the call itself raises stays as it is."""
    if not isinstance(function, type):
        return _hinted(function, function.__qualname__)
    for name, value in _constructors(function):
        if isinstance(value, classmethod):
            called = _hinted(value.__func__, f"{function.__name__}.{name}", function)
            setattr(function, name, classmethod(called))
        else:
            setattr(function, name, _hinted(value, function.__name__, function))
    return function


def former(*order: str, **names: str) -> Callable[[_Function], _Function]:
    """Marks a function that is :func:`hinted` as one that was called otherwise: with arguments of
    this ``order`` behind those that have a place now, and with the keywords of ``names``, former to
    present. Such calls warn with a DeprecationWarning."""

    def mark(function: _Function) -> _Function:
        function.former = order, names  # type: ignore[attr-defined]
        return function

    return mark


def _as_now(name: str, function: Any, values: tuple, named: dict) -> tuple[tuple, dict]:
    """The arguments of a call as the function takes them now."""
    order, names = function.former
    places = function.__code__.co_argcount
    placed = dict(zip(order, values[places:], strict=False))
    changes = []
    if placed and len(values) <= places + len(order) and not named.keys() & placed.keys():
        values, named = values[:places], named | placed
        changes += [f"{key}= by name" for key in placed]
    for before, now in names.items():
        if before in named and now not in named:
            named = {now if key == before else key: value for key, value in named.items()}
            changes.append(f"{now}= for {before}=")
    if changes:
        from kernlib.errors import deprecated

        deprecated(f"{name}() takes {', '.join(changes)}")
    return values, named


def _constructors(owner: type) -> list[tuple[str, Any]]:
    """Its own ``__init__`` and public class methods, by name."""
    return [
        (name, value)
        for name, value in vars(owner).items()
        if name == "__init__" or (isinstance(value, classmethod) and name[0] != "_")
    ]


def _hinted(function: Callable, name: str, owner: type | None = None) -> Callable:
    respelled = hasattr(function, "former")

    @functools.wraps(function)
    def call(*values, **named):
        if respelled:
            values, named = _as_now(name, function, values, named)
        try:
            return function(*values, **named)
        except TypeError as error:
            text = _misfit(function, name, owner, values, named, error)
            if text is None:
                raise
        raise TypeError(text)

    return call


def _misfit(function, name: str, owner, values: tuple, named: dict, error) -> str | None:
    """The message for arguments that do not fit a function's signature. None for arguments that
    fit: then the error came from inside of the function."""
    from inspect import signature  # only errors need it

    takes = signature(function)
    try:
        takes.bind(*values, **named)
    except TypeError:
        shown = _plain(takes, owner is not None)
    else:
        return None
    names = [*shown.parameters]
    for keyword in named:
        if keyword not in names:
            text = f"{name}() got an unexpected keyword argument {keyword!r}"
            return text + _meant(keyword, names, owner)
    return f"{error}; the call is {name}{shown}"


def _plain(takes: Signature, bound: bool) -> Signature:
    """A signature without annotations and, if ``bound``, without its first parameter (``self``)."""
    parameters = [*takes.parameters.values()][1 if bound else 0 :]
    plain = [parameter.replace(annotation=parameter.empty) for parameter in parameters]
    return takes.replace(parameters=plain, return_annotation=takes.empty)


def _meant(keyword: str, names: list[str], owner: type | None) -> str:
    from kernlib.hints import spelling

    takers = [] if owner is None else [*_takers(keyword, owner)]
    if takers:
        return f"; {' and '.join(takers)} takes it"
    return spelling.argument(keyword, names) or f"; it takes {', '.join(names)}"


def _takers(keyword: str, owner: type) -> Iterator[str]:
    """The constructors of a class that take an argument of this name."""
    from inspect import signature

    for name, value in _constructors(owner):
        is_classmethod = isinstance(value, classmethod)
        if keyword in signature(value.__func__ if is_classmethod else value).parameters:
            yield f"{owner.__name__}.{name}()" if is_classmethod else f"{owner.__name__}()"

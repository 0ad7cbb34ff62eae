"""Descriptors by name: kernlib's ready-made ones, and those of the user's own modules."""

from __future__ import annotations

import difflib
import inspect
import os
import sys
from collections.abc import Callable
from functools import reduce
from importlib import import_module

import click

HINT = "DESCRIPTOR"


def descriptors(text: str) -> list:
    """The descriptors that a word of the command line names. Raises BadParameter. Needs no torch,
    but for modules of the user's that do."""
    text = text.strip().removesuffix("()")  # a call without arguments, as in Python
    if "(" in text:
        return [_written(text)]
    module, colon, name = text.partition(":")
    if colon:
        return _of(text, _resolved(text, _imported(module), name))
    makers = ready_made()
    if text not in makers:
        raise _bad(_unknown(text, makers))
    return [makers[text]()]


def _written(text: str):
    """The descriptor that a text such as ``KroneckerSparse(a=6, b=64, c=64, d=1)`` or
    ``gaussian(symmetric=True)`` is."""
    from kernlib.descriptors.text import from_text

    functions = ready_made()  # whose modules define what a text may name
    try:
        return from_text(text, functions)
    except ValueError as error:
        message = f"{error}; fields are given by name: Pairwise(operator='dot', inner=Identity())."
        raise _bad(message) from error


def _unknown(text: str, makers: dict[str, Callable]) -> str:
    """The message about a name that is no ready-made descriptor's."""
    import kernlib

    if kernlib._HOMES.get(text, "").endswith(".descriptor"):
        return (
            f"{text} needs to be told its parts: give it as text, such as "
            f'"KroneckerSparse(a=6, b=64, c=64, d=1)", or name your own by package.module:name.'
        )
    lowered = {name.lower(): name for name in makers}
    close = difflib.get_close_matches(text.lower(), lowered, 3)
    hint = f"There are {', '.join(makers)}."
    if close:  # then the whole list would hide the answer
        hint = f"Did you mean {' or '.join(lowered[name] for name in close)}?"
    return f"{text!r} is none of kernlib's. {hint} package.module:name names your own."


def ready_made() -> dict[str, Callable]:
    """kernlib's public functions that answer a descriptor without being told anything."""
    import kernlib
    from kernlib.descriptors.base import Descriptor

    homes = sorted(kernlib._HOMES.items())
    public = {n: getattr(kernlib, n) for n, home in homes if home.endswith(".descriptor")}
    return {
        name: function
        for name, function in public.items()
        if inspect.isfunction(function)
        and _needs_nothing(function)
        and isinstance(function(), Descriptor)
    }


def _needs_nothing(function: Callable) -> bool:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return all(p.default is not p.empty or p.kind in variable for p in parameters)


def _imported(name: str):
    """A module, also of the working directory, as for ``python -m``."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return import_module(name)
    except (Exception, SystemExit) as error:  # whatever a module of the user's raises
        raise _bad(f"{name!r} cannot be imported: {_reason(error)}.") from error


def _resolved(text: str, module, name: str):
    """The object that a dotted name says, called if it is a function."""
    from kernlib.descriptors.base import Descriptor

    try:
        value = reduce(getattr, name.split("."), module)
    except AttributeError as error:
        raise _bad(f"{text!r} cannot be found: {error}.") from error
    if isinstance(value, Descriptor) or not callable(value):
        return value
    try:
        return value()
    except (Exception, SystemExit) as error:
        raise _bad(f"{text}() failed: {_reason(error)}.") from error


def _of(text: str, value) -> list:
    """One descriptor, or a list of them, as a list."""
    from kernlib.descriptors.base import Descriptor

    listed = list(value) if isinstance(value, (list, tuple)) else [value]
    wrong = next((item for item in listed if not isinstance(item, Descriptor)), None)
    if not listed or wrong is not None:
        what = f"holds a {type(wrong).__name__}" if listed else "is an empty list"
        raise _bad(
            f"{text!r} {what}; a descriptor such as kernlib.laplace_l1(), a list of them, or a "
            "function that returns either would do."
        )
    return listed


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _bad(message: str) -> click.BadParameter:
    return click.BadParameter(message, param_hint=HINT)

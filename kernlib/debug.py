"""``debug=True`` of calls that are more than one ``run_kernel``."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from torch.compiler import is_dynamo_compiling

from kernlib import events
from kernlib.descriptors.base import check_flag

Result = TypeVar("Result")
Function = TypeVar("Function", bound=Callable[..., Any])


def heard(debug: bool, function: Callable[..., Result], *values: Any, **named: Any) -> Result:
    """The result of ``function(*values, **named)``. Where ``debug`` is True its events go to
    stderr, or a line that there were none; not while Dynamo traces. Raises TypeError for a
    ``debug`` that is no bool."""
    check_flag("debug", debug)
    if not debug or is_dynamo_compiling():
        return function(*values, **named)
    with events.on_stderr() as names:
        result = function(*values, **named)
        if not names:
            text = f"{function.__name__}: no kernel, computed by torch and libraries of CUDA"
            events.emit("torch", "", "", text)
    return result


def takes_debug(function: Function) -> Function:
    """A function whose ``debug`` is seen to here: it never gets another one than its default. For
    calls that wait for the device or copy anyway, since it costs a frame."""
    return _wrapped(function, in_graphs=True)


def eager_only(function: Function) -> Function:
    """:func:`takes_debug` of a function that no graph can hold, for which torch.compile leaves its
    own. With ``fullgraph=True`` it raises torch's error, which says so in one sentence."""
    return _wrapped(function, in_graphs=False)


def _wrapped(function: Function, in_graphs: bool) -> Function:
    @wraps(function)
    def call(*values: Any, debug: bool = False, **named: Any) -> Any:
        if not in_graphs and is_dynamo_compiling():
            from kernlib.eager import eagerly

            return eagerly(call, *values, debug=debug, **named)
        if debug is False:
            return function(*values, **named)
        return heard(debug, function, *values, **named)

    return cast(Function, call)

"""What the service does, one line an event.

Off without listeners: ``debug=True`` on a call and ``KERNLIB_DEBUG=1`` write to stderr without any
logging set-up, :func:`subscribe` hands events to a function. A hot call without listeners pays for
one test of an empty list. The logger ``kernlib`` of :mod:`logging` gets the events of looking for,
compiling, storing and loading kernels, and by ``subscribe(log)`` those of calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from kernlib import settings

NAMES = ("lookup", "hit", "wait", "compile", "evict", "store", "load", "launch", "failed", "torch")

_DEBUG, _INFO, _WARNING = 10, 20, 30  # as logging numbers them
LEVELS = {name: _DEBUG for name in NAMES} | {"compile": _INFO, "evict": _INFO, "failed": _WARNING}
_CALLS = ("launch", "torch")  # events of calls, too many to log unasked

if TYPE_CHECKING:
    import logging


class Event(NamedTuple):
    """``name`` is one of :data:`NAMES`; ``key`` is the kernel's digest in hex, ``arch`` its target
    and ``description`` its line for people; ``fields`` holds what is worth knowing of this event
    (``ms``, ``registers``, ``spill_bytes``, ``shared_bytes``, ``where``, ``grid``, ``block`` ...),
    units in the names. "torch" is a call without a kernel, computed by torch's own operators, as on
    a CPU; "evict" is of kernels that made room for another, and has no key."""

    name: str
    key: str
    arch: str
    description: str
    fields: Mapping[str, object] = MappingProxyType({})  # shared, and never written to

    def __str__(self) -> str:
        details = " ".join(f"{name}={value}" for name, value in self.fields.items())
        parts = (f"kernlib {self.name:7s}", self.key[:12], self.arch, details, self.description)
        return " ".join(part for part in parts if part)


Listener = Callable[[Event], None]

_subscribers: list[Listener] = []
# One entry for each subscriber and each open block of on_stderr, of any thread. A launch tests
# whether this list is empty, in 5 ns; listening() takes 40.
watched: list[object] = []
# The names of each open block's events.
_on_stderr: ContextVar[list[str] | None] = ContextVar("kernlib_debug", default=None)
_environment_read = False


def listening() -> bool:
    """Whether anybody would see an event.

    Example:
        >>> end = kl.events.subscribe(print)
        >>> kl.events.listening(), end()
        (True, None)
    """
    if not _environment_read:
        _read_environment()
    return bool(_subscribers) or _on_stderr.get() is not None


def emit(name: str, key: str, arch: str, description: str, **fields: object) -> None:
    """Hand an event to all listeners: ``name``, ``key``, ``arch``, ``description`` and ``fields``
    are those of :class:`Event`. Raises what a listener raises, and KeyError for a name that is none
    of :data:`NAMES`.

    Example:
        >>> end = kl.events.subscribe(print)
        >>> kl.events.emit("torch", "", "", "gaussian on a CPU", ms=0.1)
        kernlib torch   ms=0.1 gaussian on a CPU
        >>> end()
    """
    is_logged = name not in _CALLS and log not in _subscribers and _is_enabled(LEVELS[name])
    if not (is_logged or listening()):
        return
    event = Event(name, key, arch, description, fields)
    if is_logged:
        log(event)
    for listener in tuple(_subscribers):
        listener(event)
    block = _on_stderr.get()
    if block is not None:
        block.append(name)
        if write_line not in _subscribers:
            write_line(event)


def subscribe(listener: Listener) -> Callable[[], None]:
    """Call ``listener`` with every later :class:`Event`; returns the function that ends it. Raises
    TypeError for what cannot be called.

    Example:
        >>> seen = []
        >>> end = kl.events.subscribe(seen.append)
        >>> y = kl.cdist(torch.randn(4, 3), torch.randn(5, 3))
        >>> end()
        >>> [event.name for event in seen]
        ['torch']
    """
    if not callable(listener):
        raise TypeError(f"listener must be a function of an Event, got {listener!r}")
    watched.append(listener)
    _subscribers.append(listener)
    mine = [listener]  # until it is ended: another may be of the same function

    def unsubscribe() -> None:
        if mine:
            mine.clear()
            _subscribers.remove(listener)
            watched.remove(listener)

    return unsubscribe


def is_debugging() -> bool:
    """Whether the call under way has ``debug=True``. Such a call may wait for the device, to find
    what is wrong with values there.

    Example:
        >>> with kl.events.on_stderr():
        ...     kl.events.is_debugging()
        True
    """
    return bool(watched) and _on_stderr.get() is not None


@contextmanager
def on_stderr() -> Iterator[list[str]]:
    """Write the events of this block, in this thread or task, to stderr; the list grows by the name
    of each.

    Example:
        >>> with kl.events.on_stderr() as names:
        ...     y = kl.cdist(torch.randn(4, 3), torch.randn(5, 3))
        >>> names
        ['torch']
    """
    block: list[str] = []
    token, mark = _on_stderr.set(block), object()
    watched.append(mark)
    try:
        yield block
    finally:
        watched.remove(mark)
        _on_stderr.reset(token)


def write_line(event: Event) -> None:
    """The listener behind ``KERNLIB_DEBUG=1``: writes ``event`` to stderr. Raises OSError where
    that cannot be written.

    Example:
        >>> end = kl.events.subscribe(kl.events.write_line)
        >>> y = kl.cdist(torch.randn(4, 3), torch.randn(5, 3))  # writes a line
        >>> end()
    """
    # One text with its end of line, since print would write that separately, and another thread's
    # event may come in between.
    if sys.stderr is not None:  # None where it is closed: print would write to stdout then
        print(f"{event}\n", end="", file=sys.stderr, flush=True)


def log(event: Event) -> None:
    """Hand ``event`` to the logger ``kernlib``: what is compiled or evicted as information, what
    fails to compile as a warning, everything else for debugging; with it as ``record.event``.
    Subscribed, it passes launches and calls of torch too, which do not go there by themselves.
    Raises KeyError for an event whose name is none of :data:`NAMES`.

    Example:
        >>> end = kl.events.subscribe(kl.events.log)
        >>> y = kl.cdist(torch.randn(4, 3), torch.randn(5, 3))  # logged for debugging
        >>> end()
    """
    if _is_enabled(LEVELS[event.name]):
        text = str(event).removeprefix("kernlib ")
        _logger().log(LEVELS[event.name], "%s", text, extra={"event": event})


def _is_enabled(level: int) -> bool:
    """Whether the logger would pass an event on. Without logging loaded, none is set up."""
    return "logging" in sys.modules and _logger().isEnabledFor(level)


def _logger() -> logging.Logger:
    import logging

    logger = logging.getLogger("kernlib")
    if not logger.handlers:  # of its own: without one logging would write warnings to stderr
        logger.addHandler(logging.NullHandler())
    return logger


def _read_environment() -> None:
    global _environment_read
    _environment_read = True
    if settings.current().debug:
        subscribe(write_line)

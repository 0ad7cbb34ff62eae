"""The exceptions kernlib raises. All of them survive pickling, so a worker process can raise them.

Errors in arguments stay `ValueError` and `TypeError`; what is below names what only kernlib knows.
"""

from __future__ import annotations

import re

# Compiled when used: each pattern costs a first call 0.2 ms.
_LOG_ERROR = r"(?m)^(?P<file>[^\n(]*)\((?P<line>\d+)\)\s*:\s*(?:\w+ )?error\b"
_HEADER_SUFFIXES = (".h", ".hpp", ".hxx", ".cuh", ".inl", ".inc")
_AROUND_LINES = 2
_SHOWN_ERRORS = 8


# There is no package index that has kernlib: extras are those of a checkout.
INSTALL = 'pip install ".[cu13]" in the checkout of kernlib; with a driver older than 580 ".[cu12]"'


class KernlibError(Exception):
    """The base of kernlib's own errors: `except KernlibError` catches all of those below."""


class CompileError(KernlibError):
    """NVRTC refused a source. Holds the message, NVRTC's log and the source it was given."""

    def __init__(self, message: str, log: str = "", source: str = ""):
        super().__init__(message, log, source)  # args are what pickle calls the class with
        self.message = message
        self.log = log
        self.source = source

    def __str__(self) -> str:
        parts = [self.message, _excerpt(self.log, self.source), self.log.rstrip()]
        return "\n\n".join(part for part in parts if part)


class UnsupportedError(KernlibError):
    """This device, architecture, dtype or platform has no kernel for what was asked."""


class CaptureError(KernlibError):
    """A kernel was missing while a CUDA graph was captured; `prepare()` it before the capture."""


class DistributedError(KernlibError):
    """A process of a group does not take part in a call of :mod:`kernlib.distributed`."""


class NotCachedError(KernlibError):
    """KERNLIB_ASSERT_CACHED is set and a kernel was neither loaded nor in the store."""


class KernlibWarning(UserWarning):
    """A call did what it was asked, but that is seldom what was meant. The text says what may have
    been meant, and how to say that it was this. Python shows each text once for each line of code.
    ``warnings.filterwarnings("ignore", category=kernlib.KernlibWarning)`` hides all of them, and
    ``"error"`` in its place makes them exceptions."""


class ConvergenceWarning(KernlibWarning):
    """A solver of :mod:`kernlib.linalg` ended above the tolerance that it was given; what it
    returns holds the residual. ``warnings.simplefilter("error", ConvergenceWarning)`` makes it an
    exception."""


GONE = "0.3"  # the version without the spellings that are deprecated now
SILENCE = "warnings.filterwarnings('ignore', category=kernlib.{}) hides this"


def warn(text: str, kind: type[KernlibWarning] = KernlibWarning) -> None:
    """A warning of a kind at the line outside of kernlib that the call came from."""
    _at_caller(f"{text}; {SILENCE.format(kind.__name__)}", kind)


def deprecated(text: str) -> None:
    """A DeprecationWarning for a spelling that version ``GONE`` will not have, at the line outside
    of kernlib that the call came from."""
    _at_caller(f"{text}; the former spelling goes with kernlib {GONE}", DeprecationWarning)


def _at_caller(text: str, kind: type[Warning]) -> None:
    import sys
    import warnings

    package, level = __name__.partition(".")[0], 3  # of the frame behind that which calls this
    frame = sys._getframe(2)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] == package:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, kind, stacklevel=level)


def _excerpt(log: str, source: str) -> str:
    """The numbered source lines around the errors of the log, or "" when none points into it."""
    lines = source.splitlines()
    errors = _error_lines(log, len(lines))
    if not errors:
        return ""
    shown = sorted({near for line in errors for near in _near(line, len(lines))})
    return "\n".join(_numbered(shown, lines, errors))


def _error_lines(log: str, count: int) -> set[int]:
    """Line numbers of the source that the log calls errors; those in headers are not ours."""
    lines = (
        int(match["line"])
        for match in re.finditer(_LOG_ERROR, log)
        if not match["file"].strip().endswith(_HEADER_SUFFIXES)
    )
    return set(sorted({line for line in lines if 1 <= line <= count})[:_SHOWN_ERRORS])


def _near(line: int, count: int) -> range:
    return range(max(1, line - _AROUND_LINES), min(count, line + _AROUND_LINES) + 1)


def _numbered(shown: list[int], lines: list[str], errors: set[int]) -> list[str]:
    width = len(str(shown[-1]))
    out: list[str] = []
    for before, number in zip([0, *shown[:-1]], shown, strict=True):
        if before and number != before + 1:
            out.append("  ...")
        mark = ">" if number in errors else " "
        out.append(f"{mark} {number:{width}d} | {lines[number - 1]}")
    return out

"""Ctrl-C at every place where Python may raise it: on the way into a function, out of it, and
behind each call that it makes."""

from __future__ import annotations

import dis
import gc
import sys
from types import CodeType, FrameType

BEHIND = ("CALL", "JUMP_BACKWARD")  # starts of the names of operations that let signals in


class Interrupt:
    """Inside the block KeyboardInterrupt is raised at place number ``at`` of the watched files.

    ``places`` is how many there were, fewer than ``at`` if it never came to that. Nothing is
    collected meanwhile: finalizers of what earlier tests left would have places of their own, and
    swallow what is raised there.
    """

    def __init__(self, at: int, files: set[str]):
        self.at, self.places = at, 0
        self.where = ""
        self._files = files
        self._last: dict[FrameType, int] = {}  # offset of the operation before

    def __enter__(self) -> Interrupt:
        self._collects = gc.isenabled()
        gc.disable()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self._last.clear()
        if self._collects:
            gc.enable()

    def _trace(self, frame: FrameType, event: str, _argument: object):
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes = True
        if event in ("call", "return") or (event == "opcode" and self._is_behind_call(frame)):
            self._place(frame, event)
        self._last[frame] = frame.f_lasti
        return self._trace

    def _is_behind_call(self, frame: FrameType) -> bool:
        last, code = self._last.get(frame, -1), frame.f_code
        if last < 0 or not dis.opname[code.co_code[last]].startswith(BEHIND):
            return False
        # Python raises at the call, a tracer behind it: the same where the same handler is near.
        return _handler(code, last) == _handler(code, frame.f_lasti)

    def _place(self, frame: FrameType, event: str) -> None:
        self.places += 1
        if self.places == self.at:
            self.where = f"{event} {frame.f_code.co_qualname}, line {frame.f_lineno}"
            raise KeyboardInterrupt


_tables: dict[CodeType, list] = {}


def _handler(code: CodeType, offset: int) -> int | None:
    if code not in _tables:
        _tables[code] = dis._parse_exception_table(code)
    found = [entry.target for entry in _tables[code] if entry.start <= offset < entry.end]
    return found[0] if found else None

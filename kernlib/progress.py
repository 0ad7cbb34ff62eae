"""Progress on stderr, for work that takes seconds: bars where these can be drawn, on terminals and
in notebooks, and a line now and then elsewhere, as in logs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Value = TypeVar("Value")
SECONDS = 10.0  # between two lines
clock = time.monotonic


def wanted(progress: bool | None) -> bool:
    """Whether to show progress: as ``progress`` says, for None if it would be drawn. Raises
    TypeError."""
    check(progress)
    return is_drawn() if progress is None else progress


def is_drawn() -> bool:
    """Whether bars can be drawn: stderr is a terminal, or a cell of a notebook with widgets."""
    return (sys.stderr is not None and sys.stderr.isatty()) or _has_widgets()


def _has_widgets() -> bool:
    """Whether this is a notebook's kernel, and has what rich draws with there."""
    from importlib.util import find_spec

    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel") and find_spec("ipywidgets") is not None


def check(progress: bool | None) -> None:
    """Raises TypeError for what is neither a bool nor None."""
    if progress is not None and type(progress) is not bool:
        raise TypeError(f"progress must be True, False or None, got {progress!r}")


class Silent:
    """Progress that is not shown."""

    def count(self, what: str, work: Callable[[], Value]) -> Value:
        """The value of ``work()``, which is shown as begun, and as done unless it raises. Any
        thread may call this."""
        return work()


class Bar(Silent):
    """A row of a rich display: title, bar, count, times, and what was begun last."""

    def __init__(self, display, title: str, total: int):
        self._display = display
        self._task = display.add_task(title, total=total, what="")

    def count(self, what: str, work: Callable[[], Value]) -> Value:
        self._display.update(self._task, what=what)
        value = work()
        self._display.advance(self._task)
        return value


class Lines(Silent):
    """A line of text for every ten seconds in which work ended; none for shorter work."""

    def __init__(self, title: str, total: int):
        self._title, self._total, self._done, self._what = title, total, 0, ""
        self._begun = self._written = clock()
        self._lock = threading.Lock()

    def count(self, what: str, work: Callable[[], Value]) -> Value:
        value = work()
        with self._lock:
            self._done, self._what = self._done + 1, what
            if clock() - self._written >= SECONDS:
                self.write()
        return value

    def write(self) -> None:
        """Write the state."""
        self._written = clock()
        text = f"{self._title} {self._done}/{self._total}, {self._written - self._begun:.0f} s"
        if sys.stderr is not None:
            # With its end of line in one text, as other threads write too.
            print(f"kernlib {text}: {self._what}\n", end="", file=sys.stderr, flush=True)


@contextmanager
def shown(progress: bool | None, title: str, total: int) -> Iterator[Silent]:
    """A bar for ``total`` pieces of work, or :class:`Lines` where none can be drawn. With
    ``progress=True`` the bar stays on the screen, else it is removed when the work ends; lines end
    with one of the final state."""
    check(progress)
    if not total or progress is False:
        yield Silent()
        return
    if not is_drawn():
        lines = Lines(title, total)
        try:
            yield lines
        finally:
            if progress:
                lines.write()
        return
    from rich import progress as rich  # 20 ms, for shown progress alone
    from rich.console import Console
    from rich.table import Column

    what = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(20),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TimeRemainingColumn(),
        rich.TextColumn("{task.fields[what]}", markup=False, table_column=what),
    )
    console = Console(stderr=True)
    with rich.Progress(*columns, console=console, transient=not progress, expand=True) as display:
        yield Bar(display, title, total)


@contextmanager
def busy(what: str) -> Iterator[None]:
    """A line of text while work lasts whose pieces cannot be counted; on a terminal only."""
    if not wanted(None):
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield
